"""A saved state in the place of a fresh one: does it fit, and on which device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..families.base import Tensors

__all__ = ["check_state", "moved"]


def moved(value: Tensor, like: Tensor) -> Tensor:
    if value.is_floating_point():
        return value.to(like)
    # whole numbers that count something are read by the host, and stay there
    return value if value.dim() == 0 and value.dtype == torch.long else value.to(like.device)


def check_state(path: str, fresh: Tensors, saved: Tensors) -> None:
    wrong = [k for k in fresh if k not in saved or saved[k].shape != fresh[k].shape]
    wrong += [k for k in saved if k not in fresh]
    if wrong:
        raise ValueError(
            f"The saved optimizer state does not fit the guide {path!r} (entries "
            f"{', '.join(wrong)}): it comes from another model, rank or setting of the optimizer."
        )
