"""What the losses of a run say: a mean that tails do not move, and what a fixed point has left."""

import math
from collections.abc import Sequence

from torch import Tensor


def trimmed_mean(x: Tensor) -> tuple[float, float]:
    """The mean without the tenths at both ends, which a few losses in a tail do not move, and its
    standard error (Tukey & McLaughlin 1963)."""
    x, cut = x.sort().values, len(x) // 10
    kept = x[cut : len(x) - cut]
    winsorized = x.clamp(kept[0], kept[-1])
    return float(kept.mean()), float(winsorized.std()) * len(x) ** 0.5 / len(kept)


def still_to_fall(losses: Sequence[float]) -> float:
    """How far losses without noise still fall where falls shrink by one factor, as near a fixed point
    (Aitken 1926), by the larger of the last two: fall q / (1 - q).  Infinite where they do not."""
    a, b, c, d = losses[-4:]
    falls = abs(a - b), abs(b - c), abs(c - d)
    if falls[2] == 0.0:
        return 0.0
    if not falls[0] > falls[1] > falls[2]:
        return math.inf
    q = max(falls[1] / falls[0], falls[2] / falls[1])
    return falls[2] * q / (1.0 - q)
