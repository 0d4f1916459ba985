r"""Where to evaluate a density of a few hyperparameters, and what its values say of all of it.

    u = mode + R z,    R R' = (-Hessian)^-1 at the mode,

so that the density of z is near N(0, I).  For one to three hyperparameters the points are a lattice of
z, grown from the mode to wherever the density is above exp(-DROP) of its largest value; sums over a
lattice of steps h integrate a Gaussian with an error of 2 exp(-2 pi^2 / h^2).  For more they are Sobol
points of N(0, WIDER^2 I), with importance weights.  In between, log p + |z|^2 / 2, no deeper than DEEP,
is interpolated by cubic radial functions |z - z_k|^3 and a linear one (in one dimension the natural
cubic spline), of which the integral and the marginals of theta are sums over many points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import log, pi

import torch
from torch import Tensor

from ..linalg.cubature import sobol_normal
from ..linalg.hessian import bfgs
from ..linalg.products import eye_like

#: by dimension: steps of the lattice, how far below its largest log p it ends, and most of its points
STEPS, DROP, MOST = {1: 0.5, 2: 0.8, 3: 1.0}, {1: 7.0, 2: 7.0, 3: 6.0}, {1: 400, 2: 400, 3: 800}
#: nats below the largest log p and a Gaussian's at which a point counts as there is none to bend from
DEEP = 14.0
#: Sobol points for each of more dimensions, of which a power of 2 is taken, and their scale
EACH, WIDER = 32, 1.4
#: fine points within a lattice step by dimension, or in all for more dimensions
FINE, DRAWN = {1: 8, 2: 8, 3: 5}, 2**13
#: steps of BFGS and halvings of one at most, the longest, and a gain in nats too small for another
CLIMBS, HALVINGS, LONGEST, SMALL = 60, 12, 2.0, 1e-3
#: searches by BFGS at most, half the width of differences for a Hessian, and its least curvature
SEARCHES, WIDTH, FLAT = 6, 0.1, 1e-2
#: rounds of standardising, and the ratio of a spread to that of N(0, I) that asks for another
ROUNDS, FAR = 3, 1.6

#: u (p,), log p and its gradient (p,) there
Place = tuple[Tensor, float, Tensor]


@dataclass(frozen=True)
class Design:
    """Points z (K, p) with log p (K,), and weights (K,) that sum to 1: ``log_sum`` is the log of the
    integral by these.  At ``lost`` (L, p) log p has no value; ``closed``: it fell by DROP all round."""

    center: Tensor
    root: Tensor
    z: Tensor
    log_p: Tensor
    weights: Tensor
    log_sum: float
    lost: Tensor
    closed: bool

    def u(self, z: Tensor) -> Tensor:
        return self.center + z @ self.root.mT

    @property
    def spread(self) -> tuple[Tensor, Tensor]:
        """Mean (p,) and covariance (p, p) of z."""
        mean = self.weights @ self.z
        left = self.z - mean
        return mean, left.mT @ (self.weights.unsqueeze(-1) * left)

    def every_other(self) -> Tensor:
        """Which points (K,) are enough for what changes little from one to the next: in two and three
        dimensions those of even sum, a lattice too."""
        p = self.z.shape[1]
        if p not in (2, 3):
            return torch.ones_like(self.log_p, dtype=torch.bool)
        return (self.z / STEPS[p]).round().sum(-1) % 2.0 == 0.0

    @property
    def effective(self) -> float:
        """1 / sum of squared weights."""
        return float(1.0 / self.weights.square().sum())

    @cached_property
    def fine(self) -> tuple[Tensor, Tensor]:
        """Many points z (S, p) with the logs of their shares (S,) of the integral over u."""
        p, volume = self.z.shape[1], torch.linalg.slogdet(self.root)[1]
        if p in STEPS:
            index = torch.arange(FINE[p], dtype=self.z.dtype, device=self.z.device)
            inner = STEPS[p] * ((index + 0.5) / FINE[p] - 0.5)
            grid = torch.cartesian_prod(*[inner] * p).reshape(-1, p)
            z = (self.z.unsqueeze(1) + grid).flatten(0, 1)
            log_q = torch.full_like(z[:, 0], p * log(FINE[p] / STEPS[p]))
        else:
            z = sobol(DRAWN, self.z)
            log_q = _log_sobol(z) + log(DRAWN)
            inside = z.norm(dim=-1) <= self.z.norm(dim=-1).max()
            z, log_q = z[inside], log_q[inside]
        return z, self.interpolated(z) + volume - log_q

    @property
    def log_integral(self) -> float:
        """The log of the integral of the density over u."""
        return float(torch.logsumexp(self.fine[1], 0))

    def interpolated(self, z: Tensor) -> Tensor:
        """log p (S,) at z (S, p)."""
        at, p = self.z, self.z.shape[1]

        def row(x: Tensor) -> Tensor:
            return torch.cat([x.new_ones(len(x), 1), x], -1)

        A = z.new_zeros(len(at) + p + 1, len(at) + p + 1)
        A[: len(at), : len(at)] = torch.cdist(at, at) ** 3
        A[: len(at), len(at) :] = row(at)
        A[len(at) :, : len(at)] = row(at).mT
        bend = (self.log_p - self.log_p.max() + 0.5 * at.square().sum(-1)).clamp_min(-DEEP)
        c = torch.linalg.lstsq(A, torch.cat([bend, z.new_zeros(p + 1)]).unsqueeze(-1)).solution
        parts = [torch.cat([torch.cdist(x, at) ** 3, row(x)], -1) @ c for x in z.split(4096)]
        return torch.cat(parts).squeeze(-1) + self.log_p.max() - 0.5 * z.square().sum(-1)


def sobol(count: int, like: Tensor) -> Tensor:
    """Points (count, p) of N(0, WIDER^2 I)."""
    return WIDER * sobol_normal(count, like.shape[-1]).to(like)


def _log_sobol(z: Tensor) -> Tensor:
    """Their log density (count,)."""
    return -0.5 * (z / WIDER).square().sum(-1) - z.shape[-1] * log(WIDER * (2.0 * pi) ** 0.5)


def find_mode(
    gradient_at: Callable[[Tensor], tuple[float, Tensor]], start: Tensor
) -> tuple[Tensor, Tensor, bool]:
    """The mode (p,), R (p, p), and whether it is one: no slope is left, the Hessian negative definite.

    ``gradient_at`` gives log p and its gradient, -inf and NaN where it has none.  The inverse of BFGS
    knows the directions alone in which it went, so it begins again from the Hessian, by differences of
    gradients, until that sees no gain either.
    """
    one = eye_like(start)
    at: Place = start, *gradient_at(start)
    inverse = one / at[2].norm().clamp_min(1.0)
    for _ in range(SEARCHES):
        before, at = at, _climb(gradient_at, at, inverse)
        steps = WIDTH * one
        slopes = [gradient_at(at[0] + s)[1] - gradient_at(at[0] - s)[1] for s in steps]
        hessian = torch.stack(slopes).nan_to_num() / (2.0 * WIDTH)  # flat beside what is lost
        values, vectors = torch.linalg.eigh(-0.5 * (hessian + hessian.mT))
        inverse = vectors / values.abs().clamp_min(FLAT) @ vectors.mT
        level = _gain(at[2], inverse) < SMALL
        if level or at is before:
            break
    return at[0], vectors * values.clamp_min(FLAT).rsqrt(), level and bool(values.min() > FLAT)


def _gain(slope: Tensor, inverse: Tensor) -> float:
    """What a Newton step would gain, in nats."""
    return 0.5 * float(slope @ inverse @ slope)


def _climb(
    gradient_at: Callable[[Tensor], tuple[float, Tensor]], at: Place, inverse: Tensor
) -> Place:
    """BFGS from an inverse Hessian (p, p) until it sees no gain, or no step has any."""
    for _ in range(CLIMBS):
        mode, value, slope = at
        if _gain(slope, inverse) < SMALL:
            break
        step = inverse @ slope
        step = step / (step.norm() / LONGEST).clamp_min(1.0)
        for _ in range(HALVINGS):
            there, after = gradient_at(mode + step)
            if there > value:
                break
            step = 0.5 * step
        else:
            break
        inverse = bfgs(inverse, step, slope - after)
        at = mode + step, there, after
    return at


def explore(log_p: Callable[[Tensor], float], mode: Tensor, root: Tensor) -> Design:
    """A design for log p of u (p,), standardised again where it is far from N(0, I).

    ``log_p`` is -inf where it has no value.
    """
    found = _around(log_p, mode, root)
    for _ in range(ROUNDS - 1):
        mean, covariance = found.spread
        sizes = torch.linalg.eigvalsh(covariance)
        fits = sizes.min() > FAR**-2
        if len(mean) in STEPS:  # a lattice finer than it need be is no worse
            fits = fits and len(found.z) < MOST[len(mean)]
        else:
            fits = fits and sizes.max() < FAR**2 and mean.abs().max() < 1.0
        if fits:
            break
        half = torch.linalg.cholesky(covariance + 1e-6 * torch.ones_like(mean).diag())
        found = _around(log_p, found.u(mean), found.root @ half)
    return found


def _around(log_p: Callable[[Tensor], float], center: Tensor, root: Tensor) -> Design:
    p, closed = len(center), True
    if p in STEPS:
        found, ring = {}, [(0,) * p]
        while ring and len(found) < MOST[p]:
            for point in ring:
                z = STEPS[p] * center.new_tensor(point)
                found[point] = log_p(center + root @ z)
            floor = max(found.values()) - DROP[p]
            near = [k for k, value in found.items() if value > floor]
            ring = sorted({b for k in near for b in _neighbours(k)} - found.keys())
        z, closed = STEPS[p] * center.new_tensor(list(found)), not ring
        values = center.new_tensor(list(found.values()))
        log_q = torch.full_like(values, -p * log(STEPS[p]))
    else:
        z = sobol(1 << (EACH * p - 1).bit_length(), center)
        values = center.new_tensor([log_p(center + root @ x) for x in z])
        log_q = _log_sobol(z) + log(len(z))
    lost, there = z[values.isneginf()], ~values.isneginf()
    z, values, log_q = z[there], values[there], log_q[there]
    log_w = values - log_q
    log_sum = float(torch.logsumexp(log_w, 0) + torch.linalg.slogdet(root)[1])
    return Design(center, root, z, values, torch.softmax(log_w, 0), log_sum, lost, closed)


def _neighbours(point: tuple[int, ...]) -> list[tuple[int, ...]]:
    moves = [(i, d) for i in range(len(point)) for d in (-1, 1)]
    return [tuple(x + d * (i == j) for j, x in enumerate(point)) for i, d in moves]
