"""What moving the units of a model shows of them.

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
from torch import Tensor

from ..linalg.host import fixed_normal, own_random_state
from ..probing.kinks import jump
from ..runtime.density import Sites, site_kind
from ..sites.probe_points import TOLERANCE, digit_masks, same
from .runs import Call, Given, LocalSite, Values, gaussian_of
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
    probe = Probe(call, units, sites, latent)
    units = replace(units, dependent=probe.are_dependent(units))
    units = probe.with_effects(units)
    units = replace(units, pooled=probe.are_pooled(units))
    e, u = probe.finite_moves(units)
    probe.check_data(units, e, u)
    if not probe.is_smooth(units, e, u):
        return replace(units, smooth=False)
    return replace(units, followed=_few_enough(probe.entering(units, e), latent))


class Probe:
    """A first call: its ``globals`` at two values, and moves ``e``, ``u`` (B, k) of its units, by up to
    their prior's sd, from its centre ``z`` (B, k).

    ``near``: the globals at their centre and beside it, as what couples may be 0 at the centre.
    """

    def __init__(self, call: Call, units: Units, sites: Sites, latent: Sites) -> None:
        self.call, self.sites = call, sites
        with own_random_state(1):
            other = call.at({})
        self.globals = tuple({n: s[n]["value"] for n in units.globals} for s in (latent, other))
        here, there = self.globals
        self.near = here, {n: torch.lerp(x, there[n], 0.1) for n, x in here.items()}
        self.z = _gaussians(units, latent)
        sd = torch.linalg.vector_norm(
            units.conditional_root(call.at(here, units.held(self.z))), dim=-1
        )
        count = len(self.z)
        self.e, self.u = fixed_normal(2, count, units.width, seed=count).to(sd) * sd.clamp_max(1.0)
        self.masks = digit_masks(count, torch.device("cpu"))[: 2 * count - 2]

    def given(self, units: Units, values: Values) -> Given:
        return units.given(self.call, {name: value.unsqueeze(0) for name, value in values.items()})

    def shape(self, rows: Callable[[Tensor], Tensor]) -> tuple[bool, bool, bool]:
        """Whether ``rows`` (B, ...) of moves (B, k) are constant, linear, each of its own unit's."""
        u, base = self.u, rows(0.0 * self.u)
        moved = rows(u) - base
        size = base.abs().amax() + moved.abs().amax()
        linear = _agree(rows(-3.0 * u) - base, -3.0 * moved, size)
        parts = (rows(torch.where(mask[:, None], u, 0.0)) - base for mask in self.masks)
        one_by_one = all(
            _agree(part[~mask], 0.0 * part[~mask], size)
            for mask, part in zip(self.masks, parts, strict=True)
        )
        return not bool(moved.any()), linear, one_by_one

    def are_dependent(self, units: Units) -> bool:
        """Whether some sites of units are means of others; refused where not linearly, or across."""
        return any([self._are_dependent(units, here) for here in self.near])

    def _are_dependent(self, units: Units, here: Values) -> bool:
        names = ", ".join(units.names)

        def at(move: Tensor) -> Sites:
            return self.call.at(here, units.held(self.z + move))

        root, other = (units.conditional_root(at(x)) for x in (0.0 * self.u, self.u))
        if not _agree(other, root):
            raise ValueError(
                f"AutoHierarchical: a scale among the units' sites {names} depends on another of them, "
                f"so they are not Gaussian together. Name those that are by locals=."
            )
        constant, linear, one_by_one = self.shape(lambda x: units.offset(at(x)))
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

    def are_pooled(self, units: Units) -> bool:
        """Whether the prior depends on the globals."""
        here, there = (self.given(units, at).priors for at in self.globals)
        return not (same(here.offset, there.offset) and same(here.root, there.root))

    def linear_among(self, units: Units) -> list[str]:
        """Those sites of a block that move the means of others, and what is named as a linear map of
        a site, linearly and no scale, wherever the others stand."""

        def moved(names: Sequence[str], effects: Sequence[LocalSite]) -> tuple[bool, bool]:
            """Whether sites move the effects, and nothing but linearly."""
            each = [moved_at(here, names, effects) for here in self.near]
            return any(x for x, _ in each), all(x for _, x in each)

        def moved_at(
            globals: Values, names: Sequence[str], effects: Sequence[LocalSite]
        ) -> tuple[bool, bool]:
            wide = replace(units, effects={effect.name: effect for effect in effects})
            each = [torch.full((s.size,), float(s.name in names)) for s, _ in units.parts]
            own = 0.3 * torch.cat(each).to(self.e)

            def at(z: Tensor) -> Sites:
                move = (0.3 - own) * self.e + own * z
                return self.call.at(globals, wide.held(self.z + move))

            def rows(z: Tensor) -> Tensor:
                sites = at(z)
                return torch.cat([e.rows(sites[e.name]["value"]) for e in effects], -1)

            here, there = (units.conditional_root(at(z)) for z in (0.0 * self.u, self.u))
            linear = _agree(there, here)
            linear = linear and self.shape(lambda z: units.offset(at(z)))[1]
            if not effects:
                return False, linear
            constant, straight, _ = self.shape(rows)
            return not constant, linear and straight

        pairs = [(s, e) for s in units.sites if s.size > 1 for e in self.shaped(s)]
        effects = [effect for site, effect in pairs if all(moved([site.name], [effect]))]

        def among(names: Sequence[str]) -> list[str]:
            if moved(names, effects)[1]:
                return list(names)
            half = len(names) // 2
            return [*among(names[:half]), *among(names[half:])] if half else []

        return among(units.names)

    def shaped(self, latent: LocalSite) -> list[LocalSite]:
        """Deterministic sites in the shape of a latent one."""
        shape = self.sites[latent.name]["value"].shape
        named = (n for n, site in self.sites.items() if site_kind(site) == "deterministic")
        return [replace(latent, name=n) for n in named if self.sites[n]["value"].shape == shape]

    def curvature(self, units: Units, at: Tensor) -> Tensor:
        """Second derivatives (1, B, k, k) of the data there, at the first value of the globals."""
        found: Any = units.slopes(self.given(units, self.globals[0]), at)
        if found is None:
            raise ValueError(
                "AutoHierarchical: no data depend on the block, so it keeps its prior."
            )
        return found.H

    def with_effects(self, units: Units) -> Units:
        """With deterministic sites in the place of latent ones, as u = m + s z in that of z, where
        fewer globals enter the likelihood beside them: data say the same of u whatever m and s are."""

        def is_map(effect: LocalSite, latent: LocalSite) -> bool:
            other = replace(units, effects={latent.name: effect}, direct=False)
            return all(self._is_linear(other, effect, at) for at in self.globals)

        def entering(units: Units) -> int:
            places = [self.given(units, at).place for at in self.globals]
            inverses = [place.inverse for place in places if place and place.inverse is not None]
            if not all(bool(inverse.isfinite().all()) for inverse in inverses):
                return MOST_ENTERING
            names = self.entering(units, self.finite_moves(units)[0])
            return sum(self.globals[0][name].numel() for name in names)

        choices: list[list[dict[str, LocalSite]]] = []
        for latent in units.sites:
            effects = [x for x in self.shaped(latent) if is_map(x, latent)]
            choices.append([{}] + [{latent.name: x} for x in effects])
        every = islice(product(*choices), MOST_CHOICES)
        merged = [dict(chain(*(x.items() for x in each))) for each in every]
        if len(merged) == 1:
            return units
        tried = [replace(units, effects=each) for each in merged]
        return min((replace(x, direct=self.is_direct(x)) for x in tried), key=entering)

    def is_direct(self, units: Units) -> bool:
        """Whether data see the latent sites that have effects through these alone."""
        if not units.effects:
            return False
        direct = replace(units, direct=True)
        e, _ = self.finite_moves(direct)

        def at(globals: Values, move: Tensor) -> Tensor:
            return direct.log_likelihood(self.given(units, globals), e, beside=self.z + move)

        moves = 0.3 * self.u, 0.3 * self.e
        return all(same(at(g, 0.0 * self.u), at(g, x)) for g in self.near for x in moves)

    def _is_linear(self, units: Units, effect: LocalSite, at: Values) -> bool:
        """Whether an effect is linear in the latent variables of its unit, and those of no other."""

        def rows(z: Tensor) -> Tensor:
            sites = self.call.at(at, units.held(self.z + 0.3 * z))
            return effect.rows(sites[effect.name]["value"])

        return all(self.shape(rows)[1:])

    def finite_moves(self, units: Units) -> tuple[Tensor, Tensor]:
        """Moves (1, B, k) of x where the data have slopes."""
        given = self.given(units, self.globals[0])
        x, size = given.priors.offset, 0.3 * given.priors.sd().clamp_max(1.0)
        e, u = (noise.to(size) * size for noise in fixed_normal(2, *x.shape[1:], seed=x.shape[1]))
        for _ in range(SHRINKS):
            if bool(units.gradient(given, x + e).isfinite().all()):
                break
            x, e, u = 0.25 * x, 0.25 * e, 0.25 * u
        return x + e, u

    def _changed(
        self, units: Units, e: Tensor, at: Values | None = None
    ) -> Callable[[Given, Tensor], Tensor]:
        """Which slopes of the data in units, (1, B, k), are not those at ``e``, and globals ``at``."""
        still = units.gradient(self.given(units, self.globals[0] if at is None else at), e)
        size = TOLERANCE * torch.finfo(still.dtype).eps * still.abs().max().clamp_min(1.0)
        return lambda given, x: (units.gradient(given, x) - still).abs() > size

    def check_data(self, units: Units, e: Tensor, u: Tensor) -> None:
        """Refuse data that see several units: the slope in a unit must stay where others move."""
        every = [(self.given(units, at), self._changed(units, e, at)) for at in self.near]
        for (given, changed), mask in product(every, self.masks.to(e.device)):
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
        prior, away = given.priors, torch.zeros_like(e)
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
        segments += [(prior.offset - c * wide, 2.0 * c * wide + away * u) for c in SEGMENTS]
        return all(smooth(start, u) for start, u in segments)

    def entering(self, units: Units, e: Tensor) -> list[str]:
        """The globals on which the slopes of the data in the units depend, at the same x."""
        (here, there), changed = self.globals, self._changed(units, e)

        def moves(name: str) -> bool:
            at = {**here, name: torch.lerp(here[name], there[name], 0.1)}
            return bool(changed(self.given(units, at), e).any())

        return [name for name in here if moves(name)]


def _gaussians(units: Units, sites: Sites) -> Tensor:
    """z (B, k) of a run."""
    parts = []
    for site in units.sites:
        value = sites[site.name]["value"]
        for transform in reversed(gaussian_of(sites[site.name])[1]):
            value = transform.inv(value)
        parts.append(site.rows(value))
    return torch.cat(parts, -1)


def _agree(a: Tensor, b: Tensor, size: Tensor | float = 0.0) -> bool:
    """Whether each entry of a is that of b to 4e-8 of it (1e-3 in float32), or to roundings of what has
    that ``size``."""
    eps = torch.finfo(b.dtype).eps
    close = (a - b).abs() <= 3.0 * eps**0.5 * b.abs() + 100.0 * eps * size
    return bool((close | (a == b) | (a.isnan() & b.isnan())).all())


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
