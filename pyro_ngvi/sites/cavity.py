r"""q without a site: what is left of the Gaussian of f_n when its site is divided out.

For q(f_n) = N(m, C) and its site t_n(f) = exp(nu' f - f' Lambda f / 2), with S S' = C and

    M = I - S' Lambda S,     g = nu - Lambda m,

q / t_n is proportional to N(m_, C_),

    C_ = (C^-1 - Lambda)^-1 = S M^-1 S',     m - m_ = C_ g,

proper where M is positive definite.  C is never inverted, so it may be singular.  In the whole block
with posterior covariance V, of which f_n sees A (C = A V A'), dividing out t_n moves the mean by

    V A' r,     r = (I - Lambda C)^-1 g = g + Lambda C_ g,

since W_ = V^-1 - A' Lambda A and h_ = h - A' (nu - Lambda b) give W_ (mean - mean_) = A' g, and
W_^-1 A' = V A' (I - Lambda C)^-1 by Woodbury.  In units of q's precision that move has the squared
length r' C r = (C_ g)' r, and

    KL(q without t_n || q) = (tr M^-1 - k + log |M| + r' C r) / 2.

All of it needs the k x k marginals only, so it holds in every algebra.  Several data at once are one
site of their stacked predictors (Opper & Winther 2000 for cavities of Gaussian approximations).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..linalg.products import matvec

__all__ = ["Cavity", "divide_out", "square_root"]


@dataclass(frozen=True)
class Cavity:
    """Gaussians of f without their sites, and how far q is from there; NaN where not ``proper`` (n,).

    ``mean`` (n, k) and ``covariance`` (n, k, k) of the cavity; ``move`` (n, k) is m - m_, ``pull``
    (n, k) is r, ``distance`` (n,) the length of the move of the whole block in q's standard
    deviations, ``kl`` (n,) KL(cavity || q) of the whole block in nats.
    """

    mean: Tensor
    covariance: Tensor
    proper: Tensor
    move: Tensor
    pull: Tensor
    distance: Tensor
    kl: Tensor


def divide_out(mean: Tensor, covariance: Tensor, linear: Tensor, precision: Tensor) -> Cavity:
    """The cavities of q(f) = N(mean (n, k), covariance (n, k, k)) without sites (n, k), (n, k, k).

    Example:
        >>> import torch
        >>> one = torch.ones(1, 1, 1)
        >>> at = divide_out(one[0], one, 2 * one[0], 0.5 * one)  # N(1, 1) / exp(2 f - f^2 / 4)
        >>> at.mean.round(decimals=6), at.covariance.round(decimals=6), at.proper
        (tensor([[-2.]]), tensor([[[2.]]]), tensor([True]))
    """
    k = mean.shape[-1]
    finite = torch.isfinite(covariance).all(-1).all(-1)
    S = square_root(torch.where(finite.reshape(-1, 1, 1), covariance, 0.0))
    Lambda = 0.5 * (precision + precision.mT)
    identity = torch.eye(k, dtype=mean.dtype, device=mean.device)
    chol, info = torch.linalg.cholesky_ex(identity - S.mT @ Lambda @ S)
    g = linear - matvec(Lambda, mean)
    proper = (info == 0) & finite & torch.isfinite(g).all(-1)
    inverse = torch.linalg.solve_triangular(chol, identity.expand_as(chol), upper=False)
    half = inverse @ S.mT
    left = half.mT @ half
    move = matvec(left, g)
    pull = g + matvec(Lambda, move)
    square = (move * pull).sum(-1).clamp_min(0.0)
    log_det = 2.0 * torch.diagonal(chol, dim1=-2, dim2=-1).log().sum(-1)
    kl = 0.5 * (inverse.square().sum((-2, -1)) - k + log_det + square)

    def known(x: Tensor) -> Tensor:
        return torch.where(proper.reshape(-1, *[1] * (x.dim() - 1)), x, torch.nan)

    return Cavity(
        known(mean - move),
        known(left),
        proper,
        known(move),
        known(pull),
        known(square.sqrt()),
        known(kl.clamp_min(0.0)),
    )


def square_root(covariance: Tensor) -> Tensor:
    """S (n, k, k) with S S' = C for positive semi-definite C (n, k, k), singular or not."""
    if covariance.shape[-1] == 1:
        return covariance.clamp_min(0.0).sqrt()
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
