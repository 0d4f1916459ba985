"""SLANG: its steps against dense matrices, and its contract with losses and guides."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from pyro_ngvi import AutoFactorPrecision, AutoMeanFieldNormal, BatchedELBO
from pyro_ngvi.families import FactorPrecisionNormal
from pyro_ngvi.optim import SLANG, PowerDecay
from pyro_ngvi.optim.von import VONRule
from tests.exact.rule_cases import update

D, N = 7, 12
Tensors = dict[str, Tensor]


def start(rank: int, seed: int = 0, d: int = D) -> Tensors:
    g = torch.Generator().manual_seed(seed)
    return {
        "loc": torch.randn(d, generator=g),
        "factor": torch.randn(d, rank, generator=g),
        "log_precision": 0.5 * torch.randn(d, generator=g),
    }


def gradients(seed: int, d: int = D, n: int = N) -> Tensors:
    g = torch.Generator().manual_seed(100 + seed)
    unused = torch.randn(d, generator=g)  # the gradients of the shape play no part
    return {
        "loc": torch.randn(d, generator=g),
        "factor": unused.unsqueeze(-1),
        "log_precision": unused,
        "curvature.rows": torch.randn(n, d, generator=g),
        "curvature.diagonal": torch.rand(d, generator=g),
    }


def precision(params: Tensors) -> Tensor:
    U = params["factor"]
    return U @ U.mT + torch.diag(params["log_precision"].exp())


def make(rank: int, **settings: Any) -> VONRule:
    how: dict[str, Any] = {"lr": 0.1, "curvature_lr": 0.3, "momentum": 0.9} | settings
    return VONRule(FactorPrecisionNormal(rank), **how)


@pytest.mark.parametrize("rank", [1, 3, 6])
@pytest.mark.parametrize("n", [1, 12], ids=["fewer rows", "more rows"])
def test_steps_equal_a_loop_on_dense_matrices(rank: int, n: int) -> None:
    lr, curvature_lr = PowerDecay(0.3, 0.51), lambda k: 0.5 / (1.0 + k)
    rule = make(rank, lr=lr, curvature_lr=curvature_lr)
    params = start(rank)
    state = rule.init(params)
    mu, U, s = params["loc"], params["factor"], params["log_precision"].exp()
    m = torch.zeros(D)
    for k in range(6):
        grads = gradients(k, n=n)
        a, b = 0.3 / (1 + k**0.51), 0.5 / (1 + k)
        G, delta = grads["curvature.rows"], grads["curvature.diagonal"]
        average = (1 - b) * U @ U.T + b * G.T @ G
        values, vectors = torch.linalg.eigh(average)
        U = vectors[:, -rank:] * values[-rank:].clamp_min(0.0).sqrt()
        s = (1 - b) * s + b * delta + (average - U @ U.T).diagonal().clamp_min(0.0)
        P = U @ U.T + torch.diag(s)
        m = 0.9 * m + 0.1 * grads["loc"]
        mu = mu - a * torch.linalg.solve(P, m / (1 - 0.9 ** (k + 1)))
        params, state, report = update(rule, params, grads, state)
        torch.testing.assert_close(precision(params), P, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(params["loc"], mu, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(report.gain, torch.tensor(a), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("d", [D, 300], ids=["exact", "range finder"])
def test_diagonal_of_the_precision_is_that_of_the_average(d: int) -> None:
    rule, params, grads = make(2), start(2, d=d), gradients(0, d=d, n=250)
    new, _, _ = update(rule, params, grads, rule.init(params))
    G = grads["curvature.rows"]
    H = G.square().sum(0) + grads["curvature.diagonal"]
    wanted = 0.7 * precision(params).diagonal() + 0.3 * H
    torch.testing.assert_close(precision(new).diagonal(), wanted, rtol=1e-10, atol=1e-10)


def test_full_rank_is_variational_online_newton() -> None:
    """Curvature in d - 1 directions beside a diagonal: nothing is dropped, P <- beta P + b H."""
    rank = D - 1
    rule = make(rank, momentum=0.0)
    g = torch.Generator().manual_seed(7)
    subspace, _ = torch.linalg.qr(torch.randn(D, rank, generator=g))
    params = start(rank)
    params["factor"] = subspace @ torch.randn(rank, rank, generator=g)
    state, P, mu = rule.init(params), precision(params), params["loc"]
    for k in range(10):
        grads = gradients(k)
        grads["curvature.rows"] = grads["curvature.rows"] @ subspace @ subspace.T
        G = grads["curvature.rows"]
        P = 0.7 * P + 0.3 * (G.T @ G + torch.diag(grads["curvature.diagonal"]))
        mu = mu - 0.1 * torch.linalg.solve(P, grads["loc"])
        params, state, _ = update(rule, params, grads, state)
        torch.testing.assert_close(precision(params), P, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(params["loc"], mu, rtol=1e-9, atol=1e-9)


def test_one_full_step_lands_on_a_gaussian_posterior() -> None:
    """lr = curvature_lr = 1, rows of rank one: the precision and the mean are exact at once."""
    rule, params = make(1, lr=1.0, curvature_lr=1.0), start(1)
    grads = gradients(0, n=1)
    H = grads["curvature.rows"].T @ grads["curvature.rows"]
    H = H + torch.diag(grads["curvature.diagonal"])
    mean = torch.linspace(-1.0, 1.0, D)
    grads["loc"] = H @ (params["loc"] - mean)
    new, _, _ = update(rule, params, grads, rule.init(params))
    torch.testing.assert_close(precision(new), H, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(new["loc"], mean, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("b", [0.3, 1.0])
def test_negative_curvature_of_the_rest_leaves_a_precision(b: float) -> None:
    rule, params, grads = make(1, curvature_lr=b), start(1), gradients(0, n=1)
    grads["curvature.rows"][:, 2:] = 0.0
    grads["curvature.diagonal"][3] = -1e3
    grads["curvature.diagonal"][4] = 0.0
    new, _, report = update(rule, params, grads, rule.init(params))
    assert bool(report.finite) and all(v.isfinite().all() for v in new.values())
    fall = float((new["log_precision"] - params["log_precision"])[3])
    torch.testing.assert_close(fall, torch.tensor(0.25).log().item(), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e200])
@pytest.mark.parametrize("where", ["loc", "curvature.rows", "curvature.diagonal"])
def test_a_step_that_is_not_finite_changes_nothing(where: str, value: float) -> None:
    rule, params = make(2), start(2)
    params, state, _ = update(rule, params, gradients(0), rule.init(params))
    bad = gradients(1)
    bad[where][..., 3] = value
    same, after, report = update(rule, params, bad, state)
    if value == 1e200 and where != "curvature.rows":  # large, not wrong
        assert all(v.isfinite().all() for v in same.values())
        return
    assert not report.finite and report.skipped == 1 and report.step_norm == 0
    assert report.bad_entries.nonzero().tolist() == [[3]]
    assert all(torch.equal(same[k], params[k]) for k in params)
    assert all(torch.equal(after[k], state[k]) for k in {*state} - {"skipped", "bad_entries"})


@pytest.mark.parametrize(("d", "n"), [(D, N), (300, 200)], ids=["small", "large"])
@pytest.mark.parametrize("rate", [0.1, PowerDecay(0.1, 0.51)], ids=["number", "function"])
def test_meta_device_shows_that_nothing_waits(d: int, n: int, rate: Any) -> None:
    def single(tensors: Tensors) -> Tensors:
        return {k: v.to(torch.float32) for k, v in tensors.items()}

    def on_meta(tensors: Tensors) -> Tensors:
        return {k: v.to("meta") for k, v in tensors.items()}

    rule = make(3, lr=rate, curvature_lr=rate)
    params, grads = single(start(3, d=d)), single(gradients(0, d, n))
    meta = on_meta(params)
    state, meta_state = rule.init(params), rule.init(meta)
    for _ in range(2):
        params, state, report = update(rule, params, grads, state)
        meta, meta_state, meta_report = update(rule, meta, on_meta(grads), meta_state)
        pairs: Any = ((params, meta), (state, meta_state), (vars(report), vars(meta_report)))
        for real, shadow in pairs:
            assert real.keys() == shadow.keys()
            for k, v in real.items():
                assert shadow[k].device.type == "meta"
                assert (v.shape, v.dtype) == (shadow[k].shape, shadow[k].dtype), k


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    X = torch.randn(40, 5, generator=g, dtype=torch.float64)
    noise = torch.randn(40, generator=g, dtype=torch.float64)
    return X, (X[:, 0] - X[:, 1] + noise > 0).to(X)


def logistic(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(5), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def run(averaging: bool = False) -> tuple[AutoFactorPrecision, SLANG, SVI]:
    guide = AutoFactorPrecision(logistic, rank=4)
    optim = SLANG(guide, lr=PowerDecay(0.2, 0.51), averaging=averaging)
    loss = BatchedELBO(4, curvature="gauss_newton")
    return guide, optim, SVI(logistic, guide, optim, loss)


@pytest.mark.parametrize("averaging", [False, True])
def test_the_state_of_a_run_resumes(averaging: bool) -> None:
    guide, optim, svi = run(averaging)
    for _ in range(5):
        svi.step(*data())
    saved, parameters, rng = optim.get_state(), guide.state_dict(), torch.get_rng_state()
    parameters = {k: v.clone() for k, v in parameters.items()}
    for _ in range(5):
        svi.step(*data())
    other, resumed, svi = run(averaging)
    other(*data())
    other.load_state_dict(parameters)
    resumed.set_state(saved)
    torch.set_rng_state(rng)
    for _ in range(5):
        svi.step(*data())
    for name, p in guide.natural_params().items():
        assert torch.equal(p, other.natural_params()[name]), name


def fit(rank: int, draws: int = 32, steps: int = 600) -> tuple[Tensor, Tensor]:
    """The logistic regression without SVI: (P - E_q[sum_i g_i g_i'] - I) in units of its diagonal,
    and the Fisher length of the gradient that is left."""
    X, y = data()
    decay = PowerDecay(0.5, 0.7)
    rule = make(rank, lr=decay, curvature_lr=decay)
    params = rule.family.init(torch.zeros(5), 0.1)
    state = rule.init(params)

    def residuals(n: int) -> Tensor:
        return torch.sigmoid(rule.family.rsample(params, torch.randn(n, 5)) @ X.T) - y

    for _ in range(steps):
        r = residuals(draws)
        grads = {
            "loc": (r @ X).mean(0) + params["loc"],
            "curvature.rows": (r.unsqueeze(-1) * X).reshape(-1, 5) / draws**0.5,
            "curvature.diagonal": torch.ones(5),
        }
        params, state, _ = update(rule, params, grads, state)
    r = residuals(100_000)
    wanted = (X.T * r.square().mean(0)) @ X + torch.eye(5)
    size = wanted.diagonal().sqrt()
    gradient = (r @ X).mean(0) + params["loc"]
    length = (rule.family.covariance_product(params, gradient) @ gradient).sqrt()
    return (precision(params) - wanted) / torch.outer(size, size), length


def test_precision_of_a_fit_is_the_expected_curvature() -> None:
    """Over ten seeds the largest error of the diagonal had a root mean square of 0.010, and the length
    of the gradient one of 0.034 nats^(1/2); the limits are three of these.  Off the diagonal the error
    is what rank L drops: 0.07 for L = 4, a systematic one."""
    error, length = fit(rank=4)
    assert float(error.diagonal().abs().max()) < 0.03
    assert float(length) < 0.1
    assert float(error.norm()) < float(fit(rank=1)[0].norm())


def test_a_loss_without_curvature_is_refused() -> None:
    guide = AutoFactorPrecision(logistic, rank=2)
    for loss in (BatchedELBO(2), BatchedELBO(2, curvature="price")):
        svi = SVI(logistic, guide, SLANG(guide, lr=0.1), loss)
        with pytest.raises(RuntimeError, match=r'SLANG .*curvature="gauss_newton"\)'):
            svi.step(*data())


def test_refuses_other_guides_and_settings() -> None:
    for guide in (AutoMeanFieldNormal(logistic), AutoNormal(logistic)):
        with pytest.raises(ValueError, match=r"Normal.*AutoFactorPrecision\(model, rank=2\)"):
            SLANG(guide, lr=0.1)
    guide = AutoFactorPrecision(logistic, rank=2)
    bad: dict[str, Any] = {"lr": 0.0, "curvature_lr": 1.5, "momentum": 1.0}
    for name, value in bad.items():
        arguments: dict[str, Any] = {"lr": 0.1, name: value}
        with pytest.raises(ValueError, match=name):
            SLANG(guide, **arguments)
