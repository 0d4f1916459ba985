"""The trust region under momentum: the cheap length of a move against the Fisher norm itself."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

import pyro_ngvi as ngvi
from pyro_ngvi.families import (
    FactorNormal,
    FactorPrecisionNormal,
    FullRankNormal,
    MatrixNormal,
    MeanFieldDirichlet,
    MeanFieldGamma,
    MeanFieldNormal,
)
from pyro_ngvi.optim.blocks import Coordinates, EstimatedGeometry
from pyro_ngvi.optim.natural_gradient import NaturalGradientRule
from pyro_ngvi.optim.schedules import Constant


@pytest.mark.parametrize("family", [MeanFieldNormal(), FactorNormal(2)], ids=["mean", "factor"])
@pytest.mark.parametrize("radius", [0.05, 10.0])
def test_reported_length_is_the_fisher_norm_of_the_move(family, radius):
    d = 12
    params = family.init(torch.zeros(d), 1.0)
    rule = NaturalGradientRule(
        family, trust_radius=radius, noise_radius=1e9, schedule=Constant(0.05), momentum=0.9
    )
    state = rule.init(params)
    g = torch.Generator().manual_seed(0)
    for _ in range(15):
        # gradients of the location alone leave the shape, hence the frame, as it is
        grads = {k: torch.zeros_like(v) for k, v in params.items()}
        grads["loc"] = torch.randn(d, generator=g)
        _, state, report = rule.update(params, grads, state)
        move = {k: torch.zeros_like(v) for k, v in params.items()} | {"loc": state["move"]["loc"]}
        norm = family.fisher_norm(params, move)
        torch.testing.assert_close(report.step_norm, norm, rtol=1e-6, atol=1e-9)
        assert float(norm) <= radius * (1 + 1e-6)


D = 12
FAMILIES = {
    "mean field": MeanFieldNormal(),
    "full rank": FullRankNormal(),
    "factor": FactorNormal(2),
    "factor precision": FactorPrecisionNormal(2),
    "matrix normal": MatrixNormal(3, 4),
    "gamma": MeanFieldGamma(),
    "dirichlet": MeanFieldDirichlet(4),
}
families = pytest.mark.parametrize("kind", FAMILIES)


def members(family, count):
    g = torch.Generator().manual_seed(1)
    for _ in range(count):
        params = family.init(torch.zeros(D), 0.7)
        for name, v in params.items():
            noise = 0.3 * torch.randn(v.shape, generator=g)
            params[name] = v + (noise.tril() if "tril" in name else noise)
        yield params


@families
def test_what_momentum_acts_on_has_one_fisher_matrix_for_every_q(kind):
    """A move of an earlier step keeps its length, and makes no part of a move of the rest."""
    family = FAMILIES[kind]
    products = []
    for params in members(family, 2):
        u = {k: torch.zeros_like(v) for k, v in params.items()}
        for name in family.location:
            u[name] = torch.linspace(-1.0, 2.0, u[name].numel()).reshape(u[name].shape)
        products.append(family.fisher_product(params, u))
    for name, value in products[0].items():
        torch.testing.assert_close(value, products[1][name])
        assert name in family.location or not value.any()


@families
def test_momentum_stays_within_the_radius_while_the_shape_changes(kind):
    """KL is about R^2 / 2 at a step, whatever the gradients; R grows while they agree."""
    family, radius = FAMILIES[kind], 0.1
    rule = NaturalGradientRule(
        family, trust_radius=radius, noise_radius=1e9, schedule=Constant(0.5), momentum=0.9
    )
    (params,) = members(family, 1)
    state, g = rule.init(params), torch.Generator().manual_seed(0)
    for _ in range(60):
        # gradients of a function of z: what noise leaves where q has no density to fit
        score = family.score(params, family.draw(params, torch.Size((4,))))
        weight = 10.0 * torch.randn(4, generator=g)
        grads = {k: torch.tensordot(weight, v, 1) for k, v in score.items()}
        before = params
        params, state, report = rule.update(params, grads, state)
        reached = radius * float(state["reach"].max())
        assert float(report.step_norm) <= reached * (1 + 1e-6)
        assert float(family.kl(params, before)) < reached**2


def test_an_estimate_that_changes_does_not_hide_a_past_move():
    """The same past move under 1/100 of the Fisher matrix, and under 100 times it."""
    frame, factor = Coordinates(("x",)), [1.0]
    geometry: Any = EstimatedGeometry(frame, lambda g: g / factor[0])
    rule = NaturalGradientRule(
        geometry,
        trust_radius=1e9,
        noise_radius=1e9,
        outlier=1e9,
        schedule=Constant(0.1),
        momentum=0.9,
    )
    params = {"x": torch.zeros(3)}
    _, state, _ = rule.update(params, {"x": torch.tensor([3.0, 0.0, 0.0])}, rule.init(params))
    factor[0] = 100.0
    gradient = {"x": torch.tensor([-25.0, 0.0, 0.0])}
    new, _, report = rule.update(params, gradient, state)
    # along one line the length is known: |F^1/2 move|
    torch.testing.assert_close(report.step_norm, 10.0 * new["x"].abs().max())


def nested(y):
    mean: Any = pyro.sample("mean", dist.Normal(0.0, 3.0))
    with pyro.plate("groups", 3):
        group: Any = pyro.sample("group", dist.Normal(mean, 1.0))
        with pyro.plate("data", 4):
            pyro.sample("y", dist.Normal(group, 0.5), obs=y)


@pytest.mark.slow
def test_factor_guide_stays_where_it_has_arrived():
    """A posterior whose sds and correlations the factors have to find, with all defaults.

    Which run goes astray for a while is a matter of the last digit, so of the machine: of 80 runs
    (seeds 1 to 40, float32 and float64) one did, for 200 steps. Two of six have a probability of 0.2 %.
    """
    g = torch.Generator().manual_seed(0)
    y = torch.tensor([1.0, 2.0, 3.0]) + 0.5 * torch.randn(4, 3, generator=g)
    # log N(y; 0, 9 + 1 within a group + 0.25 on the diagonal)
    same = torch.eye(3).repeat_interleave(4, 0)
    covariance = 9.0 + same @ same.T + 0.25 * torch.eye(12)
    flat = dist.MultivariateNormal(torch.zeros(12), covariance)
    log_z = float(flat.log_prob(y.T.reshape(-1)))
    excess = []
    for seed in range(1, 7):
        pyro.set_rng_seed(seed)
        guide = ngvi.AutoFactorNormal(nested, rank=2)
        svi = SVI(nested, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
        losses = torch.tensor([svi.step(y) for _ in range(300)])
        # near the posterior log p - log q is a constant, and so is the estimate by eight draws
        excess.append([losses[150:].median() + log_z, losses[-30:].median() + log_z])
    whole, end = torch.tensor(excess).T
    assert (whole > 0.5).sum() <= 1
    assert end.max() < 0.5
