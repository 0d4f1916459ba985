"""Gaussian processes with few parameters: figure 2 of the paper, error against number of parameters.

The paper has five functions of the library of Surjanovic & Bingham (sfu.ca/~ssurjano), 10^4 to 2 10^5
points, 80 % to train, and does not name them in any text that we found; Borehole, Robot arm,
Piston, OTL circuit and Friedman have the dimensions that it states. Inputs are uniform on the usual
domains and taken to sd 1 and mean 0, as is the output; there is no noise. RMSE in sds of the output
on the other 20 %.

* WHVI-RFF: ``nn.RandomFourierFeatures`` and a weight vector of 2 R entries made of about sqrt(2 R)
numbers
  (``WalshHadamardLinear(square=True)``);
* mean-field RFF: independent Gaussian weights, R such that the number of parameters is the same;
* sparse GP: with as many inducing points as fit into that number, GPyTorch's by Adam in minibatches and
  ours, ``AutoSites(inducing=Z)``, with all data in every step (:mod:`.sparse_gp`).

The first two by ``NGVB`` on a mean-field guide, Adam 0.01 for length-scales, variance, noise and
diagonals; 4 draws, batches of 256, 2,000 steps (quick) or 20,000.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from numpy.typing import NDArray
from pyro.infer import SVI
from pyro.infer.autoguide import init_to_sample
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor
from torch.distributions import constraints

import pyro_ngvi as ngvi

from ..blr_papers.common import Row, spread, train
from .sparse_gp import Fit, gpytorch_process, sites_process

Array = NDArray[np.float64]

FEATURES = (32, 128, 512, 2048)
QUICK_FEATURES = (32, 512)
POINTS, QUICK_POINTS = 100_000, 10_000
STEPS, QUICK_STEPS = 20_000, 2_000
BATCH, DRAWS = 256, 4
#: steps of our sparse process, each with all data
SITES_STEPS = 300


def borehole(u: Array) -> Array:
    low = np.array([0.05, 100, 63_070, 990, 63.1, 700, 1_120, 9_855])
    high = np.array([0.15, 50_000, 115_600, 1_110, 116, 820, 1_680, 12_045])
    rw, r, Tu, Hu, Tl, Hl, L, Kw = (low + u * (high - low)).T
    log = np.log(r / rw)
    return 2 * np.pi * Tu * (Hu - Hl) / (log * (1 + 2 * L * Tu / (log * rw**2 * Kw) + Tu / Tl))


def robot_arm(u: Array) -> Array:
    angles, lengths = np.cumsum(2 * np.pi * u[:, :4], 1), u[:, 4:]
    return np.hypot((lengths * np.cos(angles)).sum(1), (lengths * np.sin(angles)).sum(1))


def piston(u: Array) -> Array:
    low = np.array([30, 0.005, 0.002, 1_000, 90_000, 290, 340])
    high = np.array([60, 0.020, 0.010, 5_000, 110_000, 296, 360])
    M, S, V0, k, P0, Ta, T0 = (low + u * (high - low)).T
    A = P0 * S + 19.62 * M - k * V0 / S
    V = S / (2 * k) * (np.sqrt(A**2 + 4 * k * P0 * V0 / T0 * Ta) - A)
    return 2 * np.pi * np.sqrt(M / (k + S**2 * P0 * V0 / T0 * Ta / V**2))


def otl_circuit(u: Array) -> Array:
    low = np.array([50, 25, 0.5, 1.2, 0.25, 50])
    high = np.array([150, 70, 3.0, 2.5, 1.2, 300])
    b1, b2, f, c1, c2, beta = (low + u * (high - low)).T
    part = beta * (c2 + 9)
    first = (12 * b2 / (b1 + b2) + 0.74) * part / (part + f)
    return first + 11.35 * f / (part + f) + 0.74 * f * part / ((part + f) * c1)


def friedman(u: Array) -> Array:
    wave = 10 * np.sin(np.pi * u[:, 0] * u[:, 1])
    return wave + 20 * (u[:, 2] - 0.5) ** 2 + 10 * u[:, 3] + 5 * u[:, 4]


FUNCTIONS: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "borehole": (8, borehole),
    "robot_arm": (8, robot_arm),
    "piston": (7, piston),
    "otl_circuit": (6, otl_circuit),
    "friedman": (5, friedman),
}


def sample(name: str, points: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standardised X, y and the test part."""
    dimension, function = FUNCTIONS[name]
    u = np.random.RandomState(seed).uniform(size=(points, dimension))
    y = function(u)
    X, y = (u - 0.5) * math.sqrt(12.0), (y - y.mean()) / y.std()
    cut = points * 4 // 5
    arrays = X[:cut], y[:cut], X[cut:], y[cut:]
    X, y, X_test, y_test = (torch.tensor(a, dtype=torch.float32) for a in arrays)
    return X, y, X_test, y_test


class Process(PyroModule):
    """Random features and a linear layer of independent weights, or of Walsh-Hadamard ones."""

    noise: Any

    def __init__(self, inputs: int, features: int, num_data: int, whvi: bool) -> None:
        super().__init__()
        self.num_data = num_data
        self.features = ngvi.nn.RandomFourierFeatures(inputs, features, seed=0)
        self.layer: Any = None
        if whvi:
            how: Any = {"bias": False, "weight_sd": 1.0, "square": True}
            self.layer = ngvi.nn.WalshHadamardLinear(2 * features, 1, **how)
        else:
            self.w = PyroSample(dist.Normal(torch.zeros(2 * features), 1.0).to_event(1))
        self.noise = PyroParam(torch.tensor(0.3), constraints.positive)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        phi = self.features(x)
        mean = (phi @ self.w) if self.layer is None else self.layer(phi).squeeze(-1)
        rows = torch.arange(len(x))
        with pyro.plate("data", self.num_data, subsample=rows):
            pyro.sample("y", dist.Normal(mean, self.noise), obs=y)
        return mean


def features_process(data: Sequence[Tensor], features: int, whvi: bool, epochs: int) -> Fit:
    pyro.clear_param_store()  # the next process must not go on with the length-scales of the last
    X, y, X_test, y_test = data
    model = Process(X.shape[1], features, len(X), whvi)
    guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=init_to_sample)
    svi = SVI(model, guide, ngvi.NGVB(guide, others=Adam({"lr": 0.01})), ngvi.BatchedELBO(DRAWS))
    seconds = train(svi, X, y, BATCH, epochs)
    with torch.no_grad():  # the mean is linear in the latent vector
        median: Any = guide.median()
        mean = pyro.condition(model, data=median)(X_test)
    count = sum(p.numel() for module in (guide, model) for p in module.parameters())
    rmse = float((mean - y_test).square().mean().sqrt())
    return Fit(rmse, count, seconds, epochs * math.ceil(len(X) / BATCH))


def run(quick: bool, seeds: int, data: Sequence[str] | None) -> Iterator[Row]:
    torch.set_default_dtype(torch.float32)
    points, steps = (QUICK_POINTS, QUICK_STEPS) if quick else (POINTS, STEPS)
    for name in data or FUNCTIONS:
        for features in QUICK_FEATURES if quick else FEATURES:
            runs: dict[str, list[Fit]] = {}
            for seed in range(seeds):
                pyro.set_rng_seed(seed)
                parts = sample(name, points, seed)
                epochs = max(1, round(steps * BATCH / len(parts[0])))
                whvi = features_process(parts, features, True, epochs)
                matched = max(1, (whvi.parameters - parts[0].shape[1] - 2) // 4)
                found = {
                    f"WHVI-RFF, {features} features": whvi,
                    f"mean-field RFF, {matched} features": features_process(
                        parts, matched, False, epochs
                    ),
                    "sparse GP": gpytorch_process(parts, whvi.parameters, BATCH, epochs),
                    "sparse GP, ours": sites_process(parts, whvi.parameters, SITES_STEPS),
                }
                for label, fit in found.items():
                    runs.setdefault(label, []).append(fit)
            for label, fits in runs.items():
                rmse, counts, seconds, taken = zip(*fits, strict=True)
                each = float(np.mean(seconds))
                ours = f"{counts[0]:,} parameters, RMSE {spread(rmse, 4)} ({seeds} seeds, "
                ours += f"{taken[0]:,} steps of {1e3 * each:.1f} ms: {taken[0] * each:.1f} s)"
                detail = {"rmse": rmse, "parameters": counts[0], "seconds_per_step": seconds}
                yield Row(f"{name}, {label}", "figure only", ours, detail)
