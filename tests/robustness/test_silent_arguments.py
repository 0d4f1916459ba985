"""Arguments that would give another answer without a word, each refused where it is given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn

import pyro_ngvi as ngvi

N = 10
X = torch.linspace(-1.0, 1.0, 2 * N, dtype=torch.float64).view(N, 2).sin()
Y = torch.arange(N, dtype=torch.float64) % 3.0


def line() -> None:
    pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))


#: as arguments of the wrong kind
LINE: Any = line


def matrix(*shape: int) -> Callable[[], Any]:
    return lambda: pyro.sample("W", dist.Normal(torch.zeros(shape), 1.0).to_event(2))


def counts(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Poisson(torch.exp(X @ w)), obs=y)


def fitted_sites() -> Any:
    guide = ngvi.AutoSites(counts)
    svi = SVI(counts, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    svi.step(X, Y)
    return guide


def called_guide() -> Any:
    guide = ngvi.AutoMeanFieldNormal(line)
    guide()
    return guide


def process(**how: Any) -> Any:
    return ngvi.distributions.GaussianProcess(lambda a, b: torch.eye(len(a)), X, **how)


def chain(**how: Any) -> Any:
    parts: dict[str, Any] = {
        "initial_loc": torch.zeros(1),
        "initial_covariance": torch.eye(1),
        "transition": torch.ones(1, 1, 1),
        "noise_covariance": torch.eye(1),
    }
    return ngvi.distributions.GaussianStateSpace(**(parts | how))


def network(num_data: Any) -> Any:
    return ngvi.nn.bayesianize(nn.Linear(2, 1), "bernoulli", num_data=num_data)


def predicted(batch: Any) -> Any:
    model = ngvi.nn.bayesianize(nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), "normal", num_data=N)
    guide = ngvi.AutoMeanFieldNormal(model)
    guide(X, Y)
    return ngvi.nn.predict(model, guide, [batch], num_samples=2)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "examples, a fraction": (lambda: network(8.7), "num_data must be the number of training"),
    "examples, none": (lambda: network(None), "num_data must be .*got None"),
    "examples, zero": (lambda: network(0), "num_data must be .*got 0"),
    "examples, true": (lambda: network(True), "num_data must be .*got True"),
    "batches of three": (lambda: predicted((X, Y, Y)), "must be a tensor x or a pair"),
    "sites in a string": (
        lambda: ngvi.AutoWalshHadamard(matrix(4, 4), "W"),
        "sites must be a list of names, got 'W'",
    ),
    "sd of g": (
        lambda: ngvi.AutoWalshHadamard(matrix(4, 4), g_scale=-1.0),
        "g_scale must be a pos",
    ),
    "negative number": (lambda: fitted_sites().remove([-1]), "by numbers from 0 to 9"),
    "one truth": (lambda: fitted_sites().remove(True), "by numbers from 0 to 9"),
    "short mask": (lambda: fitted_sites().reset([True, False]), r"a mask of shape \(10,\)"),
    "levels in percent": (
        lambda: called_guide().quantiles([5, 95]),
        "levels from 0 to 1.* 5 to 95",
    ),
    "levels of sites": (lambda: fitted_sites().quantiles(1.5), "levels from 0 to 1.* 1.5 to 1.5"),
    "fewer than none": (lambda: fitted_sites().influence().most(-1), "count must not be negative"),
    "negative jitter": (lambda: process(jitter=-0.1), "jitter is -0.1"),
    "learned jitter": (lambda: process(jitter=torch.ones(())), "jitter is tensor"),
    "no layers": (lambda: ngvi.AutoCouplingFlow(line, layers=0), "layers must be at least 1"),
    "no width": (lambda: ngvi.AutoCouplingFlow(line, hidden=(0,)), "hidden must have widths"),
    "one bin": (lambda: ngvi.AutoCouplingFlow(line, kind="spline", bins=1), "bins must be"),
    "affine": (lambda: ngvi.AutoCouplingFlow(line, affine="lower"), "affine must be .*got 'lower'"),
    "swapped": (
        lambda: ngvi.nn.local_reparameterization(AutoNormal(line), LINE),
        "reads q.g. from an autoguide, and got AutoNormal, function",
    ),
    "neutra, swapped": (lambda: ngvi.neutra(AutoNormal(line), LINE), "one flat latent vector"),
    "sd of weights": (
        lambda: ngvi.nn.WalshHadamardLinear(2, 2, weight_sd=0.0),
        "weight_sd must be positive",
    ),
    "no inputs": (lambda: ngvi.nn.WalshHadamardLinear(0, 2), "in_features must be at least 1"),
    "no features": (
        lambda: ngvi.nn.RandomFourierFeatures(2, 0),
        "num_features must be at least 1",
    ),
    "steps of two lengths": (lambda: chain(num_steps=6), "transition is for 2 states"),
}


@pytest.mark.parametrize("name", CASES)
def test_is_refused(name: str) -> None:
    call, words = CASES[name]
    with pytest.raises((ValueError, TypeError), match=words):
        call()


def test_bytes_are_numbers() -> None:
    guide = fitted_sites()
    guide.reset(torch.tensor([1, 2], dtype=torch.uint8))
    moved = guide.sites()["y"].precision.flatten() != 0
    assert moved.tolist() == [i not in (1, 2) for i in range(N)]


def test_diagonals_of_another_model_in_the_store() -> None:
    how: dict[str, Any] = {"W": ngvi.nn.WalshHadamardReparam()}
    for shape, refused in (((4, 8), False), ((4, 4), True)):
        model = pyro.poutine.reparam(matrix(*shape), how)
        if not refused:
            model()
            continue
        with pytest.raises(ValueError, match="holds diagonals of another model for the site 'W'"):
            model()


def test_a_copy_made_before_the_first_call() -> None:
    copied = copy.deepcopy(ngvi.AutoFullRankNormal(line))
    with pytest.raises(RuntimeError, match="is a copy made before its original was called"):
        Predictive(line, guide=copied, num_samples=2)()
