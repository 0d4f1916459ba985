"""What a function written for another dtype gives in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ..linalg.host import own_random_state, random_states, same_states

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
        doubles, named = tree_map(double, args), tree_map(double, kwargs)
        return tree_map(double, func(*doubles, **named))


def _single(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


def double(x: Any) -> Any:
    """A tensor of real numbers in float64, and anything else as it is."""
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def in_double(f: Callable[..., Tensor], *args: Any) -> Tensor | None:
    """f of these, whose tensors become float64, evaluated in that; none where f says no to it, or draws
    numbers of its own."""
    try:
        with torch.no_grad(), own_random_state(), InDouble(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were seen before
            before = random_states()
            value = f(*tree_map(double, args))
            return value if same_states(before, random_states()) else None
    except Exception:  # whatever it says of another dtype
        return None
