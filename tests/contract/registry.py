"""The guides and models that the contract tests run through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import constraints

from pyro_ngvi.guides.base import AutoFamily
from tests import registry
from tests.registry import some

GUIDES: dict[str, Callable[..., Any]] = some(
    registry.GUIDES, "mean field", "full rank", "factor", "factor precision", "exponential"
)

#: those whose flat vector is Gaussian, on any model
NORMAL = [kind for kind in GUIDES if kind != "exponential"]
#: those that see no correlation
INDEPENDENT = ("mean field", "exponential")

LOSSES = some(registry.LOSSES, "Trace", "Trace vectorised", "TraceMeanField", "Batched")

N, D = 6, 3


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(N, D, generator=generator, dtype=torch.float64)
    noise = torch.randn(N, generator=generator, dtype=torch.float64)
    return X.to(dtype), (X.sum(-1) + 0.5 * noise).to(dtype)


def regression(X: Tensor, y: Tensor, minibatch: int | Tensor | None = None) -> None:
    """Bayesian linear regression with unit noise: the posterior is Gaussian.

    ``minibatch`` is the size of a random minibatch, or its index.
    """
    how: dict[str, Any] = {
        "subsample" if isinstance(minibatch, Tensor) else "subsample_size": minibatch
    }
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), X.new_ones(D)).to_event(1))
    with pyro.plate("data", len(y), **how) as index:
        pyro.sample("y", dist.Normal((X[index] * w).sum(-1), 1.0), obs=y[index])


def exact_posterior(X: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and precision of the weights of :func:`regression`."""
    precision = torch.eye(D, dtype=X.dtype) + X.mT @ X
    return torch.linalg.solve(precision, X.mT @ y), precision


def constrained() -> None:
    """A site for each kind of support."""
    pyro.sample("real", dist.Normal(0.0, 1.0))
    pyro.sample("gamma", dist.Gamma(2.0, torch.ones(3)).to_event(1))
    pyro.sample("half_normal", dist.HalfNormal(2.0))
    pyro.sample("uniform", dist.Uniform(-1.0, 3.0))
    pyro.sample("simplex", dist.Dirichlet(torch.ones(4)))
    pyro.sample("correlation", dist.LKJCholesky(3, 2.0))


def plates() -> None:
    """Latent sites in plates of dimension -1, -2 and both."""
    rows, columns = pyro.plate("rows", 4, dim=-2), pyro.plate("columns", 2, dim=-1)
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with columns:
        b = pyro.sample("b", dist.Normal(a, 1.0))
    with rows:
        c = pyro.sample("c", dist.Gamma(torch.ones(3), 1.0).to_event(1))
    with rows, columns:
        d = pyro.sample("d", dist.Normal(b + c.sum(-1), 1.0))
        pyro.sample("x", dist.Normal(d, 1.0), obs=torch.ones(4, 2))


SHAPES = {
    constrained: {
        "real": (),
        "gamma": (3,),
        "half_normal": (),
        "uniform": (),
        "simplex": (4,),
        "correlation": (3, 3),
    },
    plates: {"a": (), "b": (2,), "c": (4, 1, 3), "d": (4, 2)},
}


def perturbed(guide: AutoFamily, scale: float = 0.3) -> AutoFamily:
    """Move a guide, already called once, away from its symmetric start."""
    with torch.no_grad():
        for name, parameter in guide.natural_params().items():
            parameter.add_(scale * torch.randn_like(parameter))
            if name == "scale_tril":
                parameter.diagonal().abs_()
    return guide


def called(kind: str, model: Any, *args: Any, **kwargs: Any) -> Any:
    """A guide that knows the sites of its model."""
    guide = GUIDES[kind](model, **kwargs)
    guide(*args)
    return guide


def entry_supports(model: Any) -> dict[str, Any]:
    """:func:`supports` of single entries: their medians know nothing of the others of a simplex."""
    whole = {"simplex": constraints.interval(0, 1), "correlation": constraints.interval(-1, 1)}
    return {name: whole.get(name, support) for name, support in supports(model).items()}


def supports(model: Any) -> dict[str, Any]:
    trace: Any = poutine.trace(model).get_trace()
    return {name: trace.nodes[name]["fn"].support for name in SHAPES[model]}
