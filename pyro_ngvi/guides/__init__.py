"""Pyro guides, one per family."""

from .normal import AutoFactorNormal, AutoFullRankNormal, AutoMeanFieldNormal

__all__ = ["AutoFactorNormal", "AutoFullRankNormal", "AutoMeanFieldNormal"]
