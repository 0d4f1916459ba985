r"""How far importance weights would move each mean and sd, and whether the fit had ended.

**Shifts.**  With draws x_s of a quantity, s = 1..S, and smoothed weights w_s that sum to one,

    mean:   (sum_s w_s x_s - mean(x)) / sd_w,        sd:   log(sd_w / sd),

where sd is that of the draws and sd_w that of the weighted draws.  Both versions come from the same
draws; the standard error of their difference is that of the sum over s of the difference of their
influence functions (the delta method).

**Slopes.**  With l_s = log p - log q and u the unconstrained draws in units of their sds,

    b = Cov(u, l),     c = Cov((u^2 - 1) / 2, l).

For a Gaussian q these are the natural gradient of the ELBO with respect to the mean of each entry, in
sds, and to its log sd (Bonnet's and Price's identities): the step that would end the fit of a Gaussian
posterior with independent entries, and zero at the optimum of every family that can be moved and
stretched along an entry.  They need no exponential of a log weight, so they speak where k-hat cannot.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["Shift", "Slope", "shift_of", "slope_of", "steepest"]

COLUMNS = 4096  # entries at a time, to bound memory


@dataclass(frozen=True)
class Shift:
    """What weights would change, entry by entry, each an array of the shape of the quantity.

    ``mean`` is in sds of the weighted draws, ``log_sd`` a log ratio; the other two are their standard
    errors.  Infinite where a moment of the draws is not finite.
    """

    mean: np.ndarray
    mean_error: np.ndarray
    log_sd: np.ndarray
    log_sd_error: np.ndarray

    @property
    def largest_mean(self) -> float:
        """The largest change of a mean in sds, two standard errors included."""
        return _largest(np.abs(self.mean) + 2 * self.mean_error)

    @property
    def largest_log_sd(self) -> float:
        """The largest change of a log sd, two standard errors included."""
        return _largest(np.abs(self.log_sd) + 2 * self.log_sd_error)


@dataclass(frozen=True)
class Slope:
    """The steepest slope of the ELBO along an entry: ``size`` and its standard ``error``, in sds."""

    name: str
    what: str
    size: float
    error: float
    excess: float


def _largest(x: np.ndarray) -> float:
    return float(x.max()) if x.size else 0.0


def _blocks(draws: np.ndarray) -> Iterator[np.ndarray]:
    flat = draws.reshape(len(draws), -1)
    for start in range(0, flat.shape[1], COLUMNS):
        yield flat[:, start : start + COLUMNS].astype(np.float64)


def shift_of(draws: np.ndarray, log_weights: np.ndarray) -> Shift:
    """The shifts of a quantity.

    Args:
        draws: (S, *shape).
        log_weights: normalised log weights (S,), in nats.

    Returns:
        Arrays of ``shape``.

    Example:
        >>> x = np.linspace(-2.0, 2.0, 1001)
        >>> weights = np.exp(-0.5 * (x - 1.0) ** 2)
        >>> print(f"{shift_of(x, np.log(weights / weights.sum())).mean:.2f}")
        0.91
    """
    with np.errstate(all="ignore"):  # draws may be infinite; that is an answer too
        parts = [_shift(x, np.exp(log_weights)) for x in _blocks(draws)]
    columns = np.concatenate(parts, 1) if parts else np.zeros((4, 0))
    columns = np.where(np.isnan(columns), np.inf, columns)
    return Shift(*(c.reshape(draws.shape[1:]) for c in columns))


def _shift(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    even = 1 / len(x)
    fixed = (x == x[0]).all(0)  # infinite, perhaps
    x = np.where(fixed, 0.0, x)
    x = x - x.mean(0)  # the digits of what varies
    square = x * x
    variance = square.mean(0)
    mean_w = w @ x
    centred_w = x - mean_w
    square_w = centred_w * centred_w
    variance_w = w @ square_w
    sd_w = np.sqrt(np.where(fixed, 1.0, variance_w))
    of_mean = w[:, None] * centred_w - even * x
    ratio = w[:, None] * (square_w / sd_w**2 - 1) - even * (
        square / np.where(fixed, 1, variance) - 1
    )
    log_sd = np.where(fixed, 0.0, 0.5 * np.log(np.where(fixed, 1.0, variance_w / variance)))
    return np.stack(
        [
            mean_w / sd_w,
            np.sqrt((of_mean**2).sum(0)) / sd_w,
            log_sd,
            np.where(fixed, 0.0, 0.5 * np.sqrt((ratio**2).sum(0))),
        ]
    )


def slope_of(name: str, draws: np.ndarray, log_ratio: np.ndarray) -> Slope:
    """The slope of the ELBO along the entry of a quantity where it stands out most of its noise.

    ``excess`` is |slope| less 1 + sqrt(2 log 2n) standard errors, for the 2n slopes of n entries: the
    largest of so many noises stays below that.

    Args:
        name: of the quantity, for the report.
        draws: unconstrained draws (S, *shape).
        log_ratio: log p - log q at the draws (S,), in nats, up to a constant.
    """
    steepest_yet = Slope(name, "mean", 0.0, 0.0, 0.0)
    if not np.isfinite(log_ratio).all():
        return steepest_yet
    centred = (log_ratio - log_ratio.mean())[:, None]
    noises = 1 + np.sqrt(2 * np.log(max(2.0 * np.prod(draws.shape[1:]), 2.0)))
    for x in _blocks(draws):
        with np.errstate(all="ignore"):
            u = (x - x.mean(0)) / x.std(0)
        for what, feature in (("mean", u), ("sd", (u * u - 1) / 2)):
            with np.errstate(all="ignore"):
                terms = feature * centred
                slope = terms.mean(0)
                error = (terms - slope).std(0) / np.sqrt(len(x))
                excess = np.nan_to_num(np.abs(slope) - noises * error, nan=0.0, posinf=0.0)
            if excess.size and excess.max() > steepest_yet.excess:
                at = int(excess.argmax())
                found = (float(v[at]) for v in (slope, error, excess))
                steepest_yet = Slope(name, what, *found)
    return steepest_yet


def steepest(draws: Mapping[str, np.ndarray], log_ratio: np.ndarray) -> Slope | None:
    """The slope that stands out most among several quantities, see :func:`slope_of`."""
    found = [slope_of(name, x, log_ratio) for name, x in draws.items() if x.size]
    return max(found, key=lambda slope: slope.excess, default=None)
