"""A bar for what takes long and is not a run of SVI."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from tqdm.auto import tqdm

from ..linalg.host import setting

#: seconds after which it appears, and between two lines of a log
PATIENCE = 10.0
_SHOWN = ContextVar("shown", default=True)


def bars_if(shown: bool) -> AbstractContextManager[None]:
    """In here bars appear, or none does."""
    return setting(_SHOWN, shown)


def waiting(doing: str, over: Iterable[Any] | None = None, unit: str = "it") -> Any:
    """A tqdm bar ``over`` something, or one to be updated, on stderr, that appears where it is slow."""
    pause = 0.1 if sys.stderr.isatty() else PATIENCE
    how: Any = {} if _SHOWN.get() else {"disable": True}  # else as TQDM_DISABLE has it
    return tqdm(over, doing, unit=unit, delay=PATIENCE, mininterval=pause, leave=False, **how)
