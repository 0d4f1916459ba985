"""Variational families: pure functions, no state, no Pyro."""

from .base import Family, NormalFamily
from .exponential import MeanFieldDirichlet, MeanFieldGamma
from .factor import FactorNormal, FactorPrecisionNormal
from .flow import FlowFamily
from .full_rank import FullRankNormal
from .matrix_normal import MatrixNormal
from .mean_field import MeanFieldNormal
from .mixture import MixtureNormal
from .orthogonal_flow import OrthogonalFlow
from .product import ProductFamily
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
    "MixtureNormal",
    "NormalFamily",
    "OrthogonalFlow",
    "ProductFamily",
    "WalshHadamardNormal",
]
