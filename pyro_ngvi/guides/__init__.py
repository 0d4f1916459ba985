"""Pyro guides, one per family."""

from .initialization import init_to_center
from .normal import AutoFactorNormal, AutoFullRankNormal, AutoMeanFieldNormal

__all__ = ["AutoFactorNormal", "AutoFullRankNormal", "AutoMeanFieldNormal", "init_to_center"]
