"""The optima and posteriors that the zoo declares are what they are said to be."""

import json

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks.problems import DataNotFound, LogJoint, Optimum, Problem, load, logistic, regression
from benchmarks.problems.optimum import BinaryRegression, gaussian_optimum
from benchmarks.problems.posteriordb import OPTIMA, read
from benchmarks.problems.problem import FAMILIES, data_file
from benchmarks.problems.sample_average import bracket, gaussian_elbo, standard_noise

LOG_2PI = float(np.log(2 * np.pi))
UNKNOWN_SIGMA = [n for n, v in regression.VARIANTS.items() if not v[3]]
KNOWN_SIGMA = [n for n, v in regression.VARIANTS.items() if v[3]]


def load_or_skip(name: str) -> Problem:
    try:
        return load(name)
    except DataNotFound as error:
        pytest.skip(str(error))


def binary_regression(name: str) -> BinaryRegression:
    problem = load_or_skip(name)
    X, y, *prior_sd = (argument.numpy() for argument in problem.args)
    if name == "german_credit_probit":
        return BinaryRegression(X, y, np.ones(X.shape[1]), "probit")
    return BinaryRegression(X, y, prior_sd[0] ** -2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [*logistic.REGRESSIONS, "german_credit_probit"])
def test_quadrature_optima_are_reproduced(name: str, family: str) -> None:
    """The constants are printed to 6 decimals; the ELBO is right to the squared residual."""
    optimum = gaussian_optimum(binary_regression(name), family)
    assert optimum.residual < 1e-10
    assert optimum.elbo == pytest.approx(load(name).optimum[family].elbo, abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_more_quadrature_nodes_change_nothing(family: str) -> None:
    """wdbc has the widest linear predictors (sd up to 10), so the slowest quadrature."""
    base = binary_regression("wdbc")
    finer = BinaryRegression(base.X, base.y, base.precision, nodes=256)
    best = gaussian_optimum(base, family)
    assert finer.elbo(best.loc, best.covariance) == pytest.approx(best.elbo, abs=2e-6)


@pytest.mark.parametrize("name", ["wdbc", "german_credit_probit"])
def test_quadrature_agrees_with_the_pyro_model(name: str) -> None:
    """An average over 8 scrambled samples of the model's own density, within 4 standard errors."""
    problem, base = load_or_skip(name), binary_regression(name)
    best = gaussian_optimum(base, "full_rank")
    loc = torch.as_tensor(best.loc)
    scale = torch.linalg.cholesky(torch.as_tensor(best.covariance))
    log_joint = LogJoint(problem)
    values = torch.stack(
        [
            gaussian_elbo(log_joint, loc, scale, standard_noise(512, problem.dim, seed))
            for seed in range(8)
        ]
    )
    assert abs(values.mean() - best.elbo) < 4 * values.std() / 8**0.5
    assert problem.exact_elbo is not None
    assert problem.exact_elbo(loc, scale) == pytest.approx(best.elbo, abs=1e-9)


def test_a1a_optima_are_the_published_ones() -> None:
    """Mishkin et al. (2018), table 1: ELBO per datum, without the bias's log prior precision."""
    problem = load_or_skip("a1a")
    constant = -np.log(logistic.BIAS_PRECISION) / 2
    for family, published in (("full_rank", 0.3678), ("mean_field", 0.3828)):
        value = -(problem.optimum[family].elbo + constant) / 1605
        assert value == pytest.approx(published, abs=2e-4)


def test_probit_optimum_has_the_reference_moments() -> None:
    """Within 0.01 sd and 1 %, the accuracy to which the record itself was confirmed."""
    problem = load_or_skip("german_credit_probit")
    best = gaussian_optimum(binary_regression("german_credit_probit"), "full_rank")
    mean, sd = problem.mean["weights"].numpy(), problem.sd["weights"].numpy()
    assert np.abs((best.loc - mean) / sd).max() < 0.01
    assert np.abs(np.sqrt(np.diag(best.covariance)) / sd - 1).max() < 0.01


@pytest.mark.parametrize("name", KNOWN_SIGMA)
def test_known_sigma_posterior_is_exact(name: str) -> None:
    """log p(y, beta) - log q(beta) is the same number, the log evidence, wherever beta lies."""
    problem = load(name)
    loc, sd = problem.mean["beta"], problem.sd["beta"]
    fit = _least_squares(problem)
    root = np.linalg.cholesky(fit.inverse / np.outer(sd, sd)) * sd.numpy()[:, None]
    np.testing.assert_allclose(np.sqrt((root**2).sum(1)), sd.numpy(), rtol=1e-9)
    scale = torch.as_tensor(root)
    noise = 2 * torch.randn(16, problem.dim)
    log_q = -(noise**2).sum(1) / 2 - problem.dim / 2 * LOG_2PI - scale.diagonal().log().sum()
    evidence = LogJoint(problem)(loc + noise @ scale.T) - log_q
    expected = torch.full((16,), problem.optimum["full_rank"].elbo)
    torch.testing.assert_close(evidence, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", KNOWN_SIGMA)
def test_known_sigma_mean_field_optimum(name: str) -> None:
    """The noise integrates quadratics exactly; rounding is 1e-10 of terms of size up to 1e5."""
    problem = load(name)
    scale = torch.as_tensor(np.diag(1 / _least_squares(problem).lengths))
    noise = standard_noise(64, problem.dim, seed=0)
    value = gaussian_elbo(LogJoint(problem), problem.mean["beta"], scale, noise)
    assert value.item() == pytest.approx(problem.optimum["mean_field"].elbo, abs=1e-5)


def _least_squares(problem: Problem) -> regression.LeastSquares:
    X, y, *prior_sd = (argument.numpy() for argument in problem.args)
    if prior_sd:
        X, y = np.vstack([X, np.diag(1 / prior_sd[0])]), np.append(y, np.zeros(problem.dim))
    return regression.LeastSquares(X, y)


@pytest.mark.parametrize("name", UNKNOWN_SIGMA)
def test_unknown_sigma_posterior_is_exact(name: str) -> None:
    """Draws from the stated posterior: the model's density over theirs is constant.

    Their moments against the reference, with scipy's Student-t and inverse-gamma distributions.
    """
    problem = load(name)
    fit, (n, d) = _least_squares(problem), problem.args[0].shape
    nu = n - d - 1
    rng = np.random.default_rng(0)
    chi2 = rng.chisquare(nu, size=16)
    sigma = np.sqrt(fit.rss / chi2)
    sd = np.sqrt(np.diag(fit.inverse))
    root = np.linalg.cholesky(fit.inverse / np.outer(sd, sd)) * sd[:, None]
    noise = rng.standard_normal((16, d))
    beta = fit.solution + sigma[:, None] * (noise @ root.T)
    # Density of (beta, log sigma): |d chi2 / d log sigma| = 2 chi2.
    log_q = stats.chi2.logpdf(chi2, nu) + np.log(2 * chi2) - (noise**2).sum(1) / 2
    log_q -= d / 2 * LOG_2PI + np.log(np.diag(root)).sum() + d * np.log(sigma)
    theta = torch.as_tensor(np.column_stack([beta, np.log(sigma)]))
    ratio = LogJoint(problem)(theta).numpy() - log_q
    np.testing.assert_allclose(ratio, ratio[0], rtol=0, atol=1e-6)

    student = stats.t(nu, scale=np.sqrt(fit.rss / nu * np.diag(fit.inverse)))
    np.testing.assert_allclose(problem.sd["beta"], student.std(), rtol=1e-10)
    variance = stats.invgamma(nu / 2, scale=fit.rss / 2)
    assert problem.mean["sigma"] == pytest.approx(variance.expect(np.sqrt), rel=1e-6)
    second = float(problem.mean["sigma"] ** 2 + problem.sd["sigma"] ** 2)
    assert second == pytest.approx(variance.mean(), rel=1e-10)


def test_flat_regression_optimum_lies_in_its_bracket() -> None:
    """The closed form for unknown sigma against a sample average that knows nothing of it."""
    rng = np.random.default_rng(1)
    z = rng.standard_normal((20, 2))
    X = z @ np.array([[1.0, 0.8], [0.0, 0.6]])
    y = X @ np.array([1.0, -1.0]) + rng.standard_normal(20)
    args = torch.as_tensor(X), torch.as_tensor(y)
    problem = Problem("small", regression.flat_regression, args, dim=3)
    for family, closed in regression.flat_optima(X, y).items():
        found, *_ = bracket(LogJoint(problem), family, dim=3, draws=2**12)
        assert found.error < 0.005
        assert abs(found.elbo - closed.elbo) <= found.error


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["gp_regr", "eight_schools_noncentered", "arK"])
def test_sample_average_optima_are_reproduced(name: str, family: str) -> None:
    """Brackets from 2^11 other draws and from those that gave the constants must overlap."""
    problem, index = load_or_skip(name), FAMILIES.index(family)
    found, *_ = bracket(LogJoint(problem), family, problem.dim, draws=2**11, seed=100)
    constant: Optimum = OPTIMA[name][index]
    assert abs(found.elbo - constant.elbo) <= found.error + constant.error


def test_german_credit_of_both_sources_is_one_data_set() -> None:
    """The probit record's labels are 1 for bad credit, the other file's 1 for good."""
    try:
        table = np.genfromtxt(
            data_file("german_credit/german_numeric.csv"), delimiter=",", skip_header=1
        )
        record = read("german_credit_probit")["data"]
    except DataNotFound as error:
        pytest.skip(str(error))
    assert json.dumps(record["features"]) == json.dumps(table[:, :-1].astype(int).tolist())
    assert np.array_equal(1 - np.asarray(record["labels"]), table[:, -1])
