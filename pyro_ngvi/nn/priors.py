"""Priors of the weights of a module: from what the user writes to one distribution per parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import pyro.distributions as dist
import torch
from torch import Tensor

__all__ = ["Prior", "choose_prior", "normal_prior", "prior_from"]

# A distribution is Any: to a type checker Pyro's are abstract.
Prior: TypeAlias = float | Callable[[str, Tensor], Any]


def choose_prior(prior: Prior | Mapping[str, Prior], name: str) -> Prior:
    """The prior of the parameter ``name``.

    Raises:
        ValueError: when no pattern fits, or an sd is not positive.
        TypeError: when it is neither a number nor a function.
    """
    if isinstance(prior, Mapping):
        found = [p for pattern, p in prior.items() if fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(
                f"prior has no pattern that fits the parameter {name!r}; its patterns are "
                f'{list(prior)}. Add one, for instance "*": 1.0 as the last.'
            )
        prior = found[0]
    if callable(prior) and not isinstance(prior, torch.distributions.Distribution):
        return prior
    if isinstance(prior, bool) or not isinstance(prior, int | float):
        raise TypeError(
            f"The prior of {name!r} is {prior!r}; give the sd of a centred normal as a number, or a "
            f"function prior(name, parameter) that returns a distribution, for instance "
            f"lambda name, p: dist.Laplace(p.new_tensor(0.0), p.new_tensor(1.0))."
        )
    if not 0.0 < prior < math.inf:
        raise ValueError(f"The prior of {name!r} has sd {prior}; it must be positive and finite.")
    return float(prior)


def normal_prior(sd: float, like: Tensor) -> Any:
    """Independent centred normals in the shape, dtype and device of ``like``.

    It is made once and used in and out of ``vmap``, where validation can not branch on values.
    """
    base: Any = dist.Normal(like.new_zeros(()), like.new_full((), sd), validate_args=False)
    return base.expand(like.shape).to_event(like.dim())


def prior_from(function: Any, name: str, parameter: Tensor) -> Any:
    """What the user's function returns, in the shape of the parameter, which is one event.

    Raises:
        TypeError: when it returns no distribution.
        ValueError: when the shape does not fit.
    """
    fn = function(name, parameter)
    if not isinstance(fn, torch.distributions.Distribution):
        raise TypeError(
            f"The prior of {name!r} returns {type(fn).__name__}; it must return a distribution of "
            f"pyro.distributions."
        )
    fn, shape = _pyro(fn), parameter.shape
    if fn.shape() != shape:
        outer = shape[: len(shape) - fn.event_dim]
        try:
            fits = torch.broadcast_shapes(fn.batch_shape, outer) == outer
        except RuntimeError:
            fits = False
        if not fits or outer + fn.event_shape != shape:
            raise ValueError(
                f"The prior of {name!r} has shape {tuple(fn.shape())}, the parameter has shape "
                f"{tuple(shape)}. Return a distribution of that shape, or a scalar one."
            )
        fn = fn.expand(outer)
    return fn.to_event(len(fn.batch_shape))


def _pyro(fn: Any) -> Any:
    if not hasattr(fn, "to_event"):
        raise TypeError(
            f"A prior is {type(fn).__module__}.{type(fn).__name__}; Pyro takes distributions of "
            f"pyro.distributions."
        )
    return fn
