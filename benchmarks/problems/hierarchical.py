"""Hierarchical and sparse models: where a Gaussian in the unconstrained space is hardest put."""

from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from . import posteriordb
from .problem import FAMILIES, Optimum, Problem

# Optima of the full-rank and the mean-field Gaussian in nats, by `sample_average.bracket` with 2^17
# draws for the eight schools, 2^14 for the varying intercepts, 2^16 and 2^15 for the horseshoe.
OPTIMA: dict[str, tuple[Optimum, Optimum]] = {
    "eight_schools_centered": (Optimum(-32.5918, 0.0003), Optimum(-33.4041, 0.0002)),
    "horseshoe": (Optimum(-199.05, 0.10), Optimum(-209.20, 0.04)),
    "varying_intercepts": (Optimum(-272.1088, 0.0012), Optimum(-272.6204, 0.0010)),
}

#: of the varying intercepts; a number, as a step that asks its data for one cannot be compiled
GROUPS = 25


def eight_schools_centered(y: Tensor, sigma: Tensor) -> None:
    """theta_j ~ Normal(mu, tau), y_j ~ Normal(theta_j, sigma_j)."""
    mu = pyro.sample("mu", dist.Normal(y.new_zeros(()), 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(y.new_tensor(5.0)))
    with pyro.plate("schools", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def varying_intercepts(X: Tensor, group: Tensor, y: Tensor) -> None:
    """a_g ~ Normal(mu, tau), y_n ~ Bernoulli(logits = a_g(n) + x_n'beta)."""
    mu = pyro.sample("mu", dist.Normal(X.new_zeros(()), 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(X.new_tensor(1.0)))
    beta = pyro.sample("beta", dist.Normal(X.new_zeros(X.shape[1]), 1.0).to_event(1))
    with pyro.plate("groups", GROUPS):
        a = pyro.sample("a", dist.Normal(mu, tau))
    with pyro.plate("data", len(y)):
        logits = a[..., group] + (X * beta).sum(-1)
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def horseshoe(X: Tensor, y: Tensor) -> None:
    """Horseshoe regression in non-centered form (Carvalho, Polson & Scott 2010).

    coefficient_j = tau lambda_j z_j, lambda_j ~ Half-Cauchy(1), tau ~ Half-Cauchy(0.1).
    """
    d = X.shape[1]
    intercept = pyro.sample("intercept", dist.Normal(y.new_zeros(()), 5.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(y.new_tensor(2.0)))
    tau = pyro.sample("tau", dist.HalfCauchy(y.new_tensor(0.1)))
    scales = pyro.sample("lambda", dist.HalfCauchy(y.new_ones(d)).to_event(1))
    z = pyro.sample("z", dist.Normal(y.new_zeros(d), 1.0).to_event(1))
    coefficients = pyro.deterministic("beta", tau.unsqueeze(-1) * scales * z, event_dim=1)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(intercept + (X * coefficients).sum(-1), sigma), obs=y)


def _simulate_varying_intercepts(seed: int) -> tuple[Tensor, ...]:
    """Groups of 5 to 35 observations, 3 covariates."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(GROUPS), rng.integers(5, 36, size=GROUPS))
    X = rng.standard_normal((len(group), 3))
    logits = rng.normal(0.5, 0.7, size=GROUPS)[group] + X @ np.array([1.0, -0.5, 0.0])
    y = (rng.random(len(group)) < 1 / (1 + np.exp(-logits))).astype(np.float64)
    return torch.as_tensor(X), torch.as_tensor(group), torch.as_tensor(y)


def _simulate_horseshoe(seed: int) -> tuple[Tensor, ...]:
    """100 observations of 44 covariates, 5 of which matter."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((100, 44))
    coefficients = np.zeros(44)
    coefficients[:5] = (3.0, -2.0, 1.5, 1.0, -1.0)
    y = 1.0 + X @ coefficients + rng.standard_normal(100)
    return torch.as_tensor(X), torch.as_tensor(y)


def load(name: str) -> Problem:
    """The problem of that name."""
    optimum = dict(zip(FAMILIES, OPTIMA[name], strict=True))
    if name == "eight_schools_centered":
        # The same posterior of theta, mu and tau as in the non-centered form.
        other = posteriordb.load("eight_schools_noncentered")
        return replace(other, name=name, model=eight_schools_centered, optimum=optimum)
    if name == "varying_intercepts":
        args = _simulate_varying_intercepts(seed=0)
        return Problem(name, varying_intercepts, args, dim=30, optimum=optimum)
    if name == "horseshoe":
        return Problem(name, horseshoe, _simulate_horseshoe(seed=0), dim=91, optimum=optimum)
    raise KeyError(f"There is no hierarchical problem called {name!r}.")
