"""Which estimator leaves what ``BatchedELBO(curvature=...)`` is asked for."""

from __future__ import annotations

from typing import Any

from ..runtime.layout import LatentLayout
from .estimator import CurvatureEstimator
from .kronecker import KroneckerEstimator
from .residuals import ResidualEstimator

__all__ = ["make_estimator"]


def make_estimator(kind: str, guide: Any, layout: LatentLayout) -> CurvatureEstimator:
    """The estimator of that kind of curvature for a guide of ours that takes it."""
    if kind == "kronecker":
        return KroneckerEstimator(layout, guide.matrices)
    if kind == "scores":
        return ResidualEstimator(layout)
    return CurvatureEstimator(kind, guide.family.curvature_form, layout)
