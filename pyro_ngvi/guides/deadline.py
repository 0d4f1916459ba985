"""When searches are to end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: by ``time.monotonic()``
_END = ContextVar("end", default=math.inf)


@contextmanager
def ending_by(end: float) -> Iterator[None]:
    """Searches in here end by then, a time of ``time.monotonic()``."""
    token = _END.set(end)
    try:
        yield
    finally:
        _END.reset(token)


def is_late() -> bool:
    """Whether a search has no time left."""
    return time.monotonic() > _END.get()
