"""The rule of IFVB and AIFVB as pure functions: the rule of NGVB on an estimated Fisher matrix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..families.base import Tensors
from ..fisher import Blocks, Dense, InverseFisher
from ..fisher.first_guess import first_guess
from ..fisher.geometry import EstimatedGeometry
from .natural_gradient import NaturalGradientRule
from .rule import Averaging, Report, part

__all__ = ["IFVBRule"]

#: how many scores a diagonal that is known counts for
KNOWN_WEIGHT = 100.0


@dataclass(frozen=True)
class IFVBRule:
    """The mathematics, as two pure functions.

    ``step`` is the rule that steps once the natural gradient is known, ``fisher`` the estimate of the
    inverse Fisher matrix, ``step.family`` the frame.  With ``by_layer`` there is one such estimate for
    each layer that the frame knows of.
    """

    step: NaturalGradientRule
    fisher: InverseFisher
    by_layer: bool = False

    def __post_init__(self) -> None:
        if self.by_layer and not self.fisher.starts_from_guess:
            raise ValueError(
                f"by_layer=True needs an estimate that starts from the first guess of the diagonal, "
                f"and {self.fisher} does not. Leave its eps out, or use pyro_ngvi.fisher.Window(128)."
            )

    @property
    def averaging(self) -> Averaging | None:
        return self.step.averaging

    def _estimate(self, params: Tensors) -> InverseFisher:
        if not self.by_layer:
            return self.fisher
        frame: Any = self.step.family
        return Blocks(frame.layer_sizes(params), self.fisher)

    def init(self, params: Tensors, scores: Tensor | None = None) -> Tensors:
        frame: Any = self.step.family
        if scores is not None:
            diagonal, weight = first_guess(scores, [v.numel() for v in params.values()]), 1.0
        elif frame.orthogonal_frame:
            ones = {name: torch.ones_like(v) for name, v in params.items()}
            diagonal, weight = frame.pack(frame.fisher_product(params, ones)), KNOWN_WEIGHT
        else:
            diagonal, weight = torch.ones_like(frame.pack(params)), 1.0
        if isinstance(self.fisher, Dense):
            # directions that no score has shown yet would else look as if they were free
            weight = max(weight, float(len(diagonal)))
        estimate = self._estimate(params)
        fisher = estimate.init(diagonal, weight)
        if scores is not None:
            fisher = estimate.update(fisher, scores)
        return self.step.init(params) | {"fisher." + k: v for k, v in fisher.items()}

    def update(
        self, params: Tensors, grads: Tensors, state: Tensors, scores: Tensor
    ) -> tuple[Tensors, Tensors, Report]:
        """One step from ``params``, with packed ``scores`` (S, D) of the frame."""
        estimate = self._estimate(params)
        fisher = estimate.update(part(state, "fisher."), scores)
        frame: Any = self.step.family
        geometry = EstimatedGeometry(frame, lambda g: estimate.product(fisher, g))
        own = {k: v for k, v in state.items() if not k.startswith("fisher.")}
        new, own, report = replace(self.step, family=geometry).update(params, grads, own)
        return new, own | {"fisher." + k: v for k, v in fisher.items()}, report
