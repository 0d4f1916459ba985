"""Which algebra fits a block."""

from __future__ import annotations

from torch import Tensor

from .algebra import Algebra
from .bound_model import BoundModel
from .chain import ChainAlgebra
from .dense_algebra import DenseAlgebra
from .inducing import InducingAlgebra
from .structure import ModelStructure

__all__ = ["make_algebra"]


def make_algebra(plan: ModelStructure, call: BoundModel, inducing: Tensor | None) -> Algebra:
    """The dense algebra, unless the prior has a structure that makes another one cheaper."""
    if inducing is not None:
        return InducingAlgebra(plan, call, inducing)
    if plan.direct:
        return ChainAlgebra(plan, call)
    return DenseAlgebra(plan, call)
