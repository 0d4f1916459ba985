"""AutoSites with parameters of the model, and beside other guides of an AutoGuideList."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi
from tests.exact.site_cases import N, normal_weights, seeded
from tests.exact.site_cases import linear_data as data

positive = dist.constraints.positive


@pytest.fixture(autouse=True)
def empty_store() -> None:
    pyro.clear_param_store()


def conjugate(X: Tensor, y: Tensor | None = None) -> None:
    sd = pyro.param("sd", torch.tensor(2.0), constraint=positive)
    noise = pyro.param("noise", torch.tensor(1.0), constraint=positive)
    w: Any = pyro.sample("w", dist.Normal(torch.zeros(3), sd).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, noise), obs=y)


def robust(X: Tensor, y: Tensor | None = None) -> None:
    sd = pyro.param("sd", torch.tensor(2.0), constraint=positive)
    noise = pyro.param("noise", torch.tensor(1.0), constraint=positive)
    shift = pyro.param("shift", torch.tensor(0.1))
    w: Any = pyro.sample("w", dist.Normal(shift * torch.ones(3), sd).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.StudentT(4.0, X @ w + shift, noise), obs=y)


def made(model: Any, lr: float) -> tuple[Any, Any]:
    guide = ngvi.AutoSites(model)
    optim = ngvi.CVI(guide, others=Adam({"lr": lr}))
    return guide, SVI(model, guide, optim, ngvi.SitesELBO())


def log_evidence(sd: Tensor, noise: Tensor) -> Tensor:
    X, y = data()
    S = sd**2 * X @ X.mT + noise**2 * torch.eye(N)
    return dist.MultivariateNormal(torch.zeros(N), S).log_prob(y)


@pytest.mark.parametrize("model", [conjugate, robust], ids=lambda m: m.__name__)
def test_gradient_holds_the_sites(model: Any) -> None:
    """Against central differences of the loss in the unconstrained parameters."""
    _, svi = made(model, 0.0)
    for _ in range(3):
        svi.step(*data())
    store: Any = pyro.get_param_store()
    names = [n for n in store if n in ("sd", "noise", "shift")]
    ngvi.SitesELBO().loss_and_grads(model, svi.guide, *data())
    for name in names:
        raw = store.get_param(name).unconstrained()
        found, h = float(raw.grad), 1e-5
        with torch.no_grad():
            raw += h
            above = svi.evaluate_loss(*data())
            raw -= 2 * h
            below = svi.evaluate_loss(*data())
            raw += h
        assert found == pytest.approx((above - below) / (2 * h), abs=1e-6 * (1 + abs(found)))


def test_gradient_at_the_exact_posterior_is_that_of_the_evidence() -> None:
    _, svi = made(conjugate, 0.0)
    svi.step(*data())
    ngvi.SitesELBO().loss_and_grads(conjugate, svi.guide, *data())
    store: Any = pyro.get_param_store()
    raw = {n: store.get_param(n).unconstrained() for n in ("sd", "noise")}
    logs = [torch.tensor(2.0).log().requires_grad_(), torch.tensor(1.0).log().requires_grad_()]
    exact = torch.autograd.grad(log_evidence(logs[0].exp(), logs[1].exp()), logs)
    for p, g in zip(raw.values(), exact, strict=True):
        assert p.grad is not None and abs(p.grad + g) < 1e-8 * (1.0 + g.abs())


def test_type_two_optimum() -> None:
    """Sites by CVI and two scales by Adam reach the maximum of the evidence."""
    guide, svi = made(conjugate, 0.2)
    for _ in range(160):
        loss = svi.step(*data())
    logs = torch.zeros(2, requires_grad=True)
    newton = torch.optim.LBFGS([logs], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        newton.zero_grad()
        value = -log_evidence(*logs.exp())
        value.backward()
        return value

    newton.step(closure)
    best = logs.detach().exp()
    assert abs(loss - closure()) < 1e-6
    assert abs(pyro.param("sd") - best[0]) < 1e-3
    assert abs(pyro.param("noise") - best[1]) < 1e-3
    X, y = data()
    precision = X.mT @ X / best[1] ** 2 + torch.eye(3) / best[0] ** 2
    q = guide.get_posterior()
    assert (q.mean - torch.linalg.solve(precision, X.mT @ y / best[1] ** 2)).abs().max() < 1e-3


def test_refresh_follows_a_parameter_that_was_changed() -> None:
    def scaled(X: Tensor, y: Tensor | None = None) -> None:
        sd = pyro.param("sd", torch.tensor(1.0), constraint=dist.constraints.positive)
        w: Any = pyro.sample("w", dist.Normal(torch.zeros(3), sd).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    X = data()[0]
    y = X.sum(-1)
    guide = ngvi.AutoSites(scaled)
    svi: Any = SVI(scaled, guide, ngvi.CVI(guide, others=Adam({"lr": 1e-3})), ngvi.SitesELBO())
    svi.step(X, y)
    pyro.get_param_store()["sd"] = torch.tensor(0.1)
    guide.refresh(X, y)
    precision = 4.0 * X.mT @ X + 100.0 * torch.eye(3)
    q = guide.get_posterior()
    assert (q.mean - torch.linalg.solve(precision, 4.0 * X.mT @ y)).abs().max() < 1e-10
    assert (q.precision_matrix - precision).abs().max() < 1e-8


def test_minibatches_learn_parameters_of_the_likelihood() -> None:
    """The noise scale, whose optimum is that of all data, within what halves leave of noise."""

    def model(X: Tensor, y: Tensor, i: Tensor) -> None:
        noise = pyro.param("noise", torch.tensor(1.0), constraint=positive)
        w = normal_weights(3)
        with pyro.plate("data", N, subsample=i):
            pyro.sample("y", dist.Normal(X @ w, noise), obs=y)

    X, y = data()
    guide, svi = made(model, 0.02)
    generator = seeded(3)
    for _ in range(75):
        for i in torch.randperm(N, generator=generator).split(N // 2):
            svi.step(X[i], y[i], i)
    grid = torch.linspace(0.2, 1.5, 300)
    best = grid[torch.stack([log_evidence(torch.tensor(1.0), s) for s in grid]).argmax()]
    assert abs(pyro.param("noise") / best - 1.0) < 0.05
    evidence = guide.algebra.evidence
    guide.refresh(X, y, torch.arange(N))
    drift = (guide.algebra.evidence.precision - evidence.precision).abs().max()
    assert drift < 1e-10 * evidence.precision.abs().max()


def test_minibatches_do_not_learn_the_prior() -> None:
    """What the sites of the other data say is of the old prior, so this is refused at once."""

    def model(X: Tensor, y: Tensor, i: Tensor) -> None:
        sd = pyro.param("sd", torch.tensor(0.1), constraint=positive)
        w: Any = pyro.sample("w", dist.Normal(torch.zeros(3), sd).to_event(1))
        with pyro.plate("data", N, subsample=i):
            pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    X, y = data()
    _, svi = made(model, 0.02)
    i = torch.arange(10)
    with pytest.raises(ValueError, match="this step has a minibatch, and the prior or"):
        svi.step(X[i], y[i], i)


# --- with other guides


def noisy(X: Tensor, y: Tensor | None = None) -> None:
    s: Any = pyro.sample("s", dist.LogNormal(0.0, 1.0))
    w = normal_weights(3)
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, s), obs=y)


def listed(model: Any, first: bool = True) -> Any:
    guide: Any = AutoGuideList(model)
    sites = ngvi.AutoSites(poutine.block(model, hide=["s"]))
    scale = ngvi.AutoMeanFieldNormal(poutine.block(model, expose=["s"]))
    for part in (sites, scale) if first else (scale, sites):
        guide.append(part)
    return guide


@pytest.mark.slow
def test_noise_scale_by_another_guide() -> None:
    """The factorised posterior, against a full Gaussian, which is a little better."""
    torch.manual_seed(0)
    guide = listed(noisy)
    optim = ngvi.CVI(guide, lr=0.3, others=ngvi.NGVB(guide))
    svi: Any = SVI(noisy, guide, optim, ngvi.SitesELBO(num_particles=4))
    for _ in range(100):
        svi.step(*data())
    full = ngvi.AutoFullRankNormal(noisy)
    reference = SVI(noisy, full, ngvi.NGVB(full), ngvi.BatchedELBO(8))
    for _ in range(200):
        reference.step(*data())
    ours, theirs = guide.median(*data()), full.median(*data())
    sd = full.get_posterior().variance.sqrt()
    assert ((ours["w"] - theirs["w"]) / sd[1:]).abs().max() < 0.25
    assert abs(ours["s"].log() - theirs["s"].log()) < 0.25 * sd[0]
    with torch.no_grad():
        quadrature = ngvi.SitesELBO(200).loss(noisy, guide, *data())
        # draws of w and of s: the same bound with more noise
        draws = torch.tensor([Trace_ELBO().loss(noisy, guide, *data()) for _ in range(200)])
        best = ngvi.BatchedELBO(2000).loss(noisy, full, *data())
    assert abs(draws.mean() - quadrature) < 4.5 * draws.std() / 10.0
    assert -0.1 < quadrature - best < 0.2


@pytest.mark.parametrize("first", [True, False])
def test_either_order_and_reports_by_part(first: bool) -> None:
    guide = listed(noisy, first)
    others = ngvi.NGVB(guide)
    optim = ngvi.CVI(guide, lr=0.3, others=others)
    svi: Any = SVI(noisy, guide, optim, ngvi.SitesELBO())
    for _ in range(3):
        svi.step(*data())
    own, other = ("0", "1") if first else ("1", "0")
    assert optim.report(own).gain == pytest.approx(0.3)
    assert others.report(other).outcome in ("accepted", "damped")
    assert {n: x.shape for n, x in guide(*data()).items()} == {"s": (), "w": (3,)}


def test_prior_scale_of_another_guide_is_refused() -> None:
    """The block would be made from a scale that is a draw of another guide."""

    def model(X: Tensor, y: Tensor | None = None) -> None:
        s: Any = pyro.sample("s", dist.LogNormal(0.0, 1.0))
        w: Any = pyro.sample("w", dist.Normal(torch.zeros(3), s).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    guide = listed(model)
    svi: Any = SVI(model, guide, ngvi.CVI(guide, others=ngvi.NGVB(guide)), ngvi.SitesELBO())
    with pytest.raises(ValueError, match="also depends on a latent site outside of the block"):
        svi.step(*data())


def test_others_begin_at_the_second_step() -> None:
    """At the prior the gradients are so large that Adam's moments would not forget them."""
    pyro.clear_param_store()

    def model(y):
        scale = pyro.param("scale", torch.tensor(3.0), constraint=dist.constraints.positive)
        z = pyro.sample("z", dist.Normal(torch.zeros(5), scale).to_event(1))
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Poisson(z.exp()), obs=y)

    guide = ngvi.AutoSites(model)
    optim = ngvi.CVI(guide, others=Adam({"lr": 0.1}))
    svi = SVI(model, guide, optim, ngvi.SitesELBO())
    y = torch.tensor([1.0, 0.0, 3.0, 7.0, 2.0])
    svi.step(y)
    assert pyro.param("scale").item() == pytest.approx(3.0, abs=1e-12)
    svi.step(y)
    assert abs(pyro.param("scale").item() - 3.0) > 1e-3
    with pytest.raises(ValueError, match="this step has others: scale"):
        fresh = ngvi.AutoSites(model)
        SVI(model, fresh, ngvi.CVI(fresh, others=None), ngvi.SitesELBO()).step(y)


def test_frozen_parameters_want_no_trainer() -> None:
    pyro.clear_param_store()
    kernel = torch.nn.Linear(2, 1, bias=False).requires_grad_(False)

    def model(y):
        pyro.module("kernel", kernel.eval())
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", 2):
            pyro.sample("y", dist.Normal(z * kernel.weight[0], 1.0), obs=y)

    guide = ngvi.AutoSites(model)
    SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO()).step(torch.ones(2))
    assert guide.sites()["y"].precision.min() > 0
