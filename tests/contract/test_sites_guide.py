"""AutoSites as a Pyro guide: draws, densities, predictions, copies, saving and resuming."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.runtime.store import module_name
from tests.contract.resume import assert_resumes
from tests.exact.site_cases import (
    CONJUGATE,
    Fit,
    N,
    covariates,
    fit,
    gp_kernel,
    seeded,
    student,
    with_outliers,
)

problems = pytest.mark.parametrize("problem", CONJUGATE.values(), ids=CONJUGATE)


def model(X: Tensor, y: Tensor | None = None) -> None:
    """Two latent sites, of which one depends on the other, and data that are not Gaussian."""
    mu: Any = pyro.sample("mu", dist.Normal(0.5, 1.0))
    with pyro.plate("weights", X.shape[1]):
        w: Any = pyro.sample("w", dist.Normal(mu, 0.7))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def data() -> tuple[Tensor, Tensor]:
    X = covariates()
    return X, (X.sum(-1) + torch.randn(N, generator=seeded(8)) > 0).to(X)


def fitted(sweeps: int = 15) -> Fit:
    return fit(model, *data(), sweeps=sweeps)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# --- the posterior in its forms


def test_median_quantiles_and_posterior_agree() -> None:
    guide = fitted().guide
    q, median = guide.get_posterior(), guide.median()
    assert {n: x.shape for n, x in median.items()} == {"mu": (), "w": (3,)}
    assert (torch.cat([median["mu"][None], median["w"]]) - q.mean).abs().max() < 1e-12
    quantiles = guide.quantiles([0.1, 0.5, 0.975])
    assert quantiles["w"].shape == (3, 3)
    sd = q.variance.sqrt()
    for level, row in zip([0.1, 0.5, 0.975], range(3), strict=True):
        exact = dist.Normal(q.mean, sd).icdf(torch.tensor(level))
        found = torch.cat([quantiles["mu"][row][None], quantiles["w"][row]])
        assert (found - exact).abs().max() < 1e-12
    assert guide.quantiles(0.5)["w"].shape == (3,)


def test_density_of_draws_is_that_of_the_posterior() -> None:
    guide = fitted().guide
    q = guide.get_posterior()
    torch.manual_seed(0)
    for _ in range(5):
        trace = poutine.trace(guide).get_trace(*data())
        z = torch.cat([trace.nodes["mu"]["value"][None], trace.nodes["w"]["value"]])
        assert abs(trace.log_prob_sum() - q.log_prob(z)) < 1e-10


def test_draws_have_the_moments_of_the_posterior() -> None:
    """Within 4.5 standard errors of 2,000 draws."""
    guide = fitted().guide
    q, S = guide.get_posterior(), 2_000
    torch.manual_seed(1)
    with pyro.plate("draws", S, dim=-2):
        drawn = guide(*data())
    z = torch.cat([drawn["mu"].reshape(S, 1), drawn["w"].reshape(S, 3)], -1)
    assert ((z.mean(0) - q.mean) / (q.variance / S).sqrt()).abs().max() < 4.5
    v = q.variance
    error = ((torch.outer(v, v) + q.covariance_matrix.square()) / S).sqrt()
    assert ((z.T.cov() - q.covariance_matrix) / error).abs().max() < 4.5


@problems
def test_trace_elbo_of_an_exact_posterior_has_no_variance(problem: Any) -> None:
    case = problem()
    run = fit(case.model, *case.args, sweeps=1)
    evidence = case.linear.evidence(case.y, case.sd)
    for _ in range(5):
        assert abs(Trace_ELBO().loss(case.model, run.guide, *case.args) + evidence) < 1e-8


def test_trace_elbo_agrees_on_other_models() -> None:
    run = fitted()
    torch.manual_seed(0)
    draws = torch.tensor([Trace_ELBO().loss(model, run.guide, *data()) for _ in range(120)])
    error = draws.std() / len(draws) ** 0.5
    assert abs(draws.mean() - run.losses[-1]) < 4.0 * error


# --- predictions, diagnostics


def batched(X: Tensor, y: Tensor | None = None) -> None:
    """As ``model``, for plates to the left."""
    mu: Any = pyro.sample("mu", dist.Normal(0.5, 1.0))
    with pyro.plate("weights", X.shape[1]):
        w: Any = pyro.sample("w", dist.Normal(mu, 0.7))
    with pyro.plate("data", len(X)):
        logits = (X * w.unsqueeze(-2)).sum(-1)
        pyro.sample("y", dist.Bernoulli(logits=logits.reshape(*w.shape[:-1], -1)), obs=y)


@pytest.mark.parametrize(
    ("new", "program"),
    [(True, model), (False, batched)],
    ids=["new, one by one", "train, parallel"],
)
def test_predictive(new: bool, program: Any) -> None:
    """At the inputs of training, and at others of another number."""
    guide = fit(program, *data(), sweeps=15).guide
    X = torch.randn(7, 3, generator=seeded(9)) if new else data()[0]
    torch.manual_seed(0)
    S = 200 if new else 500  # one by one, or all at once
    draws = Predictive(program, guide=guide, num_samples=S, parallel=program is batched)(X, None)
    y = draws["y"].reshape(S, len(X))
    q = guide.get_posterior(*data())
    f = X @ q.mean[1:]
    v = torch.einsum("ni,ij,nj->n", X, q.covariance_matrix[1:, 1:], X)
    x = torch.linspace(-6.0, 6.0, 400)
    w = torch.softmax(-0.5 * x.square(), 0)
    p = (f + v.sqrt() * x[:, None]).sigmoid().mT @ w
    assert ((y.mean(0) - p) / (p * (1.0 - p) / S).sqrt()).abs().max() < 4.5


def test_prediction_leaves_the_guide_as_it_is() -> None:
    run = fitted()
    before = run.guide.get_posterior().mean
    Predictive(model, guide=run.guide, num_samples=3)(torch.randn(7, 3), None)
    run.svi.evaluate_loss(torch.randn(N, 3), data()[1])
    assert torch.equal(run.guide.get_posterior(*data()).mean, before)
    assert abs(run.svi.evaluate_loss(*data()) - run.losses[-1]) < 1e-9


def test_khat_and_arviz() -> None:
    run = fitted()
    torch.manual_seed(0)
    assert ngvi.khat(model, run.guide, *data()).khat < 0.7
    idata = ngvi.to_arviz(model, run.guide, *data(), num_samples=200)
    w = torch.as_tensor(idata["posterior"]["w"].values)
    q = run.guide.get_posterior()
    assert w.shape == (1, 200, 3)
    assert ((w[0].mean(0) - q.mean[1:]) / (q.variance[1:] / 200).sqrt()).abs().max() < 4.5


# --- copies, saving


def assert_same_guide(one: Any, other: Any) -> None:
    assert same(one.median(*data()), other.median(*data()))
    assert same(one.quantiles([0.1], *data()), other.quantiles([0.1], *data()))
    torch.manual_seed(3)
    ours = one(*data())
    torch.manual_seed(3)
    assert same(ours, other(*data()))


def test_deepcopy_is_a_guide_of_its_own() -> None:
    run = fitted(3)
    other = copy.deepcopy(run.guide)
    assert module_name(other) != module_name(run.guide)
    assert_same_guide(run.guide, other)
    svi: Any = SVI(model, other, ngvi.CVI(other), ngvi.SitesELBO())
    before = run.guide.sites()["y"].precision
    for _ in range(12):
        loss = svi.step(*data())
    assert torch.equal(run.guide.sites()["y"].precision, before)
    assert abs(loss - fitted().losses[-1]) < 1e-9


def test_deepcopy_knows_the_last_step() -> None:
    guide = fitted(3).guide
    other = copy.deepcopy(guide)
    assert same(other.median(), guide.median())
    assert same(other.quantiles([0.1, 0.9]), guide.quantiles([0.1, 0.9]))
    guide.remove([0, 1])
    assert same(copy.deepcopy(guide).median(), guide.median())
    assert other.sites()["y"].linear.shape[0] == N


def test_median_without_arguments_before_a_step() -> None:
    guide = ngvi.AutoSites(model)
    guide(*data())
    for ask in (guide.median, guide.get_posterior, guide.loo):
        with pytest.raises(TypeError, match="'X'"):
            ask()
    guide.median(*data())


def test_pickle_goes_on_with_the_model_of_svi() -> None:
    run = fitted(3)
    other = pickle.loads(pickle.dumps(run.guide))
    with pytest.raises(RuntimeError, match="does not carry the model"):
        other.median(*data())
    svi: Any = SVI(model, other, ngvi.CVI(other), ngvi.SitesELBO())
    assert abs(svi.evaluate_loss(*data()) - run.svi.evaluate_loss(*data())) < 1e-12
    assert_same_guide(run.guide, other)
    for _ in range(12):
        loss = svi.step(*data())
    assert abs(loss - fitted().losses[-1]) < 1e-9


def test_state_dict_into_a_fresh_guide() -> None:
    run = fitted()
    fresh = ngvi.AutoSites(model)
    fresh(*data())
    assert fresh.state_dict().keys() == run.guide.state_dict().keys()
    fresh.load_state_dict(run.guide.state_dict())
    assert_same_guide(run.guide, fresh)
    svi: Any = SVI(model, fresh, ngvi.CVI(fresh), ngvi.SitesELBO())
    assert abs(svi.step(*data()) - run.losses[-1]) < 1e-9
    assert svi.optim.report().step_norm < 1e-5


class _Run:
    """As :func:`assert_resumes` wants it."""

    def __init__(self, model: Any, *args: Any) -> None:
        self.args = args
        self.guide: Any = ngvi.AutoSites(model, name="AutoSites_resumed")
        self.optim = ngvi.CVI(self.guide)
        self.svi: Any = SVI(model, self.guide, self.optim, ngvi.SitesELBO())

    def steps(self, n: int) -> list[float]:
        return [float(self.svi.step(*self.args)) for _ in range(n)]


def _subsampled(X: Tensor, y: Tensor) -> None:
    w: Any = pyro.sample("w", dist.Normal(torch.zeros(3), 1.5).to_event(1))
    with pyro.plate("data", N, subsample_size=12) as i:
        pyro.sample("y", dist.StudentT(3.0, X[i] @ w, 0.2), obs=y[i])


@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_resumes_bit_for_bit(before: int, tmp_path: Path) -> None:
    """Before and after a sweep that is taken back, and others that a secant shortens."""
    pyro.clear_param_store()
    args = gp_kernel(), with_outliers()
    run = _Run(student, *args)
    gains = [(run.steps(1), run.optim.report().gain)[1] for _ in range(before + 4)]
    assert min(gains[before:]) < 1.0
    pyro.clear_param_store()
    assert_resumes(lambda: _Run(student, *args), args, before, 4, tmp_path)


def test_resumes_minibatches_bit_for_bit(tmp_path: Path) -> None:
    pyro.clear_param_store()
    assert_resumes(lambda: _Run(_subsampled, *data()), data(), 3, 4, tmp_path)


def test_two_guides_have_names_of_their_own() -> None:
    pyro.clear_param_store()
    one, other = fitted(2), fitted(9)
    names = {n for n in pyro.get_param_store() if "linear_y" in n}
    assert len(names) == 2
    assert not torch.equal(one.guide.linear_y, other.guide.linear_y)
    named = ngvi.AutoSites(model, name="mine")
    named(*data())
    assert "mine.linear_y" in pyro.get_param_store()


# --- what a step says


def kl(p: Any, q: Any) -> float:
    return float(torch.distributions.kl_divergence(p, q))


@pytest.mark.parametrize("lr", [1.0, 0.2])
def test_step_norm_is_the_divergence_of_the_step(lr: float) -> None:
    """step_norm^2 / 2 = KL(q before || q after), computed densely."""
    run = fit(model, *data(), sweeps=1, lr=lr)
    for _ in range(4):
        before = run.guide.get_posterior()
        run.svi.step(*data())
        norm = run.svi.optim.report().step_norm
        assert 0.5 * norm**2 == pytest.approx(kl(before, run.guide.get_posterior()), abs=1e-8)
