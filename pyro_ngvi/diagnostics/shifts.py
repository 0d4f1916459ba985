r"""By how much draws of a guide are off, by weights or by other draws, and what counts as good.

For draws x_s under weights w_s that sum to one, sd_w and Q_w of the weighted draws:

    mean:  (sum_s w_s x_s - mean(x)) / sd_w,    sd:  log(sd_w / sd),    end:  (Q_w(p) - Q(p)) / sd_w,

p = 2.5 and 97.5 %.  Standard errors are those of sums of influence functions, weighted less raw (delta
method); of an end those of the probability below it, taken back through Q (Woodruff 1952, JASA 47).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# The bounds were calibrated on the reference posteriors of ``benchmarks.reference_posteriors``: what is
# called good there has no mean off by more than 0.3 sds and no sd by more than 30 %.
COARSE_MEAN = 0.3  # sds
COARSE_SD = float(np.log(1.3))
COARSE_END = 0.5  # sds; of a Gaussian 7 % are beyond an end so far off that is to have 2.5 % there
ROUGH = COARSE_MEAN / 3, COARSE_SD / 3  # beyond which a richer guide is worth a try
ROUGH_END = COARSE_END / 3
BOUNDS = f"the bounds are {COARSE_MEAN} sd and {100 * np.expm1(COARSE_SD):.0f} %"
COLUMNS = 4096  # entries at a time, to bound memory
LEVELS = 0.025, 0.975  # of the ends of a 95 % interval
ROUNDING = 1e-9  # of a sum of weights
ROUNDINGS = 8.0  # that a constant may vary by, in those of its largest number
SORTED, FEWEST_ROWS = 10_000_000, 500  # numbers that are sorted at most, and draws that tell an end


@dataclass(frozen=True)
class Shift:
    """What weights would change, entry by entry: the ``mean`` in sds of the weighted draws, ``log_sd``
    by a log ratio, both ``ends`` (2, ...) of 95 % intervals in sds (0 of more than 20,000 entries, or
    fewer than 500 draws), and their standard errors; infinite where a moment is not finite."""

    mean: Any
    mean_error: Any
    log_sd: Any
    log_sd_error: Any
    ends: Any = field(default_factory=lambda: np.zeros(2), kw_only=True)
    ends_error: Any = field(default_factory=lambda: np.zeros(2), kw_only=True)

    def errors(self, more: float) -> tuple[Any, Any]:
        """Sizes of the changes of means, in sds, and of log sds, ``more`` standard errors added."""
        return (
            abs(self.mean) + more * self.mean_error,
            abs(self.log_sd) + more * self.log_sd_error,
        )

    def end(self, more: float = -1.0) -> float:
        """The largest change of an end, in sds, ``more`` standard errors added: of many ends fewer, as
        the noise of one of n may be sqrt(2 log n) errors.  Ends are 2 to 4 times as noisy as means."""
        n = max(1, math.prod(self.ends.shape))
        more = min(more, 1.0 - math.sqrt(2.0 * math.log(n))) if more < 0.0 else more
        sizes = abs(self.ends) + more * self.ends_error
        return float(sizes.max()) if math.prod(sizes.shape) else 0.0

    def exceeds(self, mean: float, log_sd: float, more: float = -1.0) -> bool:
        """Whether a mean changes by more than ``mean`` sds, or a log sd by more than ``log_sd``, a
        standard error taken off, or ``more`` of them added."""
        sizes = zip(self.errors(more), (mean, log_sd), strict=True)
        return any(bool((size > bound).any()) for size, bound in sizes)


def right_to(mean: float, log_sd: float) -> str:
    """How far means and sds are off at most, in words."""
    return f"means are right to {mean:.2f} sd and sds to {100 * np.expm1(log_sd):.0f} %"


def blocks(draws: np.ndarray) -> Iterator[np.ndarray]:
    """Draws (S, ...) as (S, n) of some entries after the other, in float64."""
    flat = draws.reshape(len(draws), -1)
    for start in range(0, flat.shape[1], COLUMNS):
        yield flat[:, start : start + COLUMNS].astype(np.float64)


def shift_of(draws: np.ndarray, log_weights: np.ndarray, own: np.ndarray | None = None) -> Shift:
    """The shifts of draws (S, *shape) under normalised log weights (S,), in arrays of ``shape``;
    with ``own`` (T, *shape) those from draws of their own to the weighted ones."""
    w, even = np.exp(log_weights), np.full(len(draws), 1 / len(draws))
    if own is not None:
        draws, w = np.concatenate([own, draws]), np.append(np.zeros(len(own)), w)
        even = np.append(np.full(len(own), 1 / len(own)), np.zeros(len(even)))
    step = -(-draws.size // SORTED)
    with np.errstate(all="ignore"):  # draws may be infinite; that is an answer too
        eps = ROUNDINGS * np.finfo(draws.dtype).eps
        parts = [_shift(x, w, even, step, eps) for x in blocks(draws)]
    columns = np.concatenate([np.zeros((8, 0)), *parts], 1)
    columns = np.nan_to_num(columns, nan=np.inf, posinf=np.inf)
    found = columns.reshape(8, *draws.shape[1:])
    return Shift(*found[:4], ends=found[4:6], ends_error=found[6:])


def _shift(x: np.ndarray, w: np.ndarray, even: np.ndarray, step: int, eps: float) -> np.ndarray:
    fixed = (x == x[0]).all(0)  # infinite, perhaps
    spread = np.ptp(x, 0)  # none in the 1 of a correlation of one with itself
    fixed |= (spread <= eps * np.abs(x).max(0)) & (spread < np.inf)
    x = np.where(fixed, 0.0, x)
    x = x - even @ x  # the digits of what varies
    square = x * x
    variance = even @ square
    mean_w = w @ x
    centred_w = x - mean_w
    square_w = centred_w * centred_w
    variance_w = w @ square_w
    sd_w = np.sqrt(np.where(fixed, 1.0, variance_w))
    of_mean = w[:, None] * centred_w - even[:, None] * x
    ratio = w[:, None] * (square_w / sd_w**2 - 1)
    ratio -= even[:, None] * (square / np.where(fixed, 1, variance) - 1)
    log_sd = np.where(fixed, 0.0, 0.5 * np.log(np.where(fixed, 1.0, variance_w / variance)))
    log_sd_error = np.where(fixed, 0.0, 0.5 * np.sqrt((ratio**2).sum(0)))
    moments = [mean_w / sd_w, np.sqrt((of_mean**2).sum(0)) / sd_w, log_sd, log_sd_error]
    return np.concatenate([moments, _ends(x[::step], w[::step], even[::step]) / sd_w])


def _ends(x: np.ndarray, w: np.ndarray, even: np.ndarray) -> np.ndarray:
    """By how much both ends move, and the errors of that, (4, n)."""
    if min((w > 0.0).sum(), (even > 0.0).sum()) < FEWEST_ROWS:
        return np.zeros((4, x.shape[1]))
    order = x.argsort(0)
    at, columns = np.take_along_axis(x, order, 0), np.arange(x.shape[1])

    def ends(w: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each end (n,), and the part of each draw in its error (S, n)."""
        w = w / w.sum()
        share = w[order].cumsum(0)

        def quantile(level: Any) -> np.ndarray:
            place = (share < level - ROUNDING).sum(0)
            return at[place.clip(max=len(x) - 1), columns]

        for level in LEVELS:
            found = quantile(level)
            part = w[:, None] * ((x <= found) - level)
            error = np.sqrt((part**2).sum(0))
            width = quantile(level + error) - quantile(level - error)
            yield found, part * width / (2.0 * error)

    moved, errors = [], []
    for (new, part), (old, own) in zip(ends(w), ends(even), strict=True):
        moved.append(new - old)
        errors.append(np.sqrt(((part - own) ** 2).sum(0)))
    return np.stack(moved + errors)
