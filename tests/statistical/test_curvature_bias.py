"""Bias at stationarity of the moving averages of curvature, on a conjugate Gaussian.

A rate b that does not fall leaves the precision P at random around a fixed point; where its mean lies
is the bias of the rule.  Linear regression by minibatches, rules as pure functions, the default floor
of the rates.  The answer to compare with is exact; the standard error comes from batch means.

With the noise v = Var(H) / P^2 of a curvature, P varies by b v / 2 (relative, squared), so its mean and
that of 1 / P can not both be right.  Curvatures by products or by the Hessian have little noise: there
P is tested.  Price's has much (v of 10 here, from one draw and a minibatch): the second-order term
puts P above by b v / 2, which makes the *variances* 1 / P unbiased, and these are tested.
"""

import pytest
import torch

from pyro_ngvi.families import FullRankNormal, MeanFieldNormal
from pyro_ngvi.optim.schedules import DEFAULT_RATE
from pyro_ngvi.optim.von import VONRule

N, M, D, SD = 50, 10, 3, 0.7
RATE = DEFAULT_RATE.floor
BURN, STEPS = 2_000, {"hessian": 10_000, "gauss_newton": 10_000, "price": 40_000}


@pytest.fixture
def data():
    g = torch.Generator().manual_seed(0)
    X = torch.randn(N, D, generator=g)
    X[:, 2] += 0.7 * X[:, 1]
    y = X @ torch.tensor([1.0, -0.5, 0.3]) + SD * torch.randn(N, generator=g)
    return X, y


def stationary_precision(family, kind, data, expected):
    """Mean ratio of P to ``expected(params)``, of its inverse for "price"; and its standard error."""
    X, y = data
    g = torch.Generator().manual_seed(1)
    rule = VONRule(family, RATE, RATE, momentum=0.9)
    params = family.init(torch.zeros(D), 0.1)
    state, ratios = rule.init(params), []
    for k in range(BURN + STEPS[kind]):
        batch = torch.randperm(N, generator=g)[:M]
        x, t = X[batch], y[batch]
        leaves = {name: v.clone().requires_grad_() for name, v in params.items()}
        z = family.rsample(leaves, torch.randn(1, D, generator=g))
        residual = t - z @ x.T
        log_p = -0.5 * (N / M) * (residual / SD).square().sum() - 0.5 * z.square().sum()
        (family.log_prob(params, z).sum() - log_p).backward()
        grads = {name: v.grad for name, v in leaves.items() if v.grad is not None}
        if kind == "hessian":
            H = (N / M) * x.T @ x / SD**2
        elif kind == "gauss_newton":
            rows = residual.detach().mT * x / SD**2
            H = (N / M) * rows.T @ rows
        if kind != "price":
            grads["curvature.dense"] = H + torch.eye(D)
        params, state, _ = rule.update(params, grads, state)
        if k >= BURN:
            P = torch.linalg.inv(family.covariance(params))
            ratio = P.diagonal() / expected(params).diagonal()
            ratios.append(1.0 / ratio if kind == "price" else ratio)
    ratio = torch.stack(ratios)
    batches = ratio.reshape(20, -1, D).mean(1)
    return batches.mean(0), batches.std(0) / 20**0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, kind",
    [
        (MeanFieldNormal(), "hessian"),
        (FullRankNormal(), "hessian"),
        (MeanFieldNormal(), "gauss_newton"),
        (FullRankNormal(), "gauss_newton"),
        (MeanFieldNormal(), "price"),  # that of IVON
    ],
)
def test_bias_of_the_precision_is_under_two_percent(family, kind, data):
    X, y = data
    H = X.T @ X / SD**2 + torch.eye(D)

    def expected(params):
        if kind != "gauss_newton":
            return H
        # E_q of the products: (residual of the mean)^2 + x' Sigma x
        square = (y - X @ params["loc"]).square()
        square = square + (X @ family.covariance(params) * X).sum(-1)
        return (X.T * square) @ X / SD**4 + torch.eye(D)

    ratio, error = stationary_precision(family, kind, data, expected)
    assert (error < 0.02).all(), "the run is too short to tell"
    assert ((ratio - 1.0).abs() < 0.02 + 3.0 * error).all(), (ratio, error)
