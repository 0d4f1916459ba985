"""The benchmarked models once more, in NumPyro, with the same sites and densities."""

# NumPyro is optional.
# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import log_ndtr

from .problems import Problem, hierarchical, logistic, posteriordb_models


def _linear_likelihood(mean: Any, sigma: Any, y: Any) -> None:
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)


def _normal(name: str, size: int, scale: float) -> Any:
    return numpyro.sample(name, dist.Normal(0.0, scale).expand([size]).to_event(1))


def _logistic_regression(X: Any, y: Any, prior_sd: Any) -> None:
    w = numpyro.sample("w", dist.Normal(jnp.zeros_like(prior_sd), prior_sd).to_event(1))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def _probit_regression(X: Any, y: Any) -> None:
    f = X @ _normal("weights", X.shape[1], 1.0)
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=log_ndtr(f) - log_ndtr(-f)), obs=y)


def _autoregression(lags: Any, y: Any) -> None:
    alpha = numpyro.sample("alpha", dist.Normal(0.0, 10.0))
    beta = _normal("beta", lags.shape[1], 10.0)
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    _linear_likelihood(alpha + lags @ beta, sigma, y)


def _flat_regression_half_cauchy(X: Any, y: Any) -> None:
    flat = dist.ImproperUniform(dist.constraints.real_vector, (), (X.shape[1],))
    beta = numpyro.sample("beta", flat)
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    _linear_likelihood(X @ beta, sigma, y)


def _varying_intercepts(X: Any, group: Any, y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    beta = _normal("beta", X.shape[1], 1.0)
    with numpyro.plate("groups", int(np.max(np.asarray(group))) + 1):
        a: Any = numpyro.sample("a", dist.Normal(mu, tau))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=a[group] + X @ beta), obs=y)


_TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    logistic.logistic_regression: _logistic_regression,
    posteriordb_models.probit_regression: _probit_regression,
    posteriordb_models.autoregression: _autoregression,
    posteriordb_models.flat_regression_half_cauchy: _flat_regression_half_cauchy,
    hierarchical.varying_intercepts: _varying_intercepts,
}


def translate(problem: Problem) -> Callable[..., Any]:
    """The NumPyro form of a problem's model.

    Raises
    ------
    LookupError
        If there is none.
    """
    if problem.model not in _TRANSLATIONS:
        raise LookupError(f"There is no NumPyro form of {problem.name!r}: leave out that method.")
    return _TRANSLATIONS[problem.model]


def arguments(problem: Problem) -> tuple[np.ndarray, ...]:
    """The problem's data as numpy arrays, which jit treats as constants."""
    return tuple(np.asarray(argument) for argument in problem.args)
