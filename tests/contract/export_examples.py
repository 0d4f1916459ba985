"""A regression, guides of it, and readers of ArviZ's groups, for the tests of the export."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuideList, AutoMultivariateNormal, AutoNormal
from torch import Tensor

dist: Any = pyro.distributions  # its annotations do not know what its distributions can do

S, N, D = 200, 12, 3


def model(X: Tensor, y: Tensor) -> None:
    """A regression written for one draw."""
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[1]), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.LogNormal(X.new_zeros(()), 0.5))
    mean = pyro.deterministic("mean", X @ w)
    with pyro.plate("unit", len(y)):
        pyro.sample("y", dist.Normal(mean, sigma), obs=y)


def hand_written(X: Tensor, y: Tensor) -> None:
    loc = pyro.param("loc", lambda: torch.linspace(-0.5, 0.5, D))
    w = pyro.sample("w", dist.Normal(loc, 0.3).to_event(1))
    pyro.sample("sigma", dist.LogNormal(0.1 * w.sum(), 0.2))


def guide_list(model: Callable[..., Any]) -> AutoGuideList:
    guide = AutoGuideList(model)
    guide.append(AutoNormal(poutine.block(model, expose=["sigma"])))
    guide.append(AutoMultivariateNormal(poutine.block(model, expose=["w"])))
    return guide


GUIDES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "AutoNormal": AutoNormal,
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoGuideList": guide_list,
    "hand_written": lambda _: hand_written,
}


def regression_data() -> tuple[Tensor, Tensor]:
    X = torch.randn(N, D)
    return X, X @ torch.tensor([1.0, -1.0, 0.5]) + 0.7 * torch.randn(N)


def values_of(data: Any, group: str = "posterior") -> dict[str, Tensor]:
    return {str(k): torch.from_numpy(v.values[0].copy()) for k, v in data[group].data_vars.items()}


def groups_of(result: Any) -> list[str]:
    children: Any = result.groups() if callable(result.groups) else result.children
    return list(children)
