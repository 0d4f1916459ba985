"""Asking a tensor for its value only where nobody has to wait for the answer.

A branch on a tensor makes a GPU and its host wait for each other, and has no meaning for ``meta``
tensors or under ``vmap``.  On a CPU it is free, and may spare work whose result is known beforehand.
Code that asks must give the same result, bit for bit, whether it gets an answer or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

__all__ = ["choose", "equal", "host_bool"]


def at_hand(x: Tensor) -> bool:
    """Whether the host can look at ``x`` without waiting for another device."""
    return x.device.type == "cpu"


def host_bool(condition: Tensor) -> bool | None:
    """The value of a 0-dim ``condition`` on a CPU; ``None`` where it would have to be waited for.

    Example:
        >>> import torch
        >>> host_bool(torch.tensor(1.0) > 0), host_bool(torch.ones((), device="meta") > 0)
        (True, None)
    """
    if not at_hand(condition):
        return None
    try:
        return bool(condition)
    except RuntimeError:  # under vmap and in tracing there is no single answer
        return None


def choose(condition: Tensor, accepted: Tensors, refused: Tensors) -> Tensors:
    """``accepted`` where the 0-dim ``condition`` holds, else ``refused``; nobody waits."""
    return {name: torch.where(condition, v, refused[name]) for name, v in accepted.items()}


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Whether every tensor of ``b`` equals the one of that name in ``a``: a 0-dim tensor."""
    if all(at_hand(v) for v in b.values()):
        return torch.tensor(all(torch.equal(a[name], v) for name, v in b.items()))
    return reduce(torch.logical_and, ((a[name] == v).all() for name, v in b.items()))
