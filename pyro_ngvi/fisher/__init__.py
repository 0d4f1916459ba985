"""Estimates of the inverse Fisher matrix from scores, for families that have none in closed form."""

from .inversion_free import Dense, InverseFisher, PaperWindow
from .low_rank import LowRank
from .scores import remember_arguments

__all__ = ["Dense", "InverseFisher", "LowRank", "PaperWindow", "remember_arguments"]
