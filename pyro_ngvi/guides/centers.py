"""The default strategy of initialisation: the centres of the priors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import biject_to

from ..runtime.density import feasible_value


def init_to_center(site: Any = None) -> Any:
    """Prior median where torch knows it, else the mean, else the mode, else the image of zero.

    For ``init_loc_fn`` of any Pyro autoguide; the default of ours.  Nothing is drawn.  A centre counts
    if it is finite and within the support, not on its boundary.  An improper prior starts at the image
    of zero under the transform to its support.

    Args:
        site: a message of Pyro's, whose value (*shape) is returned; ``None`` returns this function.

    Example:
        >>> import pyro.distributions as dist
        >>> init_to_center({"name": "x", "fn": dist.LogNormal(0.0, 10.0)})
        tensor(1.)
    """
    if site is None:
        return init_to_center
    fn, value = site["fn"], None
    for center in (_median, lambda fn: fn.mean, lambda fn: fn.mode):
        try:
            value = center(fn)
        except (NotImplementedError, AttributeError, RuntimeError, ValueError, TypeError):
            continue  # torch raises any of these where a distribution lacks the method
        if value.shape == fn.shape() and _inside(fn, value):
            break
    else:
        value = feasible_value(site)
    # to Pyro's reparameterizers: a default, which they may replace without a warning
    setattr(value, "_pyro_custom_init", False)  # noqa: B010
    return value


def _median(fn: Any) -> Tensor:
    while hasattr(fn, "base_dist") and not hasattr(fn, "transforms"):
        fn = fn.base_dist  # of Independent, masks and expansions
    half = torch.full_like(fn.mean.expand(fn.shape()), 0.5)  # a draw would move the random state
    return fn.icdf(half)


def _inside(fn: Any, value: Tensor) -> bool:
    if not (torch.isfinite(value).all() and torch.as_tensor(fn.support.check(value)).all()):
        return False
    try:
        transform: Any = biject_to(fn.support)
    except NotImplementedError:  # a sphere, which has no boundary
        return True
    return bool(torch.isfinite(transform.inv(value)).all())  # not on the boundary
