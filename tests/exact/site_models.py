"""Gaussian models with a guide of sites, and their posteriors in closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_ngvi import CVI, AutoSites, SitesELBO

NOISE = 0.3
PAIR_NOISE = torch.tensor([[0.5, 0.2], [0.2, 0.4]], dtype=torch.float64)


def regression(X: Tensor, y: Tensor | None = None) -> None:
    """y_n ~ N(b + x_n'w, NOISE^2)."""
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[1]), 0.7).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w + b, NOISE), obs=y)


def pairs(X: Tensor, y: Tensor | None = None) -> None:
    """y_n (2,) ~ N(W x_n, PAIR_NOISE): predictors of two entries."""
    W = pyro.sample("W", dist.Normal(torch.zeros(2, X.shape[1]), 1.3).to_event(2))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.MultivariateNormal(X @ W.T, PAIR_NOISE), obs=y)


@dataclass(frozen=True)
class Case:
    """A model, its data, and for N data A (N, k, D), prior variances (D,), noise (k, k), y (N, k)."""

    model: Callable[..., Any]
    X: Tensor
    y: Tensor
    A: Tensor
    prior: Tensor
    noise: Tensor

    def args(self, index: Any) -> tuple[Tensor, Tensor]:
        return self.X[index], self.y[index]

    def posterior(self, index: Any) -> dist.MultivariateNormal:
        """That of the data of these numbers."""
        A = self.A[index].flatten(0, 1)
        y = self.y[index].reshape(-1, self.A.shape[1])
        weights = torch.linalg.inv(self.noise)
        P = torch.diag(1 / self.prior)
        P = P + torch.einsum("nkd,kl,nle->de", self.A[index], weights, self.A[index])
        h = A.T @ (y @ weights).flatten()
        V = torch.linalg.inv(P)
        return dist.MultivariateNormal(V @ h, covariance_matrix=0.5 * (V + V.T))

    def log_predictive(self, n: int, q: dist.MultivariateNormal) -> Tensor:
        """log p(y_n) under a posterior q."""
        A = self.A[n]
        covariance = A @ q.covariance_matrix @ A.T + self.noise
        at = dist.MultivariateNormal(A @ q.mean, covariance_matrix=covariance)
        return at.log_prob(self.y[n].reshape(-1))

    def fit(self, index: Any, steps: int = 1) -> tuple[AutoSites, SVI]:
        """A guide of sites after some steps with these data, and its SVI."""
        guide = AutoSites(self.model)
        svi = SVI(self.model, guide, CVI(guide), SitesELBO())
        for _ in range(steps):
            svi.step(*self.args(index))
        return guide, svi


def cases(N: int = 12, D: int = 3) -> dict[str, Case]:
    """The same N inputs in R^D for both models."""
    generator = torch.Generator().manual_seed(5)
    X = torch.randn(N, D, generator=generator, dtype=torch.float64)
    e = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    one = torch.cat([torch.ones(N, 1, dtype=X.dtype), X], 1).unsqueeze(1)
    both = torch.zeros(N, 2, 2 * D, dtype=X.dtype)
    both[:, 0, :D] = both[:, 1, D:] = X
    variances = torch.cat([torch.full((1,), 4.0), torch.full((D,), 0.49)]).double()
    noise = torch.full((1, 1), NOISE**2, dtype=X.dtype)
    return {
        "regression": Case(regression, X, X.sum(1) + e[:, 0], one, variances, noise),
        "pairs": Case(
            pairs, X, X[:, :2] + e, both, torch.full((2 * D,), 1.69).double(), PAIR_NOISE
        ),
    }


def all_but(N: int, out: Any) -> Tensor:
    """Numbers of N data without some."""
    keep = torch.ones(N, dtype=torch.bool)
    keep[out] = False
    return keep.nonzero().squeeze(-1)


def gap(guide: AutoSites, expected: dist.MultivariateNormal) -> float:
    """Largest difference in mean and covariance between q and a Gaussian."""
    q = guide.get_posterior()
    mean = (q.mean - expected.mean).abs().max()
    return float(
        torch.maximum(mean, (q.covariance_matrix - expected.covariance_matrix).abs().max())
    )
