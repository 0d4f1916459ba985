"""Around Pyro's own loop: when to stop, how much is still to gain, and how to go on tomorrow."""

from .batches import Batches
from .checkpoint import load, save
from .gap import Gap
from .stop import StopRule

__all__ = ["Batches", "Gap", "StopRule", "load", "save"]
