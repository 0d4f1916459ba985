"""What ``BatchedELBO(curvature=...)`` adds to a step: it records the draws and asks the estimator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..linalg.autocast import outside_autocast
from ..runtime.layout import LatentLayout
from ..runtime.vmap import Minibatches
from .drawn import Drawn
from .kinds import ESTIMATORS, KINDS
from .pair import Pair
from .record import Curvature

__all__ = ["CurvatureEstimator"]


class CurvatureEstimator(Pair):
    """The curvature of one pair of model and guide, step after step, by an entry of ``ESTIMATORS``."""

    def __init__(self, kind: str, guide: Any, layout: LatentLayout) -> None:
        super().__init__(layout)
        self.kind, self.guide = kind, guide
        self._losses = torch.empty(0)

    def losses(self, each: Tensor) -> None:
        """Record log q - log p (S,) of each particle."""
        self._losses = each.detach()

    @outside_autocast
    def after_backward(
        self, model: Callable[..., Any], minibatches: Minibatches, args: Any, kwargs: Any
    ) -> Curvature:
        """The curvature at the draws of this step."""
        how: Any = {"minibatches": minibatches, "args": args, "kwargs": kwargs}
        drawn = Drawn(self.kind, self.guide, self.draws.detach(), self._losses, self, model, **how)
        parts = ESTIMATORS[self.kind](drawn)
        self.forget()
        return Curvature(self.kind if self.kind in KINDS else "hessian", parts)
