"""Optimizers for ``pyro.infer.SVI``, one rule a file."""

from ..fisher import remember_arguments
from .aifvb import AIFVB
from .ifvb import IFVB
from .ngvb import NGVB, NaturalGradient
from .noisy_kfac import NoisyKFAC
from .rule import LogPower, Rule, Step, Tail
from .schedules import Constant, NoiseClock, PowerDecay, RobbinsMonro
from .spring import SPRING
from .vogn import IVON, SLANG, VOGN, Vadam
from .von import VON

__all__ = [
    "AIFVB",
    "IFVB",
    "IVON",
    "NGVB",
    "SLANG",
    "SPRING",
    "VOGN",
    "VON",
    "Constant",
    "LogPower",
    "NaturalGradient",
    "NoiseClock",
    "NoisyKFAC",
    "PowerDecay",
    "RobbinsMonro",
    "Rule",
    "Step",
    "Tail",
    "Vadam",
    "remember_arguments",
]
