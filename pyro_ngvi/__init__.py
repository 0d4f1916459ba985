"""Natural-gradient variational inference for Pyro."""

import warnings as _warnings
from importlib import import_module as _import_module
from typing import Any as _Any

from . import (
    compiled,
    diagnostics,
    distributed,
    distributions,
    families,
    fitting,
    flows,
    guides,
    hierarchy,
    linalg,
    losses,
    metric,
    nn,
    optim,
    sites,
)
from ._version import __version__
from .compiled import compile
from .diagnostics import diagnose, khat, predict, summary, to_arviz
from .fitting import StopRule, advise, compare, fit, load, save
from .guides import (
    AutoCouplingFlow,
    AutoExponentialFamily,
    AutoFactorNormal,
    AutoFactorPrecision,
    AutoFlow,
    AutoFullRankNormal,
    AutoMatrixNormal,
    AutoMeanFieldNormal,
    AutoMixtureNormal,
    AutoOrthogonalFlow,
    AutoProperWalshHadamard,
    AutoWalshHadamard,
    neutra,
)
from .hierarchy import AutoHierarchical, collapse
from .losses import BatchedELBO
from .metric import AutoMetricNormal
from .optim import AIFVB, IFVB, NGVB
from .sites import CVI, AutoSites, SitesELBO, integrate

__all__ = [
    "AIFVB",
    "CVI",
    "IFVB",
    "NGVB",
    "AutoCouplingFlow",
    "AutoExponentialFamily",
    "AutoFactorNormal",
    "AutoFactorPrecision",
    "AutoFlow",
    "AutoFullRankNormal",
    "AutoHierarchical",
    "AutoMatrixNormal",
    "AutoMeanFieldNormal",
    "AutoMetricNormal",
    "AutoMixtureNormal",
    "AutoOrthogonalFlow",
    "AutoProperWalshHadamard",
    "AutoSites",
    "AutoWalshHadamard",
    "BatchedELBO",
    "SitesELBO",
    "StopRule",
    "__version__",
    "advise",
    "collapse",
    "compare",
    "compile",
    "compiled",
    "diagnose",
    "diagnostics",
    "distributed",
    "distributions",
    "families",
    "fit",
    "fitting",
    "flows",
    "guides",
    "hierarchy",
    "integrate",
    "khat",
    "linalg",
    "load",
    "losses",
    "metric",
    "neutra",
    "nn",
    "optim",
    "predict",
    "save",
    "sites",
    "summary",
    "to_arviz",
]

#: names that stood here in version 0.1, by where they stand now
_MOVED = {
    "optim": "VON VOGN IVON SLANG Vadam NoisyKFAC SPRING Constant LogPower NoiseClock "
    "PowerDecay RobbinsMonro Tail remember_arguments",
    "diagnostics": "KHat ModelDensity check_vectorized",
    "guides": "NeuTra init_to_center",
    "nn": "WalshHadamardReparam",
}


def __getattr__(name: str) -> _Any:
    for place, names in _MOVED.items():
        if name in names.split():
            _warnings.warn(
                f"pyro_ngvi.{name} is now pyro_ngvi.{place}.{name}; the old name is deprecated.",
                DeprecationWarning,
                stacklevel=2,
            )
            return getattr(_import_module(f"pyro_ngvi.{place}"), name)
    others = (place for place in __all__ if name in getattr(globals()[place], "__all__", ()))
    where = f"; there is pyro_ngvi.{place}.{name}" if (place := next(others, "")) else ""
    raise AttributeError(f"module 'pyro_ngvi' has no attribute {name!r}{where}")
