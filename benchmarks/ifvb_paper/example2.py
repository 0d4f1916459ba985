"""Example 2: the Poisson model of the paper, and the normal model of its authors' code."""

from __future__ import annotations

from pathlib import Path

from . import normal_model, poisson
from .report import Row

__all__ = ["run"]


def run(quick: bool, out: Path | None = None) -> list[Row]:
    """The rows of both models."""
    return poisson.run(quick, out) + normal_model.run(quick, out)
