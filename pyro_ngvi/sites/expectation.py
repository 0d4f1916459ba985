r"""Single data under Gaussian predictors: their expected log likelihoods, and their first sites.

    E_n = E log p(y_n | f),   g_n = E grad log p,   H_n = E hess log p,      f ~ N(m_n, C_n),

by fixed points x_q with weights w_q for N(0, I_k), f_q = m + L x_q, L L' = C (Price 1958; Bonnet 1964):

    E = sum_q w_q log p(f_q),  g = sum_q w_q d_q,  H = sum_q w_q d_q x_q' L^-1,  d_q = grad log p(f_q).

First derivatives of log p are enough, whatever the distribution.  For k = 1, g and 2 dE/dv = H are the
exact derivatives of the quadrature sum, so a fixed point of updates with them is a stationary point of
the very bound that is reported.  Points: Gauss-Hermite for k = 1, exact to degree 2 Q - 1, and more of
them where log p has kinks (Laplace, quantiles), which updates would put between points; products for
k = 2, 3; for k > 3 Sobol points with their antipodes, scaled to have the identity as
covariance, so exact to degree 3.

At the prior, expectations tell nothing of where the data are: under a wide one they are flat or
overflow.  So each site starts as the one that its datum would have alone, under N(m_n, C_n) with C_n
made narrower than 1:

    a <- a + V (C_n^-1 (m_n - a) + g),  V = (C_n^-1 + Lambda)^-1,  Lambda = |H|,

g and H the expectations under N(a, V), with steps of at most 2 in every entry: the scale of the usual
links.  Quadratic terms come out as they are.  A datum's own ELBO, E log p - KL(N(a, V) || N(m_n, C_n)),
must rise at every step, or the next is half as long: where f has a location and a log scale the rounds
diverge otherwise.  V, which may change by orders of magnitude, goes along a geodesic,
V^1/2 (V^-1/2 V_new V^-1/2)^t V^1/2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from ..distributed.processes import ALONE, Ranks
from ..linalg.cubature import gauss_hermite, sobol_normal
from ..linalg.host import constant, host_bool
from ..linalg.products import eye_like, matvec
from ..linalg.spectral import positive_part

#: orders of the product rules by the number of entries of f, and the number of Sobol points beyond
ORDERS, SOBOL = {1: 32, 2: 14, 3: 9}, 1024
#: the most points of a rule for one entry that is not smooth, nats that fewer may move the sum of
#: E log p by, and roundings of its terms that are no difference
MOST_POINTS, MISSED, ROUNDINGS = 256, 0.01, 8.0
#: rounds at most, the longest step of one, and steps so short that they end them
ROUNDS, LONGEST, SHORT = 16, 2.0, 0.2
#: by what factor a variance changes in a round at most
WIDEST = 16.0


class Points(NamedTuple):
    """x (Q, k) and weights (Q,) for N(0, I_k)."""

    x: Tensor
    weights: Tensor


class Expected(NamedTuple):
    """E (N,), g (N, k), H (N, k, k), in nats; ``quadratic`` (N,) bool: log p is, and all is exact."""

    value: Tensor
    gradient: Tensor
    hessian: Tensor
    quadratic: Tensor


def quadrature_points(k: int, count: int | None, like: Tensor) -> Points:
    """Points for k entries of the kind of ``like``: ``count`` a dimension (k <= 3) or in all."""
    count = count or ORDERS.get(k, SOBOL)
    return Points(*map(constant, _points(k, count, like.dtype, like.device)))


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _points(k: int, count: int, dtype: torch.dtype, device: torch.device) -> Points:
    how: Any = {"dtype": dtype, "device": device}
    if k <= 3:
        x, w = gauss_hermite(count, dtype=dtype, device="cpu")
        grid, weights = (torch.cartesian_prod(*[v] * k).reshape(-1, k) for v in (x, w))
        weights = weights.prod(-1)
        seen = weights > 0.0  # others round to 0, and 0 times what overflows there is no number
        return Points(grid[seen].to(device), weights[seen].to(device))
    half = max(count // 2, k + 1)
    x = sobol_normal(half, k)
    x = torch.cat([x, -x])
    factor = torch.linalg.cholesky(x.mT @ x / len(x))
    x = torch.linalg.solve_triangular(factor, x.mT, upper=False).mT
    return Points(x.to(**how), torch.full((len(x),), 1.0 / len(x), **how))


def enough_points(
    log_likelihood: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    marginals: Mapping[str, tuple[Tensor, Tensor]],
    weights: Mapping[str, Any],
) -> dict[str, int]:
    """How many points the groups of one entry need, twice as many until the next change their sums of
    E log p, by ``weights``, no more."""
    counts = {name: ORDERS[1] for name, (mean, _) in marginals.items() if mean.shape[-1] == 1}

    @torch.no_grad()
    def sums(counts: Mapping[str, int]) -> dict[str, Tensor]:
        points = {
            name: quadrature_points(mean.shape[-1], counts.get(name), mean)
            for name, (mean, _) in marginals.items()
        }
        found = expectations(log_likelihood, marginals, points, derivatives=False)
        return {name: weights[name] * found[name].value for name in counts}

    before, rough = sums(counts) if counts else {}, set(counts)
    while rough:
        after = sums({name: count << (name in rough) for name, count in counts.items()})
        for name in tuple(rough):
            x, eps = after[name], torch.finfo(after[name].dtype).eps
            error = (x - before[name]).abs().sum() - ROUNDINGS * eps * x.abs().sum()
            moves = host_bool(error > MISSED) is True
            counts[name] <<= moves
            if not moves or counts[name] >= MOST_POINTS:
                rough.remove(name)
        before = after
    return counts


def expectations(
    log_likelihood: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    marginals: Mapping[str, tuple[Tensor, Tensor]],
    points: Mapping[str, Points],
    derivatives: bool = True,
) -> dict[str, Expected]:
    """The expectations of every group, from one batched run of the model.

    ``log_likelihood`` takes f (Q, N, k) by group to log p (Q, N); ``marginals`` are m (N, k) and
    C (N, k, k).  Values keep the graph; derivatives are detached.
    """
    most = max(len(p.x) for p in points.values())
    f, roots, padded = {}, {}, {}
    for name, (mean, covariance) in marginals.items():
        x, weights = points[name]
        if short := most - len(x):  # groups run together
            x, weights = torch.cat([x, x[:1].expand(short, -1)]), pad(weights, (0, short))
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
    """L (N, k, k) with L L' = C, kept so far from 0 that points differ after rounding: by some
    1 / eps^(1/3) roundings of the mean, as fewer leave nothing of H and more are seen in E log p."""
    eps = torch.finfo(mean.dtype).eps
    floor = eps ** (4.0 / 3.0) * (1.0 + mean.detach().square())
    if mean.shape[-1] == 1:
        return covariance.clamp_min(floor.unsqueeze(-1)).sqrt()
    # and above the rounding of a singular C, which has no factor otherwise, each entry in its own scale
    floor = floor + 8.0 * eps * torch.diagonal(covariance.detach(), dim1=-2, dim2=-1)
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


# --- first targets of all: every datum for itself, from its own prior


class _Place(NamedTuple):
    """N(a, V) of every datum, a = m_n + R x and V = R W W' R' with C_n = R R'; log det W (n,)."""

    x: Tensor
    W: Tensor
    log_det: Tensor

    @property
    def kl(self) -> Tensor:
        """From the prior, but for a constant."""
        return 0.5 * (self.W.square().sum((-2, -1)) + self.x.square().sum(-1)) - self.log_det


@dataclass(frozen=True)
class _Newton:
    """A step (n, k) of x, and one of W to W r^-1/2 in the axes of ``W``."""

    step: Tensor
    W: Tensor
    r: Tensor

    @classmethod
    def of(cls, at: _Place, e: Expected, R: Tensor) -> _Newton:
        """From there; no step for data whose expectations are not finite."""
        root = R @ at.W
        ratio = at.W.mT @ at.W + root.mT @ _absolute(-e.hessian) @ root
        slope = matvec(root.mT, e.gradient) - matvec(at.W.mT, at.x)
        usable = torch.isfinite(slope).all(-1) & torch.isfinite(ratio).flatten(1).all(-1)
        one = eye_like(ratio)
        ratio = torch.where(usable.reshape(-1, 1, 1), ratio, one)
        if ratio.shape[-1] == 1:
            r, U = ratio.squeeze(-1), torch.ones_like(ratio)
        else:  # a GPU waits for it
            r, U = torch.linalg.eigh(ratio)
        W = at.W @ U
        step = matvec(W, matvec(U.mT, slope) / r)
        step = step / (matvec(R, step).abs().amax(-1, keepdim=True) / LONGEST).clamp_min(1.0)
        step = torch.where(usable.unsqueeze(-1), step, 0.0)
        return cls(step, W, r.clamp(1.0 / WIDEST, WIDEST))

    def moved(self, at: _Place, share: Tensor) -> _Place:
        """After that share (n,) of it."""
        half = -0.5 * share.unsqueeze(-1) * self.r.log()
        W = self.W * half.exp().unsqueeze(-2)
        return _Place(at.x + share.unsqueeze(-1) * self.step, W, at.log_det + half.sum(-1))


@torch.no_grad()
def first_targets(
    log_likelihood: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    marginals: Mapping[str, tuple[Tensor, Tensor]],
    points: Mapping[str, Points],
    ranks: Ranks = ALONE,
) -> dict[str, Expected]:
    """Expectations whose targets, at the mean of ``marginals``, are the sites of data alone."""
    roots = {name: _narrowed_root(*pair) for name, pair in marginals.items()}

    def expected(places: Mapping[str, _Place]) -> dict[str, Expected]:
        normals = {}
        for name, at in places.items():
            root = roots[name] @ at.W
            normals[name] = marginals[name][0] + matvec(roots[name], at.x), root @ root.mT
        return expectations(log_likelihood, normals, points)

    best = {}
    for name, (mean, _) in marginals.items():
        one = torch.ones_like(mean).diag_embed()
        best[name] = _Place(torch.zeros_like(mean), one, torch.zeros_like(mean).sum(-1))
    found = expected(best)
    share = {name: torch.ones_like(e.value) for name, e in found.items()}
    settled = torch.zeros((), dtype=torch.bool, device=next(iter(points.values())).x.device)
    for _ in range(ROUNDS):
        newton = {name: _Newton.of(at, found[name], roots[name]) for name, at in best.items()}
        tried = {name: newton[name].moved(at, share[name]) for name, at in best.items()}
        there = expected(tried)
        longest = []
        for name, at in tuple(best.items()):
            step = share[name].unsqueeze(-1) * matvec(roots[name], newton[name].step)
            longest.append(step.abs().max() if step.numel() else step.sum())
            before = found[name].value - at.kl
            better = (there[name].value - tried[name].kl > before) | ~before.isfinite()
            better = better & ~settled
            best[name] = _chosen(better, tried[name], at)
            found[name] = _chosen(better, there[name], found[name])
            share[name] = torch.where(better, 1.0, 0.5 * share[name])
        settled = settled | ranks.all(torch.stack(longest).max() < SHORT)
        if host_bool(settled):  # elsewhere the rounds left change nothing
            break
    targets = {}
    for name, e in found.items():
        # as a function of f at the mean of q, from which CVI takes its targets
        Lambda = torch.where(e.quadratic.reshape(-1, 1, 1), -e.hessian, _absolute(-e.hessian))
        gradient = e.gradient + matvec(Lambda, matvec(roots[name], best[name].x))
        targets[name] = e._replace(gradient=gradient, hessian=-Lambda)
    return targets


def _chosen(condition: Tensor, one: Any, other: Any) -> Any:
    """Those tensors of ``one`` for the data that are marked by ``condition`` (n,)."""

    def each(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(condition.reshape(-1, *[1] * (x.dim() - 1)), x, y)

    return tree_map(each, one, other)


def _absolute(G: Tensor) -> Tensor:
    """Symmetric G (n, k, k) with its eigenvalues' absolute values."""
    return 2.0 * positive_part(G) - G


def _narrowed_root(mean: Tensor, covariance: Tensor) -> Tensor:
    """R (n, k, k) of the covariances, with variances of at most about 1."""
    size = torch.diagonal(covariance, dim1=-2, dim2=-1).mean(-1).clamp_min(1.0)
    floor = torch.finfo(mean.dtype).eps * torch.ones_like(mean)
    narrowed = covariance / size.reshape(-1, 1, 1) + torch.diag_embed(floor)
    return torch.linalg.cholesky_ex(narrowed)[0]
