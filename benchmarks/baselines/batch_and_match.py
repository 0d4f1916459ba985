r"""Batch and match: a full-rank Gaussian by matching scores in closed form.

With draws z_b of q_t = N(mu_t, Sigma_t), scores g_b = grad log p(z_b), their means z' and g' and
covariances (divisor B) C and Gamma, the next q minimises over all Gaussians

    1/B sum_b |grad log q(z_b) - g_b|^2_Cov(q) + 2 / lambda KL(q_t || q).

Its stationary point, with

    U = lambda Gamma + lambda / (1 + lambda) g' g'^T
    V = Sigma_t + lambda C + lambda / (1 + lambda) (mu_t - z')(mu_t - z')^T,

is the positive root of Sigma U Sigma + Sigma = V, and

    mu = mu_t / (1 + lambda) + lambda / (1 + lambda) (Sigma g' + z').

The root: with V = L L^T and L^T U L = Q diag(m) Q^T, Sigma = L Q diag(2 / (1 + sqrt(1 + 4 m))) Q^T
L^T.  The paper writes the same as 2 V (I + (I + 4 U V)^(1/2))^-1.

No gradient of the ELBO enters.  A Gaussian target is a fixed point: there every score of q_t is a
score of p. On other targets the minimum is that of another divergence than KL(q || p), with another
optimal Gaussian.

Not safeguarded, as published.  An update that is not finite, or whose covariance has no Cholesky
factor, ends the run.

Source: Cai, Modi, Pillaud-Vivien, Margossian, Gower, Blei & Saul (2024, ICML), arXiv 2402.14758.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .gaussian import Gaussian, LogDensity, Report, ignore, value_and_gradient

__all__ = ["batch_and_match", "batch_and_match_update"]


def batch_and_match_update(
    loc: Tensor, covariance: Tensor, draws: Tensor, scores: Tensor, rate: float
) -> tuple[Tensor, Tensor]:
    """The mean and covariance after one update with draws and scores (B, d) and rate lambda."""
    share = rate / (1.0 + rate)
    mean_draw, mean_score = draws.mean(0), scores.mean(0)
    off, spread = loc - mean_draw, draws - mean_draw
    deviation = scores - mean_score
    U = rate * deviation.mT @ deviation / len(draws) + share * torch.outer(mean_score, mean_score)
    V = covariance + rate * spread.mT @ spread / len(draws) + share * torch.outer(off, off)
    L = torch.linalg.cholesky(V)
    m, Q = torch.linalg.eigh(L.mT @ U @ L)
    root = (L @ Q) * (2.0 / (1.0 + (1.0 + 4.0 * m.clamp_min(0.0)).sqrt())).sqrt()
    new = root @ root.mT
    return loc / (1.0 + rate) + share * (new @ mean_score + mean_draw), new


def batch_and_match(
    log_density: LogDensity,
    loc: Tensor,
    scale_tril: Tensor,
    batch: int = 32,
    max_steps: int = 1_000_000,
    report: Report = ignore,
    constant_rate: bool = False,
) -> Gaussian:
    """A Gaussian from a start, by updates of rate B d / t, t = 1, 2, ..., or B d throughout.

    The falling rate is the one of the paper for targets that are not Gaussian.

    Example:
        >>> import torch
        >>> from benchmarks.baselines import batch_and_match
        >>> def target(theta):  # N(3, 1/4) in each of two dimensions
        ...     return -2.0 * (theta - 3.0).square().sum(-1)
        >>> loc, scale = batch_and_match(target, torch.zeros(2), torch.eye(2), max_steps=50)
        >>> loc.round(decimals=2), scale.diagonal().round(decimals=2)
        (tensor([3., 3.]), tensor([0.5000, 0.5000]))
    """
    covariance = scale_tril @ scale_tril.mT
    for t in range(1, max_steps + 1):
        draws = loc + torch.randn(batch, len(loc), dtype=loc.dtype) @ scale_tril.mT
        _, scores = value_and_gradient(log_density, draws)
        rate = float(batch * len(loc)) / (1 if constant_rate else t)
        try:
            new_loc, new = batch_and_match_update(loc, covariance, draws, scores, rate)
            factor = torch.linalg.cholesky(new)
        except RuntimeError:  # torch's LinAlgError among them
            break
        if not bool(torch.isfinite(new_loc).all() and torch.isfinite(factor).all()):
            break
        loc, covariance, scale_tril = new_loc, new, factor
        if report(loc, scale_tril):
            break
    return loc, scale_tril
