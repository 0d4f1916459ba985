"""Variational families: pure functions, no state, no Pyro."""

from ._normal import NormalFamily
from .base import Family
from .dirichlet import MeanFieldDirichlet
from .exponential import ProductFamily
from .factor import FactorNormal
from .factor_precision import FactorPrecisionNormal
from .flow import FlowFamily
from .full_rank import FullRankNormal
from .gamma import MeanFieldGamma
from .matrix_normal import MatrixNormal
from .mean_field import MeanFieldNormal
from .orthogonal_flow import OrthogonalFlow
from .walsh_hadamard import WalshHadamardNormal

__all__ = [
    "FactorNormal",
    "FactorPrecisionNormal",
    "Family",
    "FlowFamily",
    "FullRankNormal",
    "MatrixNormal",
    "MeanFieldDirichlet",
    "MeanFieldGamma",
    "MeanFieldNormal",
    "NormalFamily",
    "OrthogonalFlow",
    "ProductFamily",
    "WalshHadamardNormal",
]
