"""What moving the units of a model shows of them.

Units are moved, one half of them at a time, told apart by the binary digits of their numbers, and
nothing of the other half may change.  Then globals are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import combinations, islice, product
from typing import Any

import torch
from pyro.distributions import ImproperUniform
from pyro.infer.autoguide.initialization import InitMessenger, init_to_sample
from torch import Tensor
from torch.distributions import biject_to

from ..linalg.host import fixed_normal, own_random_state
from ..probing.kinks import jump
from ..runtime.density import Site, Sites, innermost, site_kind
from ..sites.probe_points import TOLERANCE, digit_masks, same
from .runs import Call, Given, LocalSite, Values
from .slopes import slopes
from .units import Units

#: most combinations of effects that are tried; more entries of globals than there can be
MOST_CHOICES, MOST_ENTERING = 64, 1 << 62
#: units among whose data a jump is looked for, on segments of so many times three prior sds, and how
#: often moves are drawn towards 0 where the likelihood is not finite
FEW, SEGMENTS, SHRINKS = 8, (1.0, 30.0), 6
#: nats below the largest likelihood of a segment that are nothing, points that tell, numbers at most
NOTHING, GRID, MOST_NUMBERS = 12.0, 65, 10_000_000
#: shares of the way from the centre of the globals to a draw of their prior
SHARES = (0.1, 0.5)


class Probe:
    """A first call: its ``globals`` at two values, and moves ``e``, ``u`` (B, k) of its units, by up to
    their prior's sd, from its centre ``z`` (B, k).

    ``near``: the globals at their centre and beside it, as what couples may be 0 at the centre.
    """

    def __init__(self, call: Call, units: Units, sites: Sites) -> None:
        self.call, self.units, self.sites = call, units, sites
        with own_random_state(1), InitMessenger(_elsewhere):
            other = call.at({})
        self.globals = tuple({n: s[n]["value"] for n in units.globals} for s in (sites, other))
        here, there = self.globals
        self.near = here, {n: torch.lerp(x, there[n], SHARES[0]) for n, x in here.items()}
        self.z = units.gaussians(sites)
        root = units.conditional_root(call.at(here, units.held(self.z)))
        sd = torch.linalg.vector_norm(root, dim=-1)
        count = len(self.z)
        self.e, self.u = fixed_normal(2, count, units.width, seed=count).to(sd) * sd.clamp_max(1.0)
        self.masks = digit_masks(count, self.u.device)[: 2 * count - 2]
        self._given: list[tuple[Values, Given]] = []

    def having(self, **found: Any) -> Probe:
        """The same, of units of which so much more is known."""
        other = copy(self)
        other.units, other._given = replace(self.units, **found), []
        return other

    def given(self, at: Values) -> Given:
        found = next((given for values, given in self._given if values is at), None)
        if found is None:
            one = {name: x.unsqueeze(0) for name, x in at.items()}
            found = self.units.given(self.call, one)
            self._given.append((at, found))
        return found

    def shape(
        self,
        here: Values,
        rows: Callable[[Sites], Tensor],
        start: Tensor | float = 0.0,
        share: Tensor | float = 1.0,
    ) -> tuple[bool, bool, bool]:
        """Whether ``rows`` (B, ...) of runs are constant, linear, and each of its own unit, where a
        ``share`` of moves (B, k) from ``start`` is made."""

        def at(move: Tensor) -> Tensor:
            return rows(self.call.at(here, self.units.held(self.z + start + share * move)))

        u, base = self.u, at(0.0 * self.u)
        moved = at(u) - base
        size = base.abs().amax() + moved.abs().amax()
        linear = _agree(at(-3.0 * u) - base, -3.0 * moved, size)
        parts = (at(torch.where(mask[:, None], u, 0.0)) - base for mask in self.masks)
        others = (part[~mask] for mask, part in zip(self.masks, parts, strict=True))
        one_by_one = all(_agree(part, 0.0 * part, size) for part in others)
        return not bool(moved.any()), linear, one_by_one

    def has_fixed_scales(
        self, here: Values, start: Tensor | float = 0.0, share: Tensor | float = 1.0
    ) -> bool:
        """Whether no scale of a site depends on moves as in :meth:`shape`."""
        moves = (self.z + start + share * move for move in (0.0 * self.u, self.u))
        root, other = (
            self.units.conditional_root(self.call.at(here, self.units.held(z))) for z in moves
        )
        return _agree(other, root)

    def is_dependent(self, here: Values) -> bool:
        """Whether some sites of units are means of others; refused where not linearly, or across."""
        names = ", ".join(self.units.names)
        if not self.has_fixed_scales(here):
            raise ValueError(
                f"AutoHierarchical: a scale among the units' sites {names} depends on another of them, "
                f"so they are not Gaussian together. Name those that are by locals=."
            )
        constant, linear, one_by_one = self.shape(here, self.units.offset)
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

    def is_pooled(self) -> bool:
        """Whether the prior depends on the globals."""
        here, there = (self.given(at).priors for at in self.globals)
        return not (same(here.offset, there.offset) and same(here.root, there.root))

    def linear_among(self) -> list[str]:
        """Those sites of a block that move the means of others, and what is named as a linear map of
        a site, linearly and no scale, wherever the others stand."""

        def moved(names: Sequence[str], effects: Sequence[LocalSite]) -> tuple[bool, bool]:
            """Whether sites move the effects, and nothing but linearly."""
            probe = self.having(effects={effect.name: effect for effect in effects})
            each = [torch.full((s.size,), float(s.name in names)) for s in self.units.sites]
            own = 0.3 * torch.cat(each).to(self.e)
            how = (0.3 - own) * self.e, own
            moves, linear = False, True
            for here in self.near:
                linear &= probe.has_fixed_scales(here, *how)
                linear &= probe.shape(here, self.units.offset, *how)[1]
                for effect in effects:
                    constant, straight, _ = probe.shape(here, effect.rows_in, *how)
                    moves, linear = moves or not constant, linear and straight
            return moves, linear

        pairs = [(s, e) for s in self.units.sites if s.size > 1 for e in self.shaped(s)]
        effects = [effect for site, effect in pairs if all(moved([site.name], [effect]))]

        def among(names: Sequence[str]) -> list[str]:
            if moved(names, effects)[1]:
                return list(names)
            half = len(names) // 2
            return [*among(names[:half]), *among(names[half:])] if half else []

        return among(self.units.names)

    def shaped(self, latent: LocalSite) -> list[LocalSite]:
        """Deterministic sites in the shape of a latent one."""
        shape = self.sites[latent.name]["value"].shape
        named = (n for n, site in self.sites.items() if site_kind(site) == "deterministic")
        return [replace(latent, name=n) for n in named if self.sites[n]["value"].shape == shape]

    def curvature(self, at: Tensor) -> Tensor:
        """Second derivatives (1, B, k, k) of the data there, at the first value of the globals."""
        found: Any = slopes(self.units, self.given(self.globals[0]), at)
        if found is None:
            raise ValueError(
                "AutoHierarchical: no data depend on the block, so it keeps its prior."
            )
        return found.H

    def with_effects(self) -> Probe:
        """With deterministic sites in the place of latent ones, as u = m + s z in that of z, where
        fewer globals enter the likelihood beside them: data say the same of u whatever m and s are."""

        def maps(latent: LocalSite) -> list[LocalSite | None]:
            """No effect, and those that are linear in the latent variables of a unit, of their own."""
            found: list[LocalSite | None] = [None]
            for effect in self.shaped(latent):
                probe = self.having(effects={latent.name: effect})
                shapes = (probe.shape(at, effect.rows_in, share=0.3) for at in self.globals)
                found += [effect] if all(all(shape[1:]) for shape in shapes) else []
            return found

        choices = islice(product(*map(maps, self.units.sites)), MOST_CHOICES)
        named = (zip(self.units.names, each, strict=True) for each in choices)
        effects = [{name: x for name, x in pairs if x} for pairs in named]
        if len(effects) == 1:
            return self
        tried = [self.having(effects=each) for each in effects]
        return min((x.having(direct=x.is_direct()) for x in tried), key=Probe.count_entering)

    def count_entering(self) -> int:
        """Entries of globals that enter the likelihood; very many where x has no inverse map to z."""
        places = [self.given(at).place for at in self.globals]
        inverses = [place.inverse for place in places if place and place.inverse is not None]
        if not all(bool(inverse.isfinite().all()) for inverse in inverses):
            return MOST_ENTERING
        return sum(self.globals[0][n].numel() for n in self.entering(self.finite_moves()[0]))

    def is_direct(self) -> bool:
        """Whether data see the latent sites that have effects through these alone."""
        if not self.units.effects:
            return False
        direct = self.having(direct=True)
        e, _ = direct.finite_moves()

        def at(globals: Values, move: Tensor) -> Tensor:
            return direct.units.log_likelihood(direct.given(globals), e, beside=self.z + move)

        moves = 0.3 * self.u, 0.3 * self.e
        return all(same(at(g, 0.0 * self.u), at(g, x)) for g in self.near for x in moves)

    def finite_moves(self) -> tuple[Tensor, Tensor]:
        """Moves (1, B, k) of x where the data have slopes."""
        given = self.given(self.globals[0])
        x, size = given.priors.offset, 0.3 * given.priors.sd().clamp_max(1.0)
        e, u = (noise.to(size) * size for noise in fixed_normal(2, *x.shape[1:], seed=x.shape[1]))
        for _ in range(SHRINKS):
            if bool(self.units.gradient(given, x + e).isfinite().all()):
                break
            x, e, u = 0.25 * x, 0.25 * e, 0.25 * u
        return x + e, u

    def _changed(self, e: Tensor, at: Values) -> Callable[[Given, Tensor], Tensor]:
        """Which slopes of the data in units, (1, B, k), are not those at ``e``, and globals ``at``."""
        still = self.units.gradient(self.given(at), e)
        size = TOLERANCE * torch.finfo(still.dtype).eps * still.abs().max().clamp_min(1.0)
        return lambda given, x: (self.units.gradient(given, x) - still).abs() > size

    def check_data(self, e: Tensor, u: Tensor) -> None:
        """Refuse data that see several units: the slope in a unit must stay where others move."""
        every = [(self.given(at), self._changed(e, at)) for at in self.near]
        for (given, changed), mask in product(every, self.masks):
            if bool(changed(given, torch.where(mask.unsqueeze(-1), e + u, e))[:, ~mask].any()):
                raise ValueError(
                    f"AutoHierarchical: data see several units of {self.units.plate!r} at once, so "
                    f"they are not independent given the globals. Take AutoFullRankNormal, or "
                    f"AutoSites for chains and fields; of crossed effects make the smaller set "
                    f"global, locals=[...]."
                )

    def is_smooth(self, e: Tensor, u: Tensor) -> bool:
        """Whether no gradient of the data in a few of the units was seen to jump, near their priors'
        means, and on segments of three prior sds and more."""
        given = self.given(self.globals[0])
        prior, away = given.priors, torch.zeros_like(e)
        away[:, :: max(1, e.shape[1] // FEW)] = 1.0
        wide = 3.0 * away * prior.sd()
        segments = [(e - 2.0 * away, 4.0 * away * (1.0 + u.abs()))]
        segments += [(prior.offset - c * wide, 2.0 * c * wide + away * u) for c in SEGMENTS]
        f = partial(self.units.log_likelihood, given)
        # probabilities are clamped at roundings, in float32 at 1e-7: a coarse look, and a fine one
        for _ in range(2):
            segments = [self._likely(given, *part) for part in segments if jump(f, *part)]
        return not any(jump(f, *part) for part in segments)

    @torch.no_grad()
    def _likely(self, given: Given, start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of segments (1, B, k) of units with a large likelihood; the whole of too many."""
        moved = length[0].ne(0.0).any(-1).nonzero()[:, 0]
        if len(moved) * GRID * start.numel() > MOST_NUMBERS:
            return start, length
        s = torch.linspace(0.0, 1.0, GRID).to(start)
        x = start.repeat(len(moved) * GRID, 1, 1).reshape(len(moved), GRID, *start.shape[1:])
        one = torch.arange(len(moved))
        x[one, :, moved] += s[:, None] * length[0, moved, None]
        log_p = self.units.log_likelihood(given.repeated(len(moved) * GRID), x.flatten(0, 1))
        log_p = log_p.reshape(len(moved), GRID).nan_to_num(-torch.inf)
        large = log_p > log_p.amax(1, keepdim=True) - NOTHING
        low = (torch.where(large, s, 1.0).amin(1, keepdim=True) - s[1]).clamp_min(0.0)
        high = (torch.where(large, s, 0.0).amax(1, keepdim=True) + s[1]).clamp_max(1.0)
        part = torch.zeros_like(length).index_copy(1, moved, (high - low) * length[:, moved])
        return start.index_add(1, moved, low * length[:, moved]), part

    def scales_of_data(self, names: Sequence[str], e: Tensor, u: Tensor) -> tuple[str, ...]:
        """Those of the globals that change slopes by factors that are the same at two places."""

        def is_scale(name: str, here: Values) -> bool:
            # a short move may hardly tell a factor, a long one may leave the numbers of the dtype; and
            # where a coefficient is 0 all slopes vanish, of which any factor is one
            places = [self.given(here), *(self._with_other(name, here, share) for share in SHARES)]
            each = ([self.units.gradient(at, x) for x in (e, e + u)] for at in places)
            for (a, b), (c, d) in combinations(each, 2):
                # roundings are of what the data of one unit say
                size = torch.maximum(a.abs(), b.abs()) * torch.maximum(c.abs(), d.abs())
                if not _agree(a * d, b * c, size.amax(-1, keepdim=True)):
                    return False
            return True

        return tuple(name for name in names if all(is_scale(name, here) for here in self.near))

    def entering(self, e: Tensor) -> list[str]:
        """The globals on which the slopes of the data in the units depend, at the same x: at their
        centre, or beside it, as where a coefficient is 0 none does."""
        found = []
        for here in self.near:
            changed = self._changed(e, here)
            found += [n for n in here if bool(changed(self._with_other(n, here), e).any())]
        return [name for name in self.globals[0] if name in found]

    def _with_other(self, name: str, here: Values, share: float = SHARES[0]) -> Given:
        """The units where that of the globals is another, by a share of the way to a draw."""
        other = torch.lerp(here[name], self.globals[1][name], share)
        return self.given({**here, name: other})


def _elsewhere(site: Site) -> Any:
    """A draw, and where a flat prior has none another point than where a site is at first."""
    if not isinstance(innermost(site["fn"]), ImproperUniform):
        return init_to_sample(site)
    transform = biject_to(site["fn"].support)
    return transform(torch.randn(transform.inverse_shape(site["fn"].shape())))


def _agree(a: Tensor, b: Tensor, size: Tensor | float = 0.0) -> bool:
    """Whether each entry of a is that of b to 4e-8 of it (1e-3 in float32), or to roundings of what has
    that ``size``."""
    eps = torch.finfo(b.dtype).eps
    close = (a - b).abs() <= 3.0 * eps**0.5 * b.abs() + 100.0 * eps * size
    return bool((close | (a == b) | (a.isnan() & b.isnan())).all())
