"""Finds the units of a model at a guide's first call, and refuses models that have none.

Which latent sites are Gaussian given others, whether some are means of others, and whether data see
units one by one is tried in runs of the model: units are moved, one half of them at a time, told apart
by the binary digits of their numbers, and nothing of the other half may change.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..guides import init_to_center
from ..linalg.host import at_hand, fixed_normal, own_random_state
from ..probing.kinks import jump
from ..runtime.density import Site, Sites, site_kind
from ..runtime.pyro_adapter import is_marked
from ..runtime.run import Minibatches, run_plainly
from ..sites.probe_points import TOLERANCE, digit_masks, same
from .conditional import Conditionals
from .runs import Call, LocalSite, Model, is_gaussian
from .units import Given, Seen, Units

#: most latent variables of one unit, and most entries of globals that sites follow
MOST_ENTRIES, MOST_FOLLOWED = 64, 128
#: units among whose data a jump is looked for, on segments of so many times three prior sds, and how
#: often moves are drawn towards 0 where the likelihood is not finite
FEW, SEGMENTS, SHRINKS = 8, (1.0, 10.0, 100.0), 6


def find_units(model: Model, args: Any, kwargs: Any, wanted: Sequence[str] | None) -> Units:
    """The units of a model at these arguments, with the latent sites ``wanted``, or all of the largest
    plate that has Gaussian ones."""
    with poutine.block(), own_random_state(), torch.no_grad():
        # globals at the centres of their priors, where the likelihood shows what it depends on
        with InitMessenger(init_to_center):
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


def _probed(call: Call, units: Units, sites: Sites, latent: Sites) -> Units:
    """The units with what moving them shows, one half at a time; refusals."""
    values = {name: latent[name]["value"] for name in units.globals}
    with own_random_state(1):
        other = call.at({})
    elsewhere = {name: other[name]["value"] for name in values}
    count = len(units.sites[0].rows(sites[units.names[0]]["value"]))
    e, u = fixed_normal(2, count, units.width, seed=count)
    masks = digit_masks(count, torch.device("cpu"))[: 2 * count - 2]
    units = replace(units, dependent=_are_dependent(call, units, values, u, masks))
    units = replace(units, place=_place(call, units, sites, values, elsewhere, u, masks))
    e, u = _finite_moves(call, units, values, e, u)
    _check_data(call, units, values, e, u, masks)
    if not _is_smooth(call, units, values, e, u):
        return replace(units, smooth=False)
    return replace(units, followed=_followed(call, units, values, elsewhere, e))


def _are_dependent(
    call: Call, units: Units, values: dict[str, Tensor], u: Tensor, masks: Tensor
) -> bool:
    """Whether some of the units' sites are means of others; refused where not linearly, or across."""
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
    if same(moved, base):
        return False
    if not same(prior(3.0 * u)[0] - base, 3.0 * (moved - base), tolerance):
        raise ValueError(
            f"AutoHierarchical: a mean among the units' sites {names} is not linear in another of "
            f"them. Name those that are Gaussian together by locals=."
        )
    if not _stay(lambda z: prior(z)[0], base, u, masks, tolerance):
        raise ValueError(
            f"AutoHierarchical: the priors of {names} in a unit depend on other units. Units must "
            f"be independent given the globals; for chains and fields take AutoSites."
        )
    return True


def _stay(
    rows: Callable[[Tensor], Tensor], base: Tensor, u: Tensor, masks: Tensor, tolerance: float
) -> bool:
    """Whether the rows of those units stay as at 0 that do not move, whichever half moves to u."""
    return all(
        same(rows(torch.where(mask[:, None], u, 0.0))[~mask], base[~mask], tolerance)
        for mask in masks
    )


def _given(call: Call, units: Units, values: dict[str, Tensor]) -> Given:
    return units.given(call, {name: value.unsqueeze(0) for name, value in values.items()})


def _finite_moves(
    call: Call, units: Units, values: dict[str, Tensor], e: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """Moves (1, B, k) of x where the data have slopes."""
    given = _given(call, units, values)
    e, u = (0.3 * x.to(given.priors.linear).unsqueeze(0) for x in (e, u))
    for _ in range(SHRINKS):
        if bool(units.gradient(given, e).isfinite().all()):
            break
        e, u = 0.25 * e, 0.25 * u
    return e, u


def _check_data(
    call: Call, units: Units, values: dict[str, Tensor], e: Tensor, u: Tensor, masks: Tensor
) -> None:
    """Refuse data that see several units: the slope in a unit must stay where others move."""
    given = _given(call, units, values)
    still = units.gradient(given, e)
    size = TOLERANCE * torch.finfo(still.dtype).eps * still.abs().max().clamp_min(1.0)
    for mask in masks:
        moved = units.gradient(given, torch.where(mask.unsqueeze(-1), e + u, e))
        if bool(((moved - still)[:, ~mask].abs() > size).any()):
            raise ValueError(
                f"AutoHierarchical: data see several units of {units.plate!r} at once, so they are not "
                f"independent given the globals. Take AutoFullRankNormal, or AutoSites for chains and "
                f"fields; of crossed effects make the smaller set global by locals=[...]."
            )


def _is_smooth(call: Call, units: Units, values: dict[str, Tensor], e: Tensor, u: Tensor) -> bool:
    """Whether no gradient of the data in a few of the units was seen to jump, near their priors'
    means, and on segments of three prior sds and more."""
    given = _given(call, units, values)
    prior = Conditionals.of(given.priors, *(0.0 * x[0] for x in vars(given.priors).values()))
    away = torch.zeros_like(e)
    away[:, :: max(1, e.shape[1] // FEW)] = 1.0
    wide = 3.0 * away * prior.sd()

    def along(t: Tensor) -> Tensor:
        return units.log_likelihood(given, t.reshape_as(e)).sum()

    segments = [(e - 2.0 * away, 4.0 * away * (1.0 + u.abs()))]
    segments += [(prior.mean - c * wide, 2.0 * c * wide + away * u) for c in SEGMENTS]
    return all(jump(along, a.reshape(-1), b.reshape(-1)) is None for a, b in segments)


def _followed(
    call: Call,
    units: Units,
    values: dict[str, Tensor],
    elsewhere: dict[str, Tensor],
    e: Tensor,
) -> tuple[str, ...]:
    """The globals on which the slopes of the data in the units depend, at the same x."""
    still, found, entries = units.gradient(_given(call, units, values), e), [], 0
    size = TOLERANCE * torch.finfo(still.dtype).eps * still.abs().max().clamp_min(1.0)
    for name in sorted(values, key=lambda name: values[name].numel()):
        there = torch.lerp(values[name], elsewhere[name], 0.1)
        moved = units.gradient(_given(call, units, {**values, name: there}), e)
        if not bool(((moved - still).abs() > size).any()):
            continue
        entries += values[name].numel()
        if entries > MOST_FOLLOWED:
            warnings.warn(
                f"AutoHierarchical: units do not follow {name!r}, which enters their likelihood, as "
                f"there are more than {MOST_FOLLOWED} such numbers. Its sd comes out too small.",
                stacklevel=2,
            )
            break
        found.append(name)
    return tuple(name for name in values if name in found)


def _place(
    call: Call,
    units: Units,
    sites: Sites,
    values: dict[str, Tensor],
    elsewhere: dict[str, Tensor],
    u: Tensor,
    masks: Tensor,
) -> LocalSite | None:
    """A deterministic site that is a linear map of the only site of its unit, another one with other
    globals: the u of u = m + s z, where the data say the same whatever m and s are."""
    first, *more = units.sites
    if more:
        return None
    shape, u = sites[first.name]["value"].shape, 0.3 * u.to(sites[first.name]["value"])
    for name, site in sites.items():
        if site_kind(site) != "deterministic" or site["value"].shape != shape:
            continue
        place = replace(first, name=name)
        held = replace(units, place=place).held

        def rows(
            z: Tensor, at: dict[str, Tensor] = values, place: Any = place, held: Any = held
        ) -> Tensor:
            return place.rows(call.at(at, held(z))[place.name]["value"])

        base, base_elsewhere = rows(0.0 * u), rows(0.0 * u, elsewhere)
        slope = rows(u) - base
        tolerance = 1e3 * TOLERANCE * torch.finfo(base.dtype).eps
        linear = same(rows(-3.0 * u) - base, -3.0 * slope, tolerance)
        alike = same(base_elsewhere, base) and same(rows(u, elsewhere) - base_elsewhere, slope)
        one_to_one = bool((slope != 0.0).all())
        if linear and one_to_one and not alike and _stay(rows, base, u, masks, tolerance):
            return place
    return None


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
