"""What all Gaussian families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .base import Family, Tensors

__all__ = ["NormalFamily", "exportable"]


def exportable(function: Any) -> Callable[..., Any]:
    """``apply`` of an autograd function; its ``forward`` in traces without gradients, to be saved."""
    tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    return function.forward if tracing and not torch.is_grad_enabled() else function.apply


class NormalFamily(Family):
    """A family of Gaussians: the marginal quantiles follow from mean and sd."""

    def icdf(self, params: Tensors, levels: Tensor) -> Tensor:
        return self.mean(params) + self.stddev(params) * torch.special.ndtri(levels).unsqueeze(-1)
