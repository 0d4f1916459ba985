"""When searches, and looks at what is left to gain, are to end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: by ``time.monotonic()``
_END = ContextVar("end", default=math.inf)
#: by which who sent a signal is to have an answer, and seconds until then: of 30 that clusters give
_ASKED, GRACE = ContextVar("asked", default=math.inf), 5.0


@contextmanager
def ending_by(end: float) -> Iterator[None]:
    """Searches in here end by then, a time of ``time.monotonic()``."""
    token = _END.set(end)
    try:
        yield
    finally:
        _END.reset(token)


@contextmanager
def until_asked() -> Iterator[None]:
    """In here :func:`end_soon` counts."""
    token = _ASKED.set(math.inf)
    try:
        yield
    finally:
        _ASKED.reset(token)


def end_soon() -> None:
    """Whatever takes long is to end within ``GRACE``."""
    _ASKED.set(min(_ASKED.get(), time.monotonic() + GRACE))


def is_asked() -> bool:
    """Whether that time is up."""
    return time.monotonic() > _ASKED.get()


def is_late() -> bool:
    """Whether a search has no time left."""
    return time.monotonic() > _END.get() or is_asked()
