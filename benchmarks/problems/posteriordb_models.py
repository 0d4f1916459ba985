"""Pyro models of the reference posteriors, with the parameter names of the references.

Every prior is built from the data's tensors, so that a model runs in their dtype and device.
"""

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.transforms import OrderedTransform
from torch import Tensor


def _flat(name: str, like: Tensor, size: int) -> Tensor:
    """A vector with the improper density 1 on R^size."""
    zeros = like.new_zeros(size)
    return pyro.sample(name, dist.Normal(zeros, 1.0).to_event(1).mask(False))


def _flat_positive(name: str, like: Tensor) -> Tensor:
    """A number with the improper density 1 on the positive half line."""
    return pyro.sample(name, dist.LogNormal(like.new_zeros(()), 1.0).mask(False))


def _linear_likelihood(mean: Tensor, sigma: Tensor, y: Tensor) -> None:
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, sigma), obs=y)


def flat_regression(X: Tensor, y: Tensor) -> None:
    """Flat beta and flat sigma > 0."""
    beta = _flat("beta", y, X.shape[1])
    sigma = _flat_positive("sigma", y)
    _linear_likelihood((X * beta).sum(-1), sigma, y)


def flat_regression_half_cauchy(X: Tensor, y: Tensor) -> None:
    """Flat beta, sigma ~ Half-Cauchy(2.5)."""
    beta = _flat("beta", y, X.shape[1])
    sigma = pyro.sample("sigma", dist.HalfCauchy(y.new_tensor(2.5)))
    _linear_likelihood((X * beta).sum(-1), sigma, y)


def normal_regression(X: Tensor, y: Tensor) -> None:
    """beta ~ Normal(0, 10), sigma ~ Half-Normal(10)."""
    beta = pyro.sample("beta", dist.Normal(y.new_zeros(X.shape[1]), 10.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(y.new_tensor(10.0)))
    _linear_likelihood((X * beta).sum(-1), sigma, y)


def autoregression(lags: Tensor, y: Tensor) -> None:
    """y_t ~ Normal(alpha + lags_t'beta, sigma), conditioned on the first values."""
    alpha = pyro.sample("alpha", dist.Normal(y.new_zeros(()), 10.0))
    beta = pyro.sample("beta", dist.Normal(y.new_zeros(lags.shape[1]), 10.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(y.new_tensor(2.5)))
    _linear_likelihood(alpha + (lags * beta).sum(-1), sigma, y)


def _log_ndtr(f: Tensor) -> Tensor:
    """log Phi(f); torch's own has no batching rule for vmap."""
    root = 2**0.5
    lower = torch.log(torch.special.erfcx(-f.clamp(max=0) / root) / 2) - f**2 / 2
    upper = torch.log1p(-torch.special.erfc(f.clamp(min=0) / root) / 2)
    return torch.where(f < 0, lower, upper)


def probit_regression(X: Tensor, y: Tensor) -> None:
    """weights ~ Normal(0, 1), y_n ~ Bernoulli(Phi(x_n'weights))."""
    w = pyro.sample("weights", dist.Normal(y.new_zeros(X.shape[1]), 1.0).to_event(1))
    f = (X * w).sum(-1)
    logits = _log_ndtr(f) - _log_ndtr(-f)  # the logit of Phi(f), exact in both tails
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def gaussian_process(x: Tensor, y: Tensor) -> None:
    """y ~ N(0, alpha^2 exp(-(x - x')^2 / 2 rho^2) + sigma I): sigma is a variance here."""
    rho = pyro.sample("rho", dist.Gamma(y.new_tensor(25.0), y.new_tensor(4.0)))
    alpha = pyro.sample("alpha", dist.HalfNormal(y.new_tensor(2.0)))
    sigma = pyro.sample("sigma", dist.HalfNormal(y.new_tensor(1.0)))
    rho, alpha, sigma = (v[..., None, None] for v in (rho, alpha, sigma))
    distance = (x[:, None] - x) / rho
    identity = torch.eye(len(x), dtype=y.dtype, device=y.device)
    covariance = alpha**2 * torch.exp(-(distance**2) / 2) + sigma * identity
    scale = torch.linalg.cholesky(covariance)
    pyro.sample("y", dist.MultivariateNormal(torch.zeros_like(y), scale_tril=scale), obs=y)


def gaussian_mixture(y: Tensor) -> None:
    """theta Normal(mu_1, sigma_1) + (1 - theta) Normal(mu_2, sigma_2), mu_1 < mu_2."""
    # The prior is the product of normals on the ordered cone: flat there, times a factor.
    base = dist.Normal(y.new_zeros(2), 1.0).to_event(1)
    ordered = dist.TransformedDistribution(base, [OrderedTransform()])
    mu = pyro.sample("mu", ordered.mask(False))
    pyro.factor("mu_prior", dist.Normal(y.new_zeros(2), 2.0).log_prob(mu).sum(-1))
    sigma = pyro.sample("sigma", dist.HalfNormal(y.new_full((2,), 2.0)).to_event(1))
    theta = pyro.sample("theta", dist.Beta(y.new_tensor(5.0), y.new_tensor(5.0)))
    weights = dist.Categorical(probs=torch.stack([theta, 1 - theta], -1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.MixtureSameFamily(weights, dist.Normal(mu, sigma)), obs=y)


def eight_schools_noncentered(y: Tensor, sigma: Tensor) -> None:
    """theta_j = mu + tau z_j, y_j ~ Normal(theta_j, sigma_j)."""
    mu = pyro.sample("mu", dist.Normal(y.new_zeros(()), 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(y.new_tensor(5.0)))
    with pyro.plate("schools", len(y)):
        z = pyro.sample("z", dist.Normal(torch.zeros_like(y), 1.0))
        theta = pyro.deterministic("theta", mu + tau * z)
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)
