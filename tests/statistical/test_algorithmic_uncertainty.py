"""Coverage of the asymptotic covariance: 200 runs on a logistic regression, optimum by quadrature."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pyro_ngvi.families import MeanFieldNormal
from pyro_ngvi.families.vectors import pack
from pyro_ngvi.fisher import Dense
from pyro_ngvi.optim import Tail
from pyro_ngvi.optim.aifvb import measure_covariance
from pyro_ngvi.optim.blocks import Coordinates
from pyro_ngvi.optim.ifvb import SLOW
from pyro_ngvi.optim.ifvb_rule import IFVBRule
from pyro_ngvi.optim.natural_gradient import NaturalGradientRule

FAMILY = MeanFieldNormal()
RUNS, STEPS, PARTICLES = 200, 800, 4
PRIOR = {
    "loc": torch.zeros(2, dtype=torch.float64),
    "log_scale": torch.full((2,), math.log(2.0), dtype=torch.float64),
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(20, 2, generator=generator)
    X[:, 1] = 0.6 * X[:, 0] + 0.8 * X[:, 1]
    chance = torch.sigmoid(X @ torch.tensor([1.0, -0.5]))
    return X, (torch.rand(20, generator=generator) < chance).to(X)


def exact_loss(q: dict[str, Tensor], X: Tensor, y: Tensor) -> Tensor:
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    variance = ((X * q["log_scale"].exp()) ** 2).sum(-1, keepdim=True)
    f = (X @ q["loc"])[:, None] + variance.sqrt() * torch.tensor(nodes)
    terms = y[:, None] * f - torch.nn.functional.softplus(f)
    return FAMILY.kl(q, PRIOR) - (torch.tensor(weights / weights.sum()) * terms).sum()


def optimum(X: Tensor, y: Tensor) -> Tensor:
    q = {name: torch.zeros(2, requires_grad=True) for name in FAMILY.names}
    lbfgs = torch.optim.LBFGS(
        list(q.values()),
        max_iter=500,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = exact_loss(q, X, y)
        loss.backward()
        return loss

    lbfgs.step(closure)
    return pack({name: p.detach() for name, p in q.items()})


def noisy_gradient(X: Tensor, y: Tensor):
    def loss(q: dict[str, Tensor], noise: Tensor) -> Tensor:
        z = FAMILY.rsample(q, noise)
        f = z @ X.mT
        fit = (y * f - torch.nn.functional.softplus(f)).sum(-1)
        return (FAMILY.log_prob(q, z) - FAMILY.log_prob(PRIOR, z) - fit).mean()

    return torch.func.grad(loss)


def score(q: dict[str, Tensor], noise: Tensor) -> Tensor:
    values = FAMILY.score(q, FAMILY.rsample(q, noise))
    return torch.cat([values[name] for name in FAMILY.names], -1)


@pytest.mark.slow
def test_nominal_90_percent():
    """Binomial standard error of 200 runs: 2.1%.  Joint and marginal intervals within two of them."""
    torch.manual_seed(0)
    X, y = data()
    target, gradient = optimum(X, y), noisy_gradient(X, y)
    step = NaturalGradientRule(
        Coordinates(FAMILY.names), schedule=SLOW, averaging=Tail(), noise_radius=0.6
    )
    rule = IFVBRule(step, Dense())

    def advance(q, state, noise, score_noise):
        average = {name: state["average"][name] for name in q}
        new, state, _ = rule.update(
            q, gradient(q, noise), state, {"scores": score(average, score_noise)}
        )
        return new, state

    start = FAMILY.init(torch.zeros(2), 0.5)
    q = {name: v.expand(RUNS, 2).clone() for name, v in start.items()}
    first = torch.randn(RUNS, 32, 2)
    state = torch.func.vmap(lambda q, noise: rule.init(q, score(q, noise)))(q, first)
    advance = torch.func.vmap(advance)
    for _ in range(STEPS):
        q, state = advance(q, state, torch.randn(RUNS, PARTICLES, 2), torch.randn(RUNS, 1, 2))

    joint, marginal = [], []
    for run in range(RUNS):
        leaves = {name: state["average"][name][run].clone() for name in FAMILY.names}
        unit = score(leaves, torch.randn(64, 2)).square().mean(0).rsqrt()
        covariance = measure_covariance(
            lambda leaves=leaves: pack(gradient(leaves, torch.randn(PARTICLES, 2))),
            leaves,
            unit,
            state["average_square"][run],
            num_gradients=128,
            num_hessians=8,
        ).matrix
        error = pack(leaves) - target
        joint.append(error @ torch.linalg.solve(covariance, error) < 7.779)  # chi^2_4, 90%
        marginal.append(error.abs() < 1.645 * covariance.diagonal().sqrt())
    slack = 2.0 * math.sqrt(0.9 * 0.1 / RUNS)
    assert torch.stack(joint).to(X).mean() == pytest.approx(0.9, abs=slack)
    # four dependent intervals: the mean of their coverages has at most the error of one
    assert torch.stack(marginal).to(X).mean() == pytest.approx(0.9, abs=slack)
