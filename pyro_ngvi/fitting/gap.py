r"""How many nats a guide can still gain within its family, from gradients at what it holds.

Near the optimum the ELBO that is missing is, with g the gradient of the loss and H its Hessian,

    gap = g' H^-1 g / 2.                                                                          (1)

The mean of n noisy gradients would add tr(H^-1 Cov g) / (2 n) to it.  Two means over different noise do
not: with a and b those of two halves of the gradients,

    gap = x' b / 2,   H x = a                                                                     (2)

has no such bias, and its standard error is that of x' b, from the spread of the gradients behind b.
(H, of the draws behind a, depends on a: on skewed posteriors of few variables half of a gap of .05 may
be hidden by that.)

x comes from conjugate gradients, preconditioned by the Fisher matrix F of the family.  H v is the
difference of gradients at a shifted and at the same q, of the noise behind a.  That noise is white over
all of its rows: else H is not F for a normal posterior either, and the solver takes more steps.  It
goes on to a small residual: along correlated posteriors H is a thousandth of F and less.  x is also the
way to the optimum, where natural gradients creep.  Far from it (1) is no more than a large number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..families.base import Tensors, dot
from ..guides.deadline import is_asked
from ..linalg.host import is_coarse
from ..linalg.noise import SharedNoise
from ..runtime.store import traced_params

#: Fisher length of the shift between the two gradients of a Hessian product
SHIFT = 0.05
#: gradients behind b at first, and behind a at most at first; so many have numbers in a row
HALF = 8
#: steps of conjugate gradients, at most, and the share that is left of the squared residual
CG_STEPS, RESIDUAL = 20, 1e-6
#: share of the tolerance for which no step is taken: no mean is off by more than .01 sd for .05 nats
HARDLY = 1e-3
#: negative curvature, in units of F, that is taken for none, and such as no q has
FLAT, FAR = 0.1, 100.0

#: one gradient or tangent for each block
Parts = list[Tensors]


@dataclass(frozen=True)
class Gap:
    """Nats of ELBO still to gain within the family, by (2) of :mod:`pyro_ngvi.fitting.gap`.

    Attributes:
        nats: this estimate, below zero by chance where little is left.
        error: its standard error, in nats.
        gradients: how many gradients of the loss it took.
        curved: whether all Hessian products were positive; where not, the guide is at no minimum.

    Example:
        >>> gap = Gap(nats=0.03, error=0.01, gradients=80)
        >>> gap.is_below(0.05), gap.is_above(0.05), gap.is_below(0.02), gap.is_above(0.005)
        (True, False, False, True)
    """

    nats: float
    error: float
    gradients: int
    curved: bool = True

    def is_below(self, tol: float) -> bool:
        """Whether the gap is below ``tol`` nats: one standard error, of at most tol / 2, included."""
        return self.curved and self.error <= 0.5 * tol and self.nats + self.error <= tol

    def is_above(self, tol: float) -> bool:
        """Whether it is above ``tol`` nats, by two standard errors."""
        return not self.curved or not self.nats - 2.0 * self.error <= tol


class GapMeter:
    """Estimates (2) at what ``blocks`` hold, guides of ours: averages, not iterates.  ``gradient(s)``
    adds to ``.grad`` the gradient of the loss for noise and data number s, and returns the loss; a is
    the mean of ``pieces`` of them, b of ``fewest``; ``sees_all``: they know no noise of data."""

    def __init__(
        self,
        blocks: list[Any],
        gradient: Callable[[int], Any],
        pieces: int = HALF,
        fewest: int = HALF,
        sees_all: bool = True,
    ) -> None:
        self.blocks, self._gradient, self.pieces, self.fewest = blocks, gradient, pieces, fewest
        self.sees_all = sees_all
        self._noise = SharedNoise(pieces)
        self.families = [block.family for block in blocks]
        self.params: Parts = []
        self.count = self._before = 0  # gradients so far, and before this look
        self._first = self._used = 0
        self._known: dict[int, Any] = {}  # losses, by number of the gradient that has found it

    def resolves(self) -> bool:
        """Whether the shift of a Hessian product is more than a step between numbers of the dtype."""
        with self._at_answer():
            parts = zip(self.families, self.params, strict=True)
            for family, params in parts:
                mean, sd = family.mean(params), family.stddev(params)
                if bool(is_coarse(mean, sd, mean.dtype).any()):
                    return False
        return True

    def widen(self) -> None:
        """Take twice as many gradients from now on."""
        self.pieces, self.fewest = 2 * self.pieces, 2 * self.fewest

    def __call__(self, tol: float, most: int, whole: bool = False) -> Gap:
        """The gap, by the ``fewest`` gradients, or as many as tell it from ``tol`` nats, and about
        ``most`` in all at most; ``whole``: as a :meth:`newton_step` needs it."""
        self._first += self._used  # noise that is new to what is held
        with self._at_answer():
            pieces, n, sure, self._before = self.pieces, self.fewest, False, self.count
            others: list[Parts] = []
            while True:
                self._noise = SharedNoise(pieces)
                a = self._mean_gradient()
                others += [self._local_gradient(_number(1, s)) for s in range(len(others), n)]
                gap, x = self._solve(a, others, max(tol, self.far()) if whole else tol)
                if is_asked():
                    return Gap(math.inf, math.inf, self._taken)
                self._used = _number(1, n)
                energy = _dot(x, a)
                self._way = gap, x, energy, n
                if gap.is_below(tol):
                    # x overfits a by so many nats, which hides some of a gap on heavy tails: once more
                    if sure or 0.5 * energy - gap.nats <= tol:
                        return gap
                    sure = True
                # twice as many, and as many Hessian products again, cost about three times as much
                elif gap.is_above(tol) or 4 * gap.gradients > most:
                    return gap
                pieces, n = 2 * pieces, 2 * n

    def newton_step(self, tol: float) -> bool:
        """Move what the guide holds by the part of x in equation (2) that is best by b, or less of it;
        whether the mean loss over the noise behind b, of which x knows nothing, falls so.  Nothing
        moves where a thousandth of ``tol`` is not to be gained.  A part t of x lowers the loss
        by t x'b - t^2 x' H x / 2, and x' H x = x'a.
        """
        gap, x, energy, n = self._way
        if gap.is_above(self.far()) or gap.is_below(HARDLY * tol) or gap.nats <= 2.0 * gap.error:
            return False
        with self._at_answer():
            best, self.count = min(1.0, 2.0 * gap.nats / energy), self.count + n
            # known since b was taken, though counted here
            before = sum(float(self._known[_number(1, s)]) for s in range(n)) / n
            for part in (best, 0.5 * best, 0.25 * best):
                parts = zip(self.families, self.params, x, strict=True)
                self._hold([f.retract(p, u, -part) for f, p, u in parts])
                self.count += n
                if float(self._losses(n).mean()) < before:
                    return True
            self._hold(self.params)
        return False

    def rises(self, before: Parts, n: int = HALF) -> Tensor:
        """By how much the loss is above that of what the guide held ``before``, for ``n`` numbers of
        noise that x knows nothing of."""
        with self._at_answer():
            now = self._losses(n)
            self._hold(before)
            found = now - self._losses(n)
            self._hold(self.params)
        self.count += 2 * n
        return found.nan_to_num(math.inf, math.inf, -math.inf)

    def hold(self, parts: Parts) -> None:
        """Let the guide hold these."""
        with self._at_answer():
            self._hold(parts)

    @property
    def _taken(self) -> int:
        return self.count - self._before

    def far(self) -> float:
        """Nats from which natural gradients go the way: all latent variables are some sds off."""
        parts = zip(self.families, self.params, strict=True)
        return float(sum(family.dim(params) for family, params in parts))

    def _mean_gradient(self) -> Parts:
        """Of the noise behind a, where the parameters are now."""
        found = []
        for s in range(self._noise.pieces):
            with self._noise.piece(s):
                found.append(self._local_gradient(_number(0, s)))
        return _mean(found)

    def _losses(self, n: int) -> Tensor:
        """For n numbers of the noise behind b."""
        with gradients_taken_back(self.blocks):
            found = [float(self._gradient(self._first + _number(1, s))) for s in range(n)]
        return torch.tensor(found, dtype=torch.float64)

    def _solve(self, a: Parts, others: list[Parts], tol: float) -> tuple[Gap, Parts]:
        x, residual, direction = _times(0.0, a), a, self._natural(a)
        start = square = _dot(residual, direction)
        if start == 0.0:  # not even noise: a gradient of zero
            return Gap(0.0, 0.0, self._taken), x
        gap = Gap(math.inf, math.inf, self._taken)
        for _ in range(CG_STEPS):
            if not square > 0.0 or is_asked():  # nothing is left, or nothing that is finite
                break
            product = self._hessian_product(direction, a)
            curvature = _dot(direction, product)
            if curvature == math.inf:  # beyond the dtype, as where log p is
                return Gap(math.inf, math.inf, self._taken), x
            if not curvature > 0.0:
                flat = self._is_flat(direction, curvature, others)
                return Gap(gap.nats, gap.error, self._taken, curved=flat), x
            step = square / curvature
            x, residual = _add(x, step, direction), _add(residual, -step, product)
            terms = torch.tensor([0.5 * _dot(x, b) for b in others], dtype=torch.float64)
            error = float(terms.std()) / math.sqrt(len(others))
            gap = Gap(float(terms.mean()), error, self._taken)
            if gap.is_above(tol):
                break
            natural = self._natural(residual)
            last, square = square, _dot(residual, natural)
            if square <= RESIDUAL * start:
                break
            direction = _add(natural, square / last, direction)
        return gap, x

    def _is_flat(self, direction: Parts, curvature: float, others: list[Parts]) -> bool:
        """Whether a direction gains nothing: no slope but noise, and -H small, or the shift too far."""
        slopes = torch.tensor([_dot(direction, b) for b in others], dtype=torch.float64)
        steep = abs(float(slopes.mean())) > 2.0 * float(slopes.std()) / math.sqrt(len(others))
        return not steep and not -FAR < curvature / self._inner(direction) < -FLAT

    def _inner(self, tangent: Parts) -> float:
        """The squared Fisher length of a tangent."""
        parts = zip(self.families, self.params, tangent, strict=True)
        return sum(float(f.inner(p, u, u)) for f, p, u in parts)

    def _natural(self, gradient: Parts) -> Parts:
        parts = zip(self.families, self.params, gradient, strict=True)
        return [family.natural_gradient(params, g) for family, params, g in parts]

    def _hessian_product(self, tangent: Parts, a: Parts) -> Parts:
        """H times a tangent, a gradient, of the noise behind a."""
        length = math.sqrt(self._inner(tangent))
        with self._moved(tangent, SHIFT / length):
            shifted = self._mean_gradient()
        return _times(length / SHIFT, _add(shifted, -1.0, a))

    def _local_gradient(self, s: int) -> Parts:
        """Gradient number ``s`` in the local frame of what the guide holds."""
        self.count += 1
        found = []
        with gradients_taken_back(self.blocks):
            self._known[s] = self._gradient(self._first + s)
            for block, params in zip(self.blocks, self.params, strict=True):
                held = block.natural_params()
                grads = {
                    k: torch.zeros_like(v) if held[k].grad is None else held[k].grad
                    for k, v in params.items()
                }
                found.append(block.family.pull(params, grads))
        return found

    @contextmanager
    def _at_answer(self) -> Iterator[None]:
        with at_answer(self.blocks):
            self.params = [
                {name: p.detach().clone() for name, p in block._current().items()}
                for block in self.blocks
            ]
            yield

    @contextmanager
    def _moved(self, tangent: Parts, step: float) -> Iterator[None]:
        """With the parameters moved straight along a tangent."""
        try:
            parts = zip(self.families, self.params, tangent, strict=True)
            self._hold([{k: p[k] + step * v for k, v in f.push(p, u).items()} for f, p, u in parts])
            yield
        finally:
            self._hold(self.params)

    @torch.no_grad()
    def _hold(self, values: Parts) -> None:
        for block, own in zip(self.blocks, values, strict=True):
            for name, p in block.natural_params().items():
                p.copy_(own[name])


@contextmanager
def at_answer(blocks: Iterable[Any]) -> Iterator[None]:
    """Draws come from what the guide holds, by the path of log q alone, whose noise vanishes."""
    before = [(b, b._lag, b._lag_of, b.path_share) for b in blocks]
    try:
        for block, *_ in before:
            block.set_iterate_offset(None)
            block.path_share = None
        yield
    finally:
        for block, lag, lag_of, share in before:
            block.set_iterate_offset(lag, lag_of)
            block.path_share = share


@contextmanager
def gradients_taken_back(blocks: Iterable[Any]) -> Iterator[None]:
    """Around a loss and its backward pass: what they leave in parameters and blocks is gone then."""
    with pyro.poutine.trace(param_only=True) as seen:
        yield
    for p in traced_params(seen):
        p.grad = None
    for block in blocks:
        block.curvature = None


def _number(half: int, s: int) -> int:
    """Of gradient s behind a (0) or b (1): they take turns by ``HALF``, however many there will be."""
    return 2 * HALF * (s // HALF) + HALF * half + s % HALF


def _dot(a: Parts, b: Parts) -> float:
    return sum(float(dot(u, v)) for u, v in zip(a, b, strict=True))


def _add(a: Parts, factor: float, b: Parts) -> Parts:
    return tree_map(lambda u, v: torch.add(u, v, alpha=factor), a, b)


def _times(factor: float, a: Parts) -> Parts:
    return tree_map(lambda v: factor * v, a)


def _mean(drawn: list[Parts]) -> Parts:
    return _times(1.0 / len(drawn), reduce(lambda a, b: _add(a, 1.0, b), drawn))
