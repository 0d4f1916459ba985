"""Natural-gradient variational inference for Pyro."""

from . import distributions, families, linalg, nn
from ._version import __version__
from .diagnostics import KHat, khat, summary
from .diagnostics.export import to_arviz
from .diagnostics.prediction import predict
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
from .guides.reparam import WalshHadamardReparam
from .losses import BatchedELBO
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
from .probing.vectorized import check_vectorized
from .runtime.model_density import ModelDensity
from .sites import CVI, AutoSites, SitesELBO

__all__ = [
    "AIFVB",
    "CVI",
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
    "AutoSites",
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
    "SitesELBO",
    "Tail",
    "Vadam",
    "WalshHadamardReparam",
    "__version__",
    "check_vectorized",
    "distributions",
    "families",
    "init_to_center",
    "khat",
    "linalg",
    "neutra",
    "nn",
    "predict",
    "remember_arguments",
    "summary",
    "to_arviz",
]
