"""Finds the units of a model at a guide's first call, and refuses models that have none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.util import site_is_subsample

from ..guides import init_to_center
from ..linalg.host import at_hand, own_random_state
from ..runtime.density import Site, Sites
from ..runtime.pyro_adapter import is_marked
from ..runtime.run import Minibatches, run_plainly
from .given import Seen
from .probe import probed
from .runs import Call, LocalSite, Model, is_gaussian
from .units import Units

#: most latent variables of one unit
MOST_ENTRIES = 64


def find_units(model: Model, args: Any, kwargs: Any, wanted: Sequence[str] | None) -> Units:
    """The units of a model at these arguments, with the latent sites ``wanted``, or all of the largest
    plate that has Gaussian ones."""
    with poutine.block(), own_random_state(), torch.no_grad():
        with InitMessenger(_start):
            sites = run_plainly(model, {}, args, kwargs, Minibatches())
        latent = {n: s for n, s in sites.items() if not (s["is_observed"] or site_is_subsample(s))}
        units = _layout(latent, wanted)
        drawn = Minibatches({n: s["value"] for n, s in sites.items() if site_is_subsample(s)})
        return probed(Call(model, args, kwargs, drawn), units, sites, latent)


def _start(site: Site) -> Any:
    """The centre of a prior: there the likelihood shows what it depends on."""
    if is_marked(site):
        raise ValueError(
            f"AutoHierarchical: {site['name']!r} is enumerated, and its sum would tie units together. "
            f"Write the mixture as one observed site (MixtureSameFamily)."
        )
    return init_to_center(site)


def _layout(latent: Sites, wanted: Sequence[str] | None) -> Units:
    unknown = [name for name in wanted or () if name not in latent]
    if unknown:
        raise ValueError(
            f"AutoHierarchical: locals= names {unknown[0]!r}, and the latent sites of the model are "
            f"{', '.join(map(repr, latent))[:120]}."
        )
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
