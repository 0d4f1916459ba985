"""Every family, guide, rule, curvature and loss of the package, one table each.

The contract tests walk these tables.  Who adds one of these things adds a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import pyro.distributions as dist
import torch
import zuko
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoGuideList,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.nn import PyroParam

import pyro_ngvi as ngvi
from benchmarks.baselines import NAGVAC, algorithm_1, algorithm_2
from pyro_ngvi.curvature.estimators import KINDS
from pyro_ngvi.families import (
    FactorNormal,
    FactorPrecisionNormal,
    Family,
    FullRankNormal,
    MatrixNormal,
    MeanFieldDirichlet,
    MeanFieldGamma,
    MeanFieldNormal,
    MixtureNormal,
    ProductFamily,
)
from pyro_ngvi.fisher import Dense, Window

__all__ = [
    "BASELINES",
    "CURVATURES",
    "FAMILIES",
    "FOREIGN",
    "GUIDES",
    "LOSSES",
    "RULES",
    "VARIANTS",
    "some",
]

T = TypeVar("T")
Model = Callable[..., Any]
coupling = dist.transforms.affine_coupling

#: a family, and a number of entries that it takes
FAMILIES: dict[str, tuple[Family, int]] = {
    "mean field": (MeanFieldNormal(), 5),
    "full rank": (FullRankNormal(), 5),
    "factor": (FactorNormal(3, cg_iterations=40), 5),
    "factor precision": (FactorPrecisionNormal(3, cg_iterations=40), 5),
    "matrix": (
        ProductFamily(
            {"W": MatrixNormal(2, 3), "rest": FullRankNormal()},
            [("rest", 1), ("W", 6), ("rest", 1)],
            linear=False,
        ),
        8,
    ),
    "gamma": (MeanFieldGamma(), 4),
    "dirichlet": (MeanFieldDirichlet(4), 6),
    "mixture": (MixtureNormal(FullRankNormal(), 3), 3),
    "diagonal mixture": (MixtureNormal(MeanFieldNormal(), 4), 3),
    "product": (
        ProductFamily(
            {
                "dirichlet": MeanFieldDirichlet(3),
                "normal": MeanFieldNormal(),
                "gamma": MeanFieldGamma(),
            },
            [("gamma", 2), ("dirichlet", 2), ("normal", 1), ("gamma", 1), ("dirichlet", 4)],
        ),
        10,
    ),
}


def some(table: Mapping[str, T], *names: str) -> dict[str, T]:
    """The entries of a table with these names."""
    return {name: table[name] for name in names}


def listed(model: Model) -> AutoGuideList:
    """Ours beside Pyro's: the site ``s`` is Pyro's, the others are ours."""
    guide = AutoGuideList(model)
    guide.append(AutoNormal(poutine.block(model, expose=["s"])))
    guide.append(ngvi.AutoFullRankNormal(poutine.block(model, hide=["s"])))
    return guide


class AutoCovariance(AutoContinuous):
    """N(loc, covariance), as one would write it; ``IFVB`` moves both in a frame of their own."""

    covariance: Any

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        self.loc = torch.nn.Parameter(self._init_loc())
        start = 0.01 * torch.eye(len(self.loc)).to(self.loc)
        self.covariance = PyroParam(start, constraints.positive_definite)

    def get_posterior(self, *args: Any, **kwargs: Any) -> Any:
        return dist.MultivariateNormal(self.loc, self.covariance)


#: guides of this package, for a model with a matrix site ``W`` and a positive site ``s``
GUIDES: dict[str, Callable[..., Any]] = {
    "mean field": ngvi.AutoMeanFieldNormal,
    "full rank": ngvi.AutoFullRankNormal,
    "factor": partial(ngvi.AutoFactorNormal, rank=2),
    "one factor": partial(ngvi.AutoFactorNormal, rank=1),
    "factor precision": partial(ngvi.AutoFactorPrecision, rank=2),
    "matrix": ngvi.AutoMatrixNormal,
    "exponential": ngvi.AutoExponentialFamily,
    "mixture": partial(ngvi.AutoMixtureNormal, num_components=2),
    "diagonal mixture": partial(ngvi.AutoMixtureNormal, num_components=3, covariance="diagonal"),
    "Walsh-Hadamard": partial(ngvi.AutoWalshHadamard, sites=["W"]),
    "proper Walsh-Hadamard": partial(ngvi.AutoProperWalshHadamard, sites=["W"]),
    "affine coupling": partial(ngvi.AutoCouplingFlow, layers=2, hidden=(8,)),
    "spline coupling": partial(ngvi.AutoCouplingFlow, kind="spline", layers=2, hidden=(8,), bins=4),
    "Pyro's flow": lambda m, **k: ngvi.AutoFlow(
        m, lambda d: [coupling(d, [8]), coupling(d, [8])], **k
    ),
    "Zuko's flow": lambda m, **k: ngvi.AutoFlow(
        m, lambda d: zuko.flows.MAF(d, transforms=2, hidden_features=(8,)), **k
    ),
    "orthogonal flow": ngvi.AutoOrthogonalFlow,
}

#: guides of Pyro, or written by hand, which only the rules with an estimated Fisher matrix step
FOREIGN: dict[str, Callable[[Model], Any]] = {
    "AutoNormal": AutoNormal,
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "covariance": AutoCovariance,
    "list": listed,
}

#: optimizers with the settings that they need
RULES: dict[str, Callable[[Any], Any]] = {
    "NGVB": ngvi.NGVB,
    "VON": ngvi.optim.VON,
    "VOGN": ngvi.optim.VOGN,
    "IVON": ngvi.optim.IVON,
    "SLANG": partial(ngvi.optim.SLANG, lr=0.1),
    "Vadam": ngvi.optim.Vadam,
    "NoisyKFAC": partial(ngvi.optim.NoisyKFAC, lr=0.1, curvature_lr=0.05),
    "SPRING": ngvi.optim.SPRING,
    "IFVB": ngvi.IFVB,
    "AIFVB": ngvi.AIFVB,
    "CVI": ngvi.CVI,
}

#: other settings of them
VARIANTS: dict[str, Callable[[Any], Any]] = {
    "NGVB, averaged": partial(ngvi.NGVB, averaging=True),
    "NGVB, log averaged": partial(ngvi.NGVB, averaging=2.0),
    "NGVB, momentum": partial(ngvi.NGVB, momentum=0.5, lr=0.7),
    "NGVB, natural coordinates": partial(ngvi.NGVB, coordinates="natural", schedule="constant"),
    "NGVB, unbounded": partial(ngvi.NGVB, trust_radius=None, schedule=lambda k: 0.5 / (1 + k)),
    "VON, printed": partial(ngvi.optim.VON, safe=False, averaging=False),
    "VON, damped": partial(ngvi.optim.VON, momentum=0.5, damping=0.1, trust_radius=0.5),
    "NoisyKFAC, own prior": partial(ngvi.optim.NoisyKFAC, prior_precision=1.0, damping=0.1),
    "SPRING, last iterate": partial(ngvi.optim.SPRING, averaging=False, momentum=0.0),
    "IFVB, window": partial(ngvi.IFVB, fisher=Window(16), num_scores=4),
    "IFVB, dense": partial(ngvi.IFVB, fisher=Dense()),
    "IFVB, clipped": partial(ngvi.IFVB, clip_norm=10.0),
}

PRINTED: Any = {"c_a": 0.1, "alpha": 0.7}

#: published rules to compare with, which are no part of the package
BASELINES: dict[str, Callable[[Any], Any]] = {
    "NAGVAC": NAGVAC,
    "IFVB, printed": partial(algorithm_1, **PRINTED),
    "IFVB, printed window": partial(algorithm_1, window=8, **PRINTED),
    "AIFVB, printed": partial(algorithm_2, **PRINTED),
}

#: what a loss can leave beside the gradients
CURVATURES: tuple[str, ...] = KINDS

#: losses by the number of particles
LOSSES: dict[str, Callable[[int], Any]] = {
    "Trace": Trace_ELBO,
    "Trace vectorised": lambda n: Trace_ELBO(n, vectorize_particles=True, max_plate_nesting=1),
    "TraceMeanField": TraceMeanField_ELBO,
    "Batched": ngvi.BatchedELBO,
    **{f"Batched {c}": partial(ngvi.BatchedELBO, curvature=c) for c in CURVATURES},
    "Sites": lambda n: ngvi.SitesELBO(),
}
