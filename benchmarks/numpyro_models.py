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
from numpyro.infer.util import potential_energy

from .problems import LogJoint, Problem, hierarchical, logistic, posteriordb_models, regression


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


def _flat(name: str, support: Any, *shape: int) -> Any:
    return numpyro.sample(name, dist.ImproperUniform(support, (), shape))


def _flat_regression(X: Any, y: Any) -> None:
    beta = _flat("beta", dist.constraints.real_vector, X.shape[1])
    _linear_likelihood(X @ beta, _flat("sigma", dist.constraints.positive), y)


def _flat_regression_half_cauchy(X: Any, y: Any) -> None:
    beta = _flat("beta", dist.constraints.real_vector, X.shape[1])
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    _linear_likelihood(X @ beta, sigma, y)


def _normal_regression(X: Any, y: Any) -> None:
    beta = _normal("beta", X.shape[1], 10.0)
    sigma = numpyro.sample("sigma", dist.HalfNormal(10.0))
    _linear_likelihood(X @ beta, sigma, y)


def _flat_known_sigma(X: Any, y: Any) -> None:
    beta = _flat("beta", dist.constraints.real_vector, X.shape[1])
    _linear_likelihood(X @ beta, regression.SIGMA, y)


def _wide_known_sigma(X: Any, y: Any, prior_sd: Any) -> None:
    beta = numpyro.sample("beta", dist.Normal(0.0, prior_sd).to_event(1))
    _linear_likelihood(X @ beta, regression.SIGMA, y)


def _gaussian_process(x: Any, y: Any) -> None:
    rho: Any = numpyro.sample("rho", dist.Gamma(25.0, 4.0))
    alpha: Any = numpyro.sample("alpha", dist.HalfNormal(2.0))
    sigma: Any = numpyro.sample("sigma", dist.HalfNormal(1.0))
    squares = ((x[:, None] - x) / rho) ** 2
    covariance = alpha**2 * jnp.exp(-squares / 2) + sigma * jnp.eye(len(x))
    scale = jnp.linalg.cholesky(covariance)
    normal = dist.MultivariateNormal(jnp.zeros(len(y)), scale_tril=scale)
    numpyro.sample("y", normal, obs=y)


def _gaussian_mixture(y: Any) -> None:
    mu = _flat("mu", dist.constraints.ordered_vector, 2)
    numpyro.factor("mu_prior", dist.Normal(0.0, 2.0).log_prob(mu).sum())
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0).expand([2]).to_event(1))
    theta: Any = numpyro.sample("theta", dist.Beta(5.0, 5.0))
    weights = dist.Categorical(probs=jnp.stack([theta, 1 - theta]))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.MixtureSameFamily(weights, dist.Normal(mu, sigma)), obs=y)


def _schools() -> Any:
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    return mu, numpyro.sample("tau", dist.HalfCauchy(5.0))


def _eight_schools_noncentered(y: Any, sigma: Any) -> None:
    mu, tau = _schools()
    with numpyro.plate("schools", len(y)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu + tau * z, sigma), obs=y)


def _eight_schools_centered(y: Any, sigma: Any) -> None:
    mu, tau = _schools()
    with numpyro.plate("schools", len(y)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def _horseshoe(X: Any, y: Any) -> None:
    intercept: Any = numpyro.sample("intercept", dist.Normal(0.0, 5.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(0.1))
    scales = numpyro.sample("lambda", dist.HalfCauchy(1.0).expand([X.shape[1]]).to_event(1))
    z = _normal("z", X.shape[1], 1.0)
    _linear_likelihood(intercept + X @ (tau * scales * z), sigma, y)


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
    posteriordb_models.flat_regression: _flat_regression,
    posteriordb_models.flat_regression_half_cauchy: _flat_regression_half_cauchy,
    posteriordb_models.normal_regression: _normal_regression,
    regression.flat_known_sigma: _flat_known_sigma,
    regression.wide_known_sigma: _wide_known_sigma,
    posteriordb_models.gaussian_process: _gaussian_process,
    posteriordb_models.gaussian_mixture: _gaussian_mixture,
    posteriordb_models.eight_schools_noncentered: _eight_schools_noncentered,
    hierarchical.eight_schools_centered: _eight_schools_centered,
    hierarchical.varying_intercepts: _varying_intercepts,
    hierarchical.horseshoe: _horseshoe,
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


def log_joint(problem: Problem) -> Callable[[Any], Any]:
    """`problems.LogJoint` of NumPyro's model: theta (d,) to the log joint density and Jacobian."""
    model, args, shapes = translate(problem), arguments(problem), LogJoint(problem).shapes
    ends = np.cumsum([shape.numel() for shape in shapes.values()])[:-1].tolist()

    def density(theta: Any) -> Any:
        parts = zip(shapes.items(), jnp.split(theta, ends), strict=True)
        sites = {name: part.reshape(tuple(shape)) for (name, shape), part in parts}
        return -potential_energy(model, args, {}, sites)

    return density
