"""Optimizers for ``pyro.infer.SVI``, one rule a file."""

from .aifvb import AIFVB
from .averaging import LogPower, Tail
from .ifvb import IFVB
from .ngvb import NGVB
from .schedules import Constant, NoiseClock, RobbinsMonro

__all__ = ["AIFVB", "IFVB", "NGVB", "Constant", "LogPower", "NoiseClock", "RobbinsMonro", "Tail"]
