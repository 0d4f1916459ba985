r"""The network of example 3 of the paper on IFVB on German credit, and what a printed flow pays there.

    logit p(y_i = 1) = v_0 + v' relu(W x_i),   W (5, 10), v (5,):  theta in R^56,   theta ~ N(0, 10 I).

Rows 1 to 800 are trained on, the last 200 tested.

**The box.**  In theta = W_1 sigmoid(W_0 eps + b_0) + mu, W_0 eps + b_0 ~ N(b_0, I) whatever W_0 is.
So each coordinate of W_1'(theta - mu) is a sigmoid(N(b, 1)) of its own: it lies in an interval of
length 1, with an sd of at most 0.21, where the prior has 3.2.  Directions that the data leave open can
not be as wide as the prior: KL(q || prior) is at least :func:`least_kl` for every member.  A Gaussian
pays nothing for such a direction.

Source: Godichon-Baggioni, Nguyen & Tran (2024, JASA), example 3; UCI, Statlog (German Credit Data).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from ..problems.problem import data_file

__all__ = ["DIM", "Credit", "evaluate", "least_kl", "logits"]

HIDDEN, INPUTS = 5, 10
DIM = HIDDEN * INPUTS + HIDDEN + 1
PRIOR_VARIANCE = 10.0
TRAIN, CHUNK = 800, 250


class Credit:
    """The model as a callable, with minibatches of ``batch`` rows, and its test rows.

    Raises:
        DataNotFound: without the data file.
    """

    def __init__(self, batch: int | None = None) -> None:
        rows = np.loadtxt(
            data_file("german_credit/german_ifvb_example3.csv"), delimiter=",", skiprows=1
        )
        rows = torch.from_numpy(rows)
        X, y, is_test = rows[:, :INPUTS], rows[:, INPUTS], rows[:, INPUTS + 1] == 1
        self.X, self.y = X[~is_test], y[~is_test]
        self.X_test, self.y_test = X[is_test], y[is_test]
        self.batch = batch

    def __call__(self) -> None:
        zero = self.X.new_zeros(DIM)
        theta = pyro.sample("theta", dist.Normal(zero, math.sqrt(PRIOR_VARIANCE)).to_event(1))
        with pyro.plate("rows", TRAIN, subsample_size=self.batch) as rows:
            X, y = (self.X, self.y) if self.batch is None else (self.X[rows], self.y[rows])
            pyro.sample("y", dist.Bernoulli(logits=logits(theta, X)), obs=y)


def logits(theta: Tensor, X: Tensor) -> Tensor:
    """Outputs (..., n) of the networks ``theta`` (..., 56) for rows ``X`` (n, 10)."""
    split = HIDDEN * INPUTS
    W = theta[..., :split].unflatten(-1, (HIDDEN, INPUTS))
    bias, v = theta[..., split, None], theta[..., split + 1 :]
    return bias + (torch.relu(X @ W.mT) @ v.unsqueeze(-1)).squeeze(-1)


def least_kl() -> float:
    """A bound from below on KL(q || prior) in nats over all members of the printed form.

    The cross entropy is at least that of theta = 0, and the entropy at most 56 times that of
    sigmoid(N(0, 1)): log sigmoid' is concave and even, so its mean over N(b, 1) is largest at b = 0.
    """
    x, weights = np.polynomial.hermite_e.hermegauss(100)
    log_slope = -np.logaddexp(0.0, x) - np.logaddexp(0.0, -x)
    entropy = 0.5 * math.log(2 * math.pi * math.e) + float(weights @ log_slope / weights.sum())
    return DIM * (0.5 * math.log(2 * math.pi * PRIOR_VARIANCE) - entropy)


@torch.no_grad()
def evaluate(guide: Any, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """log p(y | theta), log q - log prior, each (n,), and the test logits (n, 200); always the same
    noise, and the random state is left as it was."""
    data = Credit()
    prior = dist.Normal(data.X.new_zeros(DIM), math.sqrt(PRIOR_VARIANCE)).to_event(1)
    fits, costs, tests = [], [], []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        q = guide.get_posterior()
        for _ in range(n // CHUNK):
            theta = q.sample((CHUNK,))
            costs.append(q.log_prob(theta) - prior.log_prob(theta))
            y = dist.Bernoulli(logits=logits(theta, data.X), validate_args=False)
            fits.append(y.log_prob(data.y).sum(-1))
            tests.append(logits(theta, data.X_test))
    return torch.cat(fits), torch.cat(costs), torch.cat(tests)
