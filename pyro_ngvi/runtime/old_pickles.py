"""What pickles of version 0.1 name and this version does not have."""

from __future__ import annotations

__all__ = ["refuse_pickled"]


def refuse_pickled(name: str) -> None:
    """For a module's ``__getattr__``: says which version wrote what asks for ``name``."""
    if not name.lstrip("_")[:1].isupper():  # no class: what tools ask every module for
        raise AttributeError(name)
    raise ImportError(
        f"{name.lstrip('_')} was pickled by pyro_ngvi 0.1, and is made of other parts now. Load "
        f"what 0.1 saved as state_dict() and get_state() into a new guide and optimizer, or "
        f"unpickle it there."
    )
