r"""Ill-conditioned linear regressions with the posterior in closed form.

Covariates on scales s_j from 1e-3 to 1e4 whose standardised versions correlate at 0.9999 in
pairs; y_n ~ Normal(x_n'beta, sigma). With P = A'A the precision of beta for sigma = 1, RSS the
residual sum of squares and b the least-squares (or ridge) estimate:

* sigma known: beta | y ~ N(b, P^-1), the ELBO of the full-rank optimum is the log evidence; the
  mean-field optimum is N(b, diag(P)^-1) and loses (sum_j log P_jj - log det P) / 2 nats.
* sigma unknown, beta and sigma > 0 flat, d covariates, nu = n - d - 1:
  beta | y ~ t_nu(b, RSS / nu P^-1) and sigma^2 | y ~ RSS / chi^2_nu. The optimal Gaussian in
  (beta, log sigma) has T = E[sigma^-2] = nu / RSS, independent blocks beta ~ N(b, P^-1 / T)
  (diagonal: 1 / (T P_jj)) and log sigma ~ N((v - log(T) / 2), v), v = 1 / (2 (n - 1)).

All is computed by QR of A with its columns scaled to length 1: the condition number of P itself
(1e14 from the scales alone) never appears.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from scipy.linalg import solve_triangular
from scipy.special import gammaln
from torch import Tensor

from .optimum import Array
from .posteriordb_models import flat_regression
from .problem import Optimum, Problem

CORRELATION = 0.9999
SIGMA = 1.0
WIDE = 100.0
LOG_2PI = float(np.log(2 * np.pi))

# name: (seed, n, d, sigma known, wide rather than flat prior)
VARIANTS: dict[str, tuple[int, int, int, bool, bool]] = {
    "regression_flat_n200_d3": (0, 200, 3, True, False),
    "regression_wide_n1000_d10": (1, 1000, 10, True, True),
    "regression_wide_n5000_d30": (2, 5000, 30, True, True),
    "regression_flat_n200_d30": (3, 200, 30, True, False),
    "regression_unknown_sigma_n500_d10": (4, 500, 10, False, False),
    "regression_unknown_sigma_n200_d3": (5, 200, 3, False, False),
    "regression_unknown_sigma_n5000_d30": (6, 5000, 30, False, False),
}


def flat_known_sigma(X: Tensor, y: Tensor) -> None:
    """Flat beta; noise of standard deviation SIGMA."""
    zeros = X.new_zeros(X.shape[1])
    beta = pyro.sample("beta", dist.Normal(zeros, 1.0).to_event(1).mask(False))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal((X * beta).sum(-1), SIGMA), obs=y)


def wide_known_sigma(X: Tensor, y: Tensor, prior_sd: Tensor) -> None:
    """beta ~ Normal(0, prior_sd^2); noise of standard deviation SIGMA."""
    beta = pyro.sample("beta", dist.Normal(torch.zeros_like(prior_sd), prior_sd).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal((X * beta).sum(-1), SIGMA), obs=y)


@dataclass(frozen=True)
class LeastSquares:
    """min |b - A x|^2 through QR of A with columns scaled to length 1."""

    A: Array
    b: Array

    @cached_property
    def lengths(self) -> Array:
        return np.sqrt((self.A**2).sum(0))

    @cached_property
    def _qr(self) -> tuple[Array, Array]:
        q, r = np.linalg.qr(self.A / self.lengths)
        return q, r

    @cached_property
    def solution(self) -> Array:
        q, r = self._qr
        return solve_triangular(r, q.T @ self.b) / self.lengths

    @cached_property
    def rss(self) -> float:
        """The residual sum of squares at the solution."""
        q, _ = self._qr
        return float(((self.b - q @ (q.T @ self.b)) ** 2).sum())

    @cached_property
    def inverse(self) -> Array:
        """(A'A)^-1."""
        root = solve_triangular(self._qr[1], np.eye(self.A.shape[1])) / self.lengths[:, None]
        return root @ root.T

    @property
    def log_det(self) -> float:
        """log det A'A."""
        return float(2 * (np.log(np.abs(np.diag(self._qr[1]))) + np.log(self.lengths)).sum())

    @property
    def log_det_diagonal(self) -> float:
        """log det of the diagonal of A'A."""
        return float(2 * np.log(self.lengths).sum())


def simulate(seed: int, n: int, d: int) -> tuple[Array, Array, Array]:
    """Covariates (n, d), response (n,), and the covariates' scales (d,)."""
    rng = np.random.default_rng(seed)
    scales = rng.permutation(np.logspace(-3, 4, d))
    common, own = rng.standard_normal((n, 1)), rng.standard_normal((n, d))
    z = np.sqrt(CORRELATION) * common + np.sqrt(1 - CORRELATION) * own
    y = z @ rng.standard_normal(d) + SIGMA * rng.standard_normal(n)
    return z * scales, y, scales


def known_sigma(name: str, seed: int, n: int, d: int, wide: bool) -> Problem:
    """Noise of known standard deviation: an exactly Gaussian posterior."""
    X, y, scales = simulate(seed, n, d)
    prior_sd = WIDE / scales
    A, b, constant = X / SIGMA, y / SIGMA, -n / 2 * LOG_2PI - n * np.log(SIGMA)
    if wide:
        A = np.vstack([A, np.diag(1 / prior_sd)])
        b = np.concatenate([b, np.zeros(d)])
        constant -= d / 2 * LOG_2PI + np.log(prior_sd).sum()
    fit = LeastSquares(A, b)
    evidence = float(constant - fit.rss / 2 + d / 2 * LOG_2PI - fit.log_det / 2)
    mean_field = evidence + (fit.log_det - fit.log_det_diagonal) / 2
    args = (X, y, prior_sd) if wide else (X, y)
    return Problem(
        name=name,
        model=wide_known_sigma if wide else flat_known_sigma,
        args=tuple(torch.as_tensor(a) for a in args),
        dim=d,
        optimum={"full_rank": Optimum(evidence), "mean_field": Optimum(mean_field)},
        mean={"beta": torch.as_tensor(fit.solution)},
        sd={"beta": torch.as_tensor(np.sqrt(np.diag(fit.inverse)))},
    )


def flat_optima(X: Array, y: Array) -> dict[str, Optimum]:
    """Optima for flat beta and flat sigma > 0, by family."""
    n, d = X.shape
    fit = LeastSquares(X, y)
    rate, v = (n - 1 - d) / fit.rss, 1 / (2 * (n - 1))
    location = v - np.log(rate) / 2
    shared = -(n - 1) * location - n / 2 * LOG_2PI - (n - 1) / 2
    shared += (np.log(v) - d * np.log(rate) + (d + 1) * (1 + LOG_2PI)) / 2
    log_dets = {"full_rank": fit.log_det, "mean_field": fit.log_det_diagonal}
    return {family: Optimum(float(shared - value / 2)) for family, value in log_dets.items()}


def unknown_sigma(name: str, seed: int, n: int, d: int) -> Problem:
    """Flat beta, flat sigma > 0: Student-t and inverse-chi marginals."""
    X, y, _ = simulate(seed, n, d)
    fit, nu = LeastSquares(X, y), n - d - 1
    square = fit.rss / (nu - 2)
    sigma = float(np.sqrt(fit.rss / 2) * np.exp(gammaln((nu - 1) / 2) - gammaln(nu / 2)))
    sd = np.sqrt(square * np.diag(fit.inverse))
    return Problem(
        name=name,
        model=flat_regression,
        args=(torch.as_tensor(X), torch.as_tensor(y)),
        dim=d + 1,
        optimum=flat_optima(X, y),
        mean={"beta": torch.as_tensor(fit.solution), "sigma": torch.tensor(sigma).double()},
        sd={
            "beta": torch.as_tensor(sd),
            "sigma": torch.tensor(np.sqrt(square - sigma**2)).double(),
        },
    )


def load(name: str) -> Problem:
    """The problem of that name."""
    seed, n, d, known, wide = VARIANTS[name]
    return known_sigma(name, seed, n, d, wide) if known else unknown_sigma(name, seed, n, d)
