"""A step that happens as a whole or not at all, wherever an exception or Ctrl-C cuts it off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pyro.optim import PyroOptim
from torch import Tensor

from ..runtime.store import states_to_restore

__all__ = ["all_or_nothing"]


@contextmanager
def all_or_nothing(optim: Any, params: list[Tensor]) -> Iterator[None]:
    """Around a step of ``optim``: undo it where it raises, and use the gradients up in any case."""
    leaves = {id(p): p for p in params}
    blocks = [block for _, block in optim._blocks()]
    undo: list[Callable[[], Any]] = []
    try:
        leaves |= {id(p): p for block in blocks for p in block.natural_params().values()}
        undo = _undo(optim, blocks, list(leaves.values()))
        yield
        for p in leaves.values():
            p.grad = None
    except BaseException:
        for restore in undo:
            restore()
        for p in leaves.values():
            p.grad = None
        for block in blocks:
            block.curvature = None  # what a loss left belongs to this step
        raise


def _undo(optim: Any, blocks: list[Any], leaves: list[Tensor]) -> list[Callable[[], Any]]:
    undo = [_restorer(p) for p in leaves]
    algebras = [block.algebra for block in blocks if hasattr(block, "algebra")]
    for holder in (optim, *blocks, *algebras):
        undo.append(_attributes(holder))
    if optim.others is not None:
        undo += _others(optim.others)
        undo.append(_attributes(optim._others_state))
    return undo


def _restorer(p: Tensor) -> Callable[[], Any]:
    before = p.detach().clone()

    def restore() -> None:
        with torch.no_grad():
            p.copy_(before)

    return restore


def _attributes(holder: Any) -> Callable[[], Any]:
    """What undoes a step, which replaces attributes and entries of dicts and never writes into them."""
    own = vars(holder)
    dicts = [own, *(v for v in own.values() if isinstance(v, dict))]
    before = [dict(d) for d in dicts]

    def restore() -> None:
        for held, entries in zip(dicts, before, strict=True):
            held.clear()
            held.update(entries)

    return restore


def _others(others: PyroOptim) -> list[Callable[[], Any]]:
    """What undoes a step of an ordinary optimizer, which writes into its states."""

    def forget() -> None:
        for p in [p for p in others.optim_objs if p not in known]:
            del others.optim_objs[p]
            others.grad_clip.pop(p, None)
        states_to_restore(others).clear()
        states_to_restore(others).update(waiting)

    known = set(others.optim_objs)
    waiting = dict(states_to_restore(others))
    undo: list[Callable[[], Any]] = [forget]
    for held in others.optim_objs.values():
        optim = getattr(held, "optimizer", held)  # that of a scheduler
        states = {p: _copied(state) for p, state in optim.state.items()}
        groups = [dict(group) for group in optim.param_groups]
        undo.append(_inner(optim, states, groups))
    return undo


def _inner(optim: Any, states: dict[Any, Any], groups: list[Any]) -> Callable[[], Any]:
    def restore() -> None:
        optim.state.clear()
        optim.state.update(states)
        for group, before in zip(optim.param_groups, groups, strict=True):
            group.update(before)

    return restore


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
