"""Expected curvatures that a loss leaves for its optimizer: one function each, in one table.

``docs/tutorials/12_extending.ipynb`` adds one, the empirical Fisher matrix.
"""

from .estimators import ESTIMATORS, Drawn

__all__ = ["ESTIMATORS", "Drawn"]
