"""Corrected marginals and evidence of sites, against closed forms and dense quadrature."""

from __future__ import annotations

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.gp.kernels import RBF
from pyro.infer import SVI
from torch import Tensor

from pyro_ngvi import CVI, AutoSites, SitesELBO
from pyro_ngvi.distributions import GaussianProcess, local_level
from pyro_ngvi.sites.densities import Tilted, mixture, nodes
from tests.exact.site_models import cases
from tests.exact.site_quadrature import (
    LINE,
    PAIR,
    by_quadrature,
    fitted,
    gaussian_variation,
    variation,
)


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("count", [2, 12])
def test_a_gaussian_likelihood_leaves_q_as_it_is(name: str, count: int) -> None:
    case = cases()[name]
    guide, _ = case.fit(slice(count))
    truth = case.posterior(slice(count))
    found = guide.marginals(case.X[:count], case.y[:count], num_samples=10)
    mean = torch.cat([x.reshape(-1) for x in found.mean.values()])
    sd = torch.cat([x.reshape(-1) for x in found.sd.values()])
    assert torch.allclose(mean, truth.mean, rtol=0.0, atol=1e-8)
    assert torch.allclose(sd, truth.stddev, rtol=1e-8, atol=0.0)
    assert max(float(x.max()) for x in found.distance.values()) < 1e-9
    A = case.A[:count].flatten(0, 1)
    K = A @ torch.diag(case.prior) @ A.mT + torch.block_diag(*[case.noise] * count)
    y = case.y[:count].reshape(-1)
    evidence = dist.MultivariateNormal(torch.zeros(len(y), dtype=y.dtype), K).log_prob(y)
    assert abs(found.log_evidence - float(evidence)) < 1e-8


def test_a_gaussian_chain_stays_as_it_is() -> None:
    y = torch.tensor([0.3, -0.4, 2.0, 1.1, 0.7], dtype=torch.float64)

    def model(y: Tensor) -> None:
        s = pyro.sample("s", local_level(5, initial_scale=y.new_tensor(2.0), step_scale=0.7))
        with pyro.plate("times", 5):
            pyro.sample("y", dist.Normal(s[..., 0], 0.5), obs=y)

    guide = fitted(model, y, sweeps=2)
    found, times = guide.marginals(), torch.arange(5.0, dtype=torch.float64)
    K = 4.0 + 0.49 * torch.minimum(times.unsqueeze(-1), times)
    S = K + 0.25 * torch.eye(5)
    sd = (K - K @ torch.linalg.solve(S, K)).diagonal().sqrt()
    assert torch.allclose(found.mean["s"][:, 0], K @ torch.linalg.solve(S, y), rtol=0.0, atol=1e-8)
    assert torch.allclose(found.sd["s"][:, 0], sd, rtol=1e-8, atol=0.0)
    evidence = dist.MultivariateNormal(torch.zeros_like(y), S).log_prob(y)
    assert abs(found.log_evidence - float(evidence)) < 1e-8


# --- against dense quadrature


def test_what_all_data_see_is_exact() -> None:
    y = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)

    def model(y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(y.new_tensor(0.5), 3.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=m), obs=y)

    guide = fitted(model, y)
    found = guide.marginals()
    log_p = dist.Normal(0.5, 3.0).log_prob(LINE)
    log_p = log_p + dist.Bernoulli(logits=LINE.unsqueeze(-1)).log_prob(y).sum(-1)
    evidence = torch.logsumexp(log_p, 0) + (LINE[1] - LINE[0]).log()
    truth = (log_p - evidence).exp()
    (mean, variance), (x, p) = guide.predict()["m"], found.density("m")
    assert gaussian_variation(truth, mean, variance) > 0.05
    assert variation(truth, x, p) < 2e-4
    assert abs(found.log_evidence - float(evidence)) < 1e-5
    assert abs(float(found.mean["m"] - (LINE * truth).sum() * (LINE[1] - LINE[0]))) < 1e-4


A = torch.tensor([[1.5, 0.3], [0.4, -1.0], [1.0, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize("kind", ["bernoulli", "poisson"])
def test_two_latent_numbers(kind: str) -> None:
    y = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)

    def likelihood(f: Tensor) -> Any:
        return dist.Bernoulli(logits=f) if kind == "bernoulli" else dist.Poisson(f.exp())

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(y.new_zeros(2), 1.5).to_event(1))
        f = pyro.deterministic("f", A @ z)
        with pyro.plate("data", 3):
            pyro.sample("y", likelihood(f), obs=y)

    guide = fitted(model, y)
    found = guide.marginals(names=["z", "f"])
    prior = dist.Normal(0.0, 1.5).log_prob(PAIR).sum(-1)
    truth, evidence = by_quadrature(prior + likelihood(PAIR @ A.mT).log_prob(y).sum(-1))
    (mean, variance), (x, p) = guide.predict()["z"], found.density("z")
    gaussian = [gaussian_variation(truth[i], mean[i], variance[i]) for i in (0, 1)]
    corrected = [variation(truth[i], x[:, i], p[:, i]) for i in (0, 1)]
    assert max(gaussian) > 0.03
    assert max(corrected) < 0.1 * max(gaussian)
    elbo = -SitesELBO().loss(model, guide, y)
    assert abs(found.log_evidence - evidence) < 0.1 * (evidence - elbo)
    # a latent number and what the data see of it are one
    assert found.mean["f"].shape == (3,)
    assert torch.allclose(found.mean["f"], A @ found.mean["z"], atol=5e-3)


@pytest.mark.parametrize("slope", [0.0, 0.1])
def test_outliers_on_both_sides_of_a_datum(slope: float) -> None:
    """Their sites have negative precisions, and q over the site of the datum between is not proper."""
    y = torch.tensor([0.0, -1.2, 1.5], dtype=torch.float64)
    A = torch.tensor([[1.0, -slope], [1.0, slope], [1.0, 2.0 * slope]], dtype=torch.float64)

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(y.new_zeros(2), 1.0).to_event(1))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.StudentT(4.0, A @ z, 0.25), obs=y)

    guide = fitted(model, y, sweeps=60)
    found = guide.marginals()
    prior = dist.Normal(0.0, 1.0).log_prob(PAIR).sum(-1)
    truth, evidence = by_quadrature(
        prior + dist.StudentT(4.0, PAIR @ A.mT, 0.25).log_prob(y).sum(-1)
    )
    elbo = -SitesELBO().loss(model, guide, y)
    assert elbo < evidence
    assert elbo < found.log_evidence
    assert abs(found.log_evidence - evidence) < 0.3 * (evidence - elbo)
    mean = truth @ LINE * (LINE[1] - LINE[0])
    assert ((found.mean["z"] - mean).abs() < 0.01 * found.sd["z"]).all()
    assert found.doubts == ()


def test_a_chain_of_counts() -> None:
    y = torch.tensor([0.0, 2.0], dtype=torch.float64)

    def model(y: Tensor) -> None:
        s = pyro.sample("s", local_level(2, initial_scale=y.new_tensor(1.2), step_scale=1.0))
        with pyro.plate("times", 2):
            pyro.sample("y", dist.Poisson(s[:, 0].exp()), obs=y)

    guide = fitted(model, y)
    found = guide.marginals()
    prior = dist.Normal(0.0, 1.2).log_prob(PAIR[..., 0])
    prior = prior + dist.Normal(PAIR[..., 0], 1.0).log_prob(PAIR[..., 1])
    truth, evidence = by_quadrature(prior + dist.Poisson(PAIR.exp()).log_prob(y).sum(-1))
    (mean, variance), (x, p) = guide.predict()["s"], found.density("s")
    gaussian = [gaussian_variation(truth[i], mean[i, 0], variance[i, 0]) for i in (0, 1)]
    assert max(gaussian) > 0.03
    for i in (0, 1):
        assert variation(truth[i], x[:, i, 0], p[:, i, 0]) < 0.1 * max(gaussian)
    assert abs(found.log_evidence - evidence) < 1e-3


def test_a_datum_of_two_predictors() -> None:
    y = torch.tensor([1.3], dtype=torch.float64)

    def model(y: Tensor) -> None:
        level = pyro.sample("level", dist.Normal(y.new_zeros(1), 1.0).to_event(1))
        spread = pyro.sample("spread", dist.Normal(y.new_zeros(1), 0.5).to_event(1))
        with pyro.plate("data", 1):
            pyro.sample("y", dist.Normal(level, spread.exp()), obs=y)

    guide = fitted(model, y)
    found = guide.marginals()
    prior = dist.Normal(0.0, 1.0).log_prob(PAIR[..., 0])
    prior = prior + dist.Normal(0.0, 0.5).log_prob(PAIR[..., 1])
    log_p = prior + dist.Normal(PAIR[..., 0], PAIR[..., 1].exp()).log_prob(y)
    truth, evidence = by_quadrature(log_p)
    assert abs(found.log_evidence - evidence) < 1e-3
    for i, name in enumerate(("level", "spread")):
        x, p = found.density(name)
        mean, variance = guide.predict()[name]
        assert gaussian_variation(truth[i], mean, variance) > 0.01
        assert variation(truth[i], x[:, 0], p[:, 0]) < 2e-3


# --- tables


def test_tables_of_a_known_tilt() -> None:
    # N(t; 0, 1) exp(t / 2 - t^2 / 8) is N(0.4, 0.8)
    like = torch.zeros(1, dtype=torch.float64)
    t = nodes(like)
    tilted = Tilted.of(like + 3.0, like + 2.0, (0.5 * t - 0.125 * t.square()).unsqueeze(0))
    table, sd = mixture([tilted], [1.0]), 2.0 * 0.8**0.5
    assert torch.allclose(table.mean, like + 3.8, atol=1e-9)
    assert torch.allclose(table.sd, like + sd, atol=1e-9)
    levels = torch.tensor([0.01, 0.5, 0.9], dtype=torch.float64)
    wanted = 3.8 + sd * torch.special.ndtri(levels)
    assert torch.allclose(table.quantiles(levels)[:, 0], wanted, atol=1e-3)


def test_a_tilt_with_a_cliff_does_not_swing() -> None:
    """A half of a Gaussian, cut within a step: of moments that the cut, somewhere there, allows."""
    like = torch.zeros(1, dtype=torch.float64)
    t = nodes(like)
    for below in (-1e30, -torch.inf):
        tilted = Tilted.of(like, like + 1.0, torch.where(t <= 0.0, 0.0, below).unsqueeze(0))
        table = mixture([tilted], [1.0])
        cut = torch.tensor([0.0, 0.5], dtype=torch.float64)  # from a node to the next
        ratio = torch.exp(-0.5 * cut.square()) / (2.0 * torch.pi) ** 0.5 / torch.special.ndtr(cut)
        assert -ratio[0] - 0.01 < table.mean < -ratio[1]
        low, high = (1.0 - cut * ratio - ratio.square()).sqrt()
        assert low - 0.01 < table.sd < high


@pytest.mark.parametrize("wide", [5.0, 12.0])
def test_a_count_of_zero_under_a_wide_prior(wide: float) -> None:
    """The posterior is half of the prior, of which q is a narrow part, and log p falls as -e^f: its
    moments under q are no use, and far out it is any number."""
    y = torch.tensor([0.0, 4.0], dtype=torch.float64)

    def model(y: Tensor) -> None:
        with pyro.plate("data", 2):
            f = pyro.sample("f", dist.Normal(y.new_zeros(2), wide))
            pyro.sample("y", dist.Poisson(f.exp()), obs=y)

    guide = AutoSites(model)
    svi = SVI(model, guide, CVI(guide), SitesELBO())
    for _ in range(60):
        svi.step(y)
    found = guide.marginals()
    x = torch.linspace(-8.0 * wide, 8.0, 40_001, dtype=torch.float64).unsqueeze(-1)
    log_p = dist.Normal(0.0, wide).log_prob(x) + dist.Poisson(x.exp()).log_prob(y)
    evidence = torch.logsumexp(log_p, 0) + (x[1] - x[0]).log()
    w = torch.softmax(log_p, 0)
    mean = (w * x).sum(0)
    sd = (w * (x - mean).square()).sum(0).sqrt()
    assert abs(found.log_evidence - float(evidence.sum())) < 0.01
    assert ((found.mean["f"] - mean).abs() < 0.06 * sd).all()
    assert ((found.sd["f"] / sd - 1.0).abs() < 0.1).all()
    assert ("densities are still" in str(found)) == (wide > 10.0)


def test_draws_have_the_marginals_and_the_correlations() -> None:
    y = torch.tensor([3.0, 0.0, 1.0], dtype=torch.float64)

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(y.new_zeros(2), 1.5).to_event(1))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Poisson((A @ z).exp()), obs=y)

    guide = fitted(model, y)
    count = 20_000
    found = guide.marginals(num_samples=count, seed=1)
    z, mean, sd = found.samples["z"], found.mean["z"], found.sd["z"]
    error = sd / count**0.5
    assert ((z.mean(0) - mean).abs() < 4.0 * error).all()
    # of a variance: sd^2 sqrt((kurtosis - 1) / S), with kurtosis below 5 here
    assert ((z.var(0) / sd.square() - 1.0).abs() < 4.0 * 2.0 / count**0.5).all()
    correlation = torch.corrcoef(z.mT)[0, 1]
    q = guide.get_posterior().covariance_matrix
    wanted = q[0, 1] / (q[0, 0] * q[1, 1]).sqrt()
    assert abs(float(correlation - wanted)) < 0.03  # four standard errors, and the copula's bend
    low, high = found.quantiles([0.05, 0.95])["z"]
    inside = ((z > low) & (z < high)).double().mean(0)
    assert ((inside - 0.9).abs() < 4.0 * (0.09 / count) ** 0.5).all()


# --- what is refused


def test_refusals_say_what_to_do() -> None:
    kernel = RBF(1).requires_grad_(False)
    X, counts = torch.linspace(0.0, 1.0, 6).unsqueeze(-1).double(), torch.ones(6).double()

    def process(X: Tensor, y: Tensor) -> None:
        f = pyro.sample("f", GaussianProcess(kernel, X, jitter=1e-4))
        with pyro.plate("data", 6):
            pyro.sample("y", dist.Poisson(f.exp()), obs=y)

    sparse = AutoSites(process, inducing=X[::2])
    SVI(process, sparse, CVI(sparse), SitesELBO()).step(X, counts)
    with pytest.raises(NotImplementedError, match="with inducing points"):
        sparse.marginals()
    y = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(y.new_zeros(2), 1.5).to_event(1))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Bernoulli(logits=A @ z), obs=y)

    def softmax(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(y.new_zeros(3, 4), 1.5).to_event(2))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Categorical(logits=z), obs=y)

    with pytest.raises(ValueError, match="neither a latent site nor a predictor"):
        fitted(model, y).marginals(names=["f"])
    with pytest.raises(NotImplementedError, match="depends on 4 linear"):
        fitted(softmax, y).marginals()
    assert "have not converged" in str(fitted(model, y, sweeps=1).marginals())
    with pytest.raises(ValueError, match="'f' is none of 'z'"):
        fitted(model, y).marginals().density("f")


def test_the_evidence_in_float32_where_outer_points_have_no_weight() -> None:
    """e^w overflows at points whose weights are 0 in float32; against a sum over a grid of w."""
    y = torch.tensor([0.0, 1.0])

    def model(y: Tensor) -> None:
        w: Any = pyro.sample("w", dist.Normal(y.new_zeros(()), 10.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(w.exp()), obs=y)

    guide = AutoSites(model)
    svi = SVI(model, guide, CVI(guide), SitesELBO())
    for _ in range(10):
        svi.step(y.float())
    w = torch.linspace(-60.0, 20.0, 80_001)
    log_p = dist.Poisson(w.exp()).log_prob(y[:, None]).sum(0) + dist.Normal(0.0, 10.0).log_prob(w)
    evidence = float(log_p.logsumexp(0)) - 3.0 * math.log(10.0)
    assert abs(guide.marginals(y.float()).log_evidence - evidence) < 2e-3
