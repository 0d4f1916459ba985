"""Calls of AutoSites after the first: data that see more, data out of support, other priors."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.gp.kernels import RBF
from pyro.infer import SVI, Predictive
from pyro.infer.autoguide import AutoGuideList
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.distributions import GaussianProcess, matern_state_space

N = 30
MORE = r"the data of {!r} depend on more of the latent block in this call.*where they saw {}"


def made(model: Any, **more: Any) -> tuple[ngvi.AutoSites, Any]:
    guide = ngvi.AutoSites(model)
    return guide, SVI(model, guide, ngvi.CVI(guide, **more), ngvi.SitesELBO())


def treatment(X: Tensor, treated: Tensor, y: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w + effect * treated, 1.0), obs=y)


def test_a_covariate_that_is_zero_in_the_first_data() -> None:
    X, treated = torch.randn(2 * N, 2), (torch.arange(2 * N) >= N).double()
    y = X.sum(1) + 3.0 * treated + torch.randn(2 * N)
    guide, svi = made(treatment)
    svi.step(X[:N], treated[:N], y[:N])
    guide.add(N)
    with pytest.raises(ValueError, match=MORE.format("y", "the result of matmul")):
        svi.step(X, treated, y)
    guide, svi = made(treatment)  # a guide of its own
    loss: Any = None
    for _ in range(2):
        loss = svi.step(X, treated, y)
    A = torch.cat([X, treated[:, None]], 1)
    evidence = dist.MultivariateNormal(torch.zeros(2 * N), torch.eye(2 * N) + A @ A.mT).log_prob(y)
    assert -loss == pytest.approx(float(evidence), rel=1e-10)
    guide.remove(torch.arange(N, 2 * N))  # fewer see less, which is no matter
    svi.step(X[:N], treated[:N], y[:N])


def test_in_minibatches_too() -> None:
    def model(X: Tensor, treated: Tensor, y: Tensor, index: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(X), subsample=index) as i:
            pyro.sample("y", dist.Normal(X[i] @ w + effect * treated[i], 1.0), obs=y[i])

    X, treated = torch.randn(N, 2), (torch.arange(N) >= N // 2).double()
    _, svi = made(model)
    first, second = torch.arange(N).chunk(2)
    svi.step(X, treated, torch.randn(N), first)
    with pytest.raises(ValueError, match=MORE.format("y", "the result of matmul")):
        svi.step(X, treated, torch.randn(N), second)


def test_a_parameter_that_begins_at_zero() -> None:
    group = torch.arange(N) % 5

    def model(x: Tensor, y: Tensor) -> None:
        share = pyro.param("share", torch.zeros(()))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Normal(torch.zeros(5), 0.5).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(b * x + share * z[group], 0.5), obs=y)

    _, svi = made(model, others=pyro.optim.Adam({"lr": 0.1}))  # type: ignore[attr-defined]
    x, y = torch.randn(N), torch.randn(N)
    with pytest.raises(ValueError, match=MORE.format("y", "the result of mul")):
        for _ in range(10):  # its slope is 0 while nothing sees z
            svi.step(x, y)
            pyro.param("share").data += 0.1


def test_an_outcome_that_is_missing_at_first() -> None:
    def model(X: Tensor, y1: Tensor, y2: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", N):
            pyro.sample("y1", dist.Normal(X @ a, 1.0), obs=y1)
            pyro.sample("y2", dist.Normal(X @ b, 1.0), obs=y2)

    X, y = torch.randn(N, 2), torch.randn(N)
    _, svi = made(model)
    loss = [svi.step(X, y, torch.full((N,), torch.nan)) for _ in range(2)][1]
    evidence = dist.MultivariateNormal(torch.zeros(N), torch.eye(N) + X @ X.mT).log_prob(y)
    assert -loss == pytest.approx(float(evidence), rel=1e-10)
    with pytest.raises(ValueError, match=MORE.format("y2", "nothing")):
        svi.step(X, y, y)


def test_later_data_out_of_the_support() -> None:
    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    X = torch.randn(N + 2, 2)
    guide, svi = made(model)
    svi.step(X[:N], (X[:N, 0] > 0).double())
    guide.add(2)
    y = (X[:, 0] > 0).double()
    y[N] = 2.0
    with pytest.raises(
        ValueError, match=rf"1 of the data of 'y'.*Bernoulli, the first is number {N}"
    ):
        svi.step(X, y)
    y[N] = torch.nan
    svi.step(X, y)  # missing


def test_supports_that_move_with_the_block_are_not_looked_at_off_its_mean() -> None:
    def model(y: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 0.1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Uniform(a - 1.0, a + 1.0), obs=y)

    y = torch.linspace(-0.9, 0.9, 5)
    with pytest.warns(RuntimeWarning, match="left 5 site"):  # its own bound is -inf
        made(model)[1].step(y)


def test_no_entry_of_a_site_is_taken_for_that_of_another_datum() -> None:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (-0.5 * (a[:, None] - b) ** 2).exp()

    def by_hand(X: Tensor, y: Tensor | None = None) -> None:
        K = kernel(X, X) + 1e-6 * torch.eye(len(X))
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(X)), K))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(f, 0.1), obs=y)

    def dispersed(X: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(X)):
            h = pyro.sample("h", dist.Normal(X * w, 0.8))
            pyro.sample("y", dist.Normal(h, 0.5), obs=y)

    X = torch.linspace(0.0, 5.0, 20)
    for model, name in ((by_hand, "f"), (dispersed, "h")):
        pyro.clear_param_store()
        guide, svi = made(model)
        svi.step(X, X.sin())
        fewer = rf"{name!r} has the shape \(7,\) with these arguments, and \(20,\)"
        for new, message in ((X[:7] + 0.1, fewer), (X + 0.1, rf"the prior of {name!r} is another")):
            for ask in (guide.predict, guide.median, guide.get_posterior, guide):
                with pytest.raises(ValueError, match=message):
                    ask(new)
            with pytest.raises(ValueError, match=message):
                Predictive(model, guide=guide, num_samples=2)(new)
        assert set(guide.predict(X)) >= {name}


def test_other_times_of_a_chain_are_refused_by_all_that_asks() -> None:
    def model(t: Tensor, y: Tensor | None = None) -> None:
        s = pyro.sample("s", matern_state_space(t, 1.0, 1.0, nu=1.5))
        with pyro.plate("data", len(t)):
            pyro.sample("y", dist.Normal(s[..., 0], 0.1), obs=y)

    t = 0.5 * torch.arange(12)
    guide, svi = made(model)
    svi.step(t, t.sin())
    quantiles: Any = lambda t: guide.quantiles([0.5], t)  # noqa: E731
    for ask in (guide.predict, guide.median, guide.get_posterior, quantiles):
        with pytest.raises(ValueError, match="the prior of 's' is another one"):
            ask(1.7 * t)


def test_a_site_without_data_whose_prior_another_guide_draws() -> None:
    def model(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        z = pyro.sample("z", dist.Normal(torch.zeros(6), 1.0).to_event(1))
        pyro.sample("new", dist.Normal(0.0, scale))
        with pyro.plate("data", 6):
            pyro.sample("y", dist.Normal(scale * z, 0.3), obs=y)

    guide = AutoGuideList(model)
    guide.append(ngvi.AutoSites(poutine.block(model, hide=["scale"])))
    guide.append(ngvi.AutoMeanFieldNormal(poutine.block(model, expose=["scale"])))
    svi = SVI(model, guide, ngvi.CVI(guide, others=ngvi.NGVB(guide)), ngvi.SitesELBO())
    with pytest.raises(ValueError, match="the prior of 'new' depends on a latent site outside"):
        svi.step(torch.randn(6))


def test_the_loss_where_data_are_large_beside_their_noise() -> None:
    """In float32, against the evidence in closed form; its gradient too."""
    x = torch.randn(400)
    y = 100.0 + 2.0 * x + 0.3 * torch.randn(400)
    A = torch.stack([torch.ones(400), x], 1)
    sd = torch.tensor(0.3, requires_grad=True)
    covariance = 100.0 * A @ A.mT + sd**2 * torch.eye(400)
    evidence = dist.MultivariateNormal(99.0 * A[:, 0], covariance).log_prob(y)
    (slope,) = torch.autograd.grad(-evidence, sd)

    def model(x: Tensor, y: Tensor) -> None:
        sd = pyro.param("sd", x.new_tensor(0.3))
        a = pyro.sample("a", dist.Normal(x.new_tensor(99.0), 10.0))
        b = pyro.sample("b", dist.Normal(x.new_tensor(0.0), 10.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(a + b * x, sd), obs=y)

    for dtype, tolerance in ((torch.float32, 1e-2), (torch.float64, 1e-8)):
        pyro.clear_param_store()
        data = x.to(dtype), y.to(dtype)
        guide, svi = made(model, others=pyro.optim.SGD({"lr": 0.0}))  # type: ignore[attr-defined]
        loss: Any = None
        for _ in range(3):
            loss = svi.step(*data)
        assert -float(loss) == pytest.approx(float(evidence.detach()), abs=tolerance)
        pyro.param("sd").grad = None
        bound: Any = ngvi.SitesELBO().differentiable_loss(model, guide, *data)
        (found,) = torch.autograd.grad(bound, pyro.param("sd"))
        assert float(found) == pytest.approx(float(slope), rel=1e-3)


@pytest.mark.parametrize("change", ["add", "remove"])
def test_data_come_and_go_after_a_reset_with_more_latents_than_data(change: str) -> None:
    X, y = torch.randn(12, 30), torch.randn(12)

    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(30), 1.0).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    guide, svi = made(model)
    before, after = (9, 12) if change == "add" else (12, 11)
    svi.step(X[:before], y[:before])
    guide.reset()
    guide.add(3) if change == "add" else guide.remove(11)
    loss: Any = None
    for _ in range(2):
        loss = svi.step(X[:after], y[:after])
    S = torch.eye(after) + X[:after] @ X[:after].mT
    evidence = dist.MultivariateNormal(torch.zeros(after), S).log_prob(y[:after])
    assert -loss == pytest.approx(float(evidence), rel=1e-10)


def test_a_process_beside_noise_of_every_datum() -> None:
    """The process is predicted; the noise of the new data is not that of the first ones."""

    def model(X: Tensor, y: Tensor | None = None) -> None:
        f = pyro.sample("f", GaussianProcess(rbf, X))
        with pyro.plate("data", len(X)):
            h = pyro.sample("h", dist.Normal(f, 0.7))
            pyro.sample("y", dist.Normal(h, 0.5), obs=y)

    rbf = RBF(1).requires_grad_(False)
    X = torch.linspace(0.0, 5.0, 20)
    guide, svi = made(model)
    svi.step(X, X.sin())
    far = guide.predict(X[:3] + 100.0)
    assert set(far) == {"f"} and set(guide.predict(X)) == {"f", "h"}
    torch.testing.assert_close(far["f"][1], torch.ones(3), rtol=1e-3, atol=0)
    with pytest.raises(ValueError, match=r"'h' has the shape \(3,\)"):
        guide(X[:3] + 100.0)


def test_a_vector_that_is_one_datum_of_a_latent_vector() -> None:
    """Not a latent process of which datum n sees entry n."""
    root = torch.randn(5, 5)
    S, R = root @ root.mT + torch.eye(5), torch.eye(5) + 0.5

    def model(y: Tensor) -> None:
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(5), S))
        pyro.sample("y", dist.MultivariateNormal(f, R), obs=y)

    y = torch.randn(5)
    _, svi = made(model)
    loss = [svi.step(y) for _ in range(2)][1]
    evidence = dist.MultivariateNormal(torch.zeros(5), S + R).log_prob(y)
    assert -loss == pytest.approx(float(evidence), rel=1e-10)


def test_data_without_a_plate_that_are_more_than_their_distribution() -> None:
    def model(y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(m, 1.0), obs=y)

    with pytest.raises(
        ValueError, match=r"'y' has data of shape \(12,\).*pyro.plate\('data', 12\)"
    ):
        made(model)[1].step(torch.randn(12))


def test_latents_in_float32_beside_data_in_float64() -> None:
    x, y = torch.randn(N), torch.randn(N)  # of the tests' default, float64
    torch.set_default_dtype(torch.float32)

    def model(x: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(b * x, 1.0), obs=y)

    _, svi = made(model)
    loss = [svi.step(x, y) for _ in range(2)][1]
    S = torch.eye(N, dtype=x.dtype) + torch.outer(x, x)
    evidence = dist.MultivariateNormal(torch.zeros_like(x), S).log_prob(y)
    assert -loss == pytest.approx(float(evidence), rel=1e-5)
