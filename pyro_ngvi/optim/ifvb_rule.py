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
        if isinstance(self.fisher, ConjugateGradients):
            return self._conjugate_step(params, grads, state, self.fisher, curvature)
        estimate = self.fisher
        fisher = {"fisher": estimate.update(state["fisher"], curvature["scores"])}
        rule = self._with(lambda g: estimate.product(fisher["fisher"], g))
        step = rule.step(params, grads, state)
        # scores are those of q, which are good where the gradient is not
        return replace(step, state=step.state | fisher, if_refused=step.if_refused | fisher)

    def _conjugate_step(
        self, params: Tensors, grads: Tensors, state: State, solver: ConjugateGradients, given: Any
    ) -> Step:
        product, sizes = given["product"], list(self.family.sizes(params).values())
        own = solver.update(state["fisher"], product, sizes)
        blocks = [sum(sizes)]
        if isinstance(self.family, Coordinates):
            blocks = self.family.block_sizes(params)
        rule = self._with(lambda g: solver.solve(own, product, g, blocks))
        step = rule.step(params, grads, state)
        if "divergence" in given:
            step, short = shortened(step, params, given["divergence"])
            own = solver.adapted(own, short)
        kept = {"fisher": own}
        return replace(step, state=step.state | kept, if_refused=step.if_refused | kept)
