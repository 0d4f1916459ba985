"""Models and data that the tests of what AutoSites and CVI refuse share."""

from typing import Any

import pyro
import pyro.distributions as dist
from pyro.infer import SVI
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi
from tests.exact.site_cases import N, covariates, normal_weights

X = covariates
D = 3


def y_real() -> Tensor:
    return X().sum(-1)


def made(model: Any, **options: Any) -> tuple[Any, Any]:
    guide = ngvi.AutoSites(model, **options)
    optim = ngvi.CVI(guide, others=Adam({"lr": 0.01}))
    return guide, SVI(model, guide, optim, ngvi.SitesELBO())


def plain(X: Tensor, y: Tensor | None = None) -> None:
    w = normal_weights(X.shape[1])
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def logistic(X: Tensor, y: Tensor | None = None) -> None:
    f: Any = pyro.deterministic("f", X @ normal_weights(D))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def given(X: Tensor, y: Tensor, i: Tensor) -> None:
    w = normal_weights(X.shape[1])
    with pyro.plate("data", N, subsample=i):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)
