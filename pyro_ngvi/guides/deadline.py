"""When searches, and looks at what is left to gain, are to end."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager
from contextvars import ContextVar

from ..linalg.host import setting

#: by ``time.monotonic()``
_END = ContextVar("end", default=math.inf)
#: by which who sent a signal is to have an answer, and seconds until then: of 30 that clusters give
_ASKED, GRACE = ContextVar("asked", default=math.inf), 5.0


def ending_by(end: float) -> AbstractContextManager[None]:
    """Searches in here end by then, a time of ``time.monotonic()``, or before."""
    return setting(_END, min(end, _END.get()))


def until_asked() -> AbstractContextManager[None]:
    """In here :func:`end_soon` counts."""
    return setting(_ASKED, math.inf)


def end_soon() -> None:
    """Whatever takes long is to end within ``GRACE``."""
    _ASKED.set(min(_ASKED.get(), time.monotonic() + GRACE))


def is_asked() -> bool:
    """Whether that time is up."""
    return time.monotonic() > _ASKED.get()


def seconds_left() -> float:
    """That a search may take, maybe none."""
    return min(_END.get(), _ASKED.get()) - time.monotonic()


def is_late() -> bool:
    """Whether a search has no time left."""
    return seconds_left() < 0.0
