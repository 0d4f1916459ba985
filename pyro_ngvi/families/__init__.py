"""Variational families: pure functions, no state, no Pyro."""

from .base import Family
from .factor import FactorNormal
from .full_rank import FullRankNormal
from .mean_field import MeanFieldNormal

__all__ = ["FactorNormal", "Family", "FullRankNormal", "MeanFieldNormal"]
