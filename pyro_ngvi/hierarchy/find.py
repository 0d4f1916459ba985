"""Finds the units of a model at a guide's first call, and refuses models that have none.

Whether some latent sites are means of others, and whether data see units one by one, is tried: units
are moved, one half of them at a time, told apart by the binary digits of their numbers, and nothing of
the other half may change.  Then globals are moved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice, product
from math import nan
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
from .runs import Call, Given, LocalSite, Model, Seen, Values, is_gaussian
from .units import Units

#: most latent variables of one unit
MOST_ENTRIES = 64
#: most entries of globals that sites follow
MOST_FOLLOWED = 128
#: most combinations of effects that are tried; more entries of globals than there can be
MOST_CHOICES, MOST_ENTERING = 64, 1 << 62
#: units among whose data a jump is looked for, on segments of so many times three prior sds, and how
#: often moves are drawn towards 0 where the likelihood is not finite
FEW, SEGMENTS, SHRINKS = 8, (1.0, 30.0), 6


def find_units(model: Model, args: Any, kwargs: Any, wanted: Sequence[str] | None) -> Units:
    """The units of a model at these arguments, with the latent sites ``wanted``, or all of the largest
    plate that has Gaussian ones."""
    with poutine.block(), own_random_state(), torch.no_grad():
        with InitMessenger(_start):
            sites = run_plainly(model, {}, args, kwargs, Minibatches())
        latent = {n: s for n, s in sites.items() if not (s["is_observed"] or site_is_subsample(s))}
        units = _layout(latent, wanted)
        drawn = Minibatches({n: s["value"] for n, s in sites.items() if site_is_subsample(s)})
        return _probed(Call(model, args, kwargs, drawn), units, sites, latent)


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


def _probed(call: Call, units: Units, sites: Sites, latent: Sites) -> Units:
    """The units with what moving them shows, one half at a time; refusals."""
    probe = _Probe(call, units, sites, latent)
    units = replace(units, dependent=probe.are_dependent(units))
    units = probe.with_effects(units)
    here, there = (probe.given(units, at).priors for at in probe.globals)
    stays = same(here.linear, there.linear) and same(here.precision, there.precision)
    units = replace(units, pooled=not stays)
    e, u = probe.finite_moves(units)
    probe.check_data(units, e, u)
    if not probe.is_smooth(units, e, u):
        return replace(units, smooth=False)
    return replace(units, followed=_few_enough(probe.entering(units, e), latent))


class _Probe:
    """A first call: its ``globals`` at two values, and moves ``e``, ``u`` (B, k) of its units."""

    def __init__(self, call: Call, units: Units, sites: Sites, latent: Sites) -> None:
        self.call, self.sites = call, sites
        with own_random_state(1):
            other = call.at({})
        self.globals = tuple({n: s[n]["value"] for n in units.globals} for s in (latent, other))
        count = len(units.sites[0].rows(sites[units.names[0]]["value"]))
        self.e, self.u = fixed_normal(2, count, units.width, seed=count)
        self.masks = digit_masks(count, torch.device("cpu"))[: 2 * count - 2]

    def given(self, units: Units, values: Values) -> Given:
        return units.given(self.call, {name: value.unsqueeze(0) for name, value in values.items()})

    def shape(self, rows: Callable[[Tensor], Tensor]) -> tuple[bool, bool, bool]:
        """Whether ``rows`` (B, ...) of z (B, k) are constant, linear, and each of its own unit's."""
        u, base = self.u, rows(0.0 * self.u)
        moved, tolerance = rows(u) - base, _roundings(base)
        linear = same(rows(-3.0 * u) - base, -3.0 * moved, tolerance)
        one_by_one = all(
            same(rows(torch.where(mask[:, None], u, 0.0))[~mask], base[~mask], tolerance)
            for mask in self.masks
        )
        return not bool(moved.any()), linear, one_by_one

    def are_dependent(self, units: Units) -> bool:
        """Whether some sites of units are means of others; refused where not linearly, or across."""
        here, names = self.globals[0], ", ".join(units.names)
        at = [self.call.at(here, units.held(z)) for z in (0.0 * self.u, self.u)]
        precision, other = map(units.conditional_precision, at)
        if not same(other, precision, _roundings(precision)):
            raise ValueError(
                f"AutoHierarchical: a scale among the units' sites {names} depends on another of them, "
                f"so they are not Gaussian together. Name those that are by locals=."
            )
        constant, linear, one_by_one = self.shape(
            lambda z: units.offset(self.call.at(here, units.held(z)))
        )
        if not linear:
            raise ValueError(
                f"AutoHierarchical: a mean among the units' sites {names} is not linear in another of "
                f"them. Name those that are Gaussian together by locals=."
            )
        if not one_by_one:
            raise ValueError(
                f"AutoHierarchical: the priors of {names} in a unit depend on other units. Units must "
                f"be independent given the globals; for chains and fields take AutoSites."
            )
        return not constant

    def with_effects(self, units: Units) -> Units:
        """With deterministic sites in the place of latent ones, as u = m + s z in that of z, where
        fewer globals enter the likelihood beside them: data say the same of u whatever m and s are."""
        sites = self.sites

        def is_map(effect: LocalSite, latent: LocalSite) -> bool:
            other = replace(units, effects={latent.name: effect})
            return all(self._is_linear(other, effect, at) for at in self.globals)

        def entering(units: Units) -> int:
            places = [self.given(units, at).place for at in self.globals]
            if any(place and not bool(place.log_det.isfinite().all()) for place in places):
                return MOST_ENTERING
            names = self.entering(units, self.finite_moves(units)[0])
            return sum(self.globals[0][name].numel() for name in names)

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
        return min((replace(units, effects=each) for each in merged), key=entering)

    def _is_linear(self, units: Units, effect: LocalSite, at: Values) -> bool:
        """Whether an effect is linear in the latent variables of its unit, and those of no other."""

        def rows(z: Tensor) -> Tensor:
            return effect.rows(self.call.at(at, units.held(0.3 * z))[effect.name]["value"])

        return all(self.shape(rows)[1:])

    def finite_moves(self, units: Units) -> tuple[Tensor, Tensor]:
        """Moves (1, B, k) of x where the data have slopes."""
        given = self.given(units, self.globals[0])
        e, u = (0.3 * x.to(given.priors.linear).unsqueeze(0) for x in (self.e, self.u))
        for _ in range(SHRINKS):
            if bool(units.gradient(given, e).isfinite().all()):
                break
            e, u = 0.25 * e, 0.25 * u
        return e, u

    def _changed(self, units: Units, e: Tensor) -> Callable[[Given, Tensor], Tensor]:
        """Which slopes of the data in units, (1, B, k), are not those of the first run at ``e``."""
        still = units.gradient(self.given(units, self.globals[0]), e)
        size = TOLERANCE * torch.finfo(still.dtype).eps * still.abs().max().clamp_min(1.0)
        return lambda given, x: (units.gradient(given, x) - still).abs() > size

    def check_data(self, units: Units, e: Tensor, u: Tensor) -> None:
        """Refuse data that see several units: the slope in a unit must stay where others move."""
        given, changed = self.given(units, self.globals[0]), self._changed(units, e)
        for mask in self.masks.to(e.device):
            if bool(changed(given, torch.where(mask.unsqueeze(-1), e + u, e))[:, ~mask].any()):
                raise ValueError(
                    f"AutoHierarchical: data see several units of {units.plate!r} at once, so they are "
                    f"not independent given the globals. Take AutoFullRankNormal, or AutoSites for "
                    f"chains and fields; of crossed effects make the smaller set global, locals=[...]."
                )

    def is_smooth(self, units: Units, e: Tensor, u: Tensor) -> bool:
        """Whether no gradient of the data in a few of the units was seen to jump, near their priors'
        means, and on segments of three prior sds and more."""
        given = self.given(units, self.globals[0])
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

    def entering(self, units: Units, e: Tensor) -> list[str]:
        """The globals on which the slopes of the data in the units depend, at the same x."""
        (here, there), changed = self.globals, self._changed(units, e)

        def moves(name: str) -> bool:
            at = {**here, name: torch.lerp(here[name], there[name], 0.1)}
            return bool(changed(self.given(units, at), e).any())

        return [name for name in here if moves(name)]


def _roundings(like: Tensor) -> float:
    return 1e3 * TOLERANCE * torch.finfo(like.dtype).eps


def _few_enough(entering: Sequence[str], latent: Sites) -> tuple[str, ...]:
    """Those that sites follow, the small ones first."""
    sizes = {name: latent[name]["value"].numel() for name in entering}
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
