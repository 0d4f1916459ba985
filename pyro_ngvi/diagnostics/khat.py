"""Whether to take a guide's draws as they are, to resample them, or not to use them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter

import numpy as np

from .shifts import BOUNDS, COARSE_END, COARSE_MEAN, COARSE_SD, ROUGH, Shift, right_to
from .weights import (
    FEWEST_OF_PART,
    MIN_DRAWS,
    PART,
    Slope,
    Tail,
    find_tail,
    log_sum_exp,
    share_missed,
    smoothed,
)

COARSE = 0.05  # nats of rounding above which equal and unequal weights look alike
NEGLIGIBLE = 0.01  # nats of KL that no reader of a posterior would notice
SMALL_KL = 0.5 * COARSE_MEAN**2  # nats: KL of two Gaussians whose means are that far apart
HALF = 0.5  # a k-hat below which the weights have a variance; a share of the draws
EVEN = 0.9  # share of the draws from which weights are all but equal, of which k-hat says little
FEWEST = 0.1  # share of the draws below which weighted moments were up to 70 % off
PARETO = 0.7  # the largest k-hat that more draws, 10^(1 / (1 - k)) of them, make reliable
STEEP = 0.1  # sds by which a slope stands out of its noise where a fit has not ended


@dataclass(frozen=True)
class KHat:
    r"""Importance weights w_s of a guide's draws z_s, s = 1..S, and what they say:

        w_s propto p(data, z_s) / q(z_s),  sum_s w_s = 1;  P(w > u + x | w > u) = (1 + k x / c)^(-1/k),

    the largest of them, above u, being Pareto distributed of shape k, scale c.  ``decision`` is one of

    * ``"intervals"``: means, sds and intervals of the draws may be taken as they are: two standard
      errors included, smoothed weights move no mean by more than 0.3 sds and no sd by more than 30 %,
      nor, less noise, an end of a 95 % interval by more than 0.5 sds;
    * ``"resample"``: take resampled draws, as ``to_arviz(..., resample="psis")`` gives;
    * ``"unusable"``: neither can be relied on;
    * ``"unclear"``: the guide lacks modes of comparable mass that are known, or there is a ``doubt``.

    A good k-hat says that weighted draws can be relied on, *not* that the draws can. With hundreds of
    latents it refuses guides whose single marginals are good. Sites are judged one by one: sums and
    predictions of a mean-field guide may be worse. A mode is not seen where neither the guide, nor its
    mirror images, nor enough draws of the prior go. Near its bounds the ``seed`` may decide.

    Sources: Vehtari et al. (2024), JMLR 25(72), section 3; Yao, Vehtari, Simpson & Gelman (2018), ICML.

    Attributes:
        khat: k as estimated, infinite where there is no tail.
        threshold: min(1 - 1/log10(S), 0.7), above which the weights are not to be relied on.
        ess: 1 / sum_s w_s^2, the number of exact draws that they are worth.
        log_weights: their logarithms, (S,), in nats; S may be 16 times what was asked for.
        shifts: by latent or deterministic site, what weights would change in each ``mean``, in sds,
            ``log_sd`` and ``ends``, with standard errors: arrays of the site's shape.
        slope: the steepest slope of the ELBO along a latent entry, in sds: ``name``, ``size``, ...
        missed: nats by which lower bounds on the evidence from draws of the prior exceed the guide's
            own estimate; positive where the guide has missed a mode. ``None``: not known.
        elbo: mean of log p(data, z) - log q(z) over the draws, in nats, and ``elbo_error`` its standard
            error; NaN where only normalised weights were given.
        tail: the largest weights.
        wanted: how many draws to resample, where those asked for are too few or uneven; else 0.
        impossible: where no draw has a weight, which data have no density at any of some.
        replaced: latent sites whose prior here is the guide's own (``AutoWalshHadamard``).
        modes: how many modes of comparable mass the search for the guide's start found, and
            ``modes_held`` how many of these its draws are in.
        mirrored: which mirror image of the draws is a mode of its own, in words; one of ``modes``.
        doubt: why good weights are not enough for this guide, in words, if they are not.
        rounded: by how much rounding puts log p off, in words, if that is more than other errors.

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> model, wide = (lambda s=s: pyro.sample("z", dist.Normal(0.0, s)) for s in (1.0, 2.0))
        >>> found = ngvi.khat(model, wide, seed=0)
        >>> found.decision, found.log_weights.shape, round(float(found.shifts["z"].log_sd), 1)
        ('resample', (1000,), -0.7)
    """

    khat: float
    threshold: float
    ess: float
    log_weights: np.ndarray = field(repr=False)
    shifts: Mapping[str, Shift] = field(default_factory=dict, repr=False)
    slope: Slope | None = None
    missed: float | None = None
    elbo: float = float("nan")
    elbo_error: float = float("nan")
    tail: Tail | None = field(default=None, repr=False)
    wanted: int = 0
    impossible: str = ""
    replaced: tuple[str, ...] = ()
    modes: int = 1
    modes_held: int = 1
    mirrored: str = ""
    doubt: str = ""
    rounded: str = ""

    @cached_property
    def decision(self) -> str:
        """ "intervals", "resample", "unusable" or "unclear": see the class."""
        if not self.reliable or (self.missed or 0.0) > 0.0:
            return "unusable"
        share = self.ess / len(self.log_weights)
        good = self.within_bounds and (self.khat <= HALF or share >= HALF)
        correctable = share >= HALF or (share >= FEWEST and self.ended)
        if not (good or correctable):
            return "unusable"
        if self.other_modes or self.doubt:
            return "unclear"
        return "intervals" if good else "resample"

    @property
    def ok(self) -> bool:
        """Whether the guide's draws may be taken as they are."""
        return self.decision == "intervals"

    @property
    def outside(self) -> float:
        """The share of draws at which the model has no density."""
        return float(np.isneginf(self.log_weights).mean())

    @property
    def of_modes_held(self) -> "KHat":
        """The same of the modes alone that the guide's draws are in."""
        return replace(self, modes=self.modes_held, missed=None)

    @property
    def other_modes(self) -> str:
        """That there are modes of which the guide holds nothing, in words; else empty."""
        if self.modes_held >= self.modes:
            return ""
        if self.mirrored:
            return self.mirrored
        return (
            f"The search for a start found {self.modes} modes of comparable mass, and draws of the "
            f"guide are in {self.modes_held}. If components are exchanged, order them by a prior; "
            f"else take functools.partial(pyro_ngvi.AutoMixtureNormal, num_components={self.modes})."
        )

    @property
    def nearly_equal(self) -> bool:
        """Whether weights are equal in practice, and k-hat is the shape of what is left of noise."""
        return self.kl < NEGLIGIBLE and self.ess >= 0.95 * len(self.log_weights)

    @property
    def reliable(self) -> bool:
        """Whether k-hat is small, or weights nearly equal; ``decision`` asks for ``ess`` too."""
        return not np.isnan(self.khat) and (self.khat <= self.threshold or self.nearly_equal)

    @property
    def within_bounds(self) -> bool:
        """Whether smoothed weights move means by 0.3 sds and sds by 30 % at most, two errors included,
        and ends by 0.5 sds; of no known sites, whether KL(q || posterior) is as small as that."""
        if not self.shifts:
            return self.kl <= SMALL_KL
        mean, log_sd = self.errors
        return mean <= COARSE_MEAN and log_sd <= COARSE_SD and self._end[0] <= COARSE_END

    @property
    def is_rough(self) -> bool:
        """Whether weights that can be relied on see errors of a third of the bounds and more."""
        return self.reliable and any(s.exceeds(*ROUGH) for s in self.shifts.values())

    @property
    def errors(self) -> tuple[float, float]:
        """How far smoothed weights move a mean, in sds, and a log sd at most, with two errors."""
        (mean, _), (log_sd, _) = self._moved if self.shifts else [(0.0, "")] * 2
        return mean, log_sd

    @property
    def doubtful(self) -> bool:
        """Whether k-hat alone doubts weights worth half of the draws: more draws may tell."""
        return self.khat > self.threshold and self.ess >= HALF * len(self.log_weights)

    @property
    def unsure(self) -> bool:
        """Whether more draws may tell if these can be resampled: k-hat is within two standard errors
        of its bound, (1 + k) / sqrt(M) for M in the tail, or above it for so few draws only."""
        if self.khat > self.threshold or self.tail is None:
            return self.threshold < self.khat <= PARETO
        error = (1.0 + self.khat) / max(1, len(self.tail.at)) ** 0.5
        return self.decision == "resample" and self.khat + 2.0 * error > self.threshold

    @property
    def tail_is_too_heavy(self) -> bool:
        """Whether the tail has no mean, so that smoothing would give many draws the largest weight."""
        return 1.0 < self.khat < np.inf

    @property
    def resampling(self) -> str:
        """The call for resampled draws."""
        more = f", num_samples={self.wanted}" * bool(self.wanted)
        return f'to_arviz(..., resample="psis"{more})'

    @property
    def ended(self) -> bool:
        """Whether no slope of the ELBO stands out of its noise by more than 0.1 sd."""
        return self.slope is None or self.slope.excess <= STEEP

    @property
    def kl(self) -> float:
        """Estimate of KL(q || posterior) in nats: log mean(weight) - mean(log weight)."""
        return float(-np.mean(self.log_weights) - np.log(len(self.log_weights)))

    @property
    def psis_log_weights(self) -> np.ndarray:
        """Logarithms of the Pareto-smoothed weights, (S,), in nats; the weights sum to one.

        Raises:
            ValueError: when the weights are not finite numbers.
        """
        if not np.isfinite(self.log_weights.max()):
            raise ValueError(
                "The log weights are not finite: model or guide gives NaN or an infinite density "
                "at draws of the guide, or zero at all of them. There is nothing to smooth."
            )
        if not np.isfinite(self.khat) or self.khat == 0.0:
            return self.log_weights
        return smoothed(self.log_weights, self.tail)

    @property
    def verdict(self) -> str:
        """The decision and its reasons, in words."""
        if self.other_modes:
            return f"{self.other_modes} Of this mode: {self.of_modes_held.verdict}"
        reasons = f"{self._reasons()} {self.rounded}".rstrip()
        if self.replaced:
            names = ", ".join(map(repr, self.replaced))
            reasons = (
                f"For a model with the guide's own prior of {names}, not for yours, with which "
                f"pyro_ngvi.diagnose compares: {reasons[0].lower()}{reasons[1:]}"
            )
        if self.ended or self.slope is None:
            return reasons
        return (
            f"{reasons} The fit has not ended: the ELBO still rises along the "
            f"{self.slope.what} of {self.slope.name!r} (slope {self.slope.size:.2f}, standard "
            f"error {self.slope.error:.2f}): train longer."
        )

    def _reasons(self) -> str:
        draws = len(self.log_weights)
        figures = f"k-hat {self.khat:.2f} from {draws} draws, worth {self.ess:.0f} exact ones"
        if np.isnan(self.khat):
            return (
                "Not usable: the importance weights cannot be told from rounding in this dtype"
                + ("." if self.rounded else "; evaluate the model in float64.")
            )
        if self.ess == 0.0:
            return (
                "Not usable: the density of model or guide is zero, infinite or NaN at draws of the "
                f"guide{self.impossible}. Does the support of a datum depend on a latent variable?"
            )
        if self.decision == "unclear":
            return f"Not clear ({figures}): {self.doubt}."
        if self.decision == "intervals":
            figures += ", where k-hat says nothing" * (self.khat > self.threshold)
            return f"Take the intervals as they are: {self.moves()} ({figures}; {BOUNDS})."
        if self.decision == "resample":
            return (
                f"Resample, do not take the intervals as they are: {self.moves()}. The weights can "
                f"correct that ({figures}): {self.resampling}."
            )
        if self.reliable and (self.missed or 0.0) > 0.0:
            return (
                f"Not usable: draws from the prior show {share_missed(self.missed or 0.0)}. It misses "
                f"a mode, or a long tail: start elsewhere, or take a richer guide ({figures})."
            )
        if self.reliable:
            few = ", and the weights rest on few draws" if self.ess < FEWEST * draws else ""
            return f"Not usable yet: {self.moves()}{few} ({figures})."
        if self.khat <= PARETO:
            n = 100 * int(np.ceil(10.0 ** (1.0 / (1.0 - self.khat)) / 100.0))
            return f"Not usable yet: too few draws to tell ({figures}); raise num_samples to {n}."
        k, bound = (f"{x:.2f}" for x in (self.khat, self.threshold))
        return (
            f"Not usable: k-hat is {k}, {'just ' * (k == bound)}above {bound}: the guide misses "
            f"part of the posterior. Train longer, take a richer guide, reparametrise the model, "
            f"or check against NUTS."
        )

    def moves(self) -> str:
        """How far weights move means and sds, errors included, in words."""
        if not self.shifts:
            return f"KL(q || posterior) is about {max(self.kl, 0.0):.2g} nats"
        (mean, at_mean), (log_sd, at_sd) = self._moved
        if self.within_bounds:
            doubt = "" if self.ok else ", but may be further off where these are so uneven"
            return f"{right_to(mean, log_sd)} by the weights{doubt}"
        if mean <= COARSE_MEAN and log_sd <= COARSE_SD:
            end, at_end = self._end
            return (
                f"weights move an end of the 95 % interval of {at_end!r} by {end:.2g} sds or more"
            )
        if mean / COARSE_MEAN >= log_sd / COARSE_SD:
            return f"weights move the mean of {at_mean!r} by up to {mean:.2g} sds"
        return f"weights change the sd of {at_sd!r} by a factor of up to {np.exp(log_sd):.2g}"

    @property
    def _moved(self) -> list[tuple[float, str]]:
        """How far weights move a mean, and a log sd, at most, and of which site."""
        sizes = [(name, shift.errors(2.0)) for name, shift in self.shifts.items()]
        largest = ([(float(x[i].max(initial=0.0)), name) for name, x in sizes] for i in (0, 1))
        return [max(found, key=itemgetter(0)) for found in largest]

    @property
    def _end(self) -> tuple[float, str]:
        """How far weights move an end of an interval, by more than noise, and of which site."""
        return max((shift.end(), name) for name, shift in self.shifts.items())


def khat_from_log_weights(log_weights: np.ndarray, resolution: float = 0.0) -> KHat:
    """PSIS k-hat of given log weights.

    Args:
        log_weights: log p - log q up to a constant, (S,), in nats; -inf is a weight of zero.
        resolution: log weights that all lie within that many nats are taken for equal.

    Raises:
        ValueError: when they are not a vector of at least 25.

    Example:
        >>> uniform = (np.arange(4000) + 0.5) / 4000
        >>> pareto = khat_from_log_weights(-0.9 * np.log1p(-uniform))  # a tail of shape 0.9
        >>> print(f"{pareto.khat:.2f} {pareto.threshold:.2f} {pareto.ok}")
        0.87 0.70 False
    """
    x = np.asarray(log_weights, dtype=np.float64)
    if x.ndim != 1 or len(x) < MIN_DRAWS:
        what = f"a vector of at least {MIN_DRAWS} log weights and got one of shape {x.shape}"
        raise ValueError(f"k-hat needs {what}; raise num_samples.")
    threshold = float(min(1 - 1 / np.log10(len(x)), PARETO))
    if not np.isfinite(x.max()):  # a NaN, an infinite weight, or nothing but zeros
        return KHat(float("inf"), threshold, 0.0, x)
    x = x - x.max()
    normalised = x - log_sum_exp(x)
    ess = float(1 / np.exp(2 * normalised).sum())
    # equal weights: the guide is the posterior, and there is no tail to fit
    if -x.min() <= resolution:
        return KHat(0.0 if resolution <= COARSE else float("nan"), threshold, ess, normalised)
    tail = find_tail(x)
    if tail.shape > threshold and ess >= HALF * len(x) and PART * len(tail.at) >= FEWEST_OF_PART:
        tail = find_tail(x, PART)
    return KHat(tail.shape, threshold, ess, normalised, tail=tail)
