"""Runs of a model with units: at draws of its globals, with its units held, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributions as td
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Transform
from torch.utils._pytree import tree_map_only

from ..linalg.products import matvec
from ..runtime.density import Site, Sites
from ..runtime.pyro_adapter import with_inner
from ..runtime.run import CannotBatch, Minibatches, run_in_loop, run_particles, run_plainly
from ..sites.conditioned_model import AllSeen
from .conditional import UnitPriors

Model = Callable[..., Any]
Values = Mapping[str, Tensor]

#: at how many draws mixed derivatives are taken, a pass for each of the globals followed: units average
#: them over their steps
FEW_DRAWS = 2


@dataclass(frozen=True)
class LocalSite:
    """A latent site of the units: ``rest`` is the shape of a unit's share, ``axis`` the units' dim."""

    name: str
    rest: torch.Size
    axis: int

    @property
    def size(self) -> int:
        return self.rest.numel()

    def rows(self, value: Tensor) -> Tensor:
        """(..., B, k) of a tensor (..., *shape) in the shape of the site."""
        lead = value.dim() - len(self.rest) - 1
        moved = value.movedim(self.axis, lead)
        return moved.reshape(*moved.shape[: lead + 1], self.size)

    def value(self, rows: Tensor) -> Tensor:
        """The other way round, (..., B, k) to (..., *shape)."""
        split = rows.reshape(rows.shape[:-1] + self.rest)
        return split.movedim(rows.dim() - 2, self.axis)


#: sites, and which of the k entries of a unit are their own
Parts = Sequence[tuple[LocalSite, slice]]


class Held(Messenger):
    """Around a model: its units' sites stand at z = 0, or at ``z`` (k,) or (B, k), and no more is run
    after the last of them.

    ``parts`` are these sites with their entries of z; the run goes on to the sites ``further``.
    """

    def __init__(self, parts: Parts, z: Tensor | None, further: Iterable[str] = ()) -> None:
        super().__init__()
        self.parts, self.z = {site.name: (site, own) for site, own in parts}, z
        self.wanted = {*self.parts, *further}

    def __enter__(self) -> Any:
        self.left = set(self.wanted)
        return super().__enter__()

    def __exit__(self, kind: Any, *error: Any) -> Any:
        super().__exit__(kind, *error)
        return kind is AllSeen

    def _pyro_sample(self, msg: Site) -> None:
        if msg["name"] not in self.parts:
            return
        site, own = self.parts[msg["name"]]
        fn, maps = gaussian_of(msg)
        value = torch.zeros_like(fn.loc.expand(fn.shape()))
        if self.z is not None:
            z = self.z[..., own].to(value)
            value = site.value(z.expand(value.shape[site.axis], site.size))
        for transform in maps:
            value = transform(value)
        msg["value"], msg["done"] = value, True

    def _pyro_post_sample(self, msg: Site) -> None:
        self.left.discard(msg["name"])
        if not self.left:
            raise AllSeen


@dataclass(frozen=True)
class Call:
    """A model with the arguments of one call, and its minibatches.

    ``owners``: of sites outside the plate of the B units whose data are those of single units, by name,
    the unit of each datum (N,), and B for data of none.
    """

    model: Model
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    minibatches: Minibatches
    owners: Mapping[str, Tensor] = field(default_factory=dict)

    def batched(
        self, reduce: Callable[[Sites], Any], values: Values, held: Held | None = None
    ) -> Any:
        """``reduce`` of the sites of S runs at ``values`` (S, ...) by site, out of handlers' sight.

        Where the model cannot run under ``vmap`` the runs come one after the other.
        """
        program = self.model if held is None else held(self.model)
        count = len(next(iter(values.values())))
        given = program, reduce, values, count, self.args, self.kwargs
        with poutine.block(hide_fn=lambda msg: msg.get("type") != "param"):
            try:
                return run_particles(*given, minibatches=self.minibatches)
            except CannotBatch:
                return run_in_loop(*given, minibatches=self.minibatches)
            except TypeError as error:
                if self.args or self.kwargs:
                    raise
                raise TypeError(
                    f"AutoHierarchical was asked without the arguments of its model: "
                    f"{str(error)[:80]}. Its answers are those of the units of a call: pass them, as "
                    f"in guide.median(*args)."
                ) from error

    def at(self, values: Values, held: Held | None = None) -> Sites:
        """The sites of one run."""
        program = self.model if held is None else held(self.model)
        return run_plainly(program, values, self.args, self.kwargs, self.minibatches)


def gaussian_of(site: Site) -> tuple[Any, list[Any]]:
    """The Gaussian of a site without ``to_event``, and the elementwise maps that follow it."""
    fn, maps = site["fn"], []
    while isinstance(fn, td.Independent | td.TransformedDistribution):
        if not isinstance(fn, td.Independent):
            maps = [*fn.transforms, *maps]
        fn = fn.base_dist
    return fn, maps


def is_gaussian(site: Site) -> bool:
    """Whether a latent site is a Gaussian, or an elementwise one-to-one map of one."""
    fn, maps = gaussian_of(site)
    each = all(t.bijective and t.domain.event_dim == t.codomain.event_dim == 0 for t in maps)
    inner = [part for t in maps for part in with_inner(t)]
    fixed = not any(isinstance(x, Tensor) for t in inner for x in vars(t).values())
    return isinstance(fn, td.Normal | td.MultivariateNormal) and each and fixed


# --- what one call of a model says of its units, at draws of the globals


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
