"""NAGVAC: its blocks against dense matrices, its steps against a loop written from the paper."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from torch import Tensor

from benchmarks.baselines import NAGVAC
from benchmarks.baselines.nagvac import NAGVACRule, approximate_natural_gradient
from pyro_ngvi import AutoFactorNormal, AutoMeanFieldNormal, BatchedELBO
from pyro_ngvi.families import FactorNormal
from pyro_ngvi.optim.state import flat
from tests.robustness.advice_cases import advised, line, said, steps

D = 7


def start(seed: int = 0, d: int = D) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "loc": torch.randn(d, generator=g, dtype=torch.float64),
        "factor": 0.8 * torch.randn(d, 1, generator=g, dtype=torch.float64),
        "log_scale": 0.5 * torch.randn(d, generator=g, dtype=torch.float64),
    }


def gradients(seed: int = 1, d: int = D) -> dict[str, Tensor]:
    return start(100 + seed, d)


def true_blocks(params: dict[str, Tensor]) -> Tensor:
    """Fisher matrix (3d, 3d) in (mu, b, c): the Hessian of KL(q || q') at q' = q, by autograd."""

    def gaussian(x: Tensor) -> tuple[Tensor, Tensor]:
        mu, b, c = x.split(len(x) // 3)
        return mu, torch.outer(b, b) + torch.diag(c.square())

    at = torch.cat([params["loc"], params["factor"][:, 0], params["log_scale"].exp()])
    mean, covariance = gaussian(at)

    def kl(x: Tensor) -> Tensor:
        mu, S = gaussian(x)
        r = mean - mu
        trace = torch.linalg.solve(S, covariance).trace()
        square = r @ torch.linalg.solve(S, r)
        return 0.5 * (trace + square + torch.logdet(S) - torch.logdet(covariance) - len(mu))

    hessian = torch.autograd.functional.hessian(kl, at)
    assert isinstance(hessian, Tensor)
    return hessian


def dense_natural_gradient(mu_b_c: list[Tensor], g: list[Tensor]) -> list[Tensor]:
    """The published blocks, each as a matrix and a solve."""
    _, b, c = mu_b_c
    P = torch.linalg.inv(torch.outer(b, b) + torch.diag(c.square()))
    C = torch.diag(c)
    blocks = [P, 2.0 * (b @ P @ b) * P, 2.0 * C @ (P * P) @ C]
    return [torch.linalg.solve(F, v) for F, v in zip(blocks, g, strict=True)]


def test_blocks_are_the_published_ones() -> None:
    params, grads = start(), gradients()
    c = params["log_scale"].exp()
    # a gradient in log c is one in c times c
    g = [grads["loc"], grads["factor"][:, 0], grads["log_scale"] / c]
    expected = dense_natural_gradient([params["loc"], params["factor"][:, 0], c], g)
    found = approximate_natural_gradient(params, grads)
    torch.testing.assert_close(found["loc"], expected[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["factor"][:, 0], expected[1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["scale"], expected[2], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "block"), [("loc", 0), ("scale", 2)])
def test_blocks_of_mean_and_scale_are_exact(name: str, block: int) -> None:
    params, grads = start(), gradients()
    part = slice(block * D, (block + 1) * D)
    fisher = true_blocks(params)[part, part]
    c = params["log_scale"].exp()
    g = grads["loc"] if name == "loc" else grads["log_scale"] / c
    found = approximate_natural_gradient(params, grads)[name]
    torch.testing.assert_close(fisher @ found, g, rtol=1e-9, atol=1e-10)


def test_block_of_scale_agrees_with_the_family() -> None:
    """F_c v of the family, in units of c, gives back the gradient in log c."""
    family, params, grads = FactorNormal(1), start(), gradients()
    found = approximate_natural_gradient(params, grads)
    zero = {k: torch.zeros_like(v) for k, v in params.items()}
    v = found["scale"] / params["log_scale"].exp()
    product = family.fisher_product(params, zero | {"log_scale": v})
    torch.testing.assert_close(product["log_scale"], grads["log_scale"], rtol=1e-10, atol=1e-12)


def test_what_the_approximation_drops() -> None:
    """b: right along b, half as long across it; b-c: a block that is not zero."""
    params = start()
    fisher = true_blocks(params)
    F_b, F_bc = fisher[D : 2 * D, D : 2 * D], fisher[D : 2 * D, 2 * D :]
    b, c = params["factor"][:, 0], params["log_scale"].exp()
    P = torch.linalg.inv(torch.outer(b, b) + torch.diag(c.square()))
    s = b @ P @ b
    torch.testing.assert_close(F_b, s * P + torch.outer(P @ b, P @ b), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(F_bc, 2.0 * P * (c * (P @ b)), rtol=1e-9, atol=1e-10)
    across = torch.linspace(-1.0, 1.0, D, dtype=torch.float64)
    across = across - (b @ P @ across) / s * b
    for v, factor in ((b, 1.0), (across, 0.5)):
        grads = {k: torch.zeros_like(p) for k, p in params.items()}
        grads["factor"] = (F_b @ v).unsqueeze(-1)
        found = approximate_natural_gradient(params, grads)["factor"][:, 0]
        torch.testing.assert_close(found, factor * v, rtol=1e-9, atol=1e-10)


def test_a_leverage_of_one_half_is_no_singularity() -> None:
    """b^2 / c^2 = (2, 1): l = (1/2, 1/4), where the printed formula divides by zero."""
    params = {
        "loc": torch.zeros(2),
        "factor": torch.tensor([[math.sqrt(2.0)], [1.0]]),
        "log_scale": torch.zeros(2),
    }
    g = torch.tensor([0.3, -1.0])
    grads = {k: torch.zeros_like(v) for k, v in params.items()} | {"log_scale": g}
    c = torch.ones(2)
    expected = dense_natural_gradient([c, params["factor"][:, 0], c], [c, c, g])[2]
    found = approximate_natural_gradient(params, grads)["scale"]
    # sqrt(machine epsilon) is what guards the division
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


def test_a_scale_that_almost_vanishes() -> None:
    """Leverage 1 - 3e-10: the printed formula divides by zero in float64."""
    params = start()
    params["log_scale"][2] = math.log(1e-5 * abs(float(params["factor"][2])))
    grads, c = gradients(), params["log_scale"].exp()
    b = params["factor"][:, 0]
    P = torch.diag(c**-2) - torch.outer(b / c**2, b / c**2) / (1.0 + (b / c).square().sum())
    # the entry of P for a vanishing c, which the difference above has lost
    others = [i for i in range(D) if i != 2]
    P[2, 2] = (1.0 + (b / c)[others].square().sum()) / (1.0 + (b / c).square().sum()) / c[2] ** 2
    F = 2.0 * torch.outer(c, c) * P.square()
    expected = torch.linalg.solve(F, grads["log_scale"] / c)
    found = approximate_natural_gradient(params, grads)["scale"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)


def test_no_factor_yet() -> None:
    params = start() | {"factor": torch.zeros(D, 1)}
    found = approximate_natural_gradient(params, gradients() | {"factor": torch.zeros(D, 1)})
    assert all(torch.isfinite(v).all() for v in found.values())


@pytest.mark.parametrize(("lr", "tau", "clip_norm"), [(0.01, 10_000, 100.0), (0.4, 5, 3.0)])
def test_twenty_steps_equal_a_loop_from_the_paper(lr: float, tau: float, clip_norm: float) -> None:
    """The loop keeps the sign of c; the second setting clips, decays and changes signs."""
    params = start(3)
    rule = NAGVACRule(FactorNormal(1), lr=lr, tau=tau, clip_norm=clip_norm)
    state = rule.init(params)
    mu, b, c = params["loc"], params["factor"][:, 0], params["log_scale"].exp()
    m = torch.zeros(3 * D)
    clipped = 0
    for step in range(1, 21):
        # gradients of the loss in z at z = mu + b e1 + c e2, as the paper has them
        g = torch.Generator().manual_seed(step)
        e1, e2, h = torch.randn(1, generator=g), *torch.randn(2, D, generator=g)
        gradient = [h + mu, e1 * h + b, e2 * h + 3.0 * c]
        natural = torch.cat(dense_natural_gradient([mu, b, c], gradient))
        clipped += int(natural.norm() > clip_norm)
        natural = natural * min(1.0, clip_norm / float(natural.norm()))
        m = natural if step == 1 else 0.6 * m + 0.4 * natural
        # the guide knows |c|; turning the sign of c turns that of its gradient
        grads = {
            "loc": gradient[0],
            "factor": gradient[1].unsqueeze(-1),
            "log_scale": gradient[2] * c,
        }
        params, state, report = rule.update(params, grads, state)
        rate = lr if step <= tau else lr * tau / step
        mu, b, c = (x - rate * v for x, v in zip((mu, b, c), m.split(D), strict=True))
        torch.testing.assert_close(report.gain, torch.tensor(rate), rtol=1e-12, atol=0.0)
        torch.testing.assert_close(params["loc"], mu, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(params["factor"][:, 0], b, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(params["log_scale"].exp(), c.abs(), rtol=1e-8, atol=1e-10)
    if tau == 5:
        assert clipped > 0 and bool((c < 0).any()), "this setting is there to test both"


def test_report_holds_the_fisher_length_of_a_short_step() -> None:
    """KL between successive q is half its square, up to third order."""
    family, params = FactorNormal(1), start()
    rule = NAGVACRule(family, lr=1e-4)
    new, _, report = rule.update(params, gradients(), rule.init(params))
    kl = family.kl(params, new)
    torch.testing.assert_close(0.5 * report.step_norm.square(), kl, rtol=1e-3, atol=0.0)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    params, rule = start(), NAGVACRule(FactorNormal(1))
    _, state, _ = rule.update(params, gradients(), rule.init(params))
    bad = gradients(2)
    bad["loc"][3] = torch.nan
    same, after, report = rule.update(params, bad, state)
    assert (
        not report.finite and report.skipped == 1 and report.bad_entries.nonzero().tolist() == [[3]]
    )
    assert all(torch.equal(same[k], params[k]) for k in params)
    before, after = flat(state), flat(after)
    assert all(torch.equal(after[k], before[k]) for k in {*before} - {"skipped", "bad_entries"})


def test_a_scale_of_zero_is_never_reached() -> None:
    """With b near 0 and lr = 1, a gradient in log c of 2 is the step that lands on zero."""
    params = start() | {"factor": torch.full((D, 1), 1e-8)}
    rule = NAGVACRule(FactorNormal(1), lr=1.0, clip_norm=1e9)
    grads = {k: torch.zeros_like(v) for k, v in params.items()}
    grads["log_scale"] = torch.full((D,), 2.0)
    new, _, report = rule.update(params, grads, rule.init(params))
    assert bool(report.finite) and bool(torch.isfinite(new["log_scale"]).all())


def test_meta_device_shows_that_nothing_waits() -> None:
    params = {k: v.to(torch.float32) for k, v in start().items()}
    grads = {k: v.to(torch.float32) for k, v in gradients().items()}
    rule = NAGVACRule(FactorNormal(1))
    meta = {k: v.to("meta") for k, v in params.items()}
    state, meta_state = rule.init(params), rule.init(meta)
    for _ in range(2):
        params, state, report = rule.update(params, grads, state)
        meta_grads = {k: v.to("meta") for k, v in grads.items()}
        meta, meta_state, meta_report = rule.update(meta, meta_grads, meta_state)
        pairs = (
            (params, meta),
            (flat(state), flat(meta_state)),
            (vars(report), vars(meta_report)),
        )
        for real, shadow in pairs:
            assert real.keys() == shadow.keys()
            assert all(shadow[k].device.type == "meta" for k in real)
            assert all(
                (v.shape, v.dtype) == (shadow[k].shape, shadow[k].dtype) for k, v in real.items()
            )


def data() -> tuple[Tensor, Tensor]:
    """Covariates whose sum hardly varies: the posterior has one wide direction."""
    g = torch.Generator().manual_seed(5)
    X = torch.randn(60, 6, generator=g, dtype=torch.float64)
    X = X - 0.8 * X.mean(-1, keepdim=True)
    noise = torch.randn(60, generator=g, dtype=torch.float64)
    return X, X[:, 0] - 2.0 * X[:, 1] + noise


def regression(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(6), 3.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def test_resumes_from_a_saved_state() -> None:
    def run() -> tuple[AutoFactorNormal, NAGVAC, SVI]:
        guide = AutoFactorNormal(regression, rank=1)
        optim = NAGVAC(guide, lr=0.05)
        return guide, optim, SVI(regression, guide, optim, BatchedELBO(4))

    guide, optim, svi = run()
    for _ in range(5):
        svi.step(*data())
    saved, parameters, rng = optim.get_state(), guide.state_dict(), torch.get_rng_state()
    parameters = {k: v.clone() for k, v in parameters.items()}
    for _ in range(5):
        svi.step(*data())
    other, resumed, svi = run()
    other(*data())
    other.load_state_dict(parameters)
    resumed.set_state(saved)
    torch.set_rng_state(rng)
    for _ in range(5):
        svi.step(*data())
    for name, p in guide.natural_params().items():
        assert torch.equal(p, other.natural_params()[name]), name


@pytest.mark.slow
def test_reaches_the_best_factor_covariance_of_a_regression() -> None:
    """Within 0.05 nat of L-BFGS on the closed-form KL to the exact Gaussian posterior."""
    X, y = data()
    precision = X.mT @ X + torch.eye(6) / 9.0
    covariance = torch.linalg.inv(precision)
    mean = covariance @ X.mT @ y

    def kl(params: dict[str, Tensor]) -> Tensor:
        S = FactorNormal(1).covariance(params)
        r = params["loc"] - mean
        log_ratio = torch.logdet(covariance) - torch.logdet(S)
        return 0.5 * ((precision @ S).trace() - 6.0 + r @ precision @ r + log_ratio)

    best = {k: v.clone().requires_grad_() for k, v in FactorNormal(1).init(mean, 0.1).items()}
    lbfgs = torch.optim.LBFGS(list(best.values()), max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> float:
        lbfgs.zero_grad()
        loss = kl(best)
        loss.backward()
        return float(loss.detach())

    lbfgs.step(closure)
    guide = AutoFactorNormal(regression, rank=1)
    svi = SVI(regression, guide, NAGVAC(guide, lr=0.05), BatchedELBO(16))
    for _ in range(800):
        svi.step(X, y)
    with torch.no_grad():
        found = kl({k: p.detach() for k, p in guide.natural_params().items()}) - kl(best)
    assert 0.0 <= float(found) < 0.05


def test_the_advice_of_a_refusal_can_be_followed() -> None:
    message = said(lambda: NAGVAC(AutoMeanFieldNormal(line)), "NAGVAC cannot step")
    guide = advised(message, "pyro_ngvi.AutoFactorNormal(", model=line)
    steps(line, guide, NAGVAC(guide))


def test_refuses_other_guides_and_settings() -> None:
    with pytest.raises(ValueError, match="one factor"):
        NAGVAC(AutoFactorNormal(regression, rank=2))
    with pytest.raises(ValueError, match="MeanFieldNormal"):
        NAGVAC(AutoMeanFieldNormal(regression))
    with pytest.raises(ValueError, match="found none"):
        NAGVAC(AutoGuideList(regression))
    with pytest.raises(ValueError, match="found none in AutoNormal"):
        NAGVAC(AutoNormal(regression))
    guide = AutoFactorNormal(regression, rank=1)
    bad: dict[str, Any] = {"lr": 0.0, "tau": -1.0, "clip_norm": math.inf, "momentum": 1.0}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=name):
            NAGVAC(guide, **{name: value})
