r"""Single data under Gaussian predictors: their expected log likelihoods, and q without their sites.

    E_n = E log p(y_n | f),   g_n = E grad log p,   H_n = E hess log p,      f ~ N(m_n, C_n),

by fixed points x_q with weights w_q for N(0, I_k), f_q = m + L x_q, L L' = C (Price 1958; Bonnet 1964):

    E = sum_q w_q log p(f_q),  g = sum_q w_q d_q,  H = sum_q w_q d_q x_q' L^-1,  d_q = grad log p(f_q).

First derivatives of log p are enough, whatever the distribution.  For k = 1, g and 2 dE/dv = H are the
exact derivatives of the quadrature sum, so a fixed point of updates with them is a stationary point of
the very bound that is reported.  Points: Gauss-Hermite for k = 1, exact to degree 2 Q - 1; their
products for k = 2, 3; for k > 3 Sobol points with their antipodes, scaled to have the identity as
covariance, so exact to degree 3.

For q(f_n) = N(m, C) and its site t_n(f) = exp(nu' f - f' Lambda f / 2), with S S' = C and

    M = I - S' Lambda S,     g = nu - Lambda m,

the *cavity* q / t_n is proportional to N(m_, C_),

    C_ = (C^-1 - Lambda)^-1 = S M^-1 S',     m - m_ = C_ g,

proper where M is positive definite.  C is never inverted, so it may be singular.  In the whole block
with posterior covariance V, of which f_n sees A (C = A V A'), dividing out t_n moves the mean by

    V A' r,     r = (I - Lambda C)^-1 g = g + Lambda C_ g,

since W_ = V^-1 - A' Lambda A and h_ = h - A' (nu - Lambda b) give W_ (mean - mean_) = A' g, and W_^-1
A' = V A' (I - Lambda C)^-1 by Woodbury.  In units of q's precision that move has the squared length r'
C r = (C_ g)' r, and

    KL(q without t_n || q) = (tr M^-1 - k + log |M| + r' C r) / 2.

All of it needs the k x k marginals only, so it holds in every algebra.  Several data at once are one
site of their stacked predictors (Opper & Winther 2000 for cavities of Gaussian approximations).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..linalg.cubature import gauss_hermite
from ..linalg.products import matvec

#: orders of the product rules by the number of entries of f, and the number of Sobol points beyond
ORDERS, SOBOL = {1: 32, 2: 14, 3: 9}, 1024


@dataclass(frozen=True)
class Points:
    """x (Q, k) and weights (Q,) for N(0, I_k)."""

    x: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Expected:
    """E (N,), g (N, k), H (N, k, k), in nats; ``quadratic`` (N,) bool: log p is, and all is exact."""

    value: Tensor
    gradient: Tensor
    hessian: Tensor
    quadratic: Tensor


def default_count(k: int) -> int:
    """How many points: a dimension for k <= 3, else in all."""
    return ORDERS.get(k, SOBOL)


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def quadrature_points(k: int, count: int, dtype: torch.dtype, device: torch.device | str) -> Points:
    """Points for k entries: ``count`` a dimension (k <= 3) or in all."""
    how: Any = {"dtype": dtype, "device": device}
    if k <= 3:
        x, w = gauss_hermite(count, **how)
        grid, weights = (torch.cartesian_prod(*[v] * k).reshape(-1, k) for v in (x, w))
        return Points(grid, weights.prod(-1))
    half = max(count // 2, k + 1)
    u = torch.quasirandom.SobolEngine(k, scramble=True, seed=0).draw(half).double()
    x = torch.special.ndtri(u.clamp(1e-6, 1 - 1e-6))
    x = torch.cat([x, -x])
    factor = torch.linalg.cholesky(x.mT @ x / len(x))
    x = torch.linalg.solve_triangular(factor, x.mT, upper=False).mT
    return Points(x.to(**how), torch.full((len(x),), 1.0 / len(x), **how))


def expectations(
    log_likelihood: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    marginals: Mapping[str, tuple[Tensor, Tensor]],
    points: Mapping[str, Points],
    derivatives: bool = True,
) -> dict[str, Expected]:
    """The expectations of every group, from one batched run of the model.

    ``log_likelihood`` takes f (Q, N, k) by group to log p (Q, N); ``marginals`` are m (N, k) and
    C (N, k, k).  Values keep the graph of the marginals and of the model's parameters; derivatives are
    detached.  Groups run together, so those of fewer points have some of weight 0 beside.
    """
    most = max(len(p.x) for p in points.values())
    f, roots, padded = {}, {}, {}
    for name, (mean, covariance) in marginals.items():
        x, weights = points[name].x, points[name].weights
        short = most - len(x)
        if short:
            x = torch.cat([x, x[:1].expand(short, -1)])
            weights = torch.cat([weights, weights.new_zeros(short)])
        padded[name] = Points(x, weights)
        roots[name] = _root(mean, covariance)
        f[name] = mean + torch.einsum("nij,qj->qni", roots[name], x)
        if derivatives and not f[name].requires_grad:
            f[name] = f[name].detach().requires_grad_()
    with torch.set_grad_enabled(derivatives or torch.is_grad_enabled()):
        log_p = log_likelihood(f)
        total = torch.stack([v.sum() for v in log_p.values()]).sum()
    slopes: dict[str, Tensor] = {name: torch.zeros_like(x) for name, x in f.items()}
    if derivatives:
        how: Any = {"retain_graph": True, "materialize_grads": True}
        slopes = dict(zip(f, torch.autograd.grad(total, list(f.values()), **how), strict=True))
    expected = {}
    for name, p in padded.items():
        # data of another dtype than the latent block, as from NumPy, make a log p of theirs
        value = p.weights @ log_p[name].to(p.weights.dtype)
        tensors = slopes[name].detach(), f[name].detach(), roots[name].detach()
        expected[name] = _assemble(value, *tensors, p)
    return expected


def _root(mean: Tensor, covariance: Tensor) -> Tensor:
    """L (N, k, k) with L L' = C, kept so far from 0 that points differ after rounding.

    By some 1 / eps^(1/3) roundings of the mean: fewer would leave nothing of H, and more would be
    seen in E log p, where the mean is large beside the noise of the data.
    """
    eps = torch.finfo(mean.dtype).eps
    floor = eps ** (4.0 / 3.0) * (1.0 + mean.detach().square())
    if mean.shape[-1] == 1:
        return covariance.clamp_min(floor.unsqueeze(-1)).sqrt()
    # and above the rounding of a singular C, which has no factor otherwise
    size = torch.diagonal(covariance.detach(), dim1=-2, dim2=-1).amax(-1, keepdim=True)
    floor = floor + 8.0 * eps * size
    return torch.linalg.cholesky_ex(covariance + torch.diag_embed(floor))[0]


def _assemble(value: Tensor, d: Tensor, f: Tensor, L: Tensor, p: Points) -> Expected:
    g = torch.einsum("q,qni->ni", p.weights, d)
    moments = torch.einsum("q,qni,qj->nij", p.weights, d, p.x)
    H = torch.linalg.solve_triangular(L.mT, moments.mT, upper=True).mT  # moments L^-1
    H = 0.5 * (H + H.mT)
    # a gradient that is affine in f at every point belongs to a quadratic log p
    centre = f - torch.einsum("q,qni->ni", p.weights, f)
    bend = d - g - torch.einsum("nij,qnj->qni", H, centre)
    size = d.abs().amax((0, 2)) + torch.finfo(d.dtype).tiny
    tolerance = max(1e3 * torch.finfo(d.dtype).eps, 2e-11)
    quadratic = bend.abs().amax((0, 2)) <= tolerance * size
    return Expected(value, g, H, quadratic)


@dataclass(frozen=True)
class Cavity:
    """Gaussians of f without their sites, and how far q is from there; NaN where not ``proper`` (n,).

    ``move`` (n, k) is m - m_, ``pull`` (n, k) is r; of the whole block are ``distance`` (n,), the
    length of its move in q's standard deviations, and ``kl`` (n,) KL(cavity || q) in nats.
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

    figures = map(known, (move, pull, square.sqrt(), kl.clamp_min(0.0)))
    return Cavity(known(mean - move), known(left), proper, *figures)


def square_root(covariance: Tensor) -> Tensor:
    """S (n, k, k) with S S' = C for positive semi-definite C (n, k, k), singular or not."""
    if covariance.shape[-1] == 1:
        return covariance.clamp_min(0.0).sqrt()
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
