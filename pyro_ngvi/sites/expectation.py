r"""Expected log likelihoods of single data under Gaussian predictors, with their first two derivatives.

    E_n = E log p(y_n | f),   g_n = E grad log p,   H_n = E hess log p,      f ~ N(m_n, C_n),

by fixed points x_q with weights w_q for N(0, I_k), f_q = m + L x_q, L L' = C (Price 1958; Bonnet 1964):

    E = sum_q w_q log p(f_q),  g = sum_q w_q d_q,  H = sum_q w_q d_q x_q' L^-1,  d_q = grad log p(f_q).

First derivatives of log p are enough, and they are those of the distribution itself, whatever it is.
For k = 1, g and 2 dE/dv = H are the exact derivatives of the quadrature sum, so a fixed point of
updates with them is a stationary point of the very bound that is reported.

Points: Gauss-Hermite for k = 1, exact to degree 2 Q - 1; their products for k = 2, 3; for k > 3 Sobol
points with their antipodes, scaled to have the identity as covariance, so exact to degree 3.  All are
exact for a quadratic log p, a conjugate Gaussian term.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..linalg.cubature import gauss_hermite

__all__ = ["Expected", "Points", "default_count", "expectations", "quadrature_points"]

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


def quadrature_points(k: int, count: int, dtype: torch.dtype, device: torch.device | str) -> Points:
    """Points for k entries: ``count`` a dimension (k <= 3) or in all."""
    how: dict[str, Any] = {"dtype": dtype, "device": device}
    if k > 3:
        return _sobol(k, count, how)
    x, w = gauss_hermite(count, **how)
    grid = torch.cartesian_prod(*[x] * k).reshape(-1, k)
    weights = torch.cartesian_prod(*[w] * k).reshape(-1, k).prod(-1)
    return Points(grid, weights)


def _sobol(k: int, count: int, how: dict[str, Any]) -> Points:
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
    C (N, k, k).
    Values keep the graph of the marginals and of the model's parameters; derivatives are detached.
    Groups have points of their own; the shorter are repeated with weight 0, as they run together.
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
    expected = {}
    slopes = dict.fromkeys(f)
    if derivatives:
        found = torch.autograd.grad(total, list(f.values()), retain_graph=True, allow_unused=True)
        slopes = dict(zip(f, found, strict=True))
    for name, p in padded.items():
        # data of another dtype than the latent block, as from NumPy, make a log p of theirs
        value = p.weights @ log_p[name].to(p.weights.dtype)
        d = slopes[name]
        if d is None:
            d = torch.zeros_like(f[name])
        expected[name] = _assemble(value, d.detach(), f[name].detach(), roots[name].detach(), p)
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
    factor, _ = torch.linalg.cholesky_ex(covariance + torch.diag_embed(floor))
    return factor


def _assemble(value: Tensor, d: Tensor, f: Tensor, L: Tensor, p: Points) -> Expected:
    g = torch.einsum("q,qni->ni", p.weights, d)
    moments = torch.einsum("q,qni,qj->nij", p.weights, d, p.x)
    H = torch.linalg.solve_triangular(
        L.mT, moments.mT, upper=True
    ).mT  # moments L^-1, transposed twice
    H = 0.5 * (H + H.mT)
    # a gradient that is affine in f at every point belongs to a quadratic log p
    centre = f - torch.einsum("q,qni->ni", p.weights, f)
    bend = d - g - torch.einsum("nij,qnj->qni", H, centre)
    size = d.abs().amax((0, 2)) + torch.finfo(d.dtype).tiny
    tolerance = max(1e3 * torch.finfo(d.dtype).eps, 2e-11)
    quadratic = bend.abs().amax((0, 2)) <= tolerance * size
    return Expected(value, g, H, quadratic)
