r"""Where short Markov chains lead that start at draws of a guide, and how far that is.

Hamiltonian Monte Carlo leaves the posterior as it is, so where the guide is wrong its draws move, also
where importance weights see nothing (Wang, Kasprzak & Huggins, "A targeted accuracy diagnostic for
variational approximations", AISTATS 2023).  With x_0 the draws, x_T those after T steps, and rho their
correlation, an entry whose chain is linear has

    E x_T - mu = rho (E x_0 - mu),    Var x_T - v = rho^2 (Var x_0 - v),                             (1)

mu and v of the posterior, for which :func:`diagnose` solves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..hierarchy import AutoHierarchical, ExactUnits
from ..runtime.density import feasible_value
from ..runtime.model_density import ModelDensity
from .chains import ADAPTING, KEPT, run_chains
from .correction import Corrected, decision_on, moved_by_weights
from .draws import MOST_DOUBLES, guide_draws, random_state
from .khat import HALF, KHat
from .moved import Moved, by_site, derived, moved, values_at
from .over_batches import need_all_data
from .shifts import BOUNDS, COARSE_MEAN, COARSE_SD, ROUGH, ROUGH_END, right_to
from .verdict import khat

#: k-hat above which weights know of mass that chains may not have reached: they have no mean; of more
#: latent variables than so many, errors within the bounds add up to such weights
HEAVY, FEW, HEAVIER = 1.0, 25, 1.5
#: the share of even weights that the largest errors allowed leave for each latent variable, q Gaussian
#: and the posterior too, and the part of it that heavy tails may take
EACH = math.exp(-(COARSE_MEAN**2)) * math.sqrt(1.0 - (1.0 - math.exp(-2.0 * COARSE_SD)) ** 2)
TAILS = 0.1
#: share of draws without density, from which no chain moves, that is more than overflow far out
ASTRAY = 0.02
#: chains that tell something (k-hat alone judges a mode of a mixture with fewer), and times as many
#: where the errors of these leave a site undecided
FEWEST_CHAINS, MORE_CHAINS = 50, 4


@dataclass(frozen=True)
class Diagnosis:
    """Whether to believe a guide, site by site: what :func:`pyro_ngvi.diagnose` found.

    Attributes:
        sites: :class:`Moved` by latent and, up to 10^7 numbers of all chains, deterministic site.
        unconstrained: the same of unconstrained coordinates, such as log(x) of a positive x, where
            they are others: mean and sd of x hardly see how much of the mass lies near 0.
        khat: what importance weights say.
        accepted: share of trajectories that were accepted, after adaptation; NaN without chains.
        modes: of a mixture, how many have chains of their own; ``sites`` are then (modes, ...).
        exact: of a hierarchy that corrected draws have judged, not chains, their guide and weights.

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> model, guide = (lambda m=m: pyro.sample("z", dist.Normal(m, 1.0)) for m in (0.0, 0.5))
        >>> found = ngvi.diagnose(model, guide)
        >>> found.decision, found.sites["z"].mean.round(decimals=1), 0.7 < found.accepted <= 1.0
        ('resample', tensor(-0.5...), True)
    """

    sites: dict[str, Moved]
    unconstrained: dict[str, Moved]
    khat: KHat = field(repr=False)
    accepted: float
    modes: int = 1
    exact: tuple[ExactUnits, KHat] | None = field(default=None, repr=False)

    @property
    def integrated(self) -> bool:
        """Whether this is by corrected draws of a hierarchy, not by chains."""
        return self.exact is not None

    @property
    def corrected(self) -> Corrected | None:
        """Corrected draws of a hierarchy, where errors may be a third of the bounds, or ``None``."""
        moved, apart = self._moved.values(), self.khat.other_modes or self._missed
        seen = any(m.exceeds(*ROUGH, more=0.0) or m.end() > ROUGH_END for m in moved)
        if self.exact is None or apart or (self.ok and not seen):
            return None
        guide, weights = self.exact
        taken = decision_on(weights, guide.collapsed)[0] == "intervals"
        return Corrected(guide, weights, self.verdict) if taken else None

    @property
    def _moved(self) -> dict[str, Moved]:
        others = {f"{name}, unconstrained": moved for name, moved in self.unconstrained.items()}
        return self.sites | others

    @property
    def decision(self) -> str:
        """ "intervals" where all sites are good, no mode was missed, and no weights are so heavy that
        something must be unseen; else "resample", "unusable", or "unclear"."""
        weights = self.khat
        if weights.other_modes:
            lost = self._missed or self._of_modes_held.decision == "unusable"
            return "unusable" if lost else "unclear"
        if weights.ess == 0.0:
            return "unusable"
        astray = weights.outside > ASTRAY
        good = all(m.is_good for m in self._moved.values()) and not astray
        if good and not self._missed and self._light:
            return "intervals"
        off = any(m.is_off for m in self._moved.values()) or astray
        # weights that would change little decide where chains do not, and see less of ends
        blind = good or astray or any(m.has_moments_off for m in self._moved.values())
        if (weights.decision == "resample" or (weights.ok and not blind)) and not self._elsewhere:
            return "resample"
        return "unusable" if off or self._missed else "unclear"

    @property
    def _of_modes_held(self) -> Diagnosis:
        return replace(self, khat=self.khat.of_modes_held)

    @property
    def _weighs(self) -> bool:
        """Whether weights can be relied on for what chains look at, too."""
        return self.khat.reliable and self.modes == 1 and not self.integrated

    @property
    def _light(self) -> bool:
        """Whether reliable weights move nothing beyond the bounds, or others are even enough."""
        weights = self.khat
        if self.integrated or self.modes > 1:
            return self.integrated or weights.ok
        d = sum(m.mean.numel() for m in self.sites.values())
        share = weights.ess / len(weights.log_weights)
        if self._weighs:
            # weights without a variance that are less even than that may understate an error
            return weights.within_bounds and (weights.khat <= HALF or share >= EACH**d)
        return weights.khat <= (HEAVY if d <= FEW else HEAVIER) and share >= TAILS * EACH**d

    @property
    def _elsewhere(self) -> bool:
        """Whether chains lead so far from where weights do that resampled draws would be off."""
        both = self.sites.keys() & self.khat.shifts.keys() if self.modes == 1 else ()
        return any(self.sites[name].is_far_from(self.khat.shifts[name]) for name in both)

    @property
    def _missed(self) -> bool:
        return self.khat.reliable and (self.khat.missed or 0.0) > 0.0

    @property
    def is_undecided(self) -> bool:
        """Whether a site is neither good nor off, as errors of the estimates are too large."""
        each, sure = self._moved.values(), self.khat.ess == 0.0
        return not (sure or all(m.is_sure for m in each) or any(m.is_off for m in each))

    @property
    def is_rough(self) -> bool:
        """Whether errors of a third of the bounds and more are seen, which a richer guide may lack."""
        seen = any(m.exceeds(*ROUGH) for m in self._moved.values())
        return seen or (self._weighs and self.khat.is_rough)

    @property
    def ok(self) -> bool:
        """Whether the guide's draws may be taken as they are."""
        return self.decision == "intervals"

    @property
    def verdict(self) -> str:
        """The decision and its reasons, in words."""
        words = {
            "intervals": "Take the intervals as they are",
            "resample": "Resample, do not take the intervals as they are",
            "unusable": "Not usable",
            "unclear": "Not clear",
        }
        if self.khat.ess == 0.0:
            return self.khat.verdict
        if self.khat.other_modes:
            return f"{self.khat.other_modes} Of this mode: {self._of_modes_held.verdict}"
        wrong = {n: m for n, m in self._moved.items() if not m.is_good}
        if wrong:
            name, worst = max(wrong.items(), key=lambda item: item[1].is_off)
            where = f"{name!r} has {worst}"
            if not worst.is_off:
                mean, log_sd = (float(x.max()) for x in worst.errors(2.0))
                where += f"; with their errors {mean:.2g} sd and {100.0 * math.expm1(log_sd):.0f} %"
        else:
            errors = zip(*(m.errors(2.0) for m in self._moved.values()), strict=True)
            mean, log_sd = (max(float(x.max()) for x in part if x.numel()) for part in errors)
            how = "with the units integrated out" if self.integrated else "by short chains"
            if self.ok and self._weighs:
                seen = self.khat.errors
                mean, log_sd, how = max(mean, seen[0]), max(log_sd, seen[1]), f"{how} and weights"
            where = f"{right_to(mean, log_sd)} {how}"
            where += f" in each of {self.modes} modes" * (self.modes > 1)
            where += f" ({BOUNDS})" * self.ok
        if self.khat.outside > ASTRAY:
            where = (
                f"the model has no density at {self.khat.outside:.0%} of the guide's draws, though the "
                f"supports of its latent sites have them"
            )
        elif not wrong and self._missed:
            where = f"draws of the prior show {self.khat.missed:.1f} nats more: a mode was missed"
        elif not wrong and not self.ok:
            k, share = self.khat.khat, self.khat.ess / len(self.khat.log_weights)
            figures = f"(k-hat {k:.2f}, worth {share:.1%} of the draws)"
            tail = f"weights have a heavy tail {figures}"
            if self._weighs and self.khat.within_bounds:
                tail = f"may be further off where weights are so uneven {figures}"
            elif self._weighs:
                tail = self.khat.moves()
            elif math.isnan(k):
                tail = "weights cannot be told from rounding"
                tail += ": evaluate the model in float64" * (not self.khat.rounded)
            alone = f". Of all modes together: {self.khat.verdict.rstrip('.')}"
            where += alone if self.modes > 1 else f", but {tail}"
        how = f": {self.khat.resampling}" * (self.decision == "resample")
        return f"{words[self.decision]}{how}: {where}. {self.khat.rounded}".rstrip()

    def __str__(self) -> str:
        words = {
            n: "good" if m.is_good else "off" if m.is_off else "?" for n, m in self._moved.items()
        }
        lines = [f"  {name} ({words[name]}): {moved}" for name, moved in self._moved.items()]
        draws = len(self.khat.log_weights)
        figures = f"k-hat {self.khat.khat:.2f}, {draws} weights worth {self.khat.ess:.0f} draws"
        return "\n".join([self.verdict, *lines, f"  ({figures})"])


def diagnose(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_chains: int = 1000,
    num_steps: int = 12,
    seed: int | None = 0,
    **kwargs: Any,
) -> Diagnosis:
    """Whether to believe a trained guide, by short chains from its draws: bounds on errors of means and
    sds of every site, as it is and unconstrained, where k-hat tells of the joint distribution alone.

    Hamiltonian Monte Carlo of T steps leads draws x_0 to x_T, the last four states; with rho their
    correlation, cut to [0, 0.7], an entry has (Wang, Kasprzak & Huggins 2023, AISTATS, for the idea)

        mean = E x_0 + (E x_T - E x_0) / (1 - rho),   Var = Var x_0 + (Var x_T - Var x_0) / (1 - rho^2).

    Not where ``16 * num_steps`` gradients for all chains at once cost too much, nor for several modes,
    between which short chains do not go (those of an :class:`~pyro_ngvi.AutoMixtureNormal` have their
    own, and k-hat judges their shares), nor for the neck of a funnel.  An
    :class:`~pyro_ngvi.AutoHierarchical` is judged by :func:`~pyro_ngvi.diagnostics.corrected` draws
    where these can be relied on, which see such necks.

    Args:
        model: the Pyro model.
        guide: any trained Pyro guide of it.
        args: those of both, and ``kwargs``: the full data.
        num_chains: at least 50; up to four times as many where these leave a site undecided.
        num_steps: T, at least 5, of which the first four adapt the length of leaps.
        seed: makes the result repeatable; ``None`` for the global random state.

    Raises:
        ValueError: as :func:`pyro_ngvi.khat`; for fewer than 50 chains or 5 steps; of minibatches.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> model, narrow = (lambda s=s: pyro.sample("z", dist.Normal(0.0, s)) for s in (1.0, 0.4))
        >>> diagnose(model, model).decision, diagnose(model, narrow).decision
        ('intervals', 'unusable')
    """
    if num_chains < FEWEST_CHAINS or num_steps <= ADAPTING:
        raise ValueError(
            f"diagnose needs at least {FEWEST_CHAINS} chains and {ADAPTING + 1} steps."
        )
    need_all_data(model)
    weights = khat(model, guide, *args, seed=seed, **kwargs)
    how: Any = model, guide, args, kwargs, weights, num_chains // 2, seed
    if isinstance(guide, AutoHierarchical) and (found := without_chains(*how)):
        return found
    with random_state(seed, stream=2):
        drawn = partial(guide_draws, partial(guide, *args, **kwargs))
        values, _ = drawn(num_chains)

        def at_draw(site: Any) -> Tensor:
            """Where the model runs for sure; in the middle of all supports it may be NaN."""
            return values[site["name"]][0] if site["name"] in values else feasible_value(site)

        density = ModelDensity(model, args, kwargs, init_loc_fn=at_draw)
        draws, modes_at = density.pack(values).detach(), getattr(guide, "modes_at", _one_mode)
        more = min(MORE_CHAINS * num_chains, MOST_DOUBLES // draws.shape[1]) - num_chains
        if more > 0:
            draws = torch.cat([draws, density.pack(drawn(more)[0]).detach()])
        judged_by = partial(_by_chains, density, draws, modes_at, num_steps, weights)
        found = judged_by(num_chains)
        return judged_by(len(draws)) if found.is_undecided and more > 0 else found


def without_chains(
    model: Any,
    guide: AutoHierarchical,
    args: Any,
    kwargs: Any,
    weights: KHat,
    num_draws: int = 500,
    seed: int | None = 0,
) -> Diagnosis | None:
    """As :func:`diagnose`, of a hierarchy, by corrected draws, if these can be relied on."""
    with random_state(seed, stream=2):
        judged = moved_by_weights(model, guide, args, kwargs, num_draws)
    if judged is None:
        return None
    sites, unconstrained, exact = judged
    return Diagnosis(sites, unconstrained, weights, float("nan"), exact=exact)


def _one_mode(x: Tensor) -> Tensor:
    return x.new_zeros(len(x))


def _by_chains(
    density: ModelDensity, draws: Tensor, modes_at: Any, num_steps: int, weights: KHat, chains: int
) -> Diagnosis:
    """What chains say from the first of draws (S, d) of a guide, each in its mode ``modes_at(x)``."""
    start, rest = draws[:chains], draws[chains:]
    counts = modes_at(start).unique(return_counts=True)
    modes = [int(m) for m, count in zip(*counts, strict=True) if count >= FEWEST_CHAINS]
    if len(modes) < 2:
        modes, modes_at = [0], _one_mode
    pairs, accepted = [], 0.0
    for mode in modes:
        own = start[modes_at(start) == mode]
        last, share = run_chains(density, own, num_steps)
        stays = modes_at(last[-1]) == mode
        stays |= stays.sum() < FEWEST_CHAINS  # they are of one mode
        own, last = own[stays], last[:, stays].flatten(0, 1)
        before = torch.cat([own, rest[modes_at(rest) == mode]])
        pairs.append((before, last, partial(moved, chains=len(own))))
        accepted += share / len(modes)
    with torch.no_grad():
        by_mode = [by_site(density.layout, *pair) for pair in pairs]
        latent, few = density.layout.transforms, MOST_DOUBLES // (KEPT * len(draws))
        names = [n for n, x in weights.shifts.items() if n not in latent and x.mean.size <= few]
        for (sites, _), (*pair, how) in zip(by_mode, pairs, strict=True) if names else ():
            before, after = (values_at(density.program, names, density.unpack(x)) for x in pair)
            sites |= derived(before, after, how)
    sites, unconstrained = (
        {name: Moved.of_modes([mode[name] for mode in each]) for name in each[0]}
        for each in zip(*by_mode, strict=True)
    )
    return Diagnosis(sites, unconstrained, weights, accepted, len(modes))
