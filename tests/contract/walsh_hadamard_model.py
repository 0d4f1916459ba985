"""A regression with a matrix site, and its exact posterior when the matrix is made of g."""

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

N, ROWS, COLUMNS = 30, 5, 3
SD = 0.4  # of the noise
LOC, SCALE = 0.3, 0.8  # of the prior of W


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs (N, COLUMNS) and outputs (N, ROWS)."""
    g = torch.Generator().manual_seed(7)
    how: Any = {"generator": g, "dtype": torch.float64}
    X = torch.randn(N, COLUMNS, **how)
    Y = X @ torch.randn(COLUMNS, ROWS, **how) + SD * torch.randn(N, ROWS, **how)
    return X.to(dtype), Y.to(dtype)


def weights(X: Tensor, Y: Tensor) -> None:
    """Y = X W' + noise: W (5, 3) is two blocks of 4 x 4, and one number of h is in no entry."""
    prior = dist.Normal(X.new_full((ROWS, COLUMNS), LOC), X.new_tensor(SCALE)).to_event(2)
    W = pyro.sample("W", prior)
    with pyro.plate("data", len(X)):
        pyro.sample("Y", dist.Normal(X @ W.mT, SD).to_event(1), obs=Y)


def weights_and_bias(X: Tensor, Y: Tensor) -> None:
    """The same with other latent sites before and after, one of them constrained."""
    scale = pyro.sample("scale", dist.LogNormal(X.new_zeros(()), X.new_ones(())))
    W = pyro.sample("W", dist.Normal(X.new_zeros(ROWS, COLUMNS), 1.0).to_event(2))
    b = pyro.sample("b", dist.Normal(X.new_zeros(ROWS), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        if W.dim() == 2:
            mean = X @ W.mT + b
        else:  # (S, 1, ...): vectorised particles
            mean = X @ W.mT.squeeze(-3) + b
            scale = scale.unsqueeze(-1)
        pyro.sample("Y", dist.Normal(mean, scale).to_event(1), obs=Y)


def design(A: Tensor) -> tuple[Tensor, Tensor]:
    """vec(Y) - its prior mean, and its linear map of u, W = LOC + SCALE u, u = A x."""
    X, Y = data()
    M = SCALE * torch.einsum("nj,ik->nkij", X, torch.eye(ROWS)).reshape(N * ROWS, ROWS * COLUMNS)
    return (Y - LOC * X.sum(-1, keepdim=True)).flatten(), M @ A


def exact(A: Tensor) -> tuple[MultivariateNormal, Tensor]:
    """Posterior of x ~ N(0, I) with u = A x, and the log evidence in nats."""
    y, M = design(A)
    P = torch.eye(M.shape[1]) + M.mT @ M / SD**2
    posterior = MultivariateNormal(torch.linalg.solve(P, M.mT @ y) / SD**2, precision_matrix=P)
    marginal = MultivariateNormal(torch.zeros_like(y), M @ M.mT + SD**2 * torch.eye(len(y)))
    return posterior, marginal.log_prob(y)
