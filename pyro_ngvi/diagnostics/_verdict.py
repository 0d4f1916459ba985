"""From weights to one of three decisions, and to words.

The bounds were calibrated on the reference posteriors of ``benchmarks.reference_posteriors``: what is
called good there has no mean off by more than 0.3 sds and no sd by more than 30 %.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from .khat import KHat

__all__ = ["COARSE_MEAN", "COARSE_SD", "NEGLIGIBLE", "STEEP", "decide", "sentence"]

NEGLIGIBLE = 0.01  # nats of KL that no reader of a posterior would notice
COARSE_MEAN = 0.3  # sds
COARSE_SD = float(np.log(1.3))
SMALL_KL = 0.5 * COARSE_MEAN**2  # nats: KL of two Gaussians whose means are that far apart
HALF = 0.5  # a k-hat below which the weights have a variance; a share of the draws
FEWEST = 0.1  # share of the draws below which weighted moments were up to 70 % off
STEEP = 0.1  # sds by which a slope stands out of its noise where a fit has not ended


def decide(found: KHat) -> str:
    """The decision, see :class:`~pyro_ngvi.diagnostics.KHat`."""
    if not found.reliable or (found.missed or 0.0) > 0.0:
        return "unusable"
    share = found.ess / len(found.log_weights)
    trusted = found.khat <= HALF or share >= HALF
    if found.shifts:
        small = _largest(found, "largest_mean")[1] <= COARSE_MEAN
        small = small and _largest(found, "largest_log_sd")[1] <= COARSE_SD
    else:
        small = found.kl <= SMALL_KL
    if trusted and small:
        return "intervals"
    correctable = share >= HALF or (share >= FEWEST and found.ended)
    return "resample" if correctable else "unusable"


def _largest(found: KHat, what: Literal["largest_mean", "largest_log_sd"]) -> tuple[str, float]:
    """The site that weights move most, and how far."""
    sizes = ((name, getattr(shift, what)) for name, shift in found.shifts.items())
    return max(sizes, key=lambda pair: pair[1], default=("", 0.0))


def sentence(found: KHat) -> str:
    """Decision and reasons in words."""
    return f"{_decision(found)}{_not_ended(found)}"


def _decision(found: KHat) -> str:
    draws = len(found.log_weights)
    figures = f"k-hat {found.khat:.2f} from {draws} draws, worth {found.ess:.0f} exact ones"
    if np.isnan(found.khat):
        return (
            "Not usable: the importance weights cannot be told from rounding in this dtype; evaluate "
            "the model in float64."
        )
    if found.decision == "intervals":
        return f"Take the intervals as they are: {_moves(found)} ({figures})."
    if found.decision == "resample":
        return (
            f"Resample, do not take the intervals as they are: {_moves(found)}. The weights can "
            f'correct that ({figures}): to_arviz(..., resample="psis").'
        )
    if found.reliable and (found.missed or 0.0) > 0.0:
        return (
            f"Not usable: draws from the prior show at least {found.missed:.1f} nats more evidence "
            f"than the guide's. It misses a mode: start elsewhere, or from several points ({figures})."
        )
    if found.reliable:
        few = ", and the weights rest on few draws" if found.ess < FEWEST * draws else ""
        return f"Not usable yet: {_moves(found)}{few} ({figures})."
    if found.khat <= 0.7:
        return f"Not usable yet: too few draws to tell ({figures}); raise num_samples."
    return (
        f"Not usable: k-hat is {found.khat:.2f}, above {found.threshold:.2f}: the guide misses part of "
        f"the posterior. Train longer, take a richer guide, reparametrise the model, or check "
        f"against NUTS."
    )


def _moves(found: KHat) -> str:
    if not found.shifts:
        return f"KL(q || posterior) is about {max(found.kl, 0.0):.2g} nats"
    at_mean, mean = _largest(found, "largest_mean")
    at_sd, log_sd = _largest(found, "largest_log_sd")
    if mean <= COARSE_MEAN and log_sd <= COARSE_SD:
        percent = 100 * np.expm1(log_sd)
        return f"weights move no mean by more than {mean:.2f} sd and no sd by more than {percent:.0f} %"
    if mean / COARSE_MEAN >= log_sd / COARSE_SD:
        return f"weights move the mean of {at_mean!r} by up to {mean:.2g} sds"
    return f"weights change the sd of {at_sd!r} by a factor of up to {np.exp(log_sd):.2g}"


def _not_ended(found: KHat) -> str:
    slope = found.slope
    if found.ended or slope is None:
        return ""
    return (
        f" The fit has not ended: the ELBO still rises along the {slope.what} of {slope.name!r} (slope "
        f"{slope.size:.2f}, standard error {slope.error:.2f}): train longer."
    )
