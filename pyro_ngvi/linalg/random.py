"""Draws that leave no trace: the random state is put back at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["fixed_normal", "own_random_state"]


@contextmanager
def own_random_state(seed: int | None = None) -> Iterator[None]:
    """Restores torch's random states, so that a resumed run draws what an unbroken one does.

    With a ``seed``, the draws inside are the same each time.  A GPU is left alone unless in use.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def fixed_normal(*shape: int, seed: int) -> Tensor:
    """Normal numbers in float64 on the CPU, the same for the same seed; no random state is touched."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)
