"""What a fit asks of what it is given."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..diagnostics import diagnose, khat, loo, predict, to_arviz

#: what a fit is read by, whose options have names that an argument of the model cannot have
READERS = to_arviz, khat, diagnose, loo, predict
#: by guide, what marks the fit that trained it last
_LAST: WeakKeyDictionary[Any, object] = WeakKeyDictionary()


def take_guide(guide: Any, mark: object) -> None:
    """Note that the fit of this mark trains a guide."""
    _LAST[guide] = mark


def check_guide_of(guide: Any, mark: object) -> None:
    """Refuse to read a guide for a fit whose answer it no longer holds."""
    if _LAST.get(guide, mark) is not mark:
        raise ValueError(
            "The guide of this fit was given to a later one, which trained it further. Read a fit "
            "before that, or give each a guide of its own: guide=copy.deepcopy(guide)."
        )


def check_names(kwargs: Mapping[str, Any]) -> None:
    """Keyword arguments of the model go to what reads a fit, beside options of its own."""
    for reader in READERS:
        options = inspect.signature(reader).parameters.values()
        taken = {p.name for p in options if p.kind is p.KEYWORD_ONLY} & kwargs.keys()
        for name in sorted(taken):
            raise ValueError(
                f"{name!r}, an argument of the model, is also an option of {reader.__name__}, which "
                f"reads a fit. Pass functools.partial(model, {name}=...) as the model."
            )


def is_true(answer: Any) -> bool:
    """Whether a callback says by a truth value, not by what it happens to return, that it is enough."""
    kind, entries = getattr(answer, "dtype", type(answer)), getattr(answer, "shape", ())
    return kind in (bool, torch.bool) and not entries and bool(answer)
