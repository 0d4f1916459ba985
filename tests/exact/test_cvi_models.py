"""CVI on the kinds of likelihoods and data that a model may have."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from tests.exact.site_cases import (
    Linear,
    N,
    binary,
    covariates,
    fit,
    normal_weights,
    same_q,
    seeded,
    whitened_slope,
)

X = covariates
D = 3


# --- predictors of more than one entry, and likelihoods that cannot be batched


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
    sweeps = 30 if name == "pair" else 15  # the slope falls no more after 10
    run = fit(model, X(), y, sweeps=sweeps, num_points=None if design.shape[1] > 3 else count)
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
