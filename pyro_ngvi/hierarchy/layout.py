"""Which latent sites are those of units: by their plates, or all Gaussian ones as a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..runtime.density import Site, Sites
from .runs import LocalSite, is_gaussian
from .units import Units

#: most latent variables of one unit, and of a block, whose matrices are dense
MOST_ENTRIES, MOST_OF_BLOCK = 64, 512


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


def check_names(latent: Sites, wanted: Sequence[str]) -> None:
    """Refuse ``locals=`` that are not there."""
    unknown = [name for name in wanted if name not in latent]
    if unknown:
        raise ValueError(
            f"AutoHierarchical: locals= names {unknown[0]!r}, and the latent sites of the model are "
            f"{', '.join(map(repr, latent))[:120]}."
        )


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


def check_block(units: Units) -> Units:
    """Refuse a block that is empty, all there is, or too large."""
    if not units.sites or not units.globals or units.width > MOST_OF_BLOCK:
        raise ValueError(
            f"AutoHierarchical: {units.width} Gaussian latent variables and {len(units.globals)} other "
            f"sites make no block, which has up to {MOST_OF_BLOCK} given at least one site. Take "
            f"AutoFullRankNormal, or AutoFactorNormal."
        )
    return units
