"""Which latent sites of a model are those of units, and what the model says of them.

*Units* are the entries of a plate: patients, schools, words.  Their latent sites must be Gaussian given
the *globals*, all other latent sites, or elementwise maps of such (``LogNormal``), and what is observed
must depend on units one by one.  Everything here is read off runs of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import Transform

from ..linalg.host import at_hand, fixed_normal, own_random_state
from ..runtime.density import Site, Sites, site_kind, site_log_prob
from ..runtime.pyro_adapter import is_marked, with_inner
from ..runtime.run import CannotBatch, Minibatches, run_in_loop, run_particles, run_plainly
from ..sites.probe_points import TOLERANCE, digit_masks, same
from .conditional import UnitPriors

Model = Callable[..., Any]
Values = Mapping[str, Tensor]

#: most latent variables of one unit
MOST_ENTRIES = 64


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
        """(B, k) of a tensor in the shape of the site."""
        return value.movedim(self.axis, 0).reshape(value.shape[self.axis], -1)

    def value(self, rows: Tensor) -> Tensor:
        """The other way round, (..., B, k) to (..., *shape)."""
        split = rows.reshape(rows.shape[:-1] + self.rest)
        return split.movedim(rows.dim() - 2, self.axis)


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


@dataclass(frozen=True)
class Call:
    """A model with the arguments of one call, and its minibatches."""

    model: Model
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    minibatches: Minibatches

    def batched(self, reduce: Callable[[Sites], Any], values: Values, held: Any = None) -> Any:
        """``reduce`` of the sites of S runs at ``values`` (S, ...) by site, out of handlers' sight.

        ``held``: what makes the program of the model.  Where it cannot run under ``vmap`` the runs come
        one after the other.
        """
        program = self.model if held is None else held(self.model)
        count = len(next(iter(values.values())))
        given = program, reduce, values, count, self.args, self.kwargs
        with poutine.block(hide_fn=lambda msg: msg.get("type") != "param"):
            try:
                return run_particles(*given, minibatches=self.minibatches)
            except CannotBatch:
                return run_in_loop(*given, minibatches=self.minibatches)

    def at(self, values: Values, held: Any = None) -> Sites:
        """The sites of one run."""
        program = self.model if held is None else held(self.model)
        return run_plainly(program, values, self.args, self.kwargs, self.minibatches)


@dataclass(frozen=True)
class Units:
    """The latent sites of ``size`` units in the plate ``plate``, in the order of the model.

    ``dependent``: whether some of them are means of others.
    """

    plate: str
    dim: int
    size: int
    sites: tuple[LocalSite, ...]
    globals: tuple[str, ...]
    dependent: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites)

    @property
    def width(self) -> int:
        """k."""
        return sum(site.size for site in self.sites)

    def __str__(self) -> str:
        plural = "" if self.width == 1 else "s"
        return (
            f"{self.size:,} units of {self.width} latent variable{plural} ({', '.join(self.names)}) in "
            f"the plate {self.plate!r}, given {', '.join(self.globals)}"
        )

    def parts(self) -> Iterator[tuple[LocalSite, slice]]:
        """Each site, and which of the k entries are its own."""
        start = 0
        for site in self.sites:
            yield site, slice(start, start + site.size)
            start += site.size

    def values(self, z: Tensor, maps: Mapping[str, Any]) -> dict[str, Tensor]:
        """Values (..., *shape) by site at Gaussians z (..., B, k)."""
        found = {}
        for site, own in self.parts():
            value = site.value(z[..., own])
            for transform in maps[site.name]:
                value = transform(value)
            found[site.name] = value
        return found

    def prior(
        self, call: Call, values: Values
    ) -> tuple[UnitPriors, Seen, dict[str, list[Transform]]]:
        """p(u | v) at S draws of the globals, ``values`` (S, ...) by site; the units of the call, and
        the maps from Gaussians by local site."""
        known: dict[str, Any] = {}

        def parts(sites: Sites) -> tuple[Tensor, Tensor]:
            known["seen"] = self._seen(sites)
            known["maps"] = {name: gaussian_of(sites[name])[1] for name in self.names}
            return self.offset(sites), self.conditional_precision(sites)

        offset, precision = call.batched(parts, values, self.held())
        mixing = None
        if self.dependent:
            units = torch.eye(self.width, dtype=offset.dtype, device=offset.device)
            moved = [call.batched(parts, values, self.held(z))[0] - offset for z in units]
            mixing = torch.stack(moved, -1)
        return UnitPriors.of(offset, mixing, precision), known["seen"], known["maps"]

    def slopes(
        self, call: Call, values: Values, z: Tensor, maps: Any, hessian: bool = True
    ) -> tuple[Tensor, Tensor] | None:
        """Gradient (S, B, k) and minus the Hessian (S, B, k, k) of log p of what is observed in z
        (S, B, k), unit by unit, at ``values`` (S, ...) of the globals; None where nothing depends on z.
        """

        def total(sites: Sites) -> Tensor:
            observed = [s for s in sites.values() if site_kind(s) in ("observed", "factor")]
            terms = [site_log_prob(site)[1].sum() for site in observed]
            return torch.stack(terms).sum() if terms else torch.zeros(())

        with torch.enable_grad():
            z = z.detach().requires_grad_()
            log_p = call.batched(total, {**values, **self.values(z, maps)})
            if not log_p.requires_grad:
                return None
            keep: Any = {"create_graph": True, "materialize_grads": True}
            (g,) = torch.autograd.grad(log_p.sum(), z, **keep)
            rows = [torch.zeros_like(z)] * self.width  # where the likelihood is linear
            if hessian and g.requires_grad:
                keep = {"retain_graph": True, "materialize_grads": True}
                rows = [torch.autograd.grad(x.sum(), z, **keep)[0] for x in g.unbind(-1)]
        H = -torch.stack(rows, -1)
        return g.detach(), 0.5 * (H + H.mT)

    def held(self, z: Tensor | None = None) -> Callable[[Model], Held]:
        """What makes a model stop after the units, which stand at ``z``: see :class:`Held`."""
        return lambda model: Held(model, self, z)

    def offset(self, sites: Sites) -> Tensor:
        """Prior means (B, k) in a run."""
        parts = []
        for site in self.sites:
            fn, _ = gaussian_of(sites[site.name])
            parts.append(site.rows(fn.loc.expand(fn.shape())))
        return torch.cat(parts, -1)

    def conditional_precision(self, sites: Sites) -> Tensor:
        """Precisions (B, k, k), given means, in a run."""
        blocks = []
        for site in self.sites:
            fn, _ = gaussian_of(sites[site.name])
            if isinstance(fn, dist.Normal):
                blocks.append(site.rows(fn.scale.expand(fn.shape()) ** -2).diag_embed())
                continue
            root = fn.scale_tril.expand(*fn.batch_shape, *fn.event_shape, *fn.event_shape)
            one = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
            inverse = torch.linalg.solve_triangular(root, one, upper=False)
            P = (inverse.mT @ inverse).movedim(site.axis - 1, 0)  # behind a matrix, not a vector
            P = P.reshape(len(P), -1, *P.shape[-2:])
            blocks.append(_block_diagonal([*P.unbind(1)]))
        return _block_diagonal(blocks)

    def _seen(self, sites: Sites) -> Seen:
        first = sites[self.names[0]]
        for name in self.names:
            _refuse_weights(sites[name], self.plate)
        size = next(f for f in first["cond_indep_stack"] if f.name == self.plate).size
        plate, every = sites.get(self.plate), torch.arange(size)
        if plate is None:
            return Seen(every, size, True)
        index = plate["value"]
        full = plate["fn"].size
        ordered = size == full and (not at_hand(index) or torch.equal(index, every))
        return Seen(index, full, ordered)


def _block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """Matrices (B, k_a, k_a) along the diagonal of one (B, k, k)."""
    if len(blocks) == 1:
        return blocks[0]
    k, start, rows = sum(b.shape[-1] for b in blocks), 0, []
    for b in blocks:
        n = b.shape[-1]
        rows.append(torch.nn.functional.pad(b, (start, k - start - n)))
        start += n
    return torch.cat(rows, -2)


class _AllSeen(Exception):
    """The rest of the run is not needed."""


class Held:
    """A model up to the last site of its units, which stand at z = 0, or at ``z`` (k,) or (B, k)."""

    def __init__(self, model: Model, units: Units, z: Tensor | None) -> None:
        self.model, self.handler = model, _Hold(units, z)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.handler.left = set(self.handler.units.names)
        try:
            with self.handler:
                self.model(*args, **kwargs)
        except _AllSeen:
            return


class _Hold(Messenger):
    def __init__(self, units: Units, z: Tensor | None) -> None:
        super().__init__()
        self.units, self.z = units, z
        self.parts = {site.name: (site, own) for site, own in units.parts()}
        self.left: set[str] = set()

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
            raise _AllSeen


def gaussian_of(site: Site) -> tuple[Any, list[Any]]:
    """The Gaussian of a site without ``to_event``, and the elementwise maps that follow it."""
    fn, maps = site["fn"], []
    while isinstance(fn, dist.Independent | dist.TransformedDistribution):
        if not isinstance(fn, dist.Independent):
            maps = [*fn.transforms, *maps]
        fn = fn.base_dist
    return fn, maps


def isgaussian_of(site: Site) -> bool:
    """Whether a latent site is a Gaussian, or an elementwise map of one."""
    fn, maps = gaussian_of(site)
    each = all(t.domain.event_dim == t.codomain.event_dim == 0 for t in maps)
    inner = [part for t in maps for part in with_inner(t)]
    fixed = not any(isinstance(x, Tensor) for t in inner for x in vars(t).values())
    return isinstance(fn, dist.Normal | dist.MultivariateNormal) and each and fixed


def _refuse_weights(site: Site, plate: str) -> None:
    scale = 1.0
    for frame in site["cond_indep_stack"]:
        if frame.full_size is not None and frame.full_size != frame.size:
            if frame.name != plate:
                raise ValueError(
                    f"AutoHierarchical: the site {site['name']!r} of the units in {plate!r} lies in "
                    f"another subsampled plate, {frame.name!r}. Subsample the units alone."
                )
            scale = frame.full_size / frame.size
    weighted = isinstance(site["scale"], Tensor) or abs(site["scale"] / scale - 1.0) > 1e-9
    if weighted or not (site["mask"] is None or site["mask"] is True):
        raise ValueError(
            f"AutoHierarchical: the prior of {site['name']!r} stands under poutine.scale or "
            f"poutine.mask. Scale or mask what is observed alone."
        )


# --- the first call


def find_units(model: Model, args: Any, kwargs: Any, wanted: Sequence[str] | None) -> Units:
    """The units of a model at these arguments, with the latent sites ``wanted``, or all of the largest
    plate that has Gaussian ones."""
    with poutine.block(), own_random_state(), torch.no_grad():
        sites = run_plainly(model, {}, args, kwargs, Minibatches())
        latent = {n: s for n, s in sites.items() if not (s["is_observed"] or site_is_subsample(s))}
        for name, site in latent.items():
            if is_marked(site):
                raise ValueError(
                    f"AutoHierarchical: {name!r} is enumerated, and its sum would tie units together. "
                    f"Write the mixture as one observed site (MixtureSameFamily)."
                )
        units = _layout(latent, wanted)
        drawn = Minibatches({n: s["value"] for n, s in sites.items() if site_is_subsample(s)})
        return _probed(Call(model, args, kwargs, drawn), units, sites, latent)


def _layout(latent: Sites, wanted: Sequence[str] | None) -> Units:
    unknown = [name for name in wanted or () if name not in latent]
    if unknown:
        raise ValueError(
            f"AutoHierarchical: locals= names {unknown[0]!r}, and the latent sites of the model are "
            f"{', '.join(map(repr, latent))[:120]}."
        )
    frames = {}
    for name, site in latent.items():
        if (name in wanted) if wanted is not None else isgaussian_of(site):
            for frame in site["cond_indep_stack"]:
                if frame.dim is not None:
                    frames.setdefault(frame.name, (frame, []))[1].append(name)
    full = {name: frame.full_size or frame.size for name, (frame, _) in frames.items()}
    if wanted is not None:
        full = {name: n for name, n in full.items() if len(frames[name][1]) == len(set(wanted))}
    if not full:
        raise ValueError(
            "AutoHierarchical: no plate of units was found with Gaussian latent sites in it. Put them "
            "into one, with pyro.plate('units', n): u = pyro.sample('u', dist.Normal(m, s)), or take "
            "AutoSites or AutoFullRankNormal."
        )
    plate = max(full, key=lambda name: full[name])
    frame, inside = frames[plate]
    chosen = wanted or [n for n, s in latent.items() if plate in _plates(s)]
    sites = []
    for name in (n for n in latent if n in chosen):
        site = latent[name]
        if not isgaussian_of(site):
            raise ValueError(
                f"AutoHierarchical: {name!r} in the plate {plate!r} is {type(site['fn']).__name__}. "
                f"Units need Normal, MultivariateNormal or LogNormal sites; name those by "
                f"locals={inside}, and it joins the globals."
            )
        axis = frame.dim - site["fn"].event_dim
        shape = list(site["value"].shape)
        del shape[axis]
        sites.append(LocalSite(name, torch.Size(shape), axis))
    others = tuple(n for n in latent if n not in chosen)
    units = Units(plate, frame.dim, full[plate], tuple(sites), others)
    if units.width > MOST_ENTRIES:
        raise ValueError(
            f"AutoHierarchical: a unit of {plate!r} has {units.width} latent variables, more than "
            f"{MOST_ENTRIES}. Name fewer sites by locals=, or take AutoFactorNormal."
        )
    if not others:
        raise ValueError(
            f"AutoHierarchical: all latent sites are those of units in {plate!r}, so there are no "
            f"globals to infer. Take AutoSites(model)."
        )
    return units


def _plates(site: Site) -> list[str]:
    return [frame.name for frame in site["cond_indep_stack"]]


def _probed(call: Call, units: Units, sites: Sites, latent: Sites) -> Units:
    """Whether units' sites depend on each other, and refusals: by moving them, one half at a time."""
    values = {name: latent[name]["value"] for name in units.globals}
    count = len(units.sites[0].rows(sites[units.names[0]]["value"]))
    e, u = fixed_normal(2, count, units.width, seed=count)
    masks = digit_masks(count, torch.device("cpu"))[: 2 * count - 2]
    names = ", ".join(units.names)

    def prior(z: Tensor) -> tuple[Tensor, Tensor]:
        at = call.at(values, units.held(z))
        return units.offset(at), units.conditional_precision(at)

    (base, precision), (moved, other) = prior(0.0 * u), prior(u)
    tolerance = 1e3 * TOLERANCE * torch.finfo(base.dtype).eps
    if not same(other, precision, tolerance):
        raise ValueError(
            f"AutoHierarchical: a scale among the units' sites {names} depends on another of them, so "
            f"they are not Gaussian together. Name those that are by locals=."
        )
    dependent = not same(moved, base)
    if dependent and not same(prior(3.0 * u)[0] - base, 3.0 * (moved - base), tolerance):
        raise ValueError(
            f"AutoHierarchical: a mean among the units' sites {names} is not linear in another of "
            f"them. Name those that are Gaussian together by locals=."
        )
    for mask in masks if dependent else ():
        if not same(prior(torch.where(mask[:, None], u, 0.0))[0][~mask], base[~mask], tolerance):
            raise ValueError(
                f"AutoHierarchical: the priors of {names} in a unit depend on other units. Units must "
                f"be independent given the globals; for chains and fields take AutoSites."
            )
    # the slope in a unit must stay where others move
    maps = {name: gaussian_of(latent[name])[1] for name in units.names}
    fixed = {name: value.unsqueeze(0) for name, value in values.items()}
    like = sites[units.names[0]]["value"]
    e, u = (0.3 * x.to(like) for x in (e, u))

    def slope(z: Tensor) -> Tensor | None:
        found = units.slopes(call, fixed, z.unsqueeze(0), maps, hessian=False)
        return None if found is None else found[0][0]

    still = slope(e)
    for mask in masks if still is not None else ():
        now = slope(torch.where(mask[:, None], e + u, e))
        size = TOLERANCE * torch.finfo(still.dtype).eps * still.abs().max().clamp_min(1.0)
        if now is not None and bool(((now - still)[~mask].abs() > size).any()):
            raise ValueError(
                f"AutoHierarchical: data see several units of {units.plate!r} at once, so they are not "
                f"independent given the globals. Take AutoFullRankNormal, or AutoSites for chains and "
                f"fields; of crossed effects make the smaller set global by locals=[...]."
            )
    return replace(units, dependent=dependent)


def check_index(seen: Seen, units: Units, learning: bool) -> None:
    """Refuse numbers of units that are out of range or come twice, so far as the host can look."""
    if learning and seen.size != units.size:
        raise ValueError(
            f"AutoHierarchical: the plate {units.plate!r} has {seen.size} units in this call, and had "
            f"{units.size} at the first. Units that come or go: guide.resize({seen.size})."
        )
    if not at_hand(seen.index):
        return
    if len(seen.index) and not 0 <= int(seen.index.min()) <= int(seen.index.max()) < seen.size:
        raise ValueError(
            f"AutoHierarchical: the plate {units.plate!r} of {seen.size} units got the numbers "
            f"{int(seen.index.min())} to {int(seen.index.max())}. They begin at 0."
        )
    if len(seen.index.unique()) < len(seen.index):
        raise ValueError(
            f"AutoHierarchical: a unit of {units.plate!r} comes twice in subsample=. Pass each number "
            f"once in a call."
        )
