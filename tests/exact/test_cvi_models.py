"""CVI on the kinds of likelihoods and data that a model may have."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from tests.exact.site_cases import (
    N,
    Linear,
    covariates,
    fit,
    normal_weights,
    seeded,
    whitened_slope,
)

X = covariates
D = 3


def binary() -> Tensor:
    return (X().sum(-1) + torch.randn(N, generator=seeded(8)) > 0).double()


def same_q(one: Any, other: Any, tolerance: float) -> None:
    a, b = one.guide.get_posterior(), other.guide.get_posterior()
    assert (a.mean - b.mean).abs().max() < tolerance
    assert (a.covariance_matrix - b.covariance_matrix).abs().max() < tolerance


# --- predictors of more than one entry, and likelihoods that can not be batched


def heteroscedastic(X: Tensor, y: Tensor) -> None:
    w, v = normal_weights(D), normal_weights(D, "v", 0.5)
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, (X @ v).exp()), obs=y)


def softmax(classes: int) -> Callable[[Tensor, Tensor], None]:
    def model(X: Tensor, y: Tensor) -> None:
        W: Any = pyro.sample("W", dist.Normal(torch.zeros(D, classes), 1.0).to_event(2))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Categorical(logits=X @ W), obs=y)

    return model


def ordered(X: Tensor, y: Tensor) -> None:
    w = normal_weights(D)
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.OrderedLogistic(X @ w, torch.tensor([-1.0, 0.0, 1.5])), obs=y)


def of_classes(y: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda f: f.log_softmax(-1).gather(-1, y.expand(f.shape[:-1])[..., None])[..., 0]


def of_levels(y: Tensor) -> Callable[[Tensor], Tensor]:
    cuts = torch.tensor([-torch.inf, -1.0, 0.0, 1.5, torch.inf])
    return lambda f: ((cuts[y + 1] - f[..., 0]).sigmoid() - (cuts[y] - f[..., 0]).sigmoid()).log()


def labels(classes: int) -> Tensor:
    return torch.randint(classes, (N,), generator=seeded(classes))


def many() -> dict[str, tuple[Any, Tensor, Tensor, Tensor, Any, int, float]]:
    """Model, data, prior sd (D_z,), design (N, k, D_z), log p, points an entry, slope allowed."""
    x = X()
    y = x[:, 0] + (0.5 * x[:, 1]).exp() * torch.randn(N, generator=seeded(12))

    def log_normal(f: Tensor) -> Tensor:
        s = f[..., 1]
        return -s - 0.5 * ((y - f[..., 0]) / s.exp()).square()

    def stacked(k: int) -> Tensor:  # f = X W for W (D, k), flat by rows
        return torch.einsum("nd,kj->nkdj", x, torch.eye(k)).reshape(N, k, -1)

    pair = torch.stack([torch.cat([x, 0 * x], -1), torch.cat([0 * x, x], -1)], 1)
    two_sd = torch.tensor([1.0] * D + [0.5] * D)
    return {
        "pair": (heteroscedastic, y, two_sd, pair, log_normal, 24, 1e-5),
        "softmax 3": (
            softmax(3),
            labels(3),
            torch.ones(9),
            stacked(3),
            of_classes(labels(3)),
            16,
            1e-5,
        ),
        # fixed Sobol points are some 1e-3 away from the integrals
        "softmax 4": (
            softmax(4),
            labels(4),
            torch.ones(12),
            stacked(4),
            of_classes(labels(4)),
            7,
            2e-2,
        ),
        "ordered": (ordered, labels(4), torch.ones(D), x[:, None], of_levels(labels(4)), 32, 1e-6),
    }


@pytest.mark.parametrize("name", ["pair", "softmax 3", "softmax 4", "ordered"])
def test_slope_of_the_elbo_vanishes(name: str) -> None:
    """In every direction of a full Gaussian, by an ELBO that knows nothing of sites."""
    model, y, sd, design, log_p, count, allowed = many()[name]
    run = fit(model, X(), y, sweeps=40, num_points=None if design.shape[1] > 3 else count)
    prior = dist.MultivariateNormal(torch.zeros(len(sd)), scale_tril=sd.diag())
    q = run.guide.get_posterior()
    assert run.guide.plan.groups[0].width == design.shape[1]
    assert whitened_slope(log_p, design, prior, q, count) < allowed
    assert run.svi.optim.report().step_norm < 1e-5


# --- several observed sites


def test_two_sites_that_see_one_predictor() -> None:
    """One site of the guide for both; exact, as both are Gaussian."""
    y, z = X().sum(-1), X()[:, 0] - 1.0

    def model(X: Tensor, y: Tensor, z: Tensor) -> None:
        f = X @ normal_weights(D)
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)
            pyro.sample("z", dist.Normal(2.0 * f, 1.0), obs=z)

    run = fit(model, X(), y, z, sweeps=1)
    assert [g.observed for g in run.guide.plan.groups] == [("y", "z")]
    A = torch.cat([X(), 2.0 * X()])
    precision = torch.cat([torch.full((N,), 4.0), torch.ones(N)])
    linear = Linear(torch.zeros(D), torch.eye(D), A, torch.zeros(2 * N))
    mean, covariance = linear.posterior(precision * torch.cat([y, z]), precision)
    q = run.guide.get_posterior()
    assert (q.mean - mean).abs().max() < 1e-10
    assert (q.covariance_matrix - covariance).abs().max() < 1e-10


def test_two_sites_with_predictors_of_their_own() -> None:
    Z = torch.randn(15, D, generator=seeded(20))
    y, z = X().sum(-1), Z[:, 0] - 1.0

    def model(X: Tensor, Z: Tensor, y: Tensor, z: Tensor) -> None:
        w = normal_weights(D)
        with pyro.plate("first", len(X)):
            pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)
        with pyro.plate("second", len(Z)):
            pyro.sample("z", dist.Normal(Z @ w + 1.0, 1.0), obs=z)

    run = fit(model, X(), Z, y, z, sweeps=1, lr=0.5)
    assert [g.name for g in run.guide.plan.groups] == ["y", "z"]
    precision = torch.cat([torch.full((N,), 4.0), torch.ones(15)])
    linear = Linear(torch.zeros(D), torch.eye(D), torch.cat([X(), Z]), torch.zeros(N + 15))
    mean, covariance = linear.posterior(precision * torch.cat([y, z - 1.0]), precision)
    q = run.guide.get_posterior()
    assert (q.mean - mean).abs().max() < 1e-10
    assert (q.covariance_matrix - covariance).abs().max() < 1e-10


def test_other_observed_sites_count_in_the_bound() -> None:
    def model(X: Tensor, y: Tensor, z: Tensor | None) -> None:
        w = normal_weights(D)
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)
            if z is not None:
                pyro.sample("z", dist.Normal(0.3, 2.0), obs=z)

    with_it, without = (fit(model, X(), binary(), z, sweeps=8) for z in (X()[:, 1], None))
    same_q(with_it, without, 1e-12)
    more = dist.Normal(0.3, 2.0).log_prob(X()[:, 1]).sum()
    assert abs(without.losses[-1] - with_it.losses[-1] - more) < 1e-10


# --- the same posterior, written in other ways


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
    keep = torch.arange(2 * len(X)) % 2 == 0
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
    same_q(*runs, 1e-9)
    assert abs(runs[0].losses[-1] - runs[1].losses[-1]) < 1e-9


def test_scale_on_an_observed_site_is_that_many_data() -> None:
    def scaled(X: Tensor, y: Tensor) -> None:
        w = normal_weights(D)
        with pyro.plate("data", len(X)), poutine.scale(scale=3.0):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    thrice = X().repeat(3, 1), binary().repeat(3)
    runs = fit(scaled, X(), binary()), fit(plain, *thrice)
    same_q(*runs, 1e-9)
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
