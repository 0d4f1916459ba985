"""CVI: exact in one sweep where the model is conjugate, stationary and optimal where it is not."""

from functools import cache
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor

import pyro_ngvi as ngvi
from benchmarks.problems.logistic import OPTIMA, REGRESSIONS, logistic_regression
from pyro_ngvi.sites.loss import site_targets
from tests.exact.site_cases import (
    CONJUGATE,
    Fit,
    N,
    covariates,
    expected_sum,
    fit,
    gp_kernel,
    hermite_grid,
    independent_elbo,
    normal_weights,
    seeded,
    student,
    whitened_slope,
    with_outliers,
)

pytestmark = pytest.mark.usefixtures("plain_start")

problems = pytest.mark.parametrize("problem", CONJUGATE.values(), ids=CONJUGATE)


# --- conjugate models


@problems
@pytest.mark.parametrize("lr", [1.0, 0.3])
def test_one_sweep_is_exact(problem: Any, lr: float) -> None:
    """Mean, covariance and log evidence; a smaller lr makes no difference to conjugate terms."""
    case = problem()
    run = fit(case.model, *case.args, sweeps=1, lr=lr)
    ones = torch.ones_like(case.y) / case.sd**2
    mean, covariance = case.linear.posterior(ones * (case.y - 0.0), ones)
    q = run.guide.get_posterior()
    assert (q.mean - mean).abs().max() < 1e-10
    assert (q.covariance_matrix - covariance).abs().max() < 1e-10
    evidence = case.linear.evidence(case.y, case.sd)
    assert abs(run.svi.evaluate_loss(*case.args) + evidence) < 1e-10 * (1.0 + evidence.abs())
    sites = run.guide.sites()["y"]
    assert (sites.mean[:, 0] - case.y).abs().max() < 1e-12 * case.y.abs().max()
    assert (sites.precision[:, 0, 0] * case.sd**2 - 1.0).abs().max() < 1e-12


@problems
def test_a_second_sweep_changes_nothing(problem: Any) -> None:
    case = problem()
    run = fit(case.model, *case.args, sweeps=2)
    assert run.svi.optim.report().step_norm < 1e-6  # the square root of rounding in a KL
    assert abs(run.losses[1] + case.linear.evidence(case.y, case.sd)) < 1e-9


# --- models that are not


def logistic(X: Tensor, y: Tensor) -> None:
    w = normal_weights(3)
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def poisson(K: Tensor, y: Tensor) -> None:
    f: Any = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(K)), K))
    with pyro.plate("data", len(K)):
        pyro.sample("y", dist.Poisson((f + 0.5).exp()), obs=y)


def cases() -> dict[str, tuple[Any, tuple[Any, ...], Tensor, Tensor, Any]]:
    """Model, arguments, prior covariance, design (N, D), log p of f (..., N, 1)."""
    X, K = covariates(), gp_kernel()
    yb = (X.sum(-1) + torch.randn(N, generator=seeded(8)) > 0).to(X)
    yc = torch.poisson(torch.linspace(0.2, 6.0, N), generator=seeded(9))
    ys = with_outliers()
    return {
        "logistic": (
            logistic,
            (X, yb),
            torch.eye(3),
            X,
            lambda f: -torch.nn.functional.softplus((1.0 - 2.0 * yb) * f[..., 0]),
        ),
        "poisson": (
            poisson,
            (K, yc),
            K,
            torch.eye(N),
            lambda f: yc * (f[..., 0] + 0.5) - (f[..., 0] + 0.5).exp() - (yc + 1.0).lgamma(),
        ),
        "student": (
            student,
            (K, ys),
            K,
            torch.eye(N),
            lambda f: dist.StudentT(3.0, torch.zeros(()), 0.2).log_prob(ys - f[..., 0]),
        ),
    }


NAMES = ["logistic", "poisson", "student"]
converged = pytest.mark.parametrize("name", NAMES)


@cache
def run_case(name: str) -> tuple[Fit, Any]:
    case = cases()[name]
    return fit(case[0], *case[1], sweeps=80 if name == "student" else 25), case


@converged
def test_sites_are_the_gradient_of_the_expected_likelihood(name: str) -> None:
    """lambda* = grad_mu E log p (Khan & Lin 2017, eq. 18), by autograd in mu = (m, v + m^2)."""
    run, (_, _, _, A, log_p) = run_case(name)
    q = run.guide.get_posterior()
    m = A @ q.mean
    v = torch.einsum("ni,ij,nj->n", A, q.covariance_matrix, A)
    mu1, mu2 = m.clone().requires_grad_(), (v + m.square()).requires_grad_()
    value = expected_sum(log_p, mu1[:, None], (mu2 - mu1.square())[:, None, None], 32)
    nu, half = torch.autograd.grad(value, (mu1, mu2))
    sites = run.guide.sites()["y"]
    assert (sites.linear[:, 0] - nu).abs().max() < 1e-6 * nu.abs().max()
    assert (sites.precision[:, 0, 0] + 2.0 * half).abs().max() < 1e-6 * half.abs().max()


@converged
def test_prior_and_sites_make_q(name: str) -> None:
    run, (_, _, K, A, _) = run_case(name)
    sites, q = run.guide.sites()["y"], run.guide.get_posterior()
    P = A.mT @ (sites.precision[:, 0] * A)
    covariance = torch.linalg.solve(torch.eye(len(K)) + K @ P, K)
    assert (q.covariance_matrix - covariance).abs().max() < 1e-12
    assert (q.mean - covariance @ (A.mT @ sites.linear[:, 0])).abs().max() < 1e-12


@converged
def test_elbo_at_convergence(name: str) -> None:
    """E log p - KL(q || prior), of a q at which it is stationary."""
    run, (_, args, K, A, log_p) = run_case(name)
    q = run.guide.get_posterior()
    prior = dist.MultivariateNormal(torch.zeros(len(K)), K)
    elbo = independent_elbo(log_p, A[:, None], prior, q.mean, q.scale_tril, 32)
    assert abs(run.svi.evaluate_loss(*args) + elbo) < 1e-9 * (1.0 + elbo.abs())
    assert whitened_slope(log_p, A[:, None], prior, q, 32) < 1e-5


@pytest.mark.parametrize("sweeps", [1, 3])
@converged
def test_reported_length_is_that_of_a_kl(name: str, sweeps: int) -> None:
    """length^2 / 2 = KL(q before || q after): the rest of log Z after its linear part at q before."""
    model, args, *_ = cases()[name]
    run = fit(model, *args, sweeps=sweeps, lr=0.7)
    before = run.guide.get_posterior()
    run.svi.step(*args)
    kl = torch.distributions.kl_divergence(before, run.guide.get_posterior())
    length = run.svi.optim.report().step_norm
    assert kl > 1e-4
    assert 0.5 * length**2 == pytest.approx(float(kl), rel=1e-6)


def test_targets_are_gradients_in_mean_parameters() -> None:
    """For k = 2, by the chain rule through m and C = M - m m'."""
    generator = seeded(11)
    m, root = torch.randn(3, 2, generator=generator), torch.randn(3, 2, 2, generator=generator)
    C = root @ root.mT + 0.2 * torch.eye(2)
    x, w = hermite_grid(2, 30)

    def value(m: Tensor, M: Tensor) -> Tensor:
        L = torch.linalg.cholesky(M - m[..., None] * m[..., None, :])
        f = m + torch.einsum("nij,qj->qni", L, x)
        return w @ -(0.3 * f[..., 0] - 0.5 * f[..., 1]).cosh()

    M = C + m[..., None] * m[..., None, :]
    nu, half = torch.autograd.functional.jacobian(lambda *a: value(*a).sum(), (m, M))
    f = (m + torch.einsum("nij,qj->qni", torch.linalg.cholesky(C), x)).requires_grad_()
    (d,) = torch.autograd.grad((-(0.3 * f[..., 0] - 0.5 * f[..., 1]).cosh()).sum(), f)
    scale = -(0.3 * f[..., 0] - 0.5 * f[..., 1]).cosh().detach()
    a = torch.tensor([0.3, -0.5])
    H = torch.einsum("q,qn,i,j->nij", w, scale, a, a)
    linear, precision = site_targets(torch.einsum("q,qni->ni", w, d), H, m)
    assert (linear - nu).abs().max() < 1e-9
    assert (precision + (half + half.mT)).abs().max() < 1e-9


@converged
def test_full_rank_guide_with_the_same_q(name: str) -> None:
    """Its density, and the ELBO of its draws, agree with ours."""
    run, (model, args, *_) = run_case(name)
    q = run.guide.get_posterior()
    trace = poutine.trace(run.guide).get_trace(*args)
    site = next(n for n in run.guide.plan.shapes)
    z = trace.nodes[site]["value"].detach()
    assert abs(trace.log_prob_sum() - q.log_prob(z)) < 1e-9

    full = ngvi.AutoFullRankNormal(model)
    full(*args)
    with torch.no_grad():
        full.loc.copy_(q.mean)
        full.scale_tril.copy_(q.scale_tril)
    assert abs(full.get_posterior().log_prob(z) - trace.log_prob_sum()) < 1e-9
    torch.manual_seed(0)
    draws = torch.tensor([-Trace_ELBO().loss(model, full, *args) for _ in range(80)])
    error = draws.std() / len(draws) ** 0.5
    assert abs(draws.mean() + run.svi.evaluate_loss(*args)) < 4.0 * error


@pytest.mark.parametrize("name", ["wdbc"])
def test_optimum_of_real_data(name: str) -> None:
    r = REGRESSIONS[name]()
    args = (*(torch.as_tensor(a) for a in (r.X, r.y)), torch.as_tensor(r.precision) ** -0.5)
    run = fit(logistic_regression, *args, sweeps=15)
    assert abs(run.losses[-1] + OPTIMA[name][0]) < 1e-3
    q = run.guide.get_posterior()
    assert abs(r.elbo(q.mean.numpy(), q.covariance_matrix.numpy()) + run.losses[-1]) < 1e-3


# --- the way there


def test_elbo_never_falls_with_a_heavy_tail() -> None:
    """Student's t is not log-concave: sites of outliers have a negative precision."""
    K, y = gp_kernel(), with_outliers()
    guide = ngvi.AutoSites(student)
    svi: Any = SVI(student, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    accepted, best, shorter = [], -torch.inf, 0
    for _ in range(80):
        elbo = -svi.step(K, y)
        report = svi.optim.report()
        shorter += report.outcome == "accepted" and report.gain < 1.0
        if elbo >= best - 1e-9:
            accepted.append(elbo)
            best = max(best, elbo)
        else:  # it is taken back
            assert report.outcome == "damped"
    assert shorter > 0  # by a secant, before the ELBO fell
    assert len(accepted) > 15 and accepted[-1] == pytest.approx(best, abs=1e-9)
    assert svi.optim.report().step_norm < 1e-4
    assert (guide.sites()["y"].precision < 0).any()


def test_float32() -> None:
    X, y = covariates(), (covariates()[:, 0] > 0).double()
    reference = fit(logistic, X, y)
    torch.set_default_dtype(torch.float32)
    single = fit(logistic, X.float(), y.float())
    assert {p.dtype for p in single.guide.natural_params().values()} == {torch.float32}
    assert abs(single.losses[-1] - reference.losses[-1]) < 1e-4
    ours, theirs = single.guide.get_posterior(), reference.guide.get_posterior()
    assert (ours.mean - theirs.mean).abs().max() < 1e-4
    assert (ours.covariance_matrix - theirs.covariance_matrix).abs().max() < 1e-4
