"""Published algorithms to compare with, as printed; the package has better ones in their place."""

from .ifvb import algorithm_1, algorithm_2
from .nagvac import NAGVAC
from .paper_window import PaperWindow

__all__ = ["NAGVAC", "PaperWindow", "algorithm_1", "algorithm_2"]
