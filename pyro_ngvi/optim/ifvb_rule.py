"""The step of :class:`~pyro_ngvi.IFVB`: that of NGVB on an estimate of the Fisher matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..families.base import Tensors
from ..fisher import ConjugateGradients, Dense, InverseFisher
from ..fisher.inverse import first_guess
from .blocks import Coordinates, EstimatedGeometry
from .divergence import shortened
from .natural_gradient import NaturalGradientRule
from .rule import Averaging, Rule, State, Step

#: how many scores a diagonal that is known counts for
KNOWN_WEIGHT = 100.0


@dataclass(frozen=True)
class IFVBRule(Rule):
    """``rule``, that of NGVB, on an estimated Fisher matrix; it takes "scores" (S, D) of its family.

    :class:`ConjugateGradients` take a "product" with the Fisher matrix instead; with a "divergence" of
    new parameters beside it steps are held against that.
    """

    learns_fisher: ClassVar[bool] = True

    rule: NaturalGradientRule
    fisher: InverseFisher | ConjugateGradients

    @property
    def family(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rule.family

    @property
    def averaging(self) -> Averaging | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rule.averaging

    def _with(self, product: Callable[[Tensor], Tensor]) -> NaturalGradientRule:
        """``rule`` with ``product`` for the inverse of F."""
        return replace(self.rule, family=EstimatedGeometry(self.family, product))

    def start(self, params: Tensors) -> State:
        return self._with(lambda g: g).start(params)

    def init(self, params: Tensors, scores: Tensor | None = None) -> State:
        """The state before the first step, from a few ``scores`` (n, D) where F is not known."""
        frame = self.family
        if isinstance(self.fisher, ConjugateGradients):
            return super().init(params) | {"fisher": self.fisher.init(frame.pack(params))}
        if scores is not None:
            diagonal, weight = first_guess(scores, list(frame.sizes(params).values())), 1.0
        elif frame.orthogonal_frame:
            ones = {name: torch.ones_like(v) for name, v in params.items()}
            diagonal, weight = frame.pack(frame.fisher_product(params, ones)), KNOWN_WEIGHT
        else:
            diagonal, weight = torch.ones_like(frame.pack(params)), 1.0
        if isinstance(self.fisher, Dense):
            # directions that no score has shown yet would else look as if they were free
            weight = max(weight, float(len(diagonal)))
        fisher = self.fisher.init(diagonal, weight)
        if scores is not None:
            fisher = self.fisher.update(fisher, scores)
        return super().init(params) | {"fisher": fisher}

    def step(self, params: Tensors, grads: Tensors, state: State, curvature: Any = None) -> Step:
        estimate, given = self.fisher, curvature
        if isinstance(estimate, ConjugateGradients):
            sizes = list(self.family.sizes(params).values())
            own = estimate.update(state["fisher"], given["product"], sizes)
            known = isinstance(self.family, Coordinates)
            blocks = self.family.block_sizes(params) if known else [sum(sizes)]
            rule = self._with(lambda g: estimate.solve(own, given["product"], g, blocks))
        else:
            own = estimate.update(state["fisher"], given["scores"])
            rule = self._with(lambda g: estimate.product(own, g))
        step = rule.step(params, grads, state)
        if isinstance(estimate, ConjugateGradients) and "divergence" in given:
            step, short = shortened(step, params, given["divergence"])
            own = estimate.adapted(own, short)
        # scores are those of q, which are good where the gradient is not
        fisher = {"fisher": own}
        # what is known of the error of an average holds for one that goes on
        changed: Any = {"state": step.state | fisher, "if_refused": step.if_refused | fisher}
        return replace(step, keep_average=None, **changed)
