"""What short chains, or weights of corrected draws, say of a guide, in words."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from torch import Tensor

from ..hierarchy import ExactUnits
from .correction import Corrected, decision_on
from .khat import HALF, KHat
from .moved import Moved
from .shifts import BOUNDS, COARSE_MEAN, COARSE_SD, ROUGH, ROUGH_END, right_to
from .weights import share_missed

#: k-hat above which weights know of mass that chains may not have reached: they have no mean; of more
#: latent variables than so many, errors within the bounds add up to such weights
HEAVY, FEW, HEAVIER = 1.0, 25, 1.5
#: the share of even weights that the largest errors allowed leave for each latent variable, q Gaussian
#: and the posterior too, and the part of it that heavy tails may take
EACH = math.exp(-(COARSE_MEAN**2)) * math.sqrt(1.0 - (1.0 - math.exp(-2.0 * COARSE_SD)) ** 2)
TAILS = 0.1
#: share of draws without density, from which no chain moves, that is more than overflow far out
ASTRAY = 0.02


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
        exact: where corrected draws have judged, not chains, their guide and weights.
        ends: where chains have, and weights are of no use, their last states, latent sites by name.
        heavy: where corrected draws have judged, deterministic sites whose sd a few of these make.

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
    ends: dict[str, Tensor] | None = field(default=None, repr=False)
    heavy: tuple[str, ...] = ()

    @property
    def integrated(self) -> bool:
        """Whether this is by weights of corrected draws, not by chains."""
        return self.exact is not None

    @property
    def corrected(self) -> Corrected | None:
        """Corrected draws, where errors may be a third of the bounds, or ``None``."""
        apart = self.khat.other_modes or self._missed
        if self.exact is None or apart or not self.may_be_off:
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
    def may_be_off(self) -> bool:
        """Whether errors may be a third of the bounds, as far as is known, or are beyond them."""
        moved = self._moved.values()
        seen = any(m.exceeds(*ROUGH, more=0.0) or m.end() > ROUGH_END for m in moved)
        return seen or not self.ok

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
            how = "by short chains"
            if self.exact is not None:
                units = self.exact[0].collapsed.units
                how = "by weights" if units is None else "with the units integrated out"
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
            missed = share_missed(self.khat.missed or 0.0)
            where = f"draws of the prior show {missed}: a mode was missed"
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
        named = ", ".join(map(repr, self.heavy))
        long = f"Tails of {named} are too long for a mean or an sd: read quantiles." * bool(named)
        parts = f"{words[self.decision]}{how}: {where}.", long, self.khat.rounded
        return " ".join(filter(None, parts))

    def __str__(self) -> str:
        words = {
            n: "good" if m.is_good else "off" if m.is_off else "?" for n, m in self._moved.items()
        }
        lines = [f"  {name} ({words[name]}): {moved}" for name, moved in self._moved.items()]
        draws = len(self.khat.log_weights)
        figures = f"k-hat {self.khat.khat:.2f}, {draws} weights worth {self.khat.ess:.0f} draws"
        return "\n".join([self.verdict, *lines, f"  ({figures})"])
