"""Every problem of the zoo is a sound Pyro model; those with references have the right density."""

from collections.abc import Callable
from math import log
from typing import Any

import numpy as np
import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.infer.autoguide.initialization import InitMessenger, init_to_median
from scipy import stats
from torch import Tensor

from benchmarks.problems import DataNotFound, LogJoint, Problem, load, names

WITH_DRAWS = [n for n in names("posteriordb") if n != "german_credit_probit"]
WITH_DRAWS += ["eight_schools_centered"]


def load_or_skip(name: str) -> Problem:
    try:
        return load(name)
    except DataNotFound as error:
        pytest.skip(str(error))


@pytest.fixture(params=names())
def problem(request: pytest.FixtureRequest) -> Problem:
    return load_or_skip(request.param)


def looped(problem: Problem, theta: Tensor) -> Tensor:
    """Log joint of the constrained sites, one plain call per particle."""
    log_joint, values = LogJoint(problem), []
    for row in theta:
        model = poutine.condition(problem.model, data=log_joint.constrain(row))
        values.append(poutine.trace(model).get_trace(*problem.args).log_prob_sum())
    return torch.stack([torch.as_tensor(value) for value in values])


def vectorised(problem: Problem, theta: Tensor) -> Tensor:
    """The same from one call inside a particle plate, as ``vectorize_particles=True`` makes it."""
    plain = nodes(problem.model, problem.args)
    nesting = plain_nesting(plain)
    data = {}
    for name, value in LogJoint(problem).constrain(theta).items():
        event = plain[name]["fn"].event_shape
        batch = value.shape[1 : value.dim() - len(event)]
        data[name] = value.reshape(
            (len(theta),) + (1,) * (nesting - len(batch)) + tuple(batch) + tuple(event)
        )
    model = poutine.condition(problem.model, data=data)
    with poutine.trace() as handler, pyro.plate("particles", len(theta), dim=-1 - nesting):
        model(*problem.args)
    handler.trace.compute_log_prob()
    total = theta.new_zeros(len(theta))
    sites: dict[str, Any] = dict(handler.trace.nodes)
    for site in sites.values():
        if site["type"] == "sample" and not poutine.util.site_is_subsample(site):
            assert site["log_prob"].dim() == nesting + 1, site["name"]
            total = total + site["log_prob"].reshape(len(theta), -1).sum(1)
    return total


def nodes(model: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """The sites of one run, with their log probabilities."""
    trace = poutine.trace(model).get_trace(*args)
    trace.compute_log_prob()
    return dict(trace.nodes)


def plain_nesting(sites: dict[str, Any]) -> int:
    """The number of batch dimensions that the model's plates take."""
    frames = [frame for site in sites.values() for frame in site.get("cond_indep_stack", ())]
    return max((-frame.dim for frame in frames), default=0)


def test_starts_at_a_finite_log_density(problem: Problem) -> None:
    trace = poutine.trace(InitMessenger(init_to_median)(problem.model)).get_trace(*problem.args)
    assert torch.isfinite(torch.as_tensor(trace.log_prob_sum()))


def test_has_the_declared_latent_dimension(problem: Problem) -> None:
    guide = AutoDiagonalNormal(problem.model)
    guide(*problem.args)
    assert guide.latent_dim == problem.dim == LogJoint(problem).dim


def test_log_joint_is_the_same_looped_vectorised_and_vmapped(problem: Problem) -> None:
    theta = 0.1 * torch.randn(3, problem.dim)
    log_joint = LogJoint(problem)
    expected = looped(problem, theta)
    torch.testing.assert_close(vectorised(problem, theta), expected, rtol=1e-10, atol=1e-10)
    jacobian = log_joint(theta) - torch.stack([log_joint.single(row) for row in theta])
    assert jacobian.abs().max() <= 1e-10 * expected.abs().max()


def test_float32_data_give_float32_latents_and_likelihood(problem: Problem) -> None:
    single = problem.to(torch.float32)
    sites = nodes(InitMessenger(init_to_median)(single.model), single.args)
    for name in LogJoint(single).shapes:
        assert sites[name]["value"].dtype == torch.float32, name
    assert sites["y"]["log_prob"].dtype == torch.float32


def test_constraining_and_unconstraining_are_inverse(problem: Problem) -> None:
    log_joint, theta = LogJoint(problem), torch.randn(5, problem.dim)
    torch.testing.assert_close(log_joint.unconstrain(log_joint.constrain(theta)), theta)


def stein(problem: Problem) -> tuple[float, float]:
    """p-values of E[grad log p] = 0 and of E[u grad log p'] = -I over the reference draws.

    The first is Hotelling's T^2; the second, in coordinates u with mean 0 and covariance I, the
    largest of the d^2 standardised means with a Bonferroni correction.
    """
    log_joint = LogJoint(problem)
    theta = log_joint.unconstrain(problem.reference_draws())
    gradient, (draws, dim) = log_joint.gradient(theta), theta.shape
    mean = gradient.mean(0)
    square = draws * mean @ torch.linalg.solve(torch.cov(gradient.T), mean)
    first = float(stats.chi2.sf(square.item(), dim))

    scale = torch.linalg.cholesky(torch.cov(theta.T))
    u = torch.linalg.solve_triangular(scale, (theta - theta.mean(0)).T, upper=False).T
    products = u[:, :, None] * (gradient @ scale)[:, None, :] + torch.eye(dim)
    z = products.mean(0) / (products.std(0) / draws**0.5)
    second = min(1.0, dim**2 * 2 * float(stats.norm.sf(z.abs().max().item())))
    return first, second


@pytest.mark.parametrize("name", WITH_DRAWS)
def test_density_agrees_with_the_reference_draws(name: str) -> None:
    """Both p-values are of fixed data: 10 problems, each a 0.1 % test."""
    first, second = stein(load_or_skip(name))
    assert first > 1e-3
    assert second > 1e-3


def test_the_agreement_test_sees_a_missing_jacobian_and_a_wrong_prior() -> None:
    problem = load_or_skip("gp_regr")
    log_joint = LogJoint(problem)
    gradient = log_joint.gradient(log_joint.unconstrain(problem.reference_draws()))
    standard_error = gradient.std(0) / len(gradient) ** 0.5
    # Without its Jacobian the gradient in log(parameter) lacks 1; with a Half-Normal(4) prior of
    # alpha instead of Half-Normal(2), alpha^2 (1/4 - 1/16) is missing.
    assert (1 / standard_error).min() > 5
    alpha = problem.reference_draws()["alpha"]
    assert (alpha**2).mean() * 3 / 16 / standard_error[1] > 5


@pytest.mark.parametrize("name", WITH_DRAWS)
def test_reference_draws_have_the_reference_moments(name: str) -> None:
    """2,000 of the 10,000 draws: a mean within 4.5 standard errors of sd / sqrt(2,000)."""
    problem = load_or_skip(name)
    draws = problem.reference_draws()
    for parameter, mean in problem.mean.items():
        z = (draws[parameter].mean(0) - mean) / (problem.sd[parameter] / 2000**0.5)
        assert z.abs().max() < 4.5, parameter


def test_problems_without_draws_say_so() -> None:
    with pytest.raises(LookupError, match="no reference draws"):
        load("wdbc").reference_draws()
    with pytest.raises(KeyError, match="no problem called 'nothing'"):
        load("nothing")


def test_absent_data_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from benchmarks.problems.problem import data_file

    monkeypatch.delenv("PYRO_NGVI_DATA", raising=False)
    with pytest.raises(DataNotFound, match="PYRO_NGVI_DATA is not set"):
        data_file("a.csv")
    monkeypatch.setenv("PYRO_NGVI_DATA", str(tmp_path))
    with pytest.raises(DataNotFound, match=r"a\.csv"):
        data_file("a.csv")


def test_ill_conditioned_covariates_are_as_described() -> None:
    X = load("regression_wide_n5000_d30").args[0].numpy()
    assert abs(log(X.std(0).max() / X.std(0).min(), 10) - 7) < 0.1
    correlation = np.corrcoef(X.T)[np.triu_indices(30, 1)]
    assert np.all(np.abs(correlation - 0.9999) < 1e-5)


def test_numpyro_forms_have_the_same_density(problem: Problem) -> None:
    """With the Jacobian and all constants, at random points of the unconstrained space."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    pytest.importorskip("numpyro", reason="NumPyro is not installed")
    from benchmarks.numpyro_models import log_joint

    jax.config.update("jax_enable_x64", True)
    theta = torch.randn(5, problem.dim)
    found = jax.vmap(log_joint(problem))(theta.numpy())
    np.testing.assert_allclose(np.asarray(found), LogJoint(problem)(theta).numpy(), rtol=1e-12)
