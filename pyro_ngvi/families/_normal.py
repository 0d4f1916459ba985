"""What all Gaussian families share."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Family, Tensors

__all__ = ["NormalFamily"]


class NormalFamily(Family):
    """A family of Gaussians: the marginal quantiles follow from mean and sd."""

    def icdf(self, params: Tensors, levels: Tensor) -> Tensor:
        return self.mean(params) + self.stddev(params) * torch.special.ndtri(levels).unsqueeze(-1)
