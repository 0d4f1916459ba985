"""Published algorithms to compare with, as printed; the package has better ones in their place."""

from .batch_and_match import batch_and_match, batch_and_match_update
from .dadvi import dadvi
from .ifvb import algorithm_1, algorithm_2
from .laplace import laplace
from .nagvac import NAGVAC
from .paper_dense import PaperDense
from .paper_window import PaperWindow
from .pathfinder import pathfinder

__all__ = [
    "NAGVAC",
    "PaperDense",
    "PaperWindow",
    "algorithm_1",
    "algorithm_2",
    "batch_and_match",
    "batch_and_match_update",
    "dadvi",
    "laplace",
    "pathfinder",
]
