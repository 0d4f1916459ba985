"""Published algorithms to compare with, as printed; the package has better ones in their place."""

from .nagvac import NAGVAC

__all__ = ["NAGVAC"]
