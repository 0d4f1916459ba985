"""Natural-gradient variational inference for Pyro."""

from . import families, linalg
from ._arviz_compat import summary
from ._version import __version__
from .density import ModelDensity
from .diagnostics import KHat, khat
from .elbo import BatchedELBO, check_vectorized
from .export import to_arviz
from .fisher import remember_arguments
from .guides import (
    AutoExponentialFamily,
    AutoFactorNormal,
    AutoFullRankNormal,
    AutoMeanFieldNormal,
    init_to_center,
)
from .optim import AIFVB, IFVB, NAGVAC, NGVB, Constant, LogPower, NoiseClock, RobbinsMonro, Tail

__all__ = [
    "AIFVB",
    "IFVB",
    "NAGVAC",
    "NGVB",
    "AutoExponentialFamily",
    "AutoFactorNormal",
    "AutoFullRankNormal",
    "AutoMeanFieldNormal",
    "BatchedELBO",
    "Constant",
    "KHat",
    "LogPower",
    "ModelDensity",
    "NoiseClock",
    "RobbinsMonro",
    "Tail",
    "__version__",
    "check_vectorized",
    "families",
    "init_to_center",
    "khat",
    "linalg",
    "remember_arguments",
    "summary",
    "to_arviz",
]
