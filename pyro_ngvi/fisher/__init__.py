"""Estimates of the inverse Fisher matrix from scores, for families that have none in closed form."""

from .blocks import Blocks
from .inversion_free import Dense, InverseFisher
from .low_rank import LowRank
from .scores import remember_arguments
from .window import Window

__all__ = [
    "Blocks",
    "Dense",
    "InverseFisher",
    "LowRank",
    "Window",
    "remember_arguments",
]
