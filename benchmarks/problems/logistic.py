"""Bayesian logistic regressions on real data, with optima by quadrature (see ``optimum``).

The breast cancer data (Wisconsin diagnostic) come with scikit-learn. The other sets, from the
UCI repository and the LIBSVM collection, are read from the directory in ``PYRO_NGVI_DATA``.
"""

from collections.abc import Callable

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from .optimum import Array, BinaryRegression
from .problem import Optimum, Problem, data_file

# Optima of the full-rank and the mean-field Gaussian in nats, by `gaussian_optimum`.
OPTIMA: dict[str, tuple[float, float]] = {
    "wdbc": (-55.465137, -67.463366),
    "australian_presplit": (-131.299173, -138.569986),
    "breast_cancer_presplit": (-45.811582, -50.374524),
    "german_credit": (-529.202111, -531.707480),
    "a1a": (-595.877334, -619.954314),
}

BIAS_PRECISION = 1e-5


def logistic_regression(X: Tensor, y: Tensor, prior_sd: Tensor) -> None:
    """w ~ Normal(0, prior_sd^2), y_n ~ Bernoulli(logits = x_n'w)."""
    w = pyro.sample("w", dist.Normal(torch.zeros_like(prior_sd), prior_sd).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=(X * w).sum(-1)), obs=y)


def with_intercept(X: Array) -> Array:
    """X with a last column of ones."""
    return np.column_stack([X, np.ones(len(X))])


def standardise(X: Array) -> Array:
    """Columns of mean 0 and standard deviation 1 (divisor N)."""
    return (X - X.mean(0)) / X.std(0)


def quadrature_elbo(regression: BinaryRegression) -> Callable[[Tensor, Tensor], float]:
    """The exact ELBO as a function of a Gaussian's loc and scale_tril."""

    def elbo(loc: Tensor, scale_tril: Tensor) -> float:
        scale = scale_tril.detach().cpu().numpy().astype(np.float64)
        return regression.elbo(loc.detach().cpu().numpy().astype(np.float64), scale @ scale.T)

    return elbo


def _wdbc() -> BinaryRegression:
    from sklearn.datasets import load_breast_cancer

    X, y = load_breast_cancer(return_X_y=True)
    X = with_intercept(standardise(np.asarray(X)))
    return BinaryRegression(X, np.asarray(y, dtype=np.float64), np.ones(X.shape[1]))


def _presplit(path: str) -> BinaryRegression:
    """The training half of a fixed split; weights N(0, 1), intercept N(0, 1e5)."""
    table = np.genfromtxt(data_file(path), delimiter=",", skip_header=1)
    train = table[table[:, -1] == 0]
    X = with_intercept(train[:, :-2])
    precision = np.ones(X.shape[1])
    precision[-1] = BIAS_PRECISION
    return BinaryRegression(X, train[:, -2], precision)


def _german_credit() -> BinaryRegression:
    path = data_file("german_credit/german_numeric.csv")
    table = np.genfromtxt(path, delimiter=",", skip_header=1)
    X = with_intercept(standardise(table[:, :-1]))
    return BinaryRegression(X, table[:, -1], np.ones(X.shape[1]))


def _a1a() -> BinaryRegression:
    """The 0/1 features as they are; weight precision of Mishkin et al. (2018), table 1."""
    with np.load(data_file("libsvm/a1a.npz")) as data:
        X, y = with_intercept(data["X"].astype(np.float64)), data["y"].astype(np.float64)
    precision = np.full(X.shape[1], 2.8072)
    precision[-1] = BIAS_PRECISION
    return BinaryRegression(X, y, precision)


REGRESSIONS: dict[str, Callable[[], BinaryRegression]] = {
    "wdbc": _wdbc,
    "australian_presplit": lambda: _presplit("australian/australian_presplit.csv"),
    "breast_cancer_presplit": lambda: _presplit(
        "breast_cancer_wisconsin_original/breast_cancer_presplit.csv"
    ),
    "german_credit": _german_credit,
    "a1a": _a1a,
}


def load(name: str) -> Problem:
    """The problem of that name."""
    regression = REGRESSIONS[name]()
    full_rank, mean_field = OPTIMA[name]
    prior_sd = 1 / np.sqrt(regression.precision)
    return Problem(
        name=name,
        model=logistic_regression,
        args=tuple(torch.as_tensor(a) for a in (regression.X, regression.y, prior_sd)),
        dim=regression.X.shape[1],
        optimum={"full_rank": Optimum(full_rank), "mean_field": Optimum(mean_field)},
        exact_elbo=quadrature_elbo(regression),
    )
