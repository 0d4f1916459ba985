"""What rounding does to log p: the model once more in float64, where a draw is the same number."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ..linalg.host import own_random_state, random_states, same_states
from ..runtime.density import Sites, site_log_prob
from ..runtime.model_density import map_draws
from .draws import Draws, Fitted, density_of
from .khat import COARSE, HALF
from .weights import MIN_DRAWS

#: share of the spread of log weights from which rounding is told of, numbers that are copied for that
SHARE, MOST = 0.1, 50_000_000


#: functions that jump, and those whose results may be written into
STEPS = {"lt", "le", "gt", "ge", "eq", "ne", "isclose", "bucketize", "searchsorted"}
STEPS |= {"floor", "ceil", "round", "trunc", "long", "int", "floordiv", "floor_divide", "remainder"}
VIEWS = {"__getitem__", "view", "diagonal", "narrow", "select", "squeeze", "unsqueeze"}


class InDouble(TorchFunctionMode):
    """Evaluates in float64 whatever the dtype of tensors, but for writes into them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        writes = name.startswith(("__i", "__set")) or (name[-1:] == "_" and name[-2:] != "__")
        if writes or name in VIEWS or "out" in kwargs:
            return func(*args, **kwargs)
        if name.strip("_") in STEPS:  # a number is rounded to what it is compared with
            return func(*tree_map(_single, args), **tree_map(_single, kwargs))
        doubles, named = tree_map(_double, args), tree_map(_double, kwargs)
        return tree_map(_double, func(*doubles, **named))


def _single(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def rounded(fitted: Fitted, draws: Draws, batch_size: int | None) -> tuple[str, bool]:
    """By how much log p of draws is off, in words, where that is more than other errors, and whether
    weights are hardly more than that; nothing of a model that float64 does not suit, or that draws
    numbers of its own."""
    exact = all(_double(s["value"]) is s["value"] for s in fitted.in_sum.values())
    given = tree_leaves((fitted.model.args, fitted.model.keywords))
    if exact or sum(x.numel() for x in given if isinstance(x, Tensor)) > MOST:
        return "", False
    values = {name: _double(x[:MIN_DRAWS]) for name, x in draws.values.items()}
    log_p = draws.log_joint[:MIN_DRAWS]

    def density(sites: Sites) -> Tensor:
        return density_of(sites, {name: site_log_prob(site) for name, site in sites.items()})[0]

    try:
        with torch.no_grad(), own_random_state(), InDouble(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were seen before
            before = random_states()
            off = log_p - map_draws(fitted.joint, density, values, len(log_p), batch_size)
            same = same_states(before, random_states())
    except Exception:  # whatever a model says of another dtype
        return "", False
    if not same:
        return "", False
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
