"""Pyro guides, one per family."""

from .base import AutoFamily
from .centers import init_to_center
from .exponential import AutoExponentialFamily
from .flow import AutoCouplingFlow, AutoFlow, AutoOrthogonalFlow
from .mixture import AutoMixtureNormal
from .neutra import NeuTra, neutra
from .normal import (
    AutoFactorNormal,
    AutoFactorPrecision,
    AutoFullRankNormal,
    AutoMatrixNormal,
    AutoMeanFieldNormal,
)
from .walsh_hadamard import AutoProperWalshHadamard, AutoWalshHadamard

__all__ = [
    "AutoCouplingFlow",
    "AutoExponentialFamily",
    "AutoFactorNormal",
    "AutoFactorPrecision",
    "AutoFamily",
    "AutoFlow",
    "AutoFullRankNormal",
    "AutoMatrixNormal",
    "AutoMeanFieldNormal",
    "AutoMixtureNormal",
    "AutoOrthogonalFlow",
    "AutoProperWalshHadamard",
    "AutoWalshHadamard",
    "NeuTra",
    "init_to_center",
    "neutra",
]
