"""What runs of a model show of its units, and refusals of what no site can follow.

Whether some latent sites are means of others, and whether data see units one by one, is tried: units
are moved, one half of them at a time, told apart by the binary digits of their numbers, and nothing of
the other half may change.  Then globals are moved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice, product
from math import nan

import torch
from torch import Tensor

from ..linalg.host import fixed_normal, own_random_state
from ..probing.kinks import jump
from ..runtime.density import Sites, site_kind
from ..sites.probe_points import TOLERANCE, digit_masks, same
from .conditional import Conditionals
from .given import Given
from .runs import Call, LocalSite
from .units import Units

#: most entries of globals that sites follow
MOST_FOLLOWED = 128
#: most combinations of effects that are tried; more entries of globals than there can be
MOST_CHOICES, MOST_ENTERING = 64, 1 << 62
#: units among whose data a jump is looked for, on segments of so many times three prior sds, and how
#: often moves are drawn towards 0 where the likelihood is not finite
FEW, SEGMENTS, SHRINKS = 8, (1.0, 30.0), 6


def probed(call: Call, units: Units, sites: Sites, latent: Sites) -> Units:
    """The units with what moving them shows, one half at a time; refusals."""
    values = {name: latent[name]["value"] for name in units.globals}
    with own_random_state(1):
        other = call.at({})
    elsewhere = {name: other[name]["value"] for name in values}
    count = len(units.sites[0].rows(sites[units.names[0]]["value"]))
    e, u = fixed_normal(2, count, units.width, seed=count)
    masks = digit_masks(count, torch.device("cpu"))[: 2 * count - 2]
    units = replace(units, dependent=_are_dependent(call, units, values, u, masks))
    units = _with_effects(call, units, sites, values, elsewhere, (e, u, masks))
    here, there = (_given(call, units, at).priors for at in (values, elsewhere))
    stays = same(here.linear, there.linear) and same(here.precision, there.precision)
    units = replace(units, pooled=not stays)
    e, u = _finite_moves(call, units, values, e, u)
    _check_data(call, units, values, e, u, masks)
    if not _is_smooth(call, units, values, e, u):
        return replace(units, smooth=False)
    entering = _entering(call, units, values, elsewhere, e)
    return replace(units, followed=_few_enough(entering, values))


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
    prior = Conditionals.without_sites(given.priors)
    away = torch.zeros_like(e)
    away[:, :: max(1, e.shape[1] // FEW)] = 1.0
    wide = 3.0 * away * prior.sd()

    def smooth(start: Tensor, u: Tensor) -> bool:
        def line(s: float) -> tuple[float, float]:
            try:
                return units.line(given, start + s * u, u)
            except ValueError:  # far out a parameter leaves its support
                return nan, nan

        return jump(line, torch.finfo(u.dtype).eps) is None

    segments = [(e - 2.0 * away, 4.0 * away * (1.0 + u.abs()))]
    segments += [(prior.mean - c * wide, 2.0 * c * wide + away * u) for c in SEGMENTS]
    return all(smooth(start, u) for start, u in segments)


def _entering(
    call: Call,
    units: Units,
    values: dict[str, Tensor],
    elsewhere: dict[str, Tensor],
    e: Tensor,
) -> list[str]:
    """The globals on which the slopes of the data in the units depend, at the same x."""
    still = units.gradient(_given(call, units, values), e)
    size = TOLERANCE * torch.finfo(still.dtype).eps * still.abs().max().clamp_min(1.0)

    def moves(name: str) -> bool:
        there = torch.lerp(values[name], elsewhere[name], 0.1)
        moved = units.gradient(_given(call, units, {**values, name: there}), e)
        return bool(((moved - still).abs() > size).any())

    return [name for name in values if moves(name)]


def _few_enough(entering: list[str], values: dict[str, Tensor]) -> tuple[str, ...]:
    """Those that sites follow, the small ones first."""
    found, entries = [], 0
    for name in sorted(entering, key=lambda name: values[name].numel()):
        entries += values[name].numel()
        if entries > MOST_FOLLOWED:
            warnings.warn(
                f"AutoHierarchical: units do not follow {name!r}, which enters their likelihood, as "
                f"there are more than {MOST_FOLLOWED} such numbers. Its sd comes out too small.",
                stacklevel=2,
            )
            break
        found.append(name)
    return tuple(name for name in entering if name in found)


def _with_effects(
    call: Call,
    units: Units,
    sites: Sites,
    values: dict[str, Tensor],
    elsewhere: dict[str, Tensor],
    moves: tuple[Tensor, Tensor, Tensor],
) -> Units:
    """With deterministic sites in the place of latent ones, as u = m + s z in that of z, where fewer
    globals enter the likelihood beside them: data say the same of u whatever m and s are."""
    e, u, masks = moves

    def is_map(effect: LocalSite, latent: LocalSite) -> bool:
        other = replace(units, effects={latent.name: effect})
        return all(
            _is_linear(call, other, effect, at, 0.3 * u, masks) for at in (values, elsewhere)
        )

    def entering(units: Units) -> int:
        places = [_given(call, units, at).place for at in (values, elsewhere)]
        if any(place and not bool(place.log_det.isfinite().all()) for place in places):
            return MOST_ENTERING
        x, _ = _finite_moves(call, units, values, e, u)
        return sum(values[n].numel() for n in _entering(call, units, values, elsewhere, x))

    named = [n for n, site in sites.items() if site_kind(site) == "deterministic"]
    choices: list[list[dict[str, LocalSite]]] = []
    for latent in units.sites:
        shape = sites[latent.name]["value"].shape
        effects = [replace(latent, name=n) for n in named if sites[n]["value"].shape == shape]
        choices.append([{}] + [{latent.name: x} for x in effects if is_map(x, latent)])
    every = islice(product(*choices), MOST_CHOICES)
    merged = [dict(chain(*(x.items() for x in each))) for each in every]
    if len(merged) == 1:
        return units
    counts = [entering(replace(units, effects=each)) for each in merged]
    return replace(units, effects=merged[counts.index(min(counts))])


def _is_linear(
    call: Call,
    units: Units,
    effect: LocalSite,
    at: dict[str, Tensor],
    u: Tensor,
    masks: Tensor,
) -> bool:
    """Whether an effect is linear in the latent variables of its unit, and those of no other."""

    def rows(z: Tensor) -> Tensor:
        return effect.rows(call.at(at, units.held(z))[effect.name]["value"])

    base = rows(0.0 * u)
    tolerance = 1e3 * TOLERANCE * torch.finfo(base.dtype).eps
    linear = same(rows(-3.0 * u) - base, -3.0 * (rows(u) - base), tolerance)
    return linear and _stay(rows, base, u, masks, tolerance)
