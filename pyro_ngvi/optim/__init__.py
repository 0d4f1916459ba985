"""Optimizers for ``pyro.infer.SVI``, one rule a file."""

from .aifvb import AIFVB
from .averaging import LogPower, Tail
from .ifvb import IFVB
from .nagvac import NAGVAC
from .ngvb import NGVB
from .schedules import Constant, NoiseClock, RobbinsMonro

__all__ = [
    "AIFVB",
    "IFVB",
    "NAGVAC",
    "NGVB",
    "Constant",
    "LogPower",
    "NoiseClock",
    "RobbinsMonro",
    "Tail",
]
