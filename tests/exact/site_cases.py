"""Models for AutoSites with what is known about them, and a posterior that is computed without it."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor

import pyro_ngvi as ngvi

N, G = 40, 5


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def covariates(n: int = N, d: int = 3) -> Tensor:
    return torch.randn(n, d, generator=seeded())


def linear_data() -> tuple[Tensor, Tensor]:
    """Covariates (N, 3) and real data with noise of sd 0.5."""
    X = covariates()
    return X, X @ torch.tensor([1.0, -1.0, 0.5]) + 0.5 * torch.randn(N, generator=seeded(1))


def counts(rate: Tensor) -> Tensor:
    return torch.poisson(rate, generator=seeded(3))


def normal_weights(d: int, name: str = "w", scale: float = 1.0) -> Tensor:
    w: Any = pyro.sample(name, dist.Normal(torch.zeros(d), scale).to_event(1))
    return w


@dataclass
class Fit:
    guide: Any
    svi: Any
    losses: list[float]


def fit(
    model: Callable[..., Any], *args: Any, sweeps: int = 20, lr: float = 1.0, **options: Any
) -> Fit:
    """So many steps with all of ``args``; ``options`` are those of ``SitesELBO``."""
    guide = ngvi.AutoSites(model)
    svi: Any = SVI(model, guide, ngvi.CVI(guide, lr=lr), ngvi.SitesELBO(**options))
    return Fit(guide, svi, [float(svi.step(*args)) for _ in range(sweeps)])


@dataclass
class Linear:
    """f = A z + b with z ~ N(loc, K): everything about the prior, written down without the model."""

    loc: Tensor
    K: Tensor
    A: Tensor
    b: Tensor

    def posterior(self, nu: Tensor, Lambda: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance of z with sites nu (N,), Lambda (N,), none of which is 0 together."""
        P = self.A.mT @ (Lambda[:, None] * self.A)
        covariance = torch.linalg.solve(torch.eye(len(P)) + self.K @ P, self.K)
        h = self.A.mT @ (nu - Lambda * (self.A @ self.loc + self.b))
        return self.loc + covariance @ h, 0.5 * (covariance + covariance.mT)

    def evidence(self, y: Tensor, sd: float) -> Tensor:
        """log p(y) of y ~ N(f, sd^2)."""
        S = self.A @ self.K @ self.A.mT + sd**2 * torch.eye(len(y))
        return dist.MultivariateNormal(self.A @ self.loc + self.b, S).log_prob(y)


@dataclass
class Conjugate:
    """A model with y ~ Normal(f, sd) and the arguments of a call."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    linear: Linear
    y: Tensor
    sd: float


def regression() -> Conjugate:
    X, S = covariates(), torch.tensor([[1.0, 0.4, 0.0], [0.4, 0.5, 0.1], [0.0, 0.1, 2.0]])
    y = X.sum(-1) + 0.3 * torch.randn(N, generator=seeded(1)) + 2.0

    def model(X: Tensor, y: Tensor) -> None:
        b: Any = pyro.sample("b", dist.Normal(1.0, 2.0))
        w: Any = pyro.sample("w", dist.MultivariateNormal(torch.zeros(3), S))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal((X * w).sum(-1) - 0.5 + b, 0.3), obs=y)

    K = torch.block_diag(torch.tensor([[4.0]]), S)
    A = torch.cat([torch.ones(N, 1), X], -1)
    linear = Linear(torch.tensor([1.0, 0.0, 0.0, 0.0]), K, A, torch.full((N,), -0.5))
    return Conjugate(model, (X, y), linear, y, 0.3)


def hierarchical() -> Conjugate:
    X, group = covariates(), torch.arange(N) % G
    y = X[:, 0] + 0.5 * group + 0.4 * torch.randn(N, generator=seeded(2))

    def model(X: Tensor, y: Tensor) -> None:
        mu: Any = pyro.sample("mu", dist.Normal(0.5, 1.5))
        with pyro.plate("groups", G):
            a: Any = pyro.sample("a", dist.Normal(mu, 0.7))
        w = normal_weights(3)
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(a[group] + X @ w, 0.4), obs=y)

    K = torch.eye(1 + G + 3)
    K[: G + 1, : G + 1] = 1.5**2
    K[1 : G + 1, 1 : G + 1] += 0.7**2 * torch.eye(G)
    A = torch.cat([torch.zeros(N, 1), torch.eye(G)[group], X], -1)
    loc = torch.cat([torch.full((1 + G,), 0.5), torch.zeros(3)])
    return Conjugate(model, (X, y), Linear(loc, K, A, torch.zeros(N)), y, 0.4)


def gp_kernel(n: int = N) -> Tensor:
    t = torch.linspace(0.0, 1.0, n)
    return torch.exp(-0.5 * ((t[:, None] - t) / 0.2).square()) + 1e-4 * torch.eye(n)


def gaussian_process() -> Conjugate:
    K = gp_kernel()
    y = torch.linspace(0.0, 6.0, N).sin() + 0.2 * torch.randn(N, generator=seeded(4))

    def model(K: Tensor, y: Tensor) -> None:
        f: Any = pyro.sample("f", dist.MultivariateNormal(torch.ones(len(K)), K))
        with pyro.plate("data", len(K)):
            pyro.sample("y", dist.Normal(f, 0.2), obs=y)

    linear = Linear(torch.ones(N), K, torch.eye(N), torch.zeros(N))
    return Conjugate(model, (K, y), linear, y, 0.2)


def student(K: Tensor, y: Tensor) -> None:
    """A likelihood that is not log-concave, so that sweeps overshoot."""
    f: Any = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(K)), K))
    with pyro.plate("data", len(K)):
        pyro.sample("y", dist.StudentT(3.0, f, 0.2), obs=y)


def with_outliers() -> Tensor:
    y = torch.linspace(0.0, 6.0, N).sin() + 0.2 * torch.randn(N, generator=seeded(6))
    y[::7] += 3.0 * torch.randn(len(y[::7]), generator=seeded(7))
    return y


def local_level() -> Conjugate:
    """A random walk, one latent site a time."""
    T = 12
    y = torch.randn(T, generator=seeded(5)).cumsum(0)

    def model(y: Tensor) -> None:
        x: Any = pyro.sample("x0", dist.Normal(0.0, 2.0))
        states = [x]
        for t in pyro.markov(range(1, T)):
            x = pyro.sample(f"x{t}", dist.Normal(x, 0.6))
            states.append(x)
        with pyro.plate("data", T):
            pyro.sample("y", dist.Normal(torch.stack(states), 0.5), obs=y)

    t = torch.arange(T, dtype=y.dtype)
    K = 4.0 + 0.36 * torch.minimum(t[:, None], t)
    return Conjugate(model, (y,), Linear(torch.zeros(T), K, torch.eye(T), torch.zeros(T)), y, 0.5)


CONJUGATE = {
    "regression": regression,
    "hierarchical": hierarchical,
    "gaussian process": gaussian_process,
    "local level": local_level,
}


def hermite_grid(k: int, count: int) -> tuple[Tensor, Tensor]:
    """Points (Q, k) and weights (Q,) for N(0, I), from NumPy."""
    x, w = np.polynomial.hermite.hermgauss(count)
    x, w = np.sqrt(2.0) * x, w / np.sqrt(np.pi)
    points = np.array(list(product(x, repeat=k)))
    weights = np.array([np.prod(p) for p in product(w, repeat=k)])
    return torch.as_tensor(points), torch.as_tensor(weights)


def expected_sum(log_p: Callable[[Tensor], Tensor], m: Tensor, C: Tensor, count: int) -> Tensor:
    """sum_n E log p(y_n | f_n) for ``log_p`` of f (..., N, k); m (N, k), C (N, k, k)."""
    x, w = hermite_grid(m.shape[-1], count)
    f = m + torch.einsum("nij,qj->qni", torch.linalg.cholesky(C), x)
    return (w @ log_p(f)).sum()


def independent_elbo(
    log_p: Callable[[Tensor], Tensor],
    design: Tensor,
    prior: dist.MultivariateNormal,
    mean: Tensor,
    root: Tensor,
    count: int,
) -> Tensor:
    """E log p - KL(q || prior) of q = N(mean, root root'), for f = design z with design (N, k, D)."""
    half = design @ root
    likelihood = expected_sum(log_p, design @ mean, half @ half.mT, count)
    q = dist.MultivariateNormal(mean, scale_tril=root)
    return likelihood - torch.distributions.kl_divergence(q, prior)


def whitened_slope(
    log_p: Callable[[Tensor], Tensor],
    design: Tensor,
    prior: dist.MultivariateNormal,
    q: dist.MultivariateNormal,
    count: int,
) -> float:
    """The steepest slope of the ELBO in steps of q's own sd: 0 at an optimum."""
    d = len(q.loc)
    shift, turn = torch.zeros(d, requires_grad=True), torch.zeros(d, d, requires_grad=True)
    root = q.scale_tril
    elbo = independent_elbo(
        log_p, design, prior, q.loc + root @ shift, root @ (torch.eye(d) + turn.tril()), count
    )
    return max(float(g.abs().max()) for g in torch.autograd.grad(elbo, (shift, turn)))


def binary() -> Tensor:
    return (covariates().sum(-1) + torch.randn(N, generator=seeded(8)) > 0).double()


def same_q(one: Any, other: Any, tolerance: float) -> None:
    a, b = one.guide.get_posterior(), other.guide.get_posterior()
    assert (a.mean - b.mean).abs().max() < tolerance
    assert (a.covariance_matrix - b.covariance_matrix).abs().max() < tolerance
