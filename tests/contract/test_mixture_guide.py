"""AutoMixtureNormal as a guide: starts, saving, minibatches, what is refused, and modes that stay."""

from __future__ import annotations

import copy
import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

import pyro_ngvi as ngvi
from tests.contract.registry import data, regression


def two_moons() -> None:
    """Two bent modes of the same mass (Rezende & Mohamed 2015)."""
    prior: Any = dist.Normal(torch.zeros(2), 3.0).to_event(1)
    z = pyro.sample("z", prior)
    ring = ((z.norm() - 2.0) / 0.4).square()
    sides = torch.stack([z[0] - 2.0, z[0] + 2.0]).div(0.6).square()
    pyro.factor("moons", (-0.5 * sides).logsumexp(0) - 0.5 * ring - prior.log_prob(z))


def trained(model: Any, steps: int, *args: Any, **how: Any) -> tuple[Any, Any]:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = ngvi.AutoMixtureNormal(model, **how)
    svi: Any = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4))
    for _ in range(steps):
        svi.step(*args)
    return guide, svi


@pytest.mark.parametrize(("covariance", "search"), [("full", True), ("diagonal", False)])
def test_both_modes_are_alive_after_a_thousand_steps(covariance: str, search: bool) -> None:
    """The share of one of two equal modes, by 4,000 draws, has a standard error of 0.008.

    Without a search all eight components start in a cloud around the centre, between the modes.
    """
    how: dict[str, Any] = {} if search else {"init": None, "init_scale": 2.0}
    guide, _ = trained(two_moons, 1000, num_components=8, covariance=covariance, **how)
    z = guide.get_posterior().sample((4000,))
    assert 0.4 < (z[:, 0] > 0).double().mean() < 0.6
    assert (guide.weights > 1e-3).sum() >= 6
    grid = torch.linspace(-5.0, 5.0, 401)
    density = ngvi.diagnostics.ModelDensity(two_moons)
    points = torch.cartesian_prod(grid, grid)
    evidence = density(points).logsumexp(0) + 2.0 * math.log(10.0 / 400)
    ratio = density(z) - guide.get_posterior().log_prob(z)
    # one Gaussian lacks 0.93 nats, one in each mode 0.18
    assert evidence - ratio.mean() < 0.04 + 4.0 * ratio.std() / 4000**0.5


@pytest.mark.parametrize("seed", [0, 3])
def test_a_path_that_ends_on_a_slope_is_no_mode(seed: int) -> None:
    """Newton steps from the centre end at the saddle between two labels."""
    g = torch.Generator().manual_seed(seed)
    y = torch.cat([torch.randn(30, generator=g) - 2.0, torch.randn(15, generator=g) + 2.0])

    def model() -> None:
        loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 5.0).to_event(1))
        terms = dist.Normal(loc, 1.0).log_prob(y.unsqueeze(-1)) - math.log(2.0)
        pyro.factor("y", terms.logsumexp(-1).sum())

    guide, _ = trained(model, 60, num_components=2)
    torch.testing.assert_close(guide.weights, torch.full((2,), 0.5), rtol=0.0, atol=0.02)
    grid = torch.linspace(-6.0, 6.0, 601)
    density = ngvi.diagnostics.ModelDensity(model)
    evidence = density(torch.cartesian_prod(grid, grid)).logsumexp(0) + 2.0 * math.log(0.02)
    found = ngvi.khat(model, guide, seed=0, num_samples=2000)
    assert abs(found.elbo - float(evidence)) < 0.05 + 4.0 * found.elbo_error


def test_a_run_goes_on_where_it_was_saved() -> None:
    """Bit for bit, from parameters, state and random state."""
    steps = 130
    whole, _ = trained(two_moons, 2 * steps, num_components=3, init=None)
    _, svi = trained(two_moons, steps, num_components=3, init=None)
    saved = svi.guide.state_dict(), svi.optim.get_state(), torch.get_rng_state()
    pyro.clear_param_store()
    guide = ngvi.AutoMixtureNormal(two_moons, 3, init=None)
    optim = ngvi.NGVB(guide)
    again: Any = SVI(two_moons, guide, optim, ngvi.BatchedELBO(4))
    guide()
    guide.load_state_dict(saved[0])
    optim.set_state(saved[1])
    again.loss(two_moons, guide)  # the checks of the first call draw in a state of their own
    torch.set_rng_state(saved[2])
    for _ in range(steps):
        again.step()
    for name, p in whole.natural_params().items():
        assert torch.equal(p, guide.natural_params()[name]), name


def test_copies_draw_as_the_original() -> None:
    guide, _ = trained(two_moons, 20, num_components=3)
    other = copy.deepcopy(guide)
    draws = []
    for g in (guide, other):
        torch.manual_seed(1)
        draws.append(g()["z"])
    assert torch.equal(*draws)
    assert torch.equal(guide.weights, other.weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_minibatches_start_at_points_apart_and_learn(dtype: torch.dtype) -> None:
    """The posterior is one Gaussian; without a search, components come from the prior."""
    X, y = data(dtype)
    guide, svi = trained(regression, 400, X, y, 3, num_components=2)
    assert guide.start_report is None
    precision = torch.eye(3, dtype=dtype) + X.mT @ X
    exact = torch.linalg.solve(precision, X.mT @ y)
    sd = torch.linalg.inv(precision).diagonal().sqrt()
    assert ((guide.get_posterior().mean - exact).abs() < sd).all()
    assert guide.loc.dtype == dtype and svi.optim.report().skipped == 0


def test_the_answer_goes_where_those_of_other_guides_go() -> None:
    guide, svi = trained(two_moons, 300, num_components=6)
    stop = ngvi.StopRule(svi, max_steps=100)
    while not stop(svi.step()):
        pass
    assert ngvi.khat(two_moons, guide).khat < 0.7
    idata = ngvi.to_arviz(two_moons, guide, num_samples=500)
    assert idata.posterior["z"].shape == (1, 500, 2)
    low, middle, high = guide.quantiles([0.05, 0.5, 0.95])["z"][:, 0]
    assert low < -1.5 < middle < 1.5 < high
    with pytest.raises(NotImplementedError, match="AutoMixtureNormal does not map"):
        ngvi.neutra(two_moons, guide)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"num_components": 0}, "num_components must be a whole number from 1, got 0"),
        ({"num_components": 2.5}, "num_components must be a whole number from 1, got 2.5"),
        ({"num_components": 2, "covariance": "low"}, "covariance must be 'full' or 'diagonal'"),
    ],
)
def test_arguments_out_of_range(how: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ngvi.AutoMixtureNormal(two_moons, **how)


def test_natural_coordinates_are_refused() -> None:
    with pytest.raises(ValueError, match="coordinates='natural' is not available"):
        ngvi.NGVB(ngvi.AutoMixtureNormal(two_moons, 2), coordinates="natural")
