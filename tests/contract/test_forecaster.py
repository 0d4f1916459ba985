"""Pyro's Forecaster, with vectorised particles, trains our guides by our optimizers."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.forecast import Forecaster, ForecastingModel
from pyro.infer.autoguide import AutoNormal
from pyro.infer.reparam import LocScaleReparam
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* leaves what is not natural:UserWarning"),
    pytest.mark.usefixtures("series", "plain_start"),
]
T, AHEAD = 20, 5


class Regression(ForecastingModel):
    """No latent site is in the time plate, so Pyro gives the particles the dimension of time."""

    def trend(self, zero_data: Tensor) -> Tensor:
        return zero_data

    def model(self, zero_data: Tensor, covariates: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        trend = self.trend(zero_data)
        noise = pyro.sample("noise", dist.LogNormal(-torch.ones(1), 1.0).to_event(1))
        self.predict(dist.Normal(0.0, noise), trend + (w * covariates).sum(-1, keepdim=True))


class LocalLevel(Regression):
    def trend(self, zero_data: Tensor) -> Tensor:
        scale = pyro.sample("scale", dist.LogNormal(-3.0 * torch.ones(1), 1.0).to_event(1))
        with poutine.reparam(config={"drift": LocScaleReparam()}), self.time_plate:
            drift = pyro.sample("drift", dist.Normal(zero_data, scale).to_event(1))
        return drift.cumsum(-2)


@pytest.fixture
def series() -> tuple[Tensor, Tensor]:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    covariates = torch.randn(T + AHEAD, 2)
    data = covariates[:T] @ torch.tensor([[1.0], [-2.0]]) + 0.1 * torch.randn(T, 1)
    return data, covariates


def fitted(model: Any, guide: Any, optim: Any, series: Any, steps: int = 60, **how: Any) -> Any:
    data, covariates = series
    return Forecaster(
        model, data, covariates[:T], guide=guide, optim=optim, num_steps=steps, log_every=0, **how
    )


@pytest.mark.parametrize("kind", [ngvi.AutoMeanFieldNormal, ngvi.AutoFullRankNormal])
@pytest.mark.parametrize("optimizer", [ngvi.NGVB, ngvi.IFVB])
def test_eight_particles(kind: Any, optimizer: Any, series: Any) -> None:
    """The forecast has the shape that Pyro's guide gives: a one for the plate of time."""
    model = LocalLevel()
    guide = kind(model)
    forecaster = fitted(model, guide, optimizer(guide), series, num_particles=8)
    pyros = AutoNormal(model)
    adam = Adam({"lr": 0.01})
    expected = fitted(model, pyros, adam, series, steps=1, num_particles=8)
    forecast = forecaster(*series, 200)
    assert forecast.shape == expected(*series, 200).shape == (200, 1, AHEAD, 1)
    truth = series[1][T:] @ torch.tensor([[1.0], [-2.0]])
    assert (forecast.mean(0)[0] - truth).abs().max() < 1.0  # the data's standard deviation is 2.2


def test_particles_in_the_dimension_of_time(series: Any) -> None:
    """Pyro's guides fail here too; what the error advises works."""
    model = Regression()
    guide = ngvi.AutoFullRankNormal(model)
    with pytest.raises(ValueError, match=r"'noise'.*vectorize_particles=False") as error:
        fitted(model, guide, ngvi.NGVB(guide), series, num_particles=8)
    assert len(str(error.value).splitlines()[0]) <= 240
    optim = ngvi.NGVB(guide)
    forecaster = fitted(model, guide, optim, series, num_particles=8, vectorize_particles=False)
    found = guide.median()["w"]
    assert (found - torch.tensor([1.0, -2.0])).abs().max() < 0.15  # standard error 0.1 / sqrt(20)
    assert forecaster(*series, 10).shape == (10, AHEAD, 1)
