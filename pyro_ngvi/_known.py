"""Asking a tensor for its value only where nobody has to wait for the answer.

A branch on a tensor makes a GPU and its host wait for each other, and has no meaning for ``meta``
tensors or under ``vmap``.  On a CPU it is free, and may spare work whose result is known beforehand.
Code that asks must give the same result, bit for bit, whether it gets an answer or not.
"""

from __future__ import annotations

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

__all__ = ["choose", "known"]


def known(condition: Tensor) -> bool | None:
    """The value of a 0-dim ``condition`` on a CPU; ``None`` where it would have to be waited for.

    Example:
        >>> import torch
        >>> known(torch.tensor(1.0) > 0), known(torch.ones((), device="meta") > 0)
        (True, None)
    """
    if condition.device.type != "cpu":
        return None
    try:
        return bool(condition)
    except RuntimeError:  # under vmap and in tracing there is no single answer
        return None


def choose(condition: Tensor, accepted: Tensors, refused: Tensors) -> Tensors:
    """``accepted`` where the 0-dim ``condition`` holds, else ``refused``; nobody waits."""
    return {name: torch.where(condition, v, refused[name]) for name, v in accepted.items()}
