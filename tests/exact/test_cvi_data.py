"""CVI where data are masked, weighted, missing, or the same model is written in another way."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from tests.exact.site_cases import N, binary, covariates, fit, normal_weights, same_q

X = covariates
D = 3


def plain(X: Tensor, y: Tensor) -> None:
    w = normal_weights(D)
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def by_event(X: Tensor, y: Tensor) -> None:
    pyro.sample("y", dist.Bernoulli(logits=X @ normal_weights(D)).to_event(1), obs=y)


def no_plate(X: Tensor, y: Tensor) -> None:
    with pyro.plate("weights", D):
        w: Any = pyro.sample("w", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def named(X: Tensor, y: Tensor) -> None:
    f: Any = pyro.deterministic("f", X @ normal_weights(D))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(probs=f.sigmoid()), obs=y)


def in_two_plates(X: Tensor, y: Tensor) -> None:
    w = normal_weights(D)
    with pyro.plate("rows", 4, dim=-2), pyro.plate("columns", len(X) // 4, dim=-1):
        logits = (X.reshape(4, -1, D) * w).sum(-1)
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y.reshape(4, -1))


def in_a_loop(X: Tensor, y: Tensor) -> None:
    w = normal_weights(D)
    for i in pyro.plate("halves", 2):
        half = slice(i, None, 2)
        pyro.sample(f"y{i}", dist.Bernoulli(logits=X[half] @ w).to_event(1), obs=y[half])


def dotted(X: Tensor, y: Tensor) -> None:
    w = normal_weights(D)
    with pyro.plate("data", len(X)):
        pyro.sample("part.y", dist.Bernoulli(logits=X @ w), obs=y)


def masked(X: Tensor, y: Tensor) -> None:
    """Twice the data, half of them masked, with labels that would change everything."""
    keep: Any = torch.arange(2 * len(X)) % 2 == 0
    w = normal_weights(D)
    with pyro.plate("data", 2 * len(X)), poutine.mask(mask=keep):
        logits, labels = X.repeat_interleave(2, 0) @ w, y.repeat_interleave(2)
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=torch.where(keep, labels, 1.0))


@pytest.mark.parametrize(
    "model",
    [by_event, no_plate, named, in_two_plates, in_a_loop, dotted, masked],
    ids=lambda m: m.__name__,
)
def test_other_ways_to_write_it(model: Any) -> None:
    runs = [fit(m, X(), binary(), sweeps=10) for m in (model, plain)]
    same_q(runs[0], runs[1], 1e-9)
    assert abs(runs[0].losses[-1] - runs[1].losses[-1]) < 1e-9


def test_scale_on_an_observed_site_is_that_many_data() -> None:
    def scaled(X: Tensor, y: Tensor) -> None:
        w = normal_weights(D)
        with pyro.plate("data", len(X)), poutine.scale(scale=3.0):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    thrice = X().repeat(3, 1), binary().repeat(3)
    runs = fit(scaled, X(), binary()), fit(plain, *thrice)
    same_q(runs[0], runs[1], 1e-9)
    assert abs(runs[0].losses[-1] - runs[1].losses[-1]) < 1e-9


@pytest.mark.parametrize("likelihood", ["normal", "student", "event"])
def test_missing_data_are_left_out(likelihood: str) -> None:
    def model(X: Tensor, y: Tensor) -> None:
        w = normal_weights(D)
        with pyro.plate("data", len(X)):
            if likelihood == "event":
                fn = dist.MultivariateNormal(torch.stack([X @ w, X @ w - 1.0], -1), torch.eye(2))
                pyro.sample("y", fn, obs=torch.stack([y, 0.5 * y], -1))
            elif likelihood == "student":
                pyro.sample("y", dist.StudentT(4.0, X @ w, 0.5), obs=y)
            else:
                pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    y = X().sum(-1) + 0.1
    absent = torch.arange(N) % 6 == 0  # the first among them
    gaps = fit(model, X(), torch.where(absent, torch.nan, y), sweeps=25)
    short = fit(model, X()[~absent], y[~absent], sweeps=25)
    same_q(gaps, short, 1e-9)
    assert abs(gaps.losses[-1] - short.losses[-1]) < 1e-9
    sites = gaps.guide.sites()["y"]
    assert not sites.precision[absent].any() and not sites.linear[absent].any()


def test_data_whose_likelihood_is_not_finite_keep_their_site() -> None:
    """A likelihood of -inf somewhere on the way: the others go on, and it is told once."""

    def model(X: Tensor, y: Tensor) -> None:
        f = X @ normal_weights(D)
        wall = torch.where(torch.arange(len(X)) == 2, torch.inf, 0.0)
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(f, 0.5 + wall * f.square()), obs=y)

    y = X().sum(-1)
    with pytest.warns(RuntimeWarning, match=r"CVI left 1 site\(s\) of 'y'") as told:
        run = fit(model, X(), y, sweeps=3)
    assert len(told) == 1
    assert not run.guide.sites()["y"].precision[2].any()
    keep = torch.arange(N) != 2
    expected = fit(lambda X, y: plain_normal(X, y), X()[keep], y[keep], sweeps=3)
    same_q(run, expected, 1e-9)


def plain_normal(X: Tensor, y: Tensor) -> None:
    w = normal_weights(D)
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)
