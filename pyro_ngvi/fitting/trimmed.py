"""A mean that tails do not move, for the losses of a run."""

from torch import Tensor


def trimmed_mean(x: Tensor) -> tuple[float, float]:
    """The mean without the tenths at both ends, which a few losses in a tail do not move, and its
    standard error (Tukey & McLaughlin 1963)."""
    x, cut = x.sort().values, len(x) // 10
    kept = x[cut : len(x) - cut]
    winsorized = x.clamp(kept[0], kept[-1])
    return float(kept.mean()), float(winsorized.std()) * len(x) ** 0.5 / len(kept)
