"""Errors that name their entry on the pages of gotchas, where the long story is."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told_in(place: str) -> Iterator[None]:
    """Around what raises, or as a decorator: adds a note with the ``place``, as "steps.md#starts"."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        error.add_note(f"More in the documentation: howto/gotchas_{place}")
        raise
