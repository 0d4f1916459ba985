"""CVI far from the prior, and structure that a glance at the largest numbers would miss."""

from itertools import pairwise
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

import pyro_ngvi as ngvi
from tests.exact.site_cases import seeded


def fit(model: Any, *data: Tensor, sweeps: int = 15) -> tuple[Any, list[Any]]:
    guide = ngvi.AutoSites(model)
    svi = SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    return guide, [svi.step(*data) for _ in range(sweeps)]


def counts(intercept: float) -> tuple[Tensor, Tensor]:
    generator = seeded(3)
    X = torch.cat([torch.ones(80, 1), torch.randn(80, 2, generator=generator)], 1)
    rate = torch.exp(X @ torch.tensor([intercept, 0.5, -0.5]))
    return X, torch.poisson(rate, generator=generator)


def poisson(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(torch.exp(X @ w)), obs=y)


@pytest.mark.parametrize("intercept", [0.0, 4.0, 7.0, 10.0])
def test_counts_far_from_the_prior_take_a_few_sweeps(intercept):
    """Stationary: the gradient of E log p - KL in mean and covariance, E exp f in closed form."""
    X, y = counts(intercept)
    guide, losses = fit(poisson, X, y)
    q = guide.get_posterior()
    rate = torch.exp(X @ q.mean + 0.5 * (X @ q.covariance_matrix * X).sum(-1))
    slope = X.mT @ (y - rate) - q.mean
    curvature = torch.eye(3) + X.mT @ (rate.unsqueeze(-1) * X)
    sd = q.variance.sqrt()
    assert (slope * sd).abs().max() < 1e-5
    product = q.covariance_matrix @ curvature
    assert (product - torch.eye(3)).abs().max() < 1e-5
    assert all(later <= earlier + 1e-6 for earlier, later in pairwise(losses))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_part_of_the_predictor_is_not_taken_for_all_of_it(dtype):
    """Here some terms are 1e6 times as large as those that the treatment changes."""
    generator = seeded(5)
    x = -20.0 * torch.rand(80, generator=generator, dtype=torch.float64).to(dtype)
    treated = (torch.rand(80, generator=generator) < 0.5).to(dtype)
    y = torch.poisson(torch.exp(1.0 + 0.05 * x + 1.5 * treated), generator=generator)

    def model(x: Tensor, treated: Tensor, y: Tensor) -> None:
        zero = torch.zeros((), dtype=dtype)
        a, b, g = (pyro.sample(name, dist.Normal(zero, 1.0)) for name in "abg")
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(torch.exp(a + b * x + g * treated)), obs=y)

    guide, _ = fit(model, x, treated, y)
    sd = guide.quantiles([0.5, 0.84134474606854])["g"].diff(dim=0)[0]
    assert guide.median()["g"].dtype == dtype
    assert sd < 0.3  # at its prior it would be 1
    assert (guide.median()["g"] - 1.5).abs() < 4 * sd


def test_double_data_under_single_defaults():
    torch.set_default_dtype(torch.float32)
    try:
        X, y = (t.double() for t in counts(1.0))

        def model(X: Tensor, y: Tensor) -> None:
            w = pyro.sample("w", dist.Normal(X.new_zeros(3), 1.0).to_event(1))
            with pyro.plate("data", len(y)):
                pyro.sample("y", dist.Poisson(torch.exp(X @ w)), obs=y)

        guide, losses = fit(model, X, y)
    finally:
        torch.set_default_dtype(torch.float64)
    _, reference = fit(poisson, X, y)
    assert guide.median()["w"].dtype == torch.float64
    assert losses[-1] == pytest.approx(reference[-1], abs=1e-9)


def test_one_number_that_all_data_share():
    y = torch.tensor([3.0, 5.0, 4.0, 2.0])

    def alone(y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(b.exp()), obs=y)

    def expanded(y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(b.expand(4).exp()), obs=y)

    one, losses = fit(alone, y)
    other, same = fit(expanded, y)
    assert losses == pytest.approx(same, abs=1e-10)
    assert one.median()["b"].item() == pytest.approx(other.median()["b"].item(), abs=1e-12)


def test_a_look_at_other_data_leaves_q_alone():
    X, y = counts(1.0)
    guide, _ = fit(poisson, X, y)
    before = guide.median()["w"]
    guide.loo(X + 1.0, y)
    guide.influence(2.0 * X, y)
    assert torch.equal(guide.median()["w"], before)


def test_a_parameter_store_loaded_before_the_first_call_is_q(tmp_path):
    X, y = counts(1.0)
    pyro.clear_param_store()
    guide = ngvi.AutoSites(poisson, name="restored")
    svi = SVI(poisson, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    for _ in range(10):
        loss = svi.step(X, y)
    mean = guide.median()["w"]
    pyro.get_param_store().save(tmp_path / "store")
    pyro.clear_param_store()
    pyro.get_param_store().load(tmp_path / "store")
    again = ngvi.AutoSites(poisson, name="restored")
    again(X, y)
    assert torch.allclose(again.median(X, y)["w"], mean, atol=1e-10, rtol=0)
    assert ngvi.SitesELBO().loss(poisson, again, X, y) == pytest.approx(loss, abs=1e-6)
