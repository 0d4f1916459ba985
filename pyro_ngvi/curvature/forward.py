"""Forward-mode derivatives without torch's warning about itself.

The first forward-mode derivative of a process makes torch compile some of its rules by
``torch.jit.script``, and torch says then that this is deprecated. That is no concern of whoever asked
for a curvature, so the rules are loaded here, and whatever else torch has to say is let through.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

__all__ = ["jvp"]


@cache
def _load_rules() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`torch.jit.script"
        )  # its category depends on the release
        one = torch.ones((), device="cpu")
        torch.func.jvp(torch.sin, (one,), (one,))


def jvp(f: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    """``torch.func.jvp``: ``f(*primals)`` and its derivative along ``tangents``."""
    _load_rules()
    return torch.func.jvp(f, primals, tangents)
