"""Finds the units of a model at a guide's first call, and refuses models that have none."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.util import site_is_subsample
from torch.distributions import biject_to, identity_transform
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..guides import init_to_center
from ..linalg.coloring import Coloring
from ..linalg.host import at_hand, own_random_state
from ..runtime.density import Site, Sites, is_latent, site_kind
from ..runtime.pyro_adapter import is_marked
from ..runtime.run import Minibatches, run_plainly
from ..sites.conditioned_model import reads
from ..sites.probe_points import same
from .probe import Probe
from .runs import Call, LocalSite, Model, Seen, gaussian_of, is_gaussian
from .units import Units

#: most latent variables of one unit, and of a block, whose matrices are dense
MOST_ENTRIES, MOST_OF_BLOCK = 64, 512
#: most of these that data see at once, where more than a unit has, times numbers of data: a step takes
#: as many derivatives of each
MOST_SEEN = MOST_OF_BLOCK**2
#: most entries of globals that sites follow
MOST_FOLLOWED = 128
#: latent variables of a block whose prior is one for all globals above which Gaussian data make it pay
WIDE = 100


class NumbersUntold(ValueError):
    """Of a minibatch the model does not say which units these are."""


class _Reads(TorchFunctionMode):
    """Notes the plates whose numbers, ``drawn`` by Pyro, a model looks at."""

    def __init__(self, drawn: Minibatches) -> None:
        super().__init__()
        self.drawn, self.plates = drawn, set[str]()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.drawn and reads(func, result):
            seen = [*map(id, tree_leaves((args, kwargs)))]
            self.plates.update(name for name, index in self.drawn.items() if id(index) in seen)
        return result


def find_units(model: Model, args: Any, kwargs: Any, wanted: Sequence[str] | Units | None) -> Units:
    """The units of a model at these arguments: those with the latent sites ``wanted``, or the entries
    of the largest plate that has Gaussian ones; one block where they are not independent, or where
    other effects have scales of their own too, as crossed and nested ones do."""
    if isinstance(wanted, Units):
        return wanted
    with poutine.block(), own_random_state(), torch.no_grad():
        numbers = Minibatches()
        with InitMessenger(_start), _Reads(numbers) as read:
            sites = run_plainly(model, {}, args, kwargs, numbers)
        latent = {n: s for n, s in sites.items() if is_latent(s)}
        drawn = Minibatches({n: s["value"] for n, s in sites.items() if site_is_subsample(s)})
        call = Call(model, args, kwargs, drawn)
        unknown = [name for name in wanted or () if name not in latent]
        if unknown:
            raise ValueError(
                f"AutoHierarchical: locals= names {unknown[0]!r}, and the latent sites of the model "
                f"are {', '.join(map(repr, latent))[:120]}."
            )
        try:
            units = probed(call, in_plate(latent, wanted), sites).units
        except ValueError as error:
            try:
                return _block(call, sites, latent, wanted)
            except (ValueError, RuntimeError) as why:
                raise error from why
        with suppress(ValueError, RuntimeError):
            if wanted is None and _others_are_pooled(call, units, sites, latent):
                return _block(call, sites, latent, None)
        if units.plate in numbers and units.plate not in read.plates:
            raise NumbersUntold(
                f"AutoHierarchical: the plate {units.plate!r} draws numbers of units at which the "
                f"model does not look: its data would go to any. Pass theirs, "
                f"pyro.plate({units.plate!r}, {units.size}, subsample=index)."
            )
        return units


def probed(call: Call, units: Units, sites: Sites) -> Probe:
    """The units with what moving them shows, one half at a time; refusals."""
    probe = Probe(call, units, sites)
    probe = probe.having(dependent=any([probe.is_dependent(here) for here in probe.near]))
    probe = probe.with_effects()
    probe = probe.having(pooled=probe.is_pooled())
    e, u = probe.finite_moves()
    probe.check_data(e, u)
    if not probe.is_smooth(e, u):
        return probe.having(smooth=False)
    names = _few_enough(probe.entering(e), sites)
    growing = probe.scales_of_data(names, e, u)
    maps = {
        n: biject_to(sites[n]["fn"].support) if n in growing else identity_transform for n in names
    }
    return probe.having(coordinates=maps, growing=growing)


def _few_enough(entering: Sequence[str], sites: Sites) -> tuple[str, ...]:
    """Those that sites follow, the small ones first."""
    sizes = {name: sites[name]["value"].numel() for name in entering}
    small = sorted(sizes, key=lambda name: sizes[name])
    ends = dict(zip(small, accumulate(sizes[name] for name in small), strict=True))
    left = [name for name in small if ends[name] > MOST_FOLLOWED]
    if left:
        warnings.warn(
            f"AutoHierarchical: units do not follow {left[0]!r}, which enters their likelihood, as "
            f"there are more than {MOST_FOLLOWED} such numbers. Its sd comes out too small.",
            stacklevel=2,
        )
    return tuple(name for name in entering if ends[name] <= MOST_FOLLOWED)


def in_plate(latent: Sites, wanted: Sequence[str] | None) -> Units:
    """The units of the largest plate that has Gaussian latent sites, or those ``wanted``."""
    frames = {}
    for name, site in latent.items():
        if (name in wanted) if wanted is not None else is_gaussian(site):
            for frame in site["cond_indep_stack"]:
                if frame.dim is not None:
                    frames.setdefault(frame.name, (frame, []))[1].append(name)
    full = {name: frame.full_size or frame.size for name, (frame, _) in frames.items()}
    if wanted is not None:
        full = {name: n for name, n in full.items() if len(frames[name][1]) == len(set(wanted))}
    if not full:
        raise ValueError(
            "AutoHierarchical: no plate of units was found with Gaussian latent sites in it. Sample "
            "the Normal latent variables of units inside one pyro.plate, or take AutoSites or "
            "AutoFullRankNormal."
        )
    plate = max(full, key=lambda name: full[name])
    frame, inside = frames[plate]
    chosen = wanted or [n for n, s in latent.items() if plate in _plates(s)]
    sites = []
    for name in (n for n in latent if n in chosen):
        site = latent[name]
        if not is_gaussian(site):
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
    beside = [n for n in others if plate in _plates(latent[n])]
    if beside and frame.size != full[plate]:
        raise ValueError(
            f"AutoHierarchical: {beside[0]!r} is global and lies in the subsampled plate {plate!r}, "
            f"where it would see other units than those of a step. Pass all units in each step."
        )
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


def as_block(latent: Sites, names: Sequence[str]) -> Units:
    """One unit of all that these latent sites hold."""
    sites = tuple(LocalSite(n, s["value"].shape, None) for n, s in latent.items() if n in names)
    others = tuple(n for n in latent if n not in names)
    units = Units(None, None, 1, sites, others)
    for name in names:
        frames = latent[name]["cond_indep_stack"]
        if not is_gaussian(latent[name]) or any(f.size != (f.full_size or f.size) for f in frames):
            raise ValueError(
                f"AutoHierarchical: {name!r} is not Gaussian, or stands in a subsampled plate, so it "
                f"joins no block. Leave it out of locals=."
            )
    return units


def _others_are_pooled(call: Call, units: Units, sites: Sites, latent: Sites) -> bool:
    """Whether Gaussian effects among the globals have a prior that depends on others of these."""
    gaussian = (n for n in units.globals if is_gaussian(latent[n]))
    effects = [n for n in gaussian if latent[n]["value"].numel() > 1]
    if not effects:
        return False
    return Probe(call, as_block(latent, effects), sites).is_pooled()


def _start(site: Site) -> Any:
    """The centre of a prior: there the likelihood shows what it depends on."""
    if is_marked(site):
        raise ValueError(
            f"AutoHierarchical: {site['name']!r} is enumerated, and its sum would tie units together. "
            f"Write the mixture as one observed site (MixtureSameFamily)."
        )
    return init_to_center(site)


def _is_scale(site: Site) -> bool:
    """Whether a site is one number that is Gaussian on another scale, as a log-normal sd is: data see
    it times others, and no Gaussian site of a block is right for that."""
    return site["value"].numel() == 1 and bool(gaussian_of(site)[1])


def _block(call: Call, sites: Sites, latent: Sites, wanted: Sequence[str] | None) -> Units:
    """All Gaussian latent sites as one unit, but scales, and those on which the prior of others hangs
    otherwise than by a linear mean."""
    if wanted is not None:
        units = as_block(latent, wanted)
    else:
        members = [n for n, s in latent.items() if is_gaussian(s) and not _is_scale(s)]
        units = as_block(latent, members)
        if units.sites:
            units = as_block(latent, Probe(call, units, sites).linear_among())
    if not units.sites or not units.globals or units.width > MOST_OF_BLOCK:
        raise ValueError(
            f"AutoHierarchical: {units.width} Gaussian latent variables and {len(units.globals)} other "
            f"sites make no block, which has up to {MOST_OF_BLOCK} given at least one site. Take "
            f"AutoFullRankNormal, or AutoFactorNormal."
        )
    probe = probed(call, units, sites)
    units = probe.units
    curved = [probe.curvature(at)[0, 0] for at in probe.finite_moves()] if units.smooth else []
    # many coefficients of Gaussian data have an exact q given a scale of these, and no noise of scores
    exact = bool(curved) and same(curved[0], curved[1], 1e-5) and units.width > WIDE
    if not units.smooth or (wanted is None and not units.pooled and not exact):
        raise ValueError(
            "AutoHierarchical: a block needs a likelihood without kinks, and a prior that depends on "
            "other latent sites. Take AutoFullRankNormal."
        )
    coloring = Coloring((curved[0] != 0.0) | (curved[1] != 0.0))
    observed = (s["value"] for s in sites.values() if site_kind(s) == "observed")
    data = sum(torch.as_tensor(value).numel() for value in observed)
    if coloring.count > MOST_ENTRIES and coloring.count * data > MOST_SEEN:
        raise ValueError(
            f"AutoHierarchical: {data:,} data see {coloring.count} latent variables of a block at "
            f"once, too many for as many derivatives. Name what they see in the shape of the "
            f"latent site: f = pyro.deterministic({'f'!r}, ...)."
        )
    return replace(units, coloring=coloring)


def check_index(seen: Seen, units: Units, learning: bool) -> None:
    """Refuse numbers of units that are out of range or come twice, so far as the host can look."""
    if learning and seen.size != units.size:
        raise ValueError(
            f"AutoHierarchical: the plate {units.plate!r} has {seen.size} units in this call, and had "
            f"{units.size} before. Announce units that come by guide.add(count), or go by "
            f"guide.remove(indices)."
        )
    if seen.whole or not at_hand(seen.index):
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
