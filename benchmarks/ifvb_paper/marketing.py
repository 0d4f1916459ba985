r"""Direct marketing: a Bayesian network with group-Lasso shrinkage of its inputs (example 4).

    y_i ~ N(f(x_i; theta), sigma^2)
    w_j | tau_j ~ N(0, tau_j I_m),   tau_j ~ Gamma((m + 1)/2, gamma_j^2 / 2)

with w_j the m weights that leave input j; all other weights and all biases have flat priors, and
sigma^2 ~ IG(10, 9 sd(y)).  q(theta) q(tau) q(sigma^2) is fitted by turns: a step of SVI on theta, with
E[1 / tau_j] and E[1 / sigma^2] as constants of the model, then their closed-form updates

    E[1/tau_j] = gamma_j / sqrt(E|w_j|^2),   E[tau_j] = 1 / E[1/tau_j] + 1 / gamma_j^2,
    gamma_j = sqrt((m + 1) / E[tau_j])                                     empirical Bayes
    E[1/sigma^2] = (10 + n/2) / (9 sd(y) + SSR / 2),                       from step 10 on

SSR at the mean weights, as in the authors' script.  Covariates come standardised; y is in $1000.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import init_to_value
from torch import Tensor
from torch.distributions import constraints

from pyro_ngvi import AutoFactorNormal

from ..problems import DataNotFound

__all__ = ["Marketing", "least_squares", "load"]

#: step from which on the noise variance is updated
WARM_UP = 10
GAMMA_START = 0.01
SHAPE, RATE = 10.0, 9.0
#: sd of the start of b, and the start of c
START_SCALE = 0.01

F32 = torch.float32

Part = tuple[Tensor, Tensor]


@cache
def load() -> tuple[Part, Part, Part]:
    """Training (800), validation (100) and test (100) data: X (11, n) and y (n,), float32.

    Rows first would make the products of a batch of networks twice as slow.
    """
    root = os.environ.get("PYRO_NGVI_DATA")
    path = Path(root or "") / "direct_marketing" / "direct_marketing.csv"
    if not root or not path.exists():
        raise DataNotFound(
            f"Example 4 needs {path}: set PYRO_NGVI_DATA to the directory that holds it."
        )
    table = torch.as_tensor(np.loadtxt(path, delimiter=",", skiprows=1), dtype=F32)
    X, y, split = table[:, 1:-2], table[:, -2], table[:, -1]
    train, validation, test = ((X[split == k].mT.contiguous(), y[split == k]) for k in range(3))
    return train, validation, test


def least_squares() -> tuple[float, float]:
    """Mean square errors (validation, test) of a linear regression with intercept."""
    (X, y), *others = load()
    w = torch.linalg.lstsq(_with_intercept(X), y).solution
    validation, test = (float((_with_intercept(X) @ w - y).square().mean()) for X, y in others)
    return validation, test


def _with_intercept(X: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(X[:1]), X]).mT


@dataclass
class _Hyper:
    gamma: Tensor
    inverse_tau: Tensor
    inverse_sigma2: Tensor


class Marketing:
    """The model (call it), its guide, and the updates between steps.

    Args:
        hidden: units of the hidden layers: (20,) in the authors' script, (10, 10) in the paper.
        seed: of the start of the weights.
    """

    def __init__(self, hidden: tuple[int, ...], seed: int) -> None:
        (self.X, self.y), self.validation, self.test = load()
        generator = torch.Generator().manual_seed(seed)
        d = len(self.X)
        sizes = (d, *hidden, 1)
        self.start: dict[str, Tensor] = {}
        for layer, (n_in, n_out) in enumerate(pairwise(sizes)):
            # as in the script: sqrt(6) over the sum, a third of Glorot's range
            r = 6.0**0.5 / (n_in + 1 + n_out)
            w = r * (2.0 * torch.rand(n_out, n_in + 1, generator=generator, dtype=F32) - 1.0)
            self.start[f"w{layer}"], self.start[f"b{layer}"] = w[:, 1:].contiguous(), w[:, 0]
        self.b_start = START_SCALE * torch.randn(self.dim, 1, generator=generator, dtype=F32)
        gamma = torch.full_like(self.X[:, 0], GAMMA_START)
        length = (self.start["w0"].square() + 2.0 * START_SCALE**2).sum(0).sqrt()
        self.hyper = _Hyper(gamma, gamma / length, torch.ones_like(gamma[0]))
        self.steps = 0

    @property
    def dim(self) -> int:
        """Number of weights and biases."""
        return sum(v.numel() for v in self.start.values())

    def __call__(self) -> None:
        weights: dict[str, Tensor] = {}
        for name, value in self.start.items():
            if name == "w0":
                scale = self.hyper.inverse_tau.rsqrt().expand(value.shape)
                prior: Any = dist.Normal(torch.zeros_like(scale), scale).to_event(2)
            else:
                prior = dist.ImproperUniform(constraints.real, (), value.shape)
            weights[name] = pyro.sample(name, prior)
        with pyro.plate("data", len(self.y)):
            noise = self.hyper.inverse_sigma2.rsqrt()
            pyro.sample("y", dist.Normal(self.predict(weights, self.X), noise), obs=self.y)

    def predict(self, weights: Mapping[Any, Tensor], X: Tensor) -> Tensor:
        """Network outputs (n,) for inputs X (11, n)."""
        h, layers = X, len(self.start) // 2
        for layer in range(layers):
            h = weights[f"w{layer}"] @ h + weights[f"b{layer}"].unsqueeze(-1)
            if layer < layers - 1:
                h = h.relu()
        return h.squeeze(-2)

    def make_guide(self) -> AutoFactorNormal:
        """The rank-1 guide at the start of the authors' script: b ~ N(0, 0.01^2), c = 0.01."""
        at = init_to_value(values=self.start)
        guide = AutoFactorNormal(self, rank=1, init_loc_fn=at, init_scale=START_SCALE)
        guide()
        with torch.no_grad():
            params = guide.natural_params()
            params["factor"].copy_(self.b_start)
            params["log_scale"].fill_(float(np.log(START_SCALE)))
        return guide

    @torch.no_grad()
    def update(self, guide: AutoFactorNormal) -> None:
        """The closed-form updates after a step."""
        self.steps += 1
        mean = guide.median()
        m, d = mean["w0"].shape
        variance = guide.family.stddev(dict(guide.natural_params())).square()
        length = (mean["w0"].square() + variance[: m * d].reshape(m, d)).sum(0).sqrt()
        gamma, n = self.hyper.gamma, len(self.y)
        inverse_tau = gamma / length
        tau = 1.0 / inverse_tau + gamma**-2
        self.hyper.gamma, self.hyper.inverse_tau = ((m + 1) / tau).sqrt(), inverse_tau
        if self.steps >= WARM_UP:
            ssr = (self.predict(mean, self.X) - self.y).square().sum()
            rate = RATE * self.y.std() + 0.5 * ssr
            self.hyper.inverse_sigma2 = (SHAPE + 0.5 * n) / rate

    @torch.no_grad()
    def errors(self, guide: AutoFactorNormal) -> tuple[float, float]:
        """Mean square errors (validation, test) of the network at the posterior mean."""
        weights = guide.median()
        validation, test = (
            float((self.predict(weights, X) - y).square().mean())
            for X, y in (self.validation, self.test)
        )
        return validation, test
