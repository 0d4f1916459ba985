"""Where a guide starts: a deterministic centre of the prior."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import biject_to

from ..runtime.density import feasible_value

__all__ = ["check_position", "init_to_center"]


def check_position(guide: Any, argument: str, value: Any) -> None:
    """Refuse an ``init_loc_fn`` in the place where the class of ``guide`` has another argument."""
    if callable(value):
        name = type(guide).__name__
        raise TypeError(
            f"{name}: the second argument is {argument}, and got a function. Pass a start by its "
            f"name, {name}(model, init_loc_fn=...)."
        )


def init_to_center(site: Any = None) -> Any:
    """Prior median where torch knows it, else the mean, else the mode, else the image of zero.

    Nothing is drawn, so a wide prior such as Normal(0, 1000) starts at its centre and not at the
    median of a few draws, hundreds of units away, and equal models start equal.  An improper prior,
    which has no centre, starts at the image of zero under the transform to its support.

    Use it as ``init_loc_fn`` of any Pyro autoguide; it is the default of ours.

    Example:
        >>> import pyro.distributions as dist
        >>> init_to_center({"name": "x", "fn": dist.LogNormal(0.0, 10.0)})
        tensor(1.)
    """
    if site is None:
        return init_to_center
    value = _center(site)
    # to Pyro's reparameterizers: a default, which they may replace without a warning
    setattr(value, "_pyro_custom_init", False)  # noqa: B010
    return value


def _center(site: Any) -> Tensor:
    fn = site["fn"]
    for center in (_median, _mean, _mode):
        value = _attempt(center, fn)
        if value is not None and value.shape == fn.shape() and _inside(fn, value):
            return value
    return feasible_value(site)


def _attempt(center: Callable[[Any], Tensor], fn: Any) -> Tensor | None:
    # torch raises any of these where a distribution lacks the method
    try:
        return center(fn)
    except (NotImplementedError, AttributeError, RuntimeError, ValueError, TypeError):
        return None


def _median(fn: Any) -> Tensor:
    while hasattr(fn, "base_dist") and not hasattr(
        fn, "transforms"
    ):  # Independent, masked, expanded
        fn = fn.base_dist
    half = torch.full_like(fn.mean.expand(fn.shape()), 0.5)  # a draw would move the random state
    return fn.icdf(half)


def _mean(fn: Any) -> Tensor:
    return fn.mean


def _mode(fn: Any) -> Tensor:
    return fn.mode


def _inside(fn: Any, value: Tensor) -> bool:
    if not bool(torch.isfinite(value).all()) or not bool(
        torch.as_tensor(fn.support.check(value)).all()
    ):
        return False
    try:
        transform: Any = biject_to(fn.support)
    except (
        NotImplementedError
    ):  # a sphere: it has no boundary, and its reparameteriser no transform
        return True
    return bool(torch.isfinite(transform.inv(value)).all())  # not on the boundary
