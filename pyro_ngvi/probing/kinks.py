r"""Where the gradient of a log density jumps, averages of its second derivatives are wrong.

|x| has the second derivative 0 almost everywhere, and E |x| under N(m, v) the curvature 2 N(0; m, v):
all of it is in the kink, which no draw meets.  Laplace terms, max(0, x) and the like are looked for
along two segments a + s u, s in [0, 1], with phi(s) = u' grad f(a + s u): over a part of length h

    phi(s + h) - phi(s) - h (phi'(s) + phi'(s + h)) / 2

is O(h^3) where f is smooth, O(h) where its second derivative jumps, and the jump where phi does.  The
part where it is largest is halved again and again: a jump stays as it is, all in one of the halves.
Few entries move and few data count, so that it is no small part of phi.  Jumps that neither segment
meets, of less than 1e-7 of the largest slope, or small beside rounding, are missed.

No gradient sees where a log density itself jumps, as at a switch ``torch.where(t < x, a, b)``: from one
draw of a guide to another, one latent site at a time, it is compared with the integral of its slope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jacrev

from ..linalg.hessian import gradient
from ..runtime.density import LatentLayout, Site, Sites, site_log_prob, with_density
from ..runtime.model_density import ModelDensity

ENTRIES, DATA = 4, 16  # entries of a latent site that move, and data of a site
PARTS, LAST = 4, 4  # parts of a segment at first, and last halvings, which tell jumps
#: the part of the largest slope that jumps are looked for down to, in rounding errors and at all
ROUNDING, SMALL = 1e3, 1e-7
CLEAR, KEPT = 30.0, 0.5  # a jump is so many times the other half, and keeps this share
#: pairs of draws between which a site is moved, and the most sites
PAIRS, SITES = 3, 20
#: nats, below which a jump may be one between two numbers of a model that rounds to float32, and
#: points on each side of one that say how far apart numbers are there
NOTICED, BESIDE = 0.01, 8


class _Point(NamedTuple):
    s: float
    phi: float
    slope: float


def kinked_sites(
    run: Callable[[Tensor, Callable[[Sites], Any]], Any],
    t: Tensor,
    layout: LatentLayout,
    of: Callable[[Site], bool],
) -> list[str]:
    """Sites, of those that ``of`` keeps, whose log probability has a gradient in theta that jumps.

    ``run`` as ``pyro_ngvi.curvature.Drawn.run``; segments lie around the draw t (d,).  It waits.
    """
    names: list[str] = []

    def terms(t: Tensor) -> Tensor:
        def reduce(sites: Sites) -> Tensor:
            names.clear()
            kept = [t.new_zeros(())]
            for name, site in with_density(sites).items():
                if of(site):
                    names.append(name)
                    kept.append(_few(site_log_prob(site)[1].reshape(-1), DATA).sum())
            return torch.stack(kept)

        log_probs, log_det = run(t, reduce)
        return torch.cat([log_probs[0, 1:], log_det[None]])

    moved = torch.zeros_like(t)
    for part in moved.split([shape.numel() for shape in layout.unconstrained_shapes.values()]):
        _few(part, ENTRIES).fill_(1.0)
    away = torch.arange(1, len(t) + 1, dtype=t.dtype, device=t.device).sin()
    wide = away.abs() + 0.1
    # around the draw, and through zero, where most priors have their kinks
    for a, b in ((t - 2.0 * away, t + 2.0 * away), (t + 0.3 * wide, -0.7 * t - 0.9 * wide)):
        a, u = torch.where(moved > 0.0, a, t), moved * (b - a)
        found = jump(lambda t: terms(t).sum(), a, u)
        if found is not None:
            low, high = (jacrev(terms)(a + s * u) @ u for s in found)
            change = (high - low).abs()[:-1]
            large = change > 0.25 * change.max()
            return [name for name, is_large in zip(names, large.tolist(), strict=True) if is_large]
    return []


def _few(x: Tensor, count: int) -> Tensor:
    """At most so many entries of x (n,), evenly spaced, as a view."""
    return x[:: max(1, -(-len(x) // count))]


def jumping_sites(density: ModelDensity, theta: Tensor) -> Iterator[str]:
    """Latent sites along which the log density jumps, between draws theta (S, d), S at least 6."""
    start = 0
    for name, shape in list(density.layout.unconstrained_shapes.items())[:SITES]:
        here = torch.zeros_like(theta[0])
        here[start : start + shape.numel()] = 1.0
        start += shape.numel()

        def point(x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            value = density(x.unsqueeze(0))[0]
            return value, (gradient(value, x) * u).sum()

        def jumps(a: Tensor, u: Tensor) -> bool:
            found = jump_of(point, a, u)
            if found is None:
                return False
            low, high = found
            apart = 4.0 * torch.finfo(a.dtype).eps * float(a.abs().amax() / u.abs().amax())
            beside = torch.arange(BESIDE).to(a) * max(high - low, apart)
            at = torch.stack([low - beside, high + beside]).unsqueeze(-1)
            with torch.no_grad():
                left, right = density((a + at * u).flatten(0, 1)).reshape(2, BESIDE)
            # of rounding numbers on each side are as far apart
            noise = (left.amax() - left.amin()) + (right.amax() - right.amin())
            return bool((right[0] - left[0]).abs() > NOTICED + noise)

        pairs = zip(theta[:PAIRS], theta[PAIRS : 2 * PAIRS], strict=True)
        if any(jumps(a, here * (b - a)) for a, b in pairs):
            yield name


def jump(f: Callable[[Tensor], Tensor], a: Tensor, u: Tensor) -> tuple[float, float] | None:
    """The two ends, in s, of a tiny part of the segment a + s u over which phi of ``f`` jumps."""

    def slopes(x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        phi = (gradient(f(x), x, create_graph=True) * u).sum()
        return phi, (gradient(phi, x) * u).sum()

    return jump_of(slopes, a, u)


@torch.enable_grad()
def jump_of(
    phi: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], a: Tensor, u: Tensor
) -> tuple[float, float] | None:
    """As :func:`jump`, for a ``phi`` that with its slope is a function of a point and u."""
    eps = torch.finfo(u.dtype).eps

    def point(s: float) -> _Point:
        try:
            value, slope = phi((a + s * u).detach().requires_grad_(), u)
        except ValueError:  # far out a parameter leaves its support
            return _Point(s, nan, nan)
        return _Point(s, float(value.detach()), float(slope))

    points = [point(k / PARTS) for k in range(PARTS + 1)]
    size = max(abs(p.phi) for p in points)
    least = max(ROUNDING * eps, SMALL) * size
    low, high = max(pairwise(points), key=_error)
    history = []
    while high.s - low.s > 64.0 * eps:
        if not _error((low, high)) > least:
            return None
        middle = point(0.5 * (low.s + high.s))
        halves = sorted([(low, middle), (middle, high)], key=_error)
        history.append([_error(half) for half in halves])
        low, high = halves[1]
    if len(history) < LAST:  # in half precision there is no tiny part
        return None
    smaller, larger = zip(*history[-LAST:], strict=True)
    kept = min(larger) >= KEPT * max(larger)
    return (low.s, high.s) if kept and min(larger) > CLEAR * max(smaller) else None


def _error(part: tuple[_Point, _Point]) -> float:
    """What the slopes do not explain; nothing where a number is not finite."""
    low, high = part
    error = abs(high.phi - low.phi - 0.5 * (high.s - low.s) * (low.slope + high.slope))
    return error if error < float("inf") else 0.0
