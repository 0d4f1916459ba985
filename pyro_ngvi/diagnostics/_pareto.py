r"""The generalised Pareto tail of importance weights: its fit, smoothed weights, and resampling.

Of S weights the largest M = ceil(min(S/5, 3 sqrt(S))) are the tail, u the largest that is not in it.
The excesses w - u follow a generalised Pareto distribution, whose quantile function is

    Q(p) = sigma / k ((1 - p)^-k - 1).

k and sigma are the quasi-Bayesian estimate of Zhang & Stephens (2009), k then pulled towards 1/2 with
the weight of ten draws.  Smoothing replaces the i-th smallest weight of the tail by
u + Q((i - 1/2) / M), cut at the largest raw weight: the noise of single large weights is gone, and so
is their infinite variance, for a bias that is small while k < 0.7.

Source: Vehtari, Simpson, Gelman, Yao & Gabry (2024), "Pareto smoothed importance sampling",
JMLR 25(72), section 3.  The fit is our own, because ArviZ's differs between versions (length of the
tail, sign of the argument) and has no answer for an exact guide, whose weights are all equal.
"""

from typing import NamedTuple

import numpy as np

__all__ = ["find_tail", "smoothed", "systematic_resample"]

FEWEST = 5  # weights that make a tail
PRIOR_DRAWS, PRIOR_SHAPE = 10, 0.5


class Tail(NamedTuple):
    """The weights ``at`` these places, ascending, exceed ``cutoff`` by Pareto(shape, scale).

    In units of the largest weight.  ``shape`` is infinite where there is no tail to fit.
    """

    at: np.ndarray
    cutoff: float
    shape: float
    scale: float


def find_tail(x: np.ndarray) -> Tail:
    """The tail of the weights exp(x), for log weights x (S,) with maximum 0."""
    order = np.argsort(x, kind="stable")
    length = int(np.ceil(min(len(x) / 5, 3 * np.sqrt(len(x)))))
    cutoff = max(x[order[-length - 1]], np.log(np.finfo(np.float64).tiny))
    at = order[x[order] > cutoff]
    if len(at) < FEWEST:
        return Tail(at, float(np.exp(cutoff)), float("inf"), float("nan"))
    shape, scale = _fit(np.exp(x[at]) - np.exp(cutoff))
    return Tail(at, float(np.exp(cutoff)), shape, scale)


def _fit(y: np.ndarray) -> tuple[float, float]:
    """Shape and scale by Zhang & Stephens (2009) with k = -(their k), for ascending y > 0."""
    n = len(y)
    m = 30 + int(np.sqrt(n))
    quartile = y[int(n / 4 + 0.5) - 1]
    theta = 1 / y[-1] + (1 - np.sqrt(m / (np.arange(1, m + 1) - 0.5))) / (3 * quartile)
    k = np.log1p(-theta[:, None] * y).mean(1)
    profile = n * (np.log(-theta / k) - k - 1)
    weights = np.exp(profile - profile.max())
    theta_hat = (weights / weights.sum()) @ theta
    k_hat = np.log1p(-theta_hat * y).mean()
    shape = (n * k_hat + PRIOR_DRAWS * PRIOR_SHAPE) / (n + PRIOR_DRAWS)
    return float(shape), float(-k_hat / theta_hat)  # the scale belongs to the shape of the data


def smoothed(log_weights: np.ndarray) -> np.ndarray:
    """Log weights (S,) with the tail smoothed, normalised; unchanged where there is no tail.

    >>> x = np.log(np.arange(1.0, 401.0) ** 2)
    >>> y = smoothed(x)
    >>> print(f"{np.exp(y).sum():.6f}", bool(np.all(np.argsort(y) == np.argsort(x))))
    1.000000 True
    """
    x = log_weights - log_weights.max()
    tail = find_tail(x)
    if np.isfinite(tail.shape):
        p = (np.arange(len(tail.at)) + 0.5) / len(tail.at)
        log_rest = -np.log1p(-p)
        excess = tail.scale * log_rest
        if tail.shape != 0.0:
            excess = tail.scale * np.expm1(tail.shape * log_rest) / tail.shape
        x[tail.at] = np.minimum(np.log(tail.cutoff + excess), 0.0)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def systematic_resample(log_weights: np.ndarray, offset: float) -> np.ndarray:
    """Places (S,), ascending, of S draws taken in proportion to normalised weights.

    Each place s comes floor(S w_s) or ceil(S w_s) times: less noise than independent draws, and equal
    weights take every place once.

    Args:
        offset: uniform in [0, 1).

    Example:
        >>> systematic_resample(np.log([0.5, 0.25, 0.125, 0.125]), 0.3)
        array([0, 0, 1, 2])
    """
    share = np.cumsum(np.exp(log_weights))
    points = (np.arange(len(share)) + offset) / len(share)
    # the sum of all shares is 1 up to rounding
    return np.searchsorted(share / share[-1], points, side="right").clip(max=len(share) - 1)
