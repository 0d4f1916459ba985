r"""A Gaussian to start from: Newton steps on -log p, then on its expectation under q.

**To a mode.**  From each of a few points theta, with f = -log p(y, theta) in nats and its Hessian
H = Q diag(h) Q',

    theta <- theta - W grad f,   W = Q diag(1 / (|h| + mu)) Q',

mu raised fourfold where f would not fall and lowered where it does (Levenberg 1944; the absolute values
of Dauphin et al. 2014 leave saddles).  A few gradients correct W (BFGS) before the next Hessian.  Every
Hessian makes its N(theta, |H|^-1), Laplace's approximation where theta is the mode; on a hierarchical
posterior, whose mode may be degenerate, an early one has the largest ELBO.  A path ends where it comes
into the typical set of a Gaussian of another.  When enough paths agree many more points go down at once
(:mod:`.scouts`), and those that come to rest far from all ends begin paths.  Where Hessians on the
first path are positive and f lies above its tangents at many points, it is taken for convex: one path.

**Away from it**, where log p - log N varies over the draws of the best N(m, P^-1) of a path, it goes on
by steps on expectations (:mod:`.expectations`).

**Instead**, far from the posterior, where one of several paths leads to the best or d is large: as much
work of natural-gradient steps from the start that was to be replaced, or what a mean field comes to
from there (:mod:`.narrow`), if they reach a larger ELBO.

A search stops at the time that it has to end by (:mod:`.deadline`), with what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice, tee
from typing import Any

import torch
from torch import Tensor

from ..families.base import Tensors
from ..families.full_rank import FullRankNormal
from ..linalg.hessian import ROWS, absolute, bfgs, derivatives, values_and_gradients
from ..linalg.host import apart, own_random_state
from ..linalg.noise import centred
from .ascent import ascended
from .deadline import is_late
from .expectations import DRAWS, LEFT, smoothed
from .found import BARRIER, FAINT, SAME, Found, Gaussian, holder, lower, modes_of, rounding
from .scouts import led, looks_convex

LogDensity = Callable[[Tensor], Tensor]  # theta (S, d) to (S,)
#: the d above which only the best end is moved by steps on expectations, and half of the budget, and
#: the largest d
FEW, LARGEST = 64, 1000
#: points where all lead to one ELBO; else at least, until so many led to the best ELBO, and at most
STARTS, AGAIN, NEAR, MORE_STARTS = 4, 6, 3, 32
#: points whose tangents, and others whose ends are looked at, and sds beside sqrt(d) from other ends
SCOUTS, FAR = 32, 3.0
#: evaluations after which no other path begins
BUDGET = 8_000
#: Hessians of a path at most, and gradients before the first
HESSIANS, GRADIENTS = 40, 20
#: draws behind an ELBO, behind that of a finalist, and the number of these
COMPARED, FINAL, FINALISTS = 32, 256, 3
#: nats: a promised decrease that ends a path, and what steps on expectations gain in many dimensions
DECREASE, WORTH = 0.05, 2.0
FULL = FullRankNormal()


class Search:
    """The search for one density; ``like`` is a point (d,).  See the head of this file."""

    #: the family by which the Gaussians on the way are compared
    compared: Any = FULL
    #: nats below the best end from which an end is of no use
    within: float = FAINT
    #: Gaussians in a row without a larger ELBO that end a path
    falling: int = 3
    #: what goes to another member from the start to replace, instead of a few steps of its family
    instead: Callable[[Search, Any, Tensors], Tensors | None] | None = None

    def __init__(self, density: LogDensity, like: Tensor) -> None:
        self.density, self.d, self.evaluations = density, len(like), 0
        self.budget = BUDGET if self.d <= FEW else BUDGET // 2
        self.ends: list[Gaussian] = []
        #: ends of paths, and of the steps on expectations from there
        self.smoothed_ends: list[tuple[Gaussian, Gaussian]] = []
        #: whether all Hessians on the paths were positive
        self.positive = True
        rows = FINAL if self.d <= LARGEST else COMPARED
        self.noise = torch.randn(rows, 2 * self.d, dtype=like.dtype, device=like.device)

    def f(self, theta: Tensor, cost: int = 1) -> Tensor:
        """-log p of points (S, d), which count as ``cost`` evaluations each."""
        self.evaluations += cost * len(theta)
        return -self.density(theta)

    def value_and_gradient(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """f and its gradient (d,) at a point."""
        value, g = values_and_gradients(self.f, theta.unsqueeze(0))
        return value[0], g[0]

    def derivatives(self, theta: Tensor, away: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the mean of f at theta + away (S, d): the value, gradient (d,), Hessian (d, d)."""
        return derivatives(lambda x: self.f(x + away, self.d).mean(), theta)

    def draws(self, family: Any, params: Tensors, n: int, common: bool = True) -> Tensor:
        """Draws (n, d) of a member, by noise that is ``common`` to all or by new noise."""
        size = family.noise_dim(params)
        noise = self.noise[:n, :size] if common else torch.randn(n, size).to(self.noise)
        return family.rsample(params, centred(noise))

    def log_ratio(self, family: Any, params: Tensors, n: int) -> Tensor:
        """log p - log q of n common draws, (n,)."""
        z = self.draws(family, params, n)
        return -torch.cat([self.f(part) for part in z.split(ROWS)]) - family.log_prob(params, z)

    def elbo(self, family: Any, params: Tensors, n: int = COMPARED, errors: float = 0.0) -> float:
        """In nats, of a member by n draws, less that many standard errors."""
        return lower(self.log_ratio(family, params, n), errors)

    def gaussian(self, loc: Tensor, precision: Tensor) -> Gaussian:
        ratio = self.log_ratio(self.compared, self.compared.matched(loc, precision), COMPARED)
        return Gaussian(loc, precision, lower(ratio), float(ratio.var().nan_to_num(torch.inf)))

    def descend(
        self, theta: Tensor, W: Tensor, steps: int, known: Iterable[Gaussian] = ()
    ) -> Tensor:
        """BFGS steps with W (d, d) at first, while one of three lengths lowers f, or to a ``known``."""
        value, g = self.value_and_gradient(theta)
        for _ in range(steps):
            step = -(W @ g)
            slope = g @ step
            if bool(-slope < DECREASE) or holder(known, theta) or is_late():
                break
            for length in (1.0, 0.3, 0.1):
                new = theta + length * step
                value_there, g_there = self.value_and_gradient(new)
                if bool((value_there <= value + 1e-4 * length * slope) & g_there.isfinite().all()):
                    break
            else:
                break
            W = bfgs(W, new - theta, g_there - g)
            theta, value, g = new, value_there, g_there
        return theta

    def newton(self, theta: Tensor, decrease: float = DECREASE) -> Iterator[tuple[Tensor, Tensor]]:
        """Points (d,) that go down from theta, each with |H| (d, d), until f has converged."""
        between, damping = min(max(self.d // 4, 1), 12), 0.0
        for _ in range(HESSIANS):
            value, g, H = self.derivatives(theta, torch.zeros_like(theta).unsqueeze(0))
            if not bool(torch.isfinite(g.sum() + H.sum() + value)):
                return
            precision, h, Q = absolute(H)
            self.positive &= precision is H
            yield theta, precision
            along = Q.mT @ g
            while True:
                step = along / (h + damping)
                if float(0.5 * (along * step).sum()) < decrease:
                    return
                new = theta - Q @ step
                if bool(self.f(new.unsqueeze(0))[0] < value):
                    break
                damping = max(
                    4.0 * damping, 0.1 * float(h.median()), 1e-3 * float(along.abs().max())
                )
            theta = self.descend(new, (Q / (h + damping)) @ Q.mT, between)
            damping = damping / 4.0 if damping > 1e-3 else 0.0

    def path(self, theta: Tensor, known: list[Gaussian]) -> Gaussian | None:
        """The best Gaussian on the way from a point, or one of the ``known`` if it comes to that."""
        best, falling = None, 0
        # a Cholesky at a far point, a value out of support
        with suppress(RuntimeError, ValueError):
            if known:
                units = torch.linalg.inv(max(known, key=lambda q: q.elbo).precision)
                theta = self.descend(theta, units, GRADIENTS, known)
                if near := holder(known, theta):
                    return near
            for k, (loc, precision) in enumerate(self.newton(theta), 1):
                near = holder(known, loc)
                q = near or self.gaussian(loc, precision)
                better = best is None or q.elbo > best.elbo
                best, falling = (q, 0) if better else (best, falling + 1)
                if near or falling == self.falling or is_late():
                    break
                if k == HESSIANS and better:
                    return None  # log p rises without end
        return best

    def visit(self, theta: Tensor) -> Gaussian | None:
        """Where a point leads, away from the mode where that pays; one of ``ends`` from here on."""
        # those whose typical set is the posterior's near a mode
        known = [q for q in self.ends if q.spread < SAME]
        q = self.path(theta, known)
        if q is None or q in known:
            return q
        # from N(theta, |H|^-1) on they gain KL(q || p) at most, near p half of the spread
        best = max((end.elbo for end in self.ends), default=-torch.inf)
        if self.d <= FEW and self.varies(q, LEFT) and q.elbo + 0.5 * q.spread > best - self.within:
            for before, end in self.smoothed_ends:
                # where that led from a Gaussian all but the same, it leads again
                if before.holds(q.loc) and q.holds(before.loc) and q.elbo < before.elbo + SAME:
                    return end
            with suppress(RuntimeError, ValueError):
                before, q = q, self.gaussian(*smoothed(self, q, self.compared))
                self.smoothed_ends.append((before, q))
        if q.loc.dtype != torch.float64:
            params = self.compared.matched(q.loc, q.precision)
            off = rounding(self.f, self.draws(self.compared, params, COMPARED))
            q = replace(q, elbo=q.elbo - off, off=off)
        self.ends.append(q)
        return q

    def run(self, family: Any, given: Tensors, points: Iterable[Tensor]) -> Found:
        """See :func:`best_gaussian`."""
        reached, near, convex = [], 0, False
        points, same = tee(points)
        for point in islice(points, MORE_STARTS):
            end = self.visit(point)
            reached.append(-torch.inf if end is None else end.elbo)
            convex = len(reached) == 1 and self.is_convex(islice(same, SCOUTS))
            near = sum(elbo > max(reached) - SAME for elbo in reached)
            enough = near == len(reached) == STARTS or (len(reached) >= AGAIN and near >= NEAR)
            if convex or enough or self.evaluations > self.budget or is_late():
                break
        reached += [] if convex else self.scouted(points)
        best, taken = self.final(), self.evaluations
        before, found = self.elbo(family, given), []
        if best is not None:
            found.append(self.member(best, family))
            if self.d > FEW and type(family) is type(
                self.compared
            ):  # moved since its path has ended
                at = reached.index(best.elbo)
                reached[at] = max(reached[at], self.elbo(family, found[0]))
            # where no other point leads may be no mass, as with a scale of 0 and effects that are equal
            few = self.d <= FEW  # else no end of a path has been moved by steps on expectations
            if (near == 1 or not few) and not convex and best.spread > SAME and not is_late():
                steps = taken // (DRAWS * (len(reached) if few else 2))
                other = self.instead and self.instead(self, family, given)
                other = other or ascended(lambda z: -self.f(z), family, given, steps)
                found.append(other)
                reached.append(self.elbo(family, other))
        # an ELBO may be the noise of a few draws, if q is far from the posterior
        elbos = [self.elbo(family, q, errors=2.0) for q in found]
        params = found[elbos.index(max(elbos))] if max(elbos, default=before) > before else None
        good = [q for q in self.ends if q.spread < SAME]
        seen = tuple(reached), before, self.evaluations, self.apart(good), convex
        return Found(params, *seen, tuple(self.ends))

    def is_convex(self, points: Iterable[Tensor]) -> bool:
        """Whether all that is known of f after one path, and at points (d,), is so of a convex one."""
        if self.ends and self.positive and not is_late():
            with suppress(RuntimeError, ValueError):  # as in a path
                W = torch.linalg.inv(self.ends[0].precision)
                return looks_convex(self.f, torch.stack([self.ends[0].loc, *points]), W)
        return False

    def scouted(self, points: Iterator[Tensor]) -> list[float]:
        """The largest ELBO from each place to which further points lead, in one batch, that is far from
        all ends and may hold mass."""
        reached: list[float] = []
        ends = [q for q in self.ends if q.elbo > -torch.inf]
        if not ends or self.evaluations > self.budget or is_late():
            return reached
        best = max(ends, key=lambda q: q.elbo)
        with suppress(RuntimeError, ValueError):  # as in a path, of all of them
            W = torch.linalg.inv(best.precision)
            scouts = torch.stack([*islice(points, SCOUTS)])
            theta, value, log_det = led(self.f, scouts, W, self.is_near)
            log_mass = 0.5 * log_det - value
            least = 0.5 * torch.logdet(W) - self.f(best.loc[None])[0] - self.within
            for x in theta[log_mass.argsort(descending=True)[: int((log_mass > least).sum())]]:
                if self.evaluations > self.budget or is_late():
                    break
                if not bool(self.is_near(x)):
                    end = self.visit(x)
                    reached.append(-torch.inf if end is None else end.elbo)
        return reached

    def is_near(self, theta: Tensor) -> Tensor:
        """Whether points (..., d) are near an end, (...)."""
        far = FAR + self.d**0.5
        return torch.stack([q.squared_distance(theta) < far**2 for q in self.ends]).any(0)

    def apart(self, good: list[Gaussian]) -> tuple[Gaussian, ...]:
        """Those of comparable mass, if there are several, that others do not join without a fall."""
        known, apart = modes_of(good), list[list[Gaussian]]()
        for q in known:
            joined = [m for m in apart if any(self.barrier(q, p, known) <= BARRIER for p in m)]
            apart = [m for m in apart if m not in joined] + [[q, *chain(*joined)]]
        best = (max(m, key=lambda q: q.elbo) for m in apart)
        return tuple(best) if len(apart) > 1 else ()

    def barrier(self, a: Gaussian, b: Gaussian, known: Iterable[Gaussian]) -> float:
        """Nats by which log p falls half way between two Gaussians, at the best point of that plane;
        infinity where another of the ``known`` has that point: they are joined by way of it, or not."""
        middle, along = 0.5 * (a.loc + b.loc), b.loc - a.loc
        plane = torch.linalg.qr(along.unsqueeze(-1), mode="complete")[0][:, 1:]
        theta = middle
        if self.d > 1:
            within = Search(lambda z: self.density(middle + z @ plane.mT), plane[0])
            for loc, _ in within.newton(torch.zeros_like(plane[0])):
                theta = middle + plane @ loc
            self.evaluations += within.evaluations
        if max(known, key=lambda q: float(q.log_mass(theta))) not in (a, b):
            return torch.inf
        values = self.f(torch.stack([theta, a.loc, b.loc]))
        return float(values[0] - values[1:].amax())

    def final(self) -> Gaussian | None:
        """The best of the ends, if one has an ELBO."""
        ends = (q for q in self.ends if q.elbo > -torch.inf)
        best = sorted(ends, key=lambda q: -q.elbo)[:FINALISTS]
        if len(best) < 2:
            return next(iter(best), None)
        params = [self.compared.matched(q.loc, q.precision) for q in best]
        elbos = [
            self.elbo(self.compared, p, FINAL, 2.0) - q.off
            for p, q in zip(params, best, strict=True)
        ]
        return best[elbos.index(max(elbos))]

    def member(self, q: Gaussian, family: Any) -> Tensors:
        """The nearest member of the family, by steps on its own expectations where that pays."""
        best = q.loc, q.precision
        # few variables have been moved in the family that is compared; many are so in no other
        many, same = self.d > FEW, type(family) is type(self.compared)
        if many == same and self.varies(q, WORTH if many else LEFT):
            with suppress(RuntimeError, ValueError):
                best = smoothed(self, q, family)
        return family.matched(*best)

    def varies(self, q: Gaussian, nats: float) -> bool:
        """Whether q is more than so many off, and time is left for steps on expectations."""
        return q.spread > 2.0 * nats and not is_late()


def best_gaussian(
    density: LogDensity,
    family: Any,
    given: Tensors,
    points: Iterable[Tensor],
    instead: Callable[[Search, Any, Tensors], Tensors | None] | None = None,
) -> Found:
    """The member of ``family`` nearest to the best Gaussian to which the ``points`` (d,) lead."""
    # no gradients of parameters of the model; those in theta are asked for
    with own_random_state(apart(0)), torch.no_grad():
        search = Search(density, given["loc"])
        search.instead = instead
        return search.run(family, given, points)
