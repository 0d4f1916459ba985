"""What one call of a model says of its units, at draws of the globals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Transform
from torch.utils._pytree import tree_map_only

from ..linalg.products import matvec
from .conditional import UnitPriors
from .runs import Call, Values

#: at how many draws mixed derivatives are taken, a pass for each of the globals followed: units average
#: them over their steps
FEW_DRAWS = 2


@dataclass(frozen=True)
class Seen:
    """The units of one run: their numbers (B,), and how many there are.

    ``whole``: they are all, in order.
    """

    index: Tensor
    size: int
    whole: bool

    @property
    def scale(self) -> float:
        """How many units one of the run stands for."""
        return self.size / max(len(self.index), 1)

    @property
    def given(self) -> Tensor | None:
        """What ``subsample=`` of the plate is."""
        return None if self.whole else self.index


class Place(NamedTuple):
    """x = A z + b at S draws of the globals: A^-1 (S, B, k, k), b (S, B, k), log |det A| (S, B)."""

    inverse: Tensor
    offset: Tensor
    log_det: Tensor

    @classmethod
    def of(cls, matrix: Tensor, offset: Tensor) -> Place:
        return cls(torch.linalg.inv_ex(matrix)[0], offset, torch.linalg.slogdet(matrix)[1])

    def gaussians(self, x: Tensor) -> Tensor:
        return matvec(self.inverse, x - self.offset)

    def moved(self, prior: UnitPriors) -> UnitPriors:
        """The prior of x, from that of z."""
        left = self.inverse.mT @ prior.precision
        linear = matvec(self.inverse.mT, prior.linear)
        precision = left @ self.inverse
        return UnitPriors(linear + matvec(precision, self.offset), precision)


@dataclass(frozen=True)
class Given:
    """What a call says of its units at S draws of the globals, ``values`` (S, ...) by site.

    ``priors`` are those of x, where the sites are: the Gaussians z of the units' latent sites, or their
    ``place``.  ``maps`` are those from z to latent sites, by site.
    """

    call: Call
    values: Values
    seen: Seen
    priors: UnitPriors
    maps: Mapping[str, list[Transform]]
    place: Place | None

    def detached(self) -> Given:
        return self._each(Tensor.detach)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Given:
        parts = dict(self.values), self.priors, self.place
        values, priors, place = tree_map_only(Tensor, change, parts)
        return replace(self, values=values, priors=priors, place=place)

    def repeated(self, times: int) -> Given:
        """All draws of the globals so many times, one copy after the other."""
        return self if times == 1 else self._each(lambda x: torch.cat([x] * times))

    def followed(self, names: Sequence[str]) -> Tensor:
        """phi (S, D): the globals of these names, one after the other."""
        count = len(self.priors.linear)
        return torch.cat(
            [self.priors.linear.new_zeros(count, 0)]
            + [self.values[name].reshape(count, -1).to(self.priors.linear) for name in names],
            1,
        )

    def few(self, x: Tensor) -> tuple[Given, Tensor]:
        """With x at few of the draws, evenly spaced."""
        count = min(len(x), FEW_DRAWS)
        chosen = (torch.arange(count) * len(x) // count).to(x.device)
        return self._each(lambda t: t[chosen]), x[chosen]

    def gaussians(self, x: Tensor) -> Tensor:
        """z (..., B, k) at x."""
        return x if self.place is None else self.place.gaussians(x)


@dataclass(frozen=True)
class Drawn:
    """Units at S draws of the globals: values (S, ...) by site, log q of each unit (S, B)."""

    values: dict[str, Tensor]
    log_q: Tensor
    seen: Seen

    @property
    def total(self) -> Tensor:
        """log q of all units that those of the call stand for, (S,)."""
        return self.log_q.sum(-1) * self.seen.scale
