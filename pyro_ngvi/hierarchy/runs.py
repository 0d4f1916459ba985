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

from ..distributions import GaussianProcess, GaussianStateSpace
from ..linalg.products import matvec
from ..runtime.density import Site, Sites
from ..runtime.pyro_adapter import with_inner
from ..runtime.run import (
    CannotBatch,
    Conditioned,
    Minibatches,
    run_in_loop,
    run_particles,
    run_plainly,
)
from ..sites.conditioned_model import AllSeen
from .conditional import UnitPriors

Model = Callable[..., Any]
Gaussian = td.Normal | td.MultivariateNormal | GaussianProcess | GaussianStateSpace
Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class LocalSite:
    """A latent site of the units: ``rest`` is the shape of a unit's share, ``axis`` the units' dim, or
    ``None`` where one unit has all of it."""

    name: str
    rest: torch.Size
    axis: int | None

    @property
    def size(self) -> int:
        return self.rest.numel()

    def rows(self, value: Tensor) -> Tensor:
        """(..., B, k) of a tensor (..., *shape) in the shape of the site."""
        lead = value.dim() - len(self.rest) - (self.axis is not None)
        moved = value.unsqueeze(lead) if self.axis is None else value.movedim(self.axis, lead)
        return moved.reshape(*moved.shape[: lead + 1], self.size)

    def rows_in(self, sites: Sites) -> Tensor:
        """(..., B, k) of its value in a run."""
        return self.rows(sites[self.name]["value"])

    def value(self, rows: Tensor) -> Tensor:
        """The other way round, (..., B, k) to (..., *shape)."""
        if self.axis is None:
            return rows.reshape(rows.shape[:-2] + self.rest)
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
        value = torch.zeros_like(fn.mean)
        if self.z is not None:
            z = self.z[..., own].to(value)
            value = site.value(z.expand_as(site.rows(value)))
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

    def moved(
        self, reduce: Callable[[Sites], Any], values: Values, held: Held, units: Values
    ) -> Any:
        """``reduce`` (k, S, ...) as :meth:`batched`, where the units' sites are at ``units`` (k, ...):
        what the model does with globals alone is done once."""

        def each(sites: Sites) -> Any:
            # some globals come after the units, where the run has ended
            own = {name: sites[name]["value"] for name in values if name in sites}

            def one(at: Values) -> Any:
                handler = Conditioned({**own, **at}, self.minibatches, in_vmap=True)
                with handler, held:
                    self.model(*self.args, **self.kwargs)
                return reduce(handler.sites)

            return torch.func.vmap(one)(dict(units))

        return tree_map_only(Tensor, lambda x: x.movedim(1, 0), self.batched(each, values, held))

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
    return isinstance(fn, Gaussian) and each and fixed


def root_of(fn: Any) -> Tensor:
    """The Cholesky factor of an event's covariance."""
    if not isinstance(fn, GaussianStateSpace):
        return fn.scale_tril.expand(*fn.batch_shape, *fn.scale_tril.shape[-2:])
    # x_t = A_t x_(t-1) + c_t + L_t e_t, all steps in one matrix
    (A, _, L), size = fn.steps(), fn.event_shape.numel()
    one = torch.eye(len(A), dtype=A.dtype, device=A.device)
    before = torch.cat([0.0 * one[-1:], one[:-1]])
    moved, root = (
        torch.einsum("tij,ts->tisj", each, at).reshape(size, size)
        for each, at in ((A, before), (L, one))
    )
    start = torch.eye(size, dtype=A.dtype, device=A.device) - moved
    root = torch.linalg.solve_triangular(start, root, upper=False, unitriangular=True)
    return root.expand(*fn.batch_shape, size, size)


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


class Place(NamedTuple):
    """x = P z + p at S draws of the globals: P and, where wanted, P^-1 (S, B, k, k), p (S, B, k)."""

    matrix: Tensor
    offset: Tensor
    inverse: Tensor | None

    def moved(self, prior: UnitPriors) -> UnitPriors:
        """The prior of x, from that of z."""
        offset = matvec(self.matrix, prior.offset) + self.offset
        return UnitPriors(offset, self.matrix @ prior.root, prior.triangle, self.inverse)


@dataclass(frozen=True)
class Given:
    """What a call says of its units at S draws of the globals, ``values`` (S, ...) by site.

    ``latent`` is the prior of the Gaussians z of the units' latent sites, ``maps`` lead from them to
    the sites, by site.  ``priors`` are those of x, where q has its sites: z, or its ``place``.
    """

    call: Call
    values: Values
    seen: Seen
    latent: UnitPriors
    priors: UnitPriors
    maps: Mapping[str, list[Transform]]
    place: Place | None

    def detached(self) -> Given:
        return self._each(Tensor.detach)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Given:
        parts = dict(self.values), self.latent, self.priors, self.place
        values, latent, priors, place = tree_map_only(Tensor, change, parts)
        return replace(self, values=values, latent=latent, priors=priors, place=place)

    def repeated(self, times: int) -> Given:
        """All draws of the globals so many times, one copy after the other."""
        return self if times == 1 else self._each(lambda x: torch.cat([x] * times))

    def chosen(self, index: Tensor) -> Given:
        """At the draws of the globals of these numbers."""
        return self._each(lambda t: t[index])


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
