"""What rounding does to log p: the model once more in float64, where a draw is the same number."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..runtime.density import Sites, site_log_prob
from ..runtime.in_double import double, in_double
from ..runtime.model_density import map_draws
from .draws import Draws, Fitted, density_of
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

    def density(sites: Sites) -> Tensor:
        return density_of(sites, {name: site_log_prob(site) for name, site in sites.items()})[0]

    def in_pieces(values: dict[str, Tensor]) -> Tensor:
        return map_draws(fitted.joint, density, values, len(log_p), batch_size)

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
