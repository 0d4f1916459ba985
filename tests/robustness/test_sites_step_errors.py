"""What a step of CVI refuses: data, parameters, settings, guides, losses and optimizers of others."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.distributions import GaussianStateSpace, matern_state_space
from tests.exact.site_cases import N, gp_kernel, normal_weights, seeded
from tests.robustness.site_error_cases import D, X, given, logistic, made, plain, y_real

# --- data


def test_data_outside_of_the_support() -> None:
    y = (y_real() > 0).double()
    y[3] = 2.0
    _, svi = made(logistic)
    with pytest.raises(
        ValueError, match=r"1 of the data of 'y' lie outside .* the first is number 3"
    ):
        svi.step(X(), y)


@pytest.mark.parametrize("model", [plain, logistic])
def test_first_call_without_data(model: Any) -> None:
    guide, svi = made(model)
    for call in (svi.step, guide):
        with pytest.raises(ValueError, match="data"):
            call(X())


def test_step_without_data() -> None:
    _, svi = made(plain)
    svi.step(X(), y_real())
    for call in (svi.step, svi.evaluate_loss):
        with pytest.raises(ValueError, match=r"'y' has no data in this call \(obs=None\)"):
            call(X())


def test_another_number_of_data() -> None:
    guide, svi = made(plain)
    svi.step(X(), y_real())
    before = guide.get_posterior().mean
    for call in (svi.step, svi.evaluate_loss, guide.refresh):
        with pytest.raises(ValueError, match=r"data of shape \(39,\) in this call, .* \(40,\)"):
            call(X()[1:], y_real()[1:])
    assert torch.equal(guide.get_posterior(X(), y_real()).mean, before)


@pytest.mark.parametrize("columns", [2, 4])
def test_a_block_of_another_size(columns: int) -> None:
    _, svi = made(plain)
    svi.step(X(), y_real())
    Z = torch.randn(N, columns, generator=seeded())
    with pytest.raises(ValueError, match="of another size needs a guide of its own"):
        svi.step(Z, y_real())


def other_times(t: Tensor, y: Tensor | None = None) -> None:
    f: Any = pyro.sample("f", matern_state_space(t, 1.0, 1.0))
    with pyro.plate("data", len(t)):
        pyro.sample("y", dist.Normal(f[..., 0], 0.5), obs=y)


def other_covariance(t: Tensor, y: Tensor | None = None) -> None:
    K = torch.exp(-0.5 * (t[:, None] - t).square()) + 1e-6 * torch.eye(len(t))
    f: Any = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(t)), K))
    with pyro.plate("data", len(t)):
        pyro.sample("y", dist.Normal(f, 0.5), obs=y)


def other_steps(t: Tensor, y: Tensor | None = None) -> None:
    """Of mean zero, so that nothing but the transitions tells the priors apart."""
    A = torch.eye(2) + torch.tensor([[0.0, 1.0], [0.0, 0.0]]) * t[1]
    Q = 0.1 * torch.eye(2)
    x: Any = pyro.sample("f", GaussianStateSpace(torch.zeros(2), Q, A, Q, num_steps=len(t)))
    with pyro.plate("data", len(t)):
        pyro.sample("y", dist.Normal(x[..., 0], 0.5), obs=y)


@pytest.mark.parametrize("model", [other_times, other_covariance, other_steps])
def test_as_many_other_times_as_there_are_data(model: Any) -> None:
    """Row n of the sites was seen at time n: at others q is not known."""
    guide, svi = made(model)
    times = torch.linspace(0.0, 5.0, 8)
    svi.step(times, times.sin())
    mean, _ = guide.predict(times)["f"]
    others = times + 0.3
    for call in (guide.predict, guide, Predictive(model, guide=guide, num_samples=2)):
        with pytest.raises(ValueError, match=r"prior of 'f' is another one .* NaN for their data"):
            call(others)
    assert torch.equal(guide.predict(times)["f"][0], mean)
    svi.step(others, others.sin())  # other data are a new fit
    guide.predict(others)


def scaled(X: Tensor, y: Tensor, scale: float | Tensor) -> None:
    w = normal_weights(D)
    with pyro.plate("rows", len(X)), poutine.scale(scale=scale):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


@pytest.mark.parametrize("scale", [4.0, torch.tensor(4.0)])
def test_minibatches_by_a_scale_alone(scale: float | Tensor) -> None:
    guide, svi = made(scaled)
    y = y_real()
    y[1] = torch.nan  # missing, in both steps
    for _ in range(2):
        svi.step(X()[:10], y[:10].clone(), scale)
    before = guide.get_posterior().mean
    with pytest.raises(ValueError, match=r"the data of 'y' are not .*plate\('rows', N, subsample="):
        svi.step(X()[10:20], y[10:20], scale)
    assert torch.equal(guide.get_posterior(X()[:10], y[:10], scale).mean, before)
    guide.reset()
    svi.step(X()[10:20], y[10:20], scale)


def test_minibatches_by_a_scale_in_a_buffer_or_of_equal_labels() -> None:
    """A loader that writes into the same tensors; batches of one class."""
    for y in (lambda k: y_real()[10 * k : 10 * k + 10], lambda k: torch.ones(10)):
        x_buffer, y_buffer = torch.empty(10, D), torch.empty(10)
        _, svi = made(scaled)
        x_buffer.copy_(X()[:10])
        y_buffer.copy_(y(0))
        svi.step(x_buffer, y_buffer, 4.0)
        x_buffer.copy_(X()[10:20])
        y_buffer.copy_(y(1))
        with pytest.raises(ValueError, match="are not those of the step before"):
            svi.step(x_buffer, y_buffer, 4.0)


def test_the_same_data_moved_by_a_parameter_under_a_scale() -> None:
    def shifted(y: Tensor) -> None:
        shift = pyro.param("shift", torch.tensor(0.5))
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with poutine.scale(scale=2.0), pyro.plate("data", len(y)):
            pyro.sample("y", dist.StudentT(4.0, m, 1.0), obs=y - shift)

    guide: Any = ngvi.AutoSites(shifted)
    svi: Any = SVI(shifted, guide, ngvi.CVI(guide, others=Adam({"lr": 0.1})), ngvi.SitesELBO())
    losses = [svi.step(y_real()) for _ in range(5)]
    assert losses[-1] < losses[1]


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_other_data_under_a_scale_that_is_no_minibatch(scale: float) -> None:
    guide, svi = made(scaled)
    _, fresh = made(scaled)
    svi.step(X()[:10], y_real()[:10], scale)
    svi.step(X()[10:20], y_real()[10:20], scale)
    fresh.step(X()[10:20], y_real()[10:20], scale)
    q, other = guide.get_posterior(), fresh.guide.get_posterior()
    assert torch.allclose(q.mean, other.mean, atol=1e-10)


def test_minibatches_of_a_guide_that_keeps_what_all_data_see() -> None:
    Z = torch.randn(N, 2 * N, generator=seeded())
    _, svi = made(given)
    svi.step(Z, y_real(), torch.arange(N))
    with pytest.raises(ValueError, match="keeps 40 directions of 80 latent variables"):
        svi.step(Z[:5], y_real()[:5], torch.arange(5))


def test_refresh_by_a_minibatch() -> None:
    guide, svi = made(given)
    svi.step(X()[:5], y_real()[:5], torch.arange(5))
    with pytest.raises(ValueError, match="needs all data"):
        guide.refresh(X()[:5], y_real()[:5], torch.arange(5))


def test_observed_site_that_stays_away() -> None:
    def model(X: Tensor, y: Tensor | None, z: Tensor | None) -> None:
        f = X @ normal_weights(D)
        for name, value in (("y", y), ("z", z)):
            if value is not None:
                pyro.sample(name, dist.Normal(f, 0.5), obs=value)

    _, svi = made(model)
    svi.step(X(), y_real(), y_real())
    with pytest.raises(ValueError, match=r"site 'y' has no data .* or does not come"):
        svi.step(X(), None, y_real())


def test_another_course() -> None:
    def model(X: Tensor, y: Tensor, more: bool) -> None:
        w = normal_weights(D)
        if more:
            w = w + 0.0 * w.sum() + 1.0
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    _, svi = made(model)
    svi.step(X(), y_real(), False)
    with pytest.raises(RuntimeError, match=r"took another course .* the result of matmul"):
        svi.step(X(), y_real(), True)


# --- parameters, optimizers and losses


def test_hyperparameters_that_leave_the_proper_densities() -> None:
    """Sites of outliers have a negative precision, which only their neighbours make up for."""

    def model(K: Tensor, y: Tensor) -> None:
        own = pyro.param("own", torch.tensor(1e-4), constraint=dist.constraints.positive)
        f: Any = pyro.sample("f", dist.MultivariateNormal(torch.zeros(N), K + own * torch.eye(N)))
        with pyro.plate("data", N):
            pyro.sample("y", dist.StudentT(3.0, f, 0.1), obs=y)

    pyro.clear_param_store()
    y = torch.linspace(0.0, 6.0, N).sin()
    y[::8] += 4.0
    _, svi = made(model)
    for _ in range(15):
        svi.step(gp_kernel(), y)
    pyro.get_param_store()["own"] = torch.tensor(1e3)
    with pytest.raises(RuntimeError, match="do not make a proper Gaussian"):
        svi.step(gp_kernel(), y)


def test_parameters_that_nobody_trains() -> None:
    def model(X: Tensor, y: Tensor) -> None:
        noise = pyro.param("noise", torch.tensor(1.0), constraint=dist.constraints.positive)
        f = X @ normal_weights(D)
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(f, noise), obs=y)

    pyro.clear_param_store()
    guide = ngvi.AutoSites(model)
    svi: Any = SVI(model, guide, ngvi.CVI(guide, others=None), ngvi.SitesELBO())
    with pytest.raises(ValueError, match="this step has others: noise"):
        svi.step(X(), y_real())


@pytest.mark.parametrize("lr", [0.0, -0.1, 1.5, float("nan")])
def test_lr_out_of_range(lr: Any) -> None:
    with pytest.raises(ValueError, match=r"in \(0, 1\]"):
        ngvi.CVI(ngvi.AutoSites(plain), lr=lr)


@pytest.mark.parametrize(
    "options",
    [{"num_particles": 0}, {"num_points": 1}, {"num_particles": 2.5}, {"num_points": 7.5}],
)
def test_numbers_of_the_loss(options: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match="num_particles must be at least 1 and num_points at least 2"
    ):
        ngvi.SitesELBO(**options)


def test_other_losses() -> None:
    guide = ngvi.AutoSites(plain)
    svi: Any = SVI(plain, guide, ngvi.CVI(guide), Trace_ELBO())
    with pytest.raises(RuntimeError, match=r"Pass SVI loss=pyro_ngvi\.SitesELBO\(\)"):
        svi.step(X(), y_real())


def test_other_guides() -> None:
    full = ngvi.AutoFullRankNormal(plain)
    with pytest.raises(ValueError, match="found none in AutoFullRankNormal"):
        ngvi.CVI(full)
    svi: Any = SVI(plain, full, ngvi.NGVB(full), ngvi.SitesELBO())
    with pytest.raises(ValueError, match="SitesELBO is the loss of one AutoSites guide"):
        svi.step(X(), y_real())


def test_other_optimizers() -> None:
    with pytest.raises(ValueError, match="AutoSites"):
        ngvi.NGVB(ngvi.AutoSites(plain))


def test_two_guides_of_sites_in_a_list() -> None:
    def model(X: Tensor, y: Tensor) -> None:
        w, v = normal_weights(D), normal_weights(D, "v")
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ w, (X @ v).exp()), obs=y)

    guide: Any = AutoGuideList(model)
    for name in "wv":
        guide.append(ngvi.AutoSites(poutine.block(model, expose=[name])))
    svi: Any = SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    with pytest.raises(ValueError, match="AutoGuideList has 2"):
        svi.step(X(), y_real())


def test_optimizer_of_another_guide() -> None:
    one, other = ngvi.AutoSites(plain), ngvi.AutoSites(plain)
    svi: Any = SVI(plain, one, ngvi.CVI(other), ngvi.SitesELBO())
    with pytest.raises(ValueError, match="was given no parameter of its guide"):
        svi.step(X(), y_real())


def test_state_of_another_model() -> None:
    _, svi = made(plain)
    svi.step(X(), y_real())
    guide = ngvi.AutoSites(plain)
    optim = ngvi.CVI(guide)
    optim.set_state(svi.optim.get_state() | {"others": None})
    with pytest.raises(ValueError, match="state does not fit the guide"):
        SVI(plain, guide, optim, ngvi.SitesELBO()).step(X()[:9], y_real()[:9])


@pytest.mark.parametrize("call", ["median", "sites", "get_posterior", "quantiles"])
def test_before_the_first_call(call: str) -> None:
    guide = ngvi.AutoSites(plain)
    with pytest.raises(RuntimeError, match="does not know the model's sites yet"):
        getattr(guide, call)(*([0.5] if call == "quantiles" else []))


def test_report_before_the_first_step() -> None:
    with pytest.raises(RuntimeError, match="no report before the first step"):
        ngvi.CVI(ngvi.AutoSites(plain)).report()


def test_no_share_of_the_step_is_proper_and_sites_lose_their_negative_part():
    """A likelihood with two modes, far from the prior: the first targets have negative precisions."""
    X, w = torch.randn(200, 3), torch.tensor([1.0, -1.0, 0.5])
    y = (X @ w).square() + torch.randn(200)

    def model(X, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal((X @ w).square(), 1.0), obs=y)

    guide = ngvi.AutoSites(model)
    optim = ngvi.CVI(guide)
    svi = SVI(model, guide, optim, ngvi.SitesELBO())
    losses: list[Any] = [svi.step(X, y) for _ in range(20)]
    report = optim.report()
    assert report.skipped == 0 and report.damped > 0
    # w and -w are as likely: at 0, between the two, sweeps take turns at falling and going back
    assert min(losses[2:]) < losses[1] < losses[0]
    assert torch.isfinite(torch.tensor(losses)).all()
    assert bool(guide.algebra.posterior(None, guide.algebra.evidence).proper)
