"""A step of an optimizer happens as a whole or not at all, wherever an exception cuts it off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .state import entries_of


@contextmanager
def whole_step(optim: Any, params: list[Tensor]) -> Iterator[None]:
    """Around a step of ``optim``: undo it where it raises, and use the gradients up in any case."""
    leaves = {id(p): p for p in params}
    values: list[tuple[Tensor, Tensor]] = []
    entries: list[tuple[Any, dict[Any, Any]]] = []
    try:
        leaves |= {id(p): p for p in optim.natural_params()}
        values = [(p, p.detach().clone()) for p in leaves.values()]
        for holder in (*optim.holders(), optim._others_state, optim.others):
            own = {} if holder is None else vars(holder)
            dicts = [own, *(v for v in own.values() if isinstance(v, dict))]
            entries += [(held, dict(held)) for held in dicts]
        for inner in () if optim.others is None else optim.others.optim_objs.values():
            entries += entries_of(inner)
        yield
    except BaseException:
        with torch.no_grad():
            for p, before in values:
                p.copy_(before)
        for held, before in entries:
            held.clear()
            held.update(before)
        for _, block in optim._blocks():
            block.curvature = None  # what a loss left belongs to this step
        raise
    finally:
        for p in leaves.values():
            p.grad = None
