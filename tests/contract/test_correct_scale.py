"""One posterior, however the data come: whole, subsampled by a plate, as minibatches, or scaled.

The sharp test is exact: at the same noise, the gradients of the minibatches of a partition average to
the gradient of all data. The other one trains to the closed-form posterior.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_ngvi as ngvi
from tests import registry
from tests.contract.same_noise import gradients
from tests.registry import some

pytestmark = pytest.mark.usefixtures("plain_start")

N, M, D = 48, 8, 2
NOISE = 0.5
Step = tuple[Any, tuple[Any, ...]]  # a model and its arguments
Way = Callable[[Tensor], Step]  # from the indices of a minibatch


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(N, D, generator=generator, dtype=torch.float64)
    noise = torch.randn(N, generator=generator, dtype=torch.float64)
    return X, X[:, 0] - 0.5 * X[:, 1] + 0.3 + NOISE * noise


X, Y = data()


def mean_of(x: Tensor) -> Tensor:
    """The regression line, with the sites of ``bayesianize(nn.Linear(D, 1))``."""
    weight = pyro.sample("weight", dist.Normal(torch.zeros(1, D), 1.0).to_event(2))
    bias = pyro.sample("bias", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    # vectorised particles give both a batch shape (S, 1) in front
    return (weight.squeeze(-2) * x).sum(-1) + bias.squeeze(-1)


def observe(mean: Tensor, y: Tensor) -> None:
    pyro.sample("y", dist.Normal(mean, NOISE), obs=y)


def whole_data(x: Tensor, y: Tensor) -> None:
    mean = mean_of(x)
    with pyro.plate("data", len(y)):
        observe(mean, y)


def subsampling_plate(x: Tensor, y: Tensor) -> None:
    mean = mean_of(x)
    index: Any
    with pyro.plate("data", N, subsample_size=M) as index:
        observe(mean[..., index], y[index])


def plate_of_given_minibatch(x: Tensor, y: Tensor, index: Tensor) -> None:
    mean = mean_of(x[index])
    with pyro.plate("data", N, subsample=index):
        observe(mean, y[index])


def scaled(x: Tensor, y: Tensor) -> None:
    mean = mean_of(x)
    with pyro.plate("data", len(y)), poutine.scale(scale=N / len(y)):
        observe(mean, y)


linear = nn.Linear(D, 1, dtype=torch.float64)
network = ngvi.nn.bayesianize(linear, "normal", num_data=N, noise=NOISE)

GIVEN: dict[str, Way] = {
    "plate with subsample": lambda index: (plate_of_given_minibatch, (X, Y, index)),
    "poutine.scale": lambda index: (scaled, (X[index], Y[index])),
    "bayesianize": lambda index: (network, (X[index], Y[index])),
}
LOSSES = some(registry.LOSSES, "Trace", "Trace vectorised", "Batched")
GUIDES = some(registry.GUIDES, "full rank", "mean field")


def at_noise(elbo: Any, step: Step, guide: Any) -> dict[str, Tensor]:
    """The gradients by parameter and the loss, with the noise of one seed."""
    model, args = step
    for _ in range(2):  # a loss may look at the pair of model and guide at its first call
        torch.manual_seed(11)
        loss, grads = gradients(elbo, model, guide, args)
    return {**grads, "loss": loss}


def assert_average(parts: list[dict[str, Tensor]], weights: list[float], guide: Any, elbo: Any):
    expected = at_noise(elbo, (whole_data, (X, Y)), guide)
    assert len(expected) == 3  # loc, a scale, and the loss
    for name, value in expected.items():
        average = sum(w * part[name] for w, part in zip(weights, parts, strict=True))
        scale = 1.0 + value.abs().max().item()
        torch.testing.assert_close(average, value, rtol=1e-10, atol=1e-10 * scale)


@pytest.fixture(params=GUIDES)
def guide(request: pytest.FixtureRequest) -> Any:
    guide = GUIDES[request.param](whole_data, init_scale=0.3)
    guide(X, Y)
    return guide


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("way", GIVEN)
@pytest.mark.parametrize("sizes", [[M] * (N // M), [20, 20, 8]], ids=["equal", "smaller last"])
def test_gradients_of_a_partition_average_to_that_of_all_data(
    guide: Any, loss: str, way: str, sizes: list[int]
) -> None:
    """The prior counts once in each minibatch, so the weights are the shares of the data."""
    parts = torch.randperm(N).split(sizes)
    elbo = LOSSES[loss](3)
    found = [at_noise(elbo, GIVEN[way](index), guide) for index in parts]
    assert_average(found, [len(index) / N for index in parts], guide, elbo)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_a_subsampling_plate_average_to_that_of_all_data(
    guide: Any, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, with the plate itself drawing one part of the partition after the other."""
    order, elbo, found = torch.randperm(N), LOSSES[loss](3), []
    for i in range(N // M):
        monkeypatch.setattr(torch, "randperm", lambda *_, i=i, **__: order.roll(-i * M))
        found.append(at_noise(elbo, (subsampling_plate, (X, Y)), guide))
    monkeypatch.undo()
    assert_average(found, [M / N] * len(found), guide, elbo)


def test_forgotten_scale_is_seen(guide: Any) -> None:
    parts, elbo = torch.randperm(N).split(M), ngvi.BatchedELBO(3)
    found = [at_noise(elbo, (whole_data, (X[index], Y[index])), guide) for index in parts]
    with pytest.raises(AssertionError):
        assert_average(found, [M / N] * len(found), guide, elbo)


def exact_posterior() -> tuple[Tensor, Tensor]:
    """Mean and covariance of (weight, bias)."""
    F = torch.cat([X, torch.ones(N, 1)], dim=1)
    covariance = torch.linalg.inv(F.mT @ F / NOISE**2 + torch.eye(D + 1))
    return covariance @ F.mT @ Y / NOISE**2, covariance


def minibatches() -> Any:
    """Endlessly the indices of minibatches, the last of an epoch smaller."""
    while True:
        yield from torch.randperm(N).split([20, 20, 8])


def steps_of(way: str) -> Any:
    """Endlessly a model and its arguments."""
    if way == "whole":
        yield from itertools.repeat((whole_data, (X, Y)))
    if way == "plate with subsample_size":
        yield from itertools.repeat((subsampling_plate, (X, Y)))
    if way == "DataLoader":
        batches: Any = DataLoader(TensorDataset(X, Y), batch_size=20, shuffle=True)
        while True:
            yield from ((network, tuple(batch)) for batch in batches)
    yield from (GIVEN[way](index) for index in minibatches())


def fitted(way: str, loss: str, seed: int, steps: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance after that many steps of NGVB."""
    pyro.set_rng_seed(seed)
    guide = ngvi.AutoFullRankNormal(whole_data)
    guide(X, Y)
    optim, elbo = ngvi.NGVB(guide, averaging=True), LOSSES[loss](3)
    svis: dict[Any, SVI] = {}
    for model, args in itertools.islice(steps_of(way), steps):
        svi = svis.setdefault(model, SVI(model, guide, optim, loss=elbo))
        svi.step(*args)
    params = {name: p.detach() for name, p in guide.natural_params().items()}
    return guide.family.mean(params), guide.family.covariance(params)


def test_all_data_give_the_closed_form() -> None:
    """No noise is left at the optimum, so that 200 steps come within 1e-3 posterior sds."""
    mean, covariance = fitted("whole", "Batched", 0, 200)
    expected_mean, expected = exact_posterior()
    whiten = torch.linalg.inv(torch.linalg.cholesky(expected))
    error = whiten @ (mean - expected_mean)
    torch.testing.assert_close(error, torch.zeros(D + 1), rtol=0.0, atol=1e-3)
    ratio = whiten @ covariance @ whiten.mT
    torch.testing.assert_close(ratio, torch.eye(D + 1), rtol=0.0, atol=1e-3)


@pytest.mark.parametrize("loss", LOSSES)
def test_given_minibatches_give_the_same_run_whatever_the_idiom(loss: str) -> None:
    runs = [fitted(way, loss, 0, 20) for way in GIVEN]
    for run in runs[1:]:
        torch.testing.assert_close(run, runs[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "loss", ["Batched", pytest.param("Trace vectorised", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("way", ["plate with subsample_size", "DataLoader"])
def test_minibatches_give_the_closed_form(way: str, loss: str) -> None:
    """Means (in posterior sds) and log sds over 6 runs, within 4.5 standard errors of the truth.

    The standard errors are those of the 6 runs, pooled over the 3 coordinates (15 degrees of freedom,
    so that 1 run in 2,000 would be further off by chance).
    """
    expected_mean, expected = exact_posterior()
    fits = [fitted(way, loss, seed, 60) for seed in range(6)]
    sd = expected.diagonal().sqrt()
    errors = {
        "mean": torch.stack([(mean - expected_mean) / sd for mean, _ in fits]),
        "log sd": torch.stack([(c.diagonal() / sd.square()).log() / 2 for _, c in fits]),
    }
    for name, error in errors.items():
        standard_error = (error.var(0).mean() / len(fits)).sqrt()
        if name == "log sd":  # a forgotten scale makes it larger by log(48 / 20) / 2 = 0.44 or more
            assert standard_error < 0.44 / (2 * 4.5), "too noisy to see a wrong scale"
        worst = (error.mean(0) / standard_error).abs().max().item()
        assert worst < 4.5, f"{name}: {worst:.1f} standard errors of {standard_error:.4f} away"
