"""Around Pyro's own loop: when to stop, and how much is still to gain."""

from .gap import Gap
from .stop import StopRule

__all__ = ["Gap", "StopRule"]
