"""Gradients of a backward pass that is cut off by an exception or Ctrl-C: all or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyro
from torch import Tensor

__all__ = ["whole_gradients"]


@contextmanager
def whole_gradients() -> Iterator[None]:
    """Around a loss and its backward pass: ``.grad`` of what Pyro's store holds gets all, or nothing.

    Gradients that were there before, of a loop that accumulates them, stay and are added to.
    """
    store = pyro.get_param_store()
    before: dict[Tensor, Tensor | None] = {p: p.grad for _, p in store.named_parameters()}
    try:
        for p in before:
            p.grad = None
        yield
        for p, g in before.items():
            if g is not None:
                p.grad = g if p.grad is None else g + p.grad
    except BaseException:
        for _, p in store.named_parameters():
            p.grad = before.get(p)
        raise
