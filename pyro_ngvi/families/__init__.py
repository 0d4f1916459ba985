"""Variational families: pure functions, no state, no Pyro."""

from .base import Family
from .dirichlet import MeanFieldDirichlet
from .exponential import ProductFamily
from .factor import FactorNormal
from .full_rank import FullRankNormal
from .gamma import MeanFieldGamma
from .mean_field import MeanFieldNormal

__all__ = [
    "FactorNormal",
    "Family",
    "FullRankNormal",
    "MeanFieldDirichlet",
    "MeanFieldGamma",
    "MeanFieldNormal",
    "ProductFamily",
]
