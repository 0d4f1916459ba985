"""Natural-gradient variational inference for Pyro."""

from . import families, linalg, nn
from ._arviz_compat import summary
from ._version import __version__
from .density import ModelDensity
from .diagnostics import KHat, khat
from .elbo import BatchedELBO, check_vectorized
from .export import to_arviz
from .fisher import remember_arguments
from .guides import (
    AutoCouplingFlow,
    AutoExponentialFamily,
    AutoFactorNormal,
    AutoFactorPrecision,
    AutoFlow,
    AutoFullRankNormal,
    AutoMatrixNormal,
    AutoMeanFieldNormal,
    AutoOrthogonalFlow,
    AutoWalshHadamard,
    NeuTra,
    init_to_center,
    neutra,
)
from .optim import (
    AIFVB,
    IFVB,
    IVON,
    NAGVAC,
    NGVB,
    SLANG,
    SPRING,
    VOGN,
    VON,
    Constant,
    LogPower,
    NoiseClock,
    NoisyKFAC,
    PowerDecay,
    RobbinsMonro,
    Tail,
    Vadam,
)
from .reparam import WalshHadamardReparam

__all__ = [
    "AIFVB",
    "IFVB",
    "IVON",
    "NAGVAC",
    "NGVB",
    "SLANG",
    "SPRING",
    "VOGN",
    "VON",
    "AutoCouplingFlow",
    "AutoExponentialFamily",
    "AutoFactorNormal",
    "AutoFactorPrecision",
    "AutoFlow",
    "AutoFullRankNormal",
    "AutoMatrixNormal",
    "AutoMeanFieldNormal",
    "AutoOrthogonalFlow",
    "AutoWalshHadamard",
    "BatchedELBO",
    "Constant",
    "KHat",
    "LogPower",
    "ModelDensity",
    "NeuTra",
    "NoiseClock",
    "NoisyKFAC",
    "PowerDecay",
    "RobbinsMonro",
    "Tail",
    "Vadam",
    "WalshHadamardReparam",
    "__version__",
    "check_vectorized",
    "families",
    "init_to_center",
    "khat",
    "linalg",
    "neutra",
    "nn",
    "remember_arguments",
    "summary",
    "to_arviz",
]
