"""Pyro guides, one per family."""

from .exponential import AutoExponentialFamily
from .initialization import init_to_center
from .normal import AutoFactorNormal, AutoFullRankNormal, AutoMeanFieldNormal

__all__ = [
    "AutoExponentialFamily",
    "AutoFactorNormal",
    "AutoFullRankNormal",
    "AutoMeanFieldNormal",
    "init_to_center",
]
