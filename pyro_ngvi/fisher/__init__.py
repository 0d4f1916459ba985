"""Inverse Fisher matrices that nobody knows in closed form: from scores, or by products with F."""

from .conjugate import ConjugateGradients
from .inverse import Dense, InverseFisher, Window
from .low_rank import LowRank
from .watch import remember_arguments

__all__ = [
    "ConjugateGradients",
    "Dense",
    "InverseFisher",
    "LowRank",
    "Window",
    "remember_arguments",
]
