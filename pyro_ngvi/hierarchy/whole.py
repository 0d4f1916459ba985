"""A model without units, as one whose units are integrated out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..runtime.density import LatentLayout
from ..runtime.run import Minibatches, Values
from .runs import Call


class Whole:
    """A model all of whose latent variables are globals, in the place of a :class:`.Collapsed` one.

    Args:
        model, guide: and the ``args`` and ``kwargs`` of both.
        joint: the model with these bound and its enumerated sites summed out.
        room: how many draws bound the memory.
    """

    units = None
    is_rough = too_rough = False
    missed_in_words, error = "", 0.0

    def __init__(
        self, model: Any, guide: Any, args: Any, kwargs: Any, joint: Callable[[], Any], room: float
    ) -> None:
        self.guide, self.call = guide, Call(model, args, kwargs, Minibatches())
        self.globals = partial(guide, *args, **kwargs)
        self.layout = LatentLayout(guide.prototype_trace)
        self.missed: dict[int, float] = {}
        self.room, self._joint = room, joint

    def __call__(self) -> Any:
        return self._joint()

    def drawn_in_pieces(self, values: Values) -> tuple[dict[str, Tensor], Tensor]:
        """No units, and no log density of them (S, 0)."""
        first = next(iter(values.values()))
        return {}, first.new_zeros(len(first), 0)
