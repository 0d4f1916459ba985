"""More than a hundred latent variables with a Gaussian prior: sites, which have no noise."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.fitting.structure import FEW

N, D = 150, FEW + 20
X = torch.randn(N, D, generator=torch.Generator().manual_seed(0)).double() / 4.0
Y = torch.bernoulli(torch.sigmoid(X.sum(1)), generator=torch.Generator().manual_seed(1))


def logistic(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def test_sites_are_advised_and_reach_the_optimum_of_a_full_covariance() -> None:
    fit = ngvi.fit(logistic, X, Y, seed=0, progress=False)
    assert str(fit.advice).startswith(
        f"AutoSites, for {D} latent variables, Gaussian a priori; CVI"
    )
    assert fit.why_stopped == "settled" and fit.steps < 15
    full = ngvi.fit(logistic, X, Y, guide="AutoFullRankNormal", seed=0, progress=False)
    # nats: noise of both, and what the full rank may have left to gain
    room = 3.0 * (fit.elbo[1] + full.elbo[1])
    assert full.elbo[0] - room < fit.elbo[0] < full.elbo[0] + full.stop.tol + room
    assert (
        ngvi.fit(logistic, X, Y, guide="auto", seed=0, progress=False).rungs[0].guide == "AutoSites"
    )


def with_dispersion(X: Tensor, y: Tensor) -> None:
    """Not Gaussian a priori."""
    s = pyro.sample("s", dist.HalfNormal(1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.NegativeBinomial(1.0 / s, logits=X @ w), obs=y)


def with_noise(X: Tensor, y: Tensor) -> None:
    """Gaussian given a scale that is not."""
    s = pyro.sample("s", dist.HalfNormal(1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, s), obs=y)


def with_a_parameter(X: Tensor, y: Tensor) -> None:
    s = pyro.param("s", torch.ones(()), constraint=dist.constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[1]), s).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def in_minibatches(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(X), subsample_size=10) as index:
        pyro.sample("y", dist.Bernoulli(logits=X[index] @ w), obs=y[index])


def network(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[1], 2), 1.0).to_event(2))
    v = pyro.sample("v", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=torch.tanh(X @ w) @ v), obs=y)


def broken_far_out(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[1]), 1.0).to_event(1))
    if torch.linalg.vector_norm(w) > 100.0:
        raise FloatingPointError("no such weights")
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


@pytest.mark.parametrize(
    "model", [with_dispersion, with_a_parameter, in_minibatches, network, broken_far_out]
)
def test_models_that_sites_do_not_take_have_a_gaussian_over_all(model: Any) -> None:
    advice = ngvi.advise(model, X, Y)
    assert advice.guide is ngvi.AutoFullRankNormal


def test_many_coefficients_of_gaussian_data_are_a_block_given_their_scale() -> None:
    """q(w | s) is exact, and q(s) nearly so: ELBO, mean and sd of s against a grid."""
    y = X.sum(1) + 0.7 * torch.randn(N, generator=torch.Generator().manual_seed(2)).double()
    advice = ngvi.advise(with_noise, X, y)
    pyro.set_rng_seed(0)
    svi = advice.svi()
    for _ in range(25):
        svi.step(X, y)
    assert str(svi.guide.units) == f"a block of {D} latent variables (w), given s"
    assert ngvi.advise(with_noise, X[:, :FEW], y).guide is ngvi.AutoFullRankNormal
    s = torch.linspace(0.1, 2.0, 191).double()
    covariance = X @ X.T + s.square()[:, None, None] * torch.eye(N).double()
    log_p = dist.MultivariateNormal(torch.zeros(N).double(), covariance).log_prob(y)
    log_p = log_p + dist.HalfNormal(1.0).log_prob(s)
    evidence = float(log_p.logsumexp(0)) + math.log(0.01)
    with torch.no_grad():
        elbo = -ngvi.BatchedELBO(64).loss(with_noise, svi.guide, X, y)
    assert elbo == pytest.approx(evidence, abs=0.05)
    weights = log_p.softmax(0)
    mean = weights @ s.log()
    sd = (weights @ (s.log() - mean).square()).sqrt()
    q = svi.guide.globals.get_posterior()
    assert float((q.mean[0].detach() - mean) / sd) == pytest.approx(0.0, abs=0.15)
    assert float(q.stddev[0].detach() / sd) == pytest.approx(1.0, abs=0.1)


def test_a_minibatch_that_comes_as_a_scale_gets_no_sites() -> None:
    assert ngvi.advise(poutine.scale(logistic, 4.0), X, Y).guide is ngvi.AutoFullRankNormal
    assert ngvi.advise(poutine.scale(logistic, 1.0), X, Y).guide is ngvi.AutoSites


def test_what_is_given_decides() -> None:
    how: Any
    for how in ({"optim": "NGVB"}, {"optim": ngvi.optim.VON}, {"loss": ngvi.BatchedELBO(4)}):
        assert ngvi.advise(logistic, X, Y, **how).guide is ngvi.AutoFullRankNormal
    for how in ({"optim": "CVI"}, {"loss": ngvi.SitesELBO()}):
        assert ngvi.advise(logistic, X, Y, **how).guide is ngvi.AutoSites
    assert ngvi.advise(logistic, X[:, :FEW], Y).guide is ngvi.AutoFullRankNormal


def test_a_design_that_would_fill_the_memory_gets_no_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound in (("DESIGN", N * D - 1), ("WORK", N * D * D - 1)):
        with monkeypatch.context() as patch:
            patch.setattr(f"pyro_ngvi.fitting.structure.{name}", bound)
            assert ngvi.advise(logistic, X, Y).guide is ngvi.AutoFullRankNormal
            patch.setattr(f"pyro_ngvi.fitting.structure.{name}", bound + 1)
            assert ngvi.advise(logistic, X, Y).guide is ngvi.AutoSites
