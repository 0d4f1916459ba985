r"""First targets of all: every datum for itself, from its own prior.

At the prior, expectations tell nothing of where the data are: under a wide one they are flat or
overflow, and the first Newton step of a count of 1,000 goes to f = 600.  So each site starts as the one
that its datum would have alone, under N(m_n, C_n) with C_n made narrower than 1:

    a <- a + V (C_n^-1 (m_n - a) + g),  V = (C_n^-1 + Lambda)^-1,  Lambda = |H|,

g and H the expectations under N(a, V), with steps of at most 2 in every entry: the scale of the usual
links.  Quadratic terms come out as they are, whatever the start.

A datum's own ELBO, E log p - KL(N(a, V) || N(m_n, C_n)), must rise at every step, or the next is half
as long.  The rounds diverge otherwise where f has a location and a log scale: H grows as the scale to
the power -2, so V and H take turns at being too wide and too narrow.  There H is indefinite too, which
is why it is |H| that bounds a step.  V goes along a geodesic, V^1/2 (V^-1/2 V_new V^-1/2)^t V^1/2,
since it may change by orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ..linalg.host import host_bool
from ..linalg.products import matvec
from ..linalg.spectral import positive_part
from .expectation import Expected, Points, expectations

T = TypeVar("T", "_Place", Expected)

#: rounds at most, the longest step of one, and steps so short that they end them
ROUNDS, LONGEST, SHORT = 16, 2.0, 0.2
#: by what factor a variance changes in a round at most
WIDEST = 16.0


@dataclass(frozen=True)
class _Place:
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
        one = torch.eye(ratio.shape[-1], dtype=ratio.dtype, device=ratio.device)
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
        settled = settled | (torch.stack(longest).max() < SHORT)
        if host_bool(settled):  # elsewhere the rounds left change nothing
            break
    targets = {}
    for name, e in found.items():
        # as a function of f at the mean of q, from which CVI takes its targets
        Lambda = torch.where(e.quadratic.reshape(-1, 1, 1), -e.hessian, _absolute(-e.hessian))
        gradient = e.gradient + matvec(Lambda, matvec(roots[name], best[name].x))
        targets[name] = replace(e, gradient=gradient, hessian=-Lambda)
    return targets


def _chosen(condition: Tensor, one: T, other: T) -> T:
    """Those tensors of ``one`` for the data that are marked by ``condition`` (n,)."""
    found = {
        name: torch.where(condition.reshape(-1, *[1] * (x.dim() - 1)), x, getattr(other, name))
        for name, x in vars(one).items()
    }
    return replace(one, **found)


def _absolute(G: Tensor) -> Tensor:
    """Symmetric G (n, k, k) with its eigenvalues' absolute values."""
    return 2.0 * positive_part(G) - G


def _narrowed_root(mean: Tensor, covariance: Tensor) -> Tensor:
    """R (n, k, k) of the covariances, with variances of at most about 1."""
    size = torch.diagonal(covariance, dim1=-2, dim2=-1).mean(-1).clamp_min(1.0)
    floor = torch.finfo(mean.dtype).eps * torch.ones_like(mean)
    narrowed = covariance / size.reshape(-1, 1, 1) + torch.diag_embed(floor)
    return torch.linalg.cholesky_ex(narrowed)[0]
