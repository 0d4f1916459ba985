"""Models with a Gaussian likelihood: one sweep of CVI with lr 1 against the closed form.

    z ~ N(m0, K),   y ~ N(A z + b, R):   G = K A' (A K A' + R)^-1,
    E z = m0 + G (y - A m0 - b),   cov z = K - G A K,   log p(y) = log N(y; A m0 + b, A K A' + R),

in NumPy, or the same in D x D matrices where z is shorter than y and these are more exact:

    P = K^-1 + A' R^-1 A,   E z = P^-1 A' R^-1 y,   cov z = P^-1,
    log p(y) = -(N log 2 pi + log |R| + log |K| + log |P| + y' R^-1 y - (E z)' P E z) / 2.

Errors are absolute, the largest over all entries; nats for the evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from numpy.typing import NDArray
from torch import Tensor

from .common import Row, moments, sites_svi

Array = NDArray[np.floating]

TARGET = 1e-10


@dataclass(frozen=True)
class Case:
    """A model with its data, and the Gaussian algebra that it stands for: see the head of the file."""

    model: Callable[[Tensor], None]
    y: Tensor
    prior: Array
    design: Array
    noise: Array

    def exact(self) -> tuple[Array, Array, float]:
        """Mean and covariance of z, and log p(y); the prior's mean is 0."""
        y, A, K = self.y.numpy(), self.design, self.prior
        if len(K) < len(y):
            return self._exact_in_weights()
        S = A @ K @ A.T + self.noise
        gain = np.linalg.solve(S, A @ K).T
        evidence = _log_normal(y, S)
        return gain @ y, K - gain @ A @ K, evidence

    def _exact_in_weights(self) -> tuple[Array, Array, float]:
        y, A = self.y.numpy(), self.design
        weighted = np.linalg.solve(self.noise, A).T
        P = np.linalg.inv(self.prior) + weighted @ A
        h = weighted @ y
        mean = np.linalg.solve(P, h)
        dets = sum(np.linalg.slogdet(M)[1] for M in (self.noise, self.prior, P))
        square = y @ np.linalg.solve(self.noise, y) - h @ mean
        evidence = -0.5 * (len(y) * np.log(2 * np.pi) + dets + square)
        return mean, np.linalg.inv(P), float(evidence)


def _log_normal(y: Array, S: Array) -> float:
    """log N(y; 0, S)."""
    square = y @ np.linalg.solve(S, y)
    return float(-0.5 * (len(y) * np.log(2 * np.pi) + np.linalg.slogdet(S)[1] + square))


def rbf(x: Tensor, length: float) -> Tensor:
    """The covariance (N, N) of a Gaussian process at 1-d inputs, with jitter 1e-6."""
    return torch.exp(-0.5 * ((x - x.unsqueeze(-1)) / length) ** 2) + 1e-6 * torch.eye(len(x))


def gp_regression() -> Case:
    """f ~ GP(0, RBF), y ~ N(f, 0.1^2), N = 200."""
    x = torch.linspace(0.0, 10.0, 200)
    K = rbf(x, 1.0)
    y = torch.sin(x) + 0.1 * torch.randn(200)

    def model(y: Tensor) -> None:
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(200), K))
        with pyro.plate("data", 200):
            pyro.sample("y", dist.Normal(f, 0.1), obs=y)

    return Case(model, y, K.numpy(), np.eye(200), 0.01 * np.eye(200))


def linear_regression() -> Case:
    """w ~ N(0, 10^2 I), y ~ N(X w, sd_n^2), N = 300, D = 10, two columns nearly the same."""
    X = torch.randn(300, 10)
    X[:, 1] = X[:, 0] + 0.01 * torch.randn(300)
    sd = torch.linspace(0.2, 2.0, 300)
    y = X @ torch.randn(10) + sd * torch.randn(300)

    def model(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(10), 10.0).to_event(1))
        with pyro.plate("data", 300):
            pyro.sample("y", dist.Normal(X @ w, sd), obs=y)

    return Case(model, y, 100.0 * np.eye(10), X.numpy(), np.diag(sd.numpy() ** 2))


def local_level() -> Case:
    """x_0 ~ N(0, 3^2), x_t ~ N(x_(t-1), 0.7^2), y_t ~ N(x_t, 0.5^2): 60 sites, dense algebra."""
    T = 60
    y = torch.randn(T).cumsum(0)

    def model(y: Tensor) -> None:
        level = [pyro.sample("x_0", dist.Normal(0.0, 3.0))]
        for t in range(1, T):
            level.append(pyro.sample(f"x_{t}", dist.Normal(level[-1], 0.7)))
        with pyro.plate("times", T):
            pyro.sample("y", dist.Normal(torch.stack(level, -1), 0.5), obs=y)

    times = np.arange(T)
    K = 9.0 + 0.49 * np.minimum(times[:, None], times)
    return Case(model, y, K, np.eye(T), 0.25 * np.eye(T))


CASES: dict[str, Callable[[], Case]] = {
    "GP regression": gp_regression,
    "linear regression": linear_regression,
    "local level": local_level,
}


def errors(case: Case) -> dict[str, float]:
    """The largest errors after one sweep."""
    guide, svi = sites_svi(case.model)
    svi.step(case.y)
    loss: Any = svi.evaluate_loss(case.y)
    mean, covariance = moments(guide)
    exact_mean, exact_covariance, evidence = case.exact()
    return {
        "mean": float(np.abs(mean.numpy() - exact_mean).max()),
        "covariance": float(np.abs(covariance.numpy() - exact_covariance).max()),
        "log evidence": abs(float(loss) + evidence),
    }


def run(quick: bool, seeds: int, data: Sequence[str] | None) -> Iterator[Row]:
    for name in data or CASES:
        found: list[dict[str, float]] = []
        for seed in range(seeds):
            pyro.set_rng_seed(seed)
            found.append(errors(CASES[name]()))
        worst = {what: max(f[what] for f in found) for what in found[0]}
        measured = ", ".join(f"{what} {error:.1e}" for what, error in worst.items())
        met = max(worst.values()) < TARGET
        yield Row(f"{name}, largest errors", f"{TARGET:g}", measured, met, {"errors": found})
