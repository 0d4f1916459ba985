"""Pyro guides, one per family."""

from .exponential import AutoExponentialFamily
from .initialization import init_to_center
from .matrix_normal import AutoMatrixNormal
from .normal import (
    AutoFactorNormal,
    AutoFactorPrecision,
    AutoFullRankNormal,
    AutoMeanFieldNormal,
)

__all__ = [
    "AutoExponentialFamily",
    "AutoFactorNormal",
    "AutoFactorPrecision",
    "AutoFullRankNormal",
    "AutoMatrixNormal",
    "AutoMeanFieldNormal",
    "init_to_center",
]
