r"""The exact optimum of the ELBO of a Gaussian on a binary regression, by quadrature.

For a likelihood that factorises over 1-d linear predictors f_n = x_n'w and a Gaussian prior
N(0, Lambda^-1), a Gaussian q = N(m, S) has

    ELBO = sum_n E[l_n(f_n)] - KL(q || prior),    f_n ~ N(x_n'm, x_n'S x_n),

so only 1-d expectations are needed: Gauss-Hermite quadrature gives them to machine precision.
At the optimum (Opper & Archambeau 2009, "The variational Gaussian approximation revisited")

    X' E[l'] = Lambda m,        S^-1 = Lambda + X' diag(E[-l'']) X     (full rank),
                                S_jj^-1 = the same diagonal            (mean field),

which the natural-gradient iteration with unit steps (halved while the ELBO would fall) solves.
Deterministic; costs O(N d^2 + d^3) a step. Not for models with other latent variables.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, log_expit, log_ndtr

from .problem import FAMILIES

Array = NDArray[np.floating]


@dataclass(frozen=True)
class BinaryRegression:
    """y_n ~ Bernoulli(g(x_n'w)), w_j ~ Normal(0, 1/precision_j), y in {0, 1}.

    ``link`` is ``"logit"`` (g the logistic function) or ``"probit"`` (g the normal cdf).
    """

    X: Array
    y: Array
    precision: Array
    link: Literal["logit", "probit"] = "logit"
    nodes: int = 128

    @cached_property
    def _quadrature(self) -> tuple[Array, Array]:
        nodes, weights = np.polynomial.hermite_e.hermegauss(self.nodes)
        return nodes, weights / weights.sum()

    def expected_terms(self, loc: Array, covariance: Array) -> tuple[Array, Array, Array]:
        """E[l_n], E[l_n'], E[l_n''] of every datum's log likelihood, each (N,).

        The last as E[l' (f - m)] / var (Price), by the same points: then these are the derivatives of
        the quadrature sum itself, and its optimum can be found however wide f is.
        """
        nodes, weights = self._quadrature
        sd = np.sqrt(np.einsum("nd,de,ne->n", self.X, covariance, self.X, optimize=True))
        f = (self.X @ loc)[:, None] + sd[:, None] * nodes
        sign = (2 * self.y - 1)[:, None]
        if self.link == "logit":
            value, slope = log_expit(sign * f), sign * expit(-sign * f)
        else:
            value = log_ndtr(sign * f)
            slope = sign * np.exp(-(f**2) / 2 - value) / np.sqrt(2 * np.pi)
        return value @ weights, slope @ weights, slope @ (weights * nodes) / sd

    def elbo(self, loc: Array, covariance: Array) -> float:
        """The ELBO of N(loc, covariance), in nats."""
        prior = self.precision
        kl = (prior * (np.diag(covariance) + loc**2) - 1 - np.log(prior)).sum()
        kl -= np.linalg.slogdet(covariance)[1]
        return float(self.expected_terms(loc, covariance)[0].sum() - kl / 2)


@dataclass(frozen=True)
class GaussianOptimum:
    """The optimal Gaussian, its ELBO in nats, and the Fisher norm of the gradient left there."""

    elbo: float
    loc: Array
    covariance: Array
    residual: float


def gaussian_optimum(
    problem: BinaryRegression, family: str, tolerance: float = 1e-10, max_steps: int = 1000
) -> GaussianOptimum:
    """The Gaussian of a family with the largest ELBO.

    Stops when the Fisher norm of the natural gradient is below ``tolerance`` (the ELBO is then
    right to about its square).

    Raises
    ------
    ValueError
        If the family is neither ``"full_rank"`` nor ``"mean_field"``.
    ArithmeticError
        If that does not happen within ``max_steps``.
    """
    X, prior = problem.X, problem.precision
    loc, precision = np.zeros(X.shape[1]), np.diag(prior) + X.T @ X / 4
    if family == "mean_field":
        precision = np.diag(np.diag(precision))
    covariance = np.linalg.inv(precision)
    elbo, residual = problem.elbo(loc, covariance), np.inf
    if family not in FAMILIES:
        raise ValueError(f"The family is {family!r}: it must be one of {', '.join(FAMILIES)}.")
    for _ in range(max_steps):
        _, first, second = problem.expected_terms(loc, covariance)
        hessian = np.diag(prior) + X.T @ (X * -second[:, None])
        gradient = X.T @ first - prior * loc
        target = hessian if family == "full_rank" else np.diag(np.diag(hessian))
        scale = np.linalg.cholesky(covariance)
        change = scale.T @ (target - precision) @ scale
        residual = float(np.sqrt(gradient @ covariance @ gradient + (change**2).sum() / 2))
        if residual < tolerance:
            return GaussianOptimum(elbo, loc, covariance, residual)
        # The Hessian of the ELBO in the mean: a Newton step for both families.
        direction, step = np.linalg.solve(hessian, gradient), 1.0
        while True:
            trial_loc = loc + step * direction
            trial_precision = precision + step * (target - precision)
            trial_covariance = np.linalg.inv(trial_precision)
            trial_elbo = problem.elbo(trial_loc, trial_covariance)
            if trial_elbo >= elbo - 1e-10 * abs(elbo) or step < 1e-6:
                break
            step /= 2
        loc, precision, covariance = trial_loc, trial_precision, trial_covariance
        elbo = trial_elbo
    raise ArithmeticError(f"No optimum after {max_steps} steps: residual {residual:.1e}.")
