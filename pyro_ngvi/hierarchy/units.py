"""Which latent sites of a model are those of units, and what the model says of them.

*Units* are the entries of a plate: patients, schools, words.  Their latent sites must be Gaussian given
the *globals*, all other latent sites, or elementwise maps of such (``LogNormal``), and what is observed
must depend on units one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import log
from operator import itemgetter
from typing import Any, cast

import pyro
import torch
import torch.distributions as td
from torch import Tensor, nn
from torch.distributions import Transform
from torch.utils._pytree import tree_map_only

from ..guides.marginals import sample_value
from ..linalg.coloring import Coloring
from ..linalg.hessian import gradient
from ..linalg.host import at_hand
from ..linalg.products import matvec
from ..runtime.density import Sites, site_kind, site_log_prob, with_density
from ..sites.structure import is_weighted
from .conditional import UnitPriors
from .runs import (
    Call,
    Drawn,
    Given,
    Held,
    LocalSite,
    Parts,
    Place,
    Seen,
    Values,
    gaussian_of,
    root_of,
)

#: names of latent sites that a sentence has
MOST_NAMES = 4


@dataclass(frozen=True)
class Units:
    """The latent sites of ``size`` units in the plate ``plate``, in the order of the model.

    Without a plate it is one unit, a *block*: a field, a series, crossed effects.  ``coloring`` says
    which derivatives of what is observed are taken together then.
    ``dependent``: whether some of them are means of others.  ``effects``: deterministic sites, by the
    latent site whose place they take, which are linear in these with coefficients that depend on the
    globals, as u = m + s z: sites are on u then.  ``direct``: whether data see z through u alone.
    ``coordinates``: the maps from numbers phi to globals that sites follow, by name: those on which the
    slope of the data in the units depends.  ``growing``: those of them that are a scale of the data, as
    the slopes of all units have a factor of it; these are unconstrained in phi, others as they are.
    ``smooth``: whether no gradient of what is observed was seen to jump.
    ``pooled``: whether the prior of sites, or of the effects in their place, depends on the globals.
    """

    plate: str | None
    dim: int | None
    size: int
    sites: tuple[LocalSite, ...]
    globals: tuple[str, ...]
    dependent: bool = False
    effects: Mapping[str, LocalSite] = field(default_factory=dict)
    direct: bool = False
    coordinates: Mapping[str, Transform] = field(default_factory=dict)
    growing: tuple[str, ...] = ()
    smooth: bool = True
    pooled: bool = True
    coloring: Coloring | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites)

    @property
    def followed(self) -> tuple[str, ...]:
        """Names of the globals that sites follow."""
        return tuple(self.coordinates)

    def gaussians(self, sites: Sites) -> Tensor:
        """z (B, k) of a run."""
        parts = []
        for site in self.sites:
            value = sites[site.name]["value"]
            for transform in reversed(gaussian_of(sites[site.name])[1]):
                value = transform.inv(value)
            parts.append(site.rows(value))
        return torch.cat(parts, -1)

    def phi_parts(self, values: Values) -> list[Tensor]:
        """The globals followed, in their coordinates."""
        return [cast(Tensor, to.inv(values[name])) for name, to in self.coordinates.items()]

    def phi_shapes(self, values: Values) -> dict[str, torch.Size]:
        """Shapes of the globals followed, in their coordinates."""
        known = self.coordinates.items()
        return {name: torch.Size(to.inverse_shape(values[name].shape)) for name, to in known}

    def at_phi(self, phi: Tensor, like: Values) -> dict[str, Tensor]:
        """The other way round, (S, D) to values (S, ...) by site."""
        shapes = self.phi_shapes(like)
        split = phi.split([shape[1:].numel() for shape in shapes.values()], -1)
        named = zip(self.coordinates.items(), shapes.values(), split, strict=True)
        return {n: cast(Tensor, to(y.reshape(at).to(like[n]))) for (n, to), at, y in named}

    def phi(self, given: Given) -> Tensor:
        """These at S draws, one after the other, (S, D)."""
        like = given.priors.offset
        parts = [x.reshape(len(like), -1).to(like) for x in self.phi_parts(given.values)]
        phi, kind = torch.cat([like.new_zeros(len(like), 0), *parts], 1), torch.finfo(like.dtype)
        return phi.nan_to_num(neginf=log(kind.tiny), posinf=log(kind.max))  # rounded to a bound

    @property
    def width(self) -> int:
        """k."""
        return sum(site.size for site in self.sites)

    @property
    def is_block(self) -> bool:
        """Whether they are one unit without a plate."""
        return self.plate is None

    @property
    def countable(self) -> int:
        """How many units there are, where they can come and go."""
        if self.is_block:
            raise ValueError(
                "AutoHierarchical: a block has no units that come or go. Make a new guide."
            )
        return self.size

    @property
    def called(self) -> str:
        """What they are, in the middle of a sentence."""
        return "block" if self.is_block else f"units of {self.plate!r}"

    def __str__(self) -> str:
        what = f"{self.width} latent variable{'' if self.width == 1 else 's'}"

        def few(names: Sequence[str]) -> str:
            return ", ".join(names[:MOST_NAMES]) + ", ..." * (len(names) > MOST_NAMES)

        names = few(self.names)
        where = f"{self.size:,} units of {what} ({names}) in the plate {self.plate!r}"
        if self.plate is None:
            where = f"a block of {what} ({names})"
        return f"{where}, given {few(self.globals)}"

    @property
    def parts(self) -> Parts:
        """Each site, and which of the k entries are its own."""
        ends = list(accumulate(site.size for site in self.sites))
        named = zip(self.sites, ends, strict=True)
        return [(site, slice(end - site.size, end)) for site, end in named]

    def values(self, z: Tensor, maps: Mapping[str, list[Transform]]) -> dict[str, Tensor]:
        """Values (..., *shape) by site at Gaussians z (..., B, k)."""
        return self.mapped(z, maps)[0]

    def mapped(
        self, z: Tensor, maps: Mapping[str, list[Transform]]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """With log |d values / dz| of each unit, (..., B)."""
        found, log_det = {}, torch.zeros_like(z[..., 0])
        for site, own in self.parts:
            value = site.value(z[..., own])
            for transform in maps[site.name]:
                y: Any = transform(value)
                each = transform.log_abs_det_jacobian(value, y)
                value, log_det = y, log_det + site.rows(each).sum(-1)
            found[site.name] = value
        return found, log_det

    def given(self, call: Call, values: Values) -> Given:
        """The prior of the units of a call at S draws of the globals."""
        known: dict[str, Any] = {}

        def parts(sites: Sites) -> tuple[Tensor, Tensor, list[Tensor]]:
            known["seen"] = self._seen(sites)
            gaussians = [gaussian_of(sites[name]) for name in self.names]
            known["maps"] = {n: maps for n, (_, maps) in zip(self.names, gaussians, strict=True)}
            known["diagonal"] = all(isinstance(fn, td.Normal) for fn, _ in gaussians)
            effects = [effect.rows_in(sites) for effect in self.effects.values()]
            return self.offset(sites), self.conditional_root(sites), effects

        offset, root, effects = call.batched(parts, values, self.held())
        mixing = place = None
        if self.dependent or self.effects:
            units = torch.eye(self.width, dtype=offset.dtype, device=offset.device)
            moved = self._moved(parts, call, values, units, known["maps"])
            if self.dependent:
                mixing = torch.stack([x[0] - offset for x in moved], -1)
            if self.effects:
                there = self._in_place(effects, torch.zeros_like(offset))
                pairs = zip(moved, units, strict=True)
                columns = [self._in_place(x[2], z.expand_as(offset)) - there for x, z in pairs]
                matrix, direct = torch.stack(columns, -1), self.direct and self.smooth
                inverse = None if direct else torch.linalg.inv_ex(matrix)[0]
                place = Place(matrix, there, inverse)
        latent = UnitPriors.of(offset, mixing, root, known["diagonal"])
        priors = latent if place is None else place.moved(latent)
        return Given(call, values, known["seen"], latent, priors, known["maps"], place)

    def _moved(
        self, parts: Any, call: Call, values: Values, units: Tensor, maps: Mapping[str, Any]
    ) -> Sequence[Any]:
        """``parts`` at each of the Gaussians ``units`` (k, k) of all units."""
        if self.plate is not None:
            return [call.batched(parts, values, self.held(z)) for z in units]
        moved = call.moved(parts, values, self.held(), self.values(units.unsqueeze(1), maps))
        return [tree_map_only(Tensor, itemgetter(i), moved) for i in range(len(units))]

    def _in_place(self, effects: Sequence[Tensor], z: Tensor) -> Tensor:
        """x (S, B, k) at z: effects where there are some, and z elsewhere."""
        rows = dict(zip(self.effects, effects, strict=True))
        return torch.cat([rows.get(site.name, z[..., own]) for site, own in self.parts], -1)

    def log_likelihood(
        self, given: Given, x: Tensor, weight: float = 1.0, beside: Tensor | None = None
    ) -> Tensor:
        """log p (S,) of all that may depend on x (S, B, k); ``weight`` is that of what is observed.

        What data see ``direct`` is put in for the model to go on with, and latent variables in whose
        place it stands are ``beside`` (B, k), wherever that is.
        """

        def total(sites: Sites) -> Tensor:
            sums = [torch.zeros(())]
            for name, site in with_density(sites).items():
                if name not in self.names:
                    observed = site_kind(site) == "observed"
                    sums.append((weight if observed else 1.0) * site_log_prob(site)[1].sum())
            return torch.stack([x.to(sums[-1]) for x in sums]).sum()

        z, effects = x, dict[str, Tensor]()
        if self.direct:
            away = torch.zeros_like(x) if beside is None else beside.to(x).expand_as(x)
            kept = [(away if s.name in self.effects else x)[..., own] for s, own in self.parts]
            z = torch.cat(kept, -1)
            parts = {site.name: x[..., own] for site, own in self.parts}
            effects = {e.name: e.value(parts[name]) for name, e in self.effects.items()}
        elif given.place is not None:
            z = matvec(cast(Tensor, given.place.inverse), x - given.place.offset)
        values = {**given.values, **self.values(z, given.maps), **effects}
        return given.call.batched(total, values)

    @torch.enable_grad()
    def gradient(self, given: Given, x: Tensor) -> Tensor:
        """Of ``log_likelihood`` in x (S, B, k)."""
        x = x.detach().requires_grad_()
        return gradient(self.log_likelihood(given, x), x)

    def held(self, z: Tensor | None = None) -> Held:
        """What makes a model stop after the units, which stand at ``z``."""
        return Held(self.parts, z, [effect.name for effect in self.effects.values()])

    def offset(self, sites: Sites) -> Tensor:
        """Prior means (B, k) in a run."""
        fns = [gaussian_of(sites[name])[0] for name in self.names]
        return torch.cat([s.rows(fn.mean) for s, fn in zip(self.sites, fns, strict=True)], -1)

    def conditional_root(self, sites: Sites) -> Tensor:
        """Cholesky factors of covariances (B, k, k), given means, in a run."""
        blocks: list[Tensor] = []
        for site in self.sites:
            fn = gaussian_of(sites[site.name])[0]
            if isinstance(fn, td.Normal):
                blocks.append(site.rows(fn.scale.expand(fn.batch_shape)).diag_embed())
                continue
            root = root_of(fn)
            # behind a matrix, not an event
            axis = None if site.axis is None else site.axis + fn.event_dim - 2
            root = root.unsqueeze(0) if axis is None else root.movedim(axis, 0)
            blocks += root.reshape(len(root), -1, *root.shape[-2:]).unbind(1)
        if len(blocks) == 1:
            return blocks[0]
        rows, end = [], 0  # torch.block_diag has no form for many, and under vmap takes one by one
        for block in blocks:
            start, end = end, end + block.shape[-1]
            rows.append(nn.functional.pad(block, (start, self.width - end)))
        return torch.cat(rows, -2)

    def sample(
        self, drawn: Drawn, nodes: Mapping[str, Any], plates: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Sample the latent sites at one draw; ``nodes`` and ``plates`` are a guide's."""
        seen, values = drawn.seen, {}
        share = drawn.log_q[0] / len(self.sites)
        if self.plate is not None:
            index = None if seen.whole else seen.index
            of_units = pyro.plate(self.plate, seen.size, dim=self.dim, subsample=index)
            plates = {**plates, self.plate: of_units}
        for name in self.names:
            node, value = nodes[name], drawn.values[name][0]
            batch = value.shape[: value.dim() - node["fn"].event_dim]
            # in other plates too: each entry of a unit has an equal part
            equal = share * len(share) / max(batch.numel(), 1)
            if self.dim is not None:
                equal = equal.reshape(-1, *[1] * (-self.dim - 1))
            log_q = equal.expand(batch) if batch else equal.sum()
            values[name] = sample_value(node, plates, value, log_q)
        return values

    def _seen(self, sites: Sites) -> Seen:
        first = sites[self.names[0]]
        for name in self.names:
            if is_weighted(sites[name], self.plate):
                beside = "its own" if self.plate is None else repr(self.plate)
                raise ValueError(
                    f"AutoHierarchical: the prior of {name!r} stands under poutine.scale, poutine.mask,"
                    f" obs_mask= or a subsampled plate beside {beside}. Subsample units alone; "
                    f"scale or mask what is observed alone."
                )
        if self.plate is None:
            return Seen(torch.arange(1), 1, True)
        size = next(f for f in first["cond_indep_stack"] if f.name == self.plate).size
        plate, every = sites.get(self.plate), torch.arange(size)
        if plate is None:
            return Seen(every, size, True)
        index = torch.as_tensor(plate["value"]).long()
        full = plate["fn"].size
        ordered = size == full and (not at_hand(index) or torch.equal(index, every))
        return Seen(index, full, ordered)
