"""Linear algebra in the precision of its arguments, also where a model runs under ``torch.autocast``.

Autocast rounds the arguments of every matrix product to 8 or 11 bits.  A network survives that; a
Cholesky factor, a rotation or an inverse Fisher matrix does not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = ["outside_autocast"]

P = ParamSpec("P")
T = TypeVar("T")


def outside_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` with autocast switched off for CPU and GPU while it runs.

    Example:
        >>> a = torch.eye(2)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     (a @ a).dtype, outside_autocast(torch.mm)(a, a).dtype
        (torch.bfloat16, torch.float32)
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return run
