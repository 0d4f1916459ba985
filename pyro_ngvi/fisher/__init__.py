"""Estimates of the inverse Fisher matrix from scores, for families that have none in closed form."""

from .inverse import Blocks, Dense, InverseFisher, Window
from .low_rank import LowRank
from .scores import remember_arguments

__all__ = ["Blocks", "Dense", "InverseFisher", "LowRank", "Window", "remember_arguments"]
