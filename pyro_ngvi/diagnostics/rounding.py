"""What rounding does to log p: the model once more in float64, where a draw is the same number."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.distributions import constraints
from torch.utils._pytree import tree_leaves

from ..linalg.host import is_coarse
from ..runtime.density import Sites, plain_support
from ..runtime.in_double import double, in_double
from ..runtime.model_density import map_draws
from .draws import Draws, Fitted, joint_of
from .khat import COARSE, HALF
from .weights import MIN_DRAWS

#: share of the spread of log weights from which rounding is told of, numbers that are copied for that
SHARE, MOST = 0.1, 50_000_000


def rounded(fitted: Fitted, draws: Draws, batch_size: int | None) -> tuple[str, bool]:
    """By how much log p of draws is off, in words, where that is more than other errors, and whether
    weights are hardly more than that; nothing of a model that float64 does not suit, or that draws
    numbers of its own."""
    exact = all(double(s["value"]) is s["value"] for s in fitted.in_sum.values())
    given = tree_leaves((fitted.model.args, fitted.model.keywords))
    if exact or sum(x.numel() for x in given if isinstance(x, Tensor)) > MOST:
        return "", False
    log_p = draws.log_joint[:MIN_DRAWS]

    def in_pieces(values: dict[str, Tensor]) -> Tensor:
        return map_draws(fitted.joint, joint_of, values, len(log_p), batch_size)

    right = in_double(in_pieces, {name: x[:MIN_DRAWS] for name, x in draws.values.items()})
    if right is None:
        return "", False
    off = log_p - right
    (level, spread), (_, sd) = _middle(off.numpy(force=True)), _middle(draws.log_ratio)
    if not np.isfinite([level, spread, sd]).all():
        return "", False
    error = sd / math.sqrt(len(draws.log_q))
    if not (abs(level) > COARSE + 2.0 * error or spread > max(COARSE, SHARE * sd)):
        return "", False
    words = (
        f"Rounding puts log p off by {abs(level):.2g} nats, and by {spread:.2g} between draws: take "
        f"float64, torch.set_default_dtype(torch.float64), with the data in it."
    )
    return words, spread > HALF * max(1.0, sd)


def _middle(x: np.ndarray) -> tuple[float, float]:
    """Median and half of what lies around it, an sd of a Gaussian: draws far out do not count."""
    with np.errstate(all="ignore"):
        low, middle, high = np.quantile(x, [0.16, 0.5, 0.84])
    return float(middle), float(high - low) / 2.0


def warn_of_rounding(sites: Sites, values: Mapping[str, Tensor]) -> None:
    """Warn where numbers near the draws are as far apart as these, or rounding has put many draws onto
    the upper end of an interval, or of a simplex."""
    for name, x in values.items():
        support = plain_support(sites[name]["fn"].support)
        if not x.numel() or not x.is_floating_point():
            continue
        near = 4.0 * torch.finfo(x.dtype).eps
        if getattr(support, "event_dim", 1) == 0:  # others have entries that do not vary
            sd, at = x.double().std(0), x.abs().amax(0)
            coarse = (x != x[0]).any(0) & is_coarse(at, sd, x.dtype)
            if bool(coarse.any()):
                dtype = str(x.dtype).removeprefix("torch.")
                warnings.warn(
                    f"Draws of {name!r} are around {float(at[coarse].max()):.3g} with an sd of "
                    f"{float(sd[coarse].min()):.2g}, which {dtype} hardly resolves. Use float64, "
                    f"or subtract a constant from the data.",
                    RuntimeWarning,
                    stacklevel=3,
                )
        if isinstance(support, constraints.interval):
            x = (x - support.lower_bound) / (support.upper_bound - support.lower_bound)
            rounded = x >= 1.0 - near
        elif support is constraints.simplex:  # whose last entry is what the others leave
            rounded = x[..., -1] <= near
        else:
            continue
        share = float(rounded.double().mean(0).max())
        if share > 0.002:
            warnings.warn(
                f"{100.0 * share:.1f} % of the draws of {name!r} are rounded to the end of their "
                f"support, beyond which the posterior is lost. Use float64, or the other end: the "
                f"probability near 0, for a simplex another last entry.",
                RuntimeWarning,
                stacklevel=3,
            )
