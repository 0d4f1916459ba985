"""Bias at stationarity of the moving averages of curvature, on a conjugate Gaussian.

A rate b that does not fall leaves the precision P at random around a fixed point; where its mean lies
is the bias of the rule.  Linear regression by minibatches, rules as pure functions, the default floor
of the rates.  The answer to compare with is exact; the standard error comes from batch means.

With the noise v = Var(H) / P^2 of a curvature, P varies by b v / 2 (relative, squared), so its mean and
that of 1 / P cannot both be right.  Curvatures by products or by the Hessian have little noise: there
P is tested.  Price's has much (v of 10 here, from one draw and a minibatch): the second-order term
puts P above by b v / 2, which makes the *variances* 1 / P unbiased, and these are tested.

SLANG drops correlations and keeps the diagonal of the average, which is tested.  Vadam averages the
square of the gradient G = N/M sum_batch g_i of a minibatch, over N: biased by design.  Its stationary
value is known, with the sums over all data at draws z of q, for minibatches without replacement

    E G^2 / N = E_q[ t^2 + N (N - M) / (M (N - 1)) (u - t^2 / N) ] / N,  t = sum_i g_i, u = sum_i g_i^2,

about u / M where the data's gradients cancel, as they do at a fit.  That is what is tested.
"""

import pytest
import torch

from pyro_ngvi.families import FactorPrecisionNormal, FullRankNormal, MeanFieldNormal
from pyro_ngvi.optim.vogn import IVONRule, VadamRule
from pyro_ngvi.optim.von import VONRule

N, M, D, SD = 50, 10, 3, 0.7
RATE = 0.01  # where the default rate ends
BURN = 2_000
STEPS = {"hessian": 10_000, "gauss_newton": 10_000, "rows": 10_000} | dict.fromkeys(
    ("price", "squared_gradient"), 40_000
)


@pytest.fixture
def data():
    g = torch.Generator().manual_seed(0)
    X = torch.randn(N, D, generator=g)
    X[:, 2] += 0.7 * X[:, 1]
    y = X @ torch.tensor([1.0, -0.5, 0.3]) + SD * torch.randn(N, generator=g)
    return X, y


def stationary_precision(rule, kind, data, expected):
    """Mean ratio of P to ``expected(params)``, of its inverse for "price"; and its standard error."""
    X, y = data
    g = torch.Generator().manual_seed(1)
    family = rule.family
    params = family.init(torch.zeros(D), 0.1)
    state, ratios = rule.init(params), []
    for k in range(BURN + STEPS[kind]):
        batch = torch.randperm(N, generator=g)[:M]
        x, t = X[batch], y[batch]
        leaves = {name: v.clone().requires_grad_() for name, v in params.items()}
        z = family.rsample(leaves, torch.randn(1, family.noise_dim(params), generator=g))
        residual = t - z @ x.T
        log_p = -0.5 * (N / M) * (residual / SD).square().sum() - 0.5 * z.square().sum()
        (family.log_prob(params, z).sum() - log_p).backward()
        grads = {name: v.grad for name, v in leaves.items() if v.grad is not None}
        rows = residual.detach().mT * x / SD**2
        if kind == "hessian":
            grads["curvature.dense"] = (N / M) * x.T @ x / SD**2 + torch.eye(D)
        elif kind == "gauss_newton":
            grads["curvature.dense"] = (N / M) * rows.T @ rows + torch.eye(D)
        elif kind == "rows":
            grads["curvature.rows"] = (N / M) ** 0.5 * rows
            grads["curvature.diagonal"] = torch.ones(D)
        elif kind == "squared_gradient":
            square = ((N / M) * rows.sum(0)).square() / N
            grads["curvature.diagonal"] = square + 1.0
            grads |= {"curvature.prior": torch.ones(D), "curvature.count": torch.tensor(float(N))}
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
    "rule, family, kind",
    [
        (VONRule, MeanFieldNormal(), "hessian"),
        (VONRule, FullRankNormal(), "hessian"),
        (VONRule, MeanFieldNormal(), "gauss_newton"),
        (VONRule, FullRankNormal(), "gauss_newton"),
        (IVONRule, MeanFieldNormal(), "price"),
        (VONRule, FactorPrecisionNormal(1), "rows"),
        (VONRule, FactorPrecisionNormal(2), "rows"),
    ],
)
def test_bias_of_the_precision_is_under_two_percent(rule, family, kind, data):
    X, y = data
    H = X.T @ X / SD**2 + torch.eye(D)

    def expected(params):
        if kind in ("hessian", "price"):
            return H
        # E_q of the products: (residual of the mean)^2 + x' Sigma x
        square = (y - X @ params["loc"]).square()
        square = square + (X @ family.covariance(params) * X).sum(-1)
        return (X.T * square) @ X / SD**4 + torch.eye(D)

    rule = rule(family, RATE, RATE, momentum=0.9)
    ratio, error = stationary_precision(rule, kind, data, expected)
    assert (error < 0.02).all(), "the run is too short to tell"
    assert ((ratio - 1.0).abs() < 0.02 + 3.0 * error).all(), (ratio, error)


@pytest.mark.slow
def test_vadam_has_the_stationary_value_of_its_squared_gradient(data):
    """The value that the head gives, and so a precision far below the posterior's."""
    X, y = data
    family = MeanFieldNormal()

    def expected(params):
        residual = y - X @ params["loc"]
        products = residual.outer(residual) + X @ family.covariance(params) @ X.T
        whole = (X * (products @ X)).sum(0) / SD**4  # E_q t^2
        single = (X.square() * products.diagonal().unsqueeze(-1)).sum(0) / SD**4  # E_q u
        square = whole + N * (N - M) / (M * (N - 1)) * (single - whole / N)
        return torch.diag(square / N + 1.0)

    rule = VadamRule(family, RATE, RATE, momentum=0.9, safe=False)
    ratio, error = stationary_precision(rule, "squared_gradient", data, expected)
    assert (error < 0.02).all(), "the run is too short to tell"
    assert ((ratio - 1.0).abs() < 0.02 + 3.0 * error).all(), (ratio, error)
    fit = {"loc": torch.linalg.solve(X.T @ X / SD**2 + torch.eye(D), X.T @ y / SD**2)}
    at_fit = expected(fit | {"log_scale": torch.full((D,), -20.0)}).diagonal()
    assert (at_fit < 0.2 * (X.square().sum(0) / SD**2 + 1.0)).all()
