"""Finds the units of a model at a guide's first call, and refuses models that have none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.util import site_is_subsample

from ..guides import init_to_center
from ..linalg.coloring import Coloring
from ..linalg.host import at_hand, own_random_state
from ..runtime.density import Site, Sites
from ..runtime.pyro_adapter import is_marked
from ..runtime.run import Minibatches, run_plainly
from .layout import MOST_ENTRIES, as_block, check_block, check_names, in_plate
from .probe import Probe, probed
from .runs import Call, Model, Seen, is_gaussian
from .units import Units


def find_units(model: Model, args: Any, kwargs: Any, wanted: Sequence[str] | None) -> Units:
    """The units of a model at these arguments: those with the latent sites ``wanted``, or the entries
    of the largest plate that has Gaussian ones; one block where they are not independent, or where
    other effects have scales of their own too, as crossed and nested ones do."""
    with poutine.block(), own_random_state(), torch.no_grad():
        with InitMessenger(_start):
            sites = run_plainly(model, {}, args, kwargs, Minibatches())
        latent = {n: s for n, s in sites.items() if not (s["is_observed"] or site_is_subsample(s))}
        drawn = Minibatches({n: s["value"] for n, s in sites.items() if site_is_subsample(s)})
        call = Call(model, args, kwargs, drawn)
        check_names(latent, wanted or ())
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


def _block(call: Call, sites: Sites, latent: Sites, wanted: Sequence[str] | None) -> Units:
    """All Gaussian latent sites as one unit, but those on which the prior of others hangs otherwise
    than by a linear mean."""
    if wanted is not None:
        units = as_block(latent, wanted)
    else:
        units = as_block(latent, [n for n, s in latent.items() if is_gaussian(s)])
        if units.sites:
            units = as_block(latent, Probe(call, units, sites).linear_among())
    probe = probed(call, check_block(units), sites)
    units = probe.units
    if not units.smooth or (wanted is None and not units.pooled):
        raise ValueError(
            "AutoHierarchical: a block needs a likelihood without kinks, and a prior that depends on "
            "other latent sites. Take AutoFullRankNormal."
        )
    pattern = [probe.curvature(at)[0, 0] != 0.0 for at in probe.finite_moves()]
    coloring = Coloring(pattern[0] | pattern[1])
    if coloring.count > MOST_ENTRIES:
        raise ValueError(
            f"AutoHierarchical: data see {coloring.count} latent variables of a block at once, more "
            f"than {MOST_ENTRIES}. Name what they see: f = pyro.deterministic({'f'!r}, ...)."
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
