"""What ``BatchedELBO(curvature="scores")`` leaves: the draws of a step, and log q - log p at each.

Scores of q at the draws then give the Fisher matrix, and their regression on the residuals the natural
gradient (:class:`pyro_ngvi.optim.SPRING`).  No gradient passes through the draws, so the model is
evaluated and not differentiated, but for its own parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.layout import LatentLayout
from .estimator import CurvatureEstimator

__all__ = ["ResidualEstimator"]


class ResidualEstimator(CurvatureEstimator):
    """Draws (S, d) of the flat latent vector and residuals (S,), in nats, of one step after another."""

    def __init__(self, layout: LatentLayout) -> None:
        super().__init__("scores", "scores", layout)
        self._losses = torch.empty(0)

    def losses(self, each: Tensor) -> None:
        self._losses = each.detach()

    def after_backward(self, *_: Any) -> dict[str, Tensor]:
        parts = {"draws": self._draws, "residuals": self._losses}
        self._forget()
        return parts
