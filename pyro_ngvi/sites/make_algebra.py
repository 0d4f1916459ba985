"""Which algebra fits a block."""

from __future__ import annotations

from torch import Tensor

from .algebra import Algebra, DenseAlgebra
from .plan import Call, Plan

__all__ = ["make_algebra"]


def make_algebra(plan: Plan, call: Call, inducing: Tensor | None) -> Algebra:
    """The dense algebra, unless the prior has a structure that makes another one cheaper."""
    return DenseAlgebra(plan, call)
