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
from .walsh_hadamard import AutoWalshHadamard

__all__ = [
    "AutoExponentialFamily",
    "AutoFactorNormal",
    "AutoFactorPrecision",
    "AutoFullRankNormal",
    "AutoMatrixNormal",
    "AutoMeanFieldNormal",
    "AutoWalshHadamard",
    "init_to_center",
]
