"""to_arviz: every group against slow references, for Pyro's own guides and hand-written ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import arviz as az
import matplotlib
import numpy as np
import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGaussian, AutoMultivariateNormal, AutoNormal, AutoStructured
from pyro.infer.reparam import LocScaleReparam
from pyro.nn import PyroModule, PyroSample
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_ngvi.diagnostics import khat
from pyro_ngvi.diagnostics.arviz_compat import summary
from pyro_ngvi.diagnostics.export import to_arviz
from pyro_ngvi.losses import BatchedELBO
from tests.contract.export_examples import (
    GUIDES,
    D,
    S,
    dist,
    groups_of,
    hand_written,
    model,
    regression_data,
    values_of,
)


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    return regression_data()


def slow_log_q(name: str, guide: Any, args: Any, w: Tensor, sigma: Tensor) -> Any:
    """log q of one draw on the constrained space, from the definition of each guide."""
    if name == "hand_written":
        fixed = poutine.condition(guide, data={"w": w, "sigma": sigma})
        return poutine.trace(fixed).get_trace(*args).log_prob_sum()
    log_sigma = sigma.log()
    if name == "AutoNormal":
        loc, scale = guide.locs, guide.scales
        log_q = dist.Normal(loc.w, scale.w).log_prob(w).sum()
        log_q = log_q + dist.Normal(loc.sigma, scale.sigma).log_prob(log_sigma)
    elif name == "AutoMultivariateNormal":
        log_q = guide.get_posterior().log_prob(torch.cat([w, log_sigma.reshape(1)]))
    else:
        of_sigma, of_w = guide
        log_q = dist.Normal(of_sigma.locs.sigma, of_sigma.scales.sigma).log_prob(log_sigma)
        log_q = log_q + of_w.get_posterior().log_prob(w)
    return log_q - log_sigma  # the log-Jacobian of the logarithm


@pytest.mark.parametrize("batch_size", [None, 70])
@pytest.mark.parametrize("name", GUIDES)
def test_densities_are_those_of_pyro(
    name: str, batch_size: int | None, data: tuple[Tensor, Tensor]
) -> None:
    X, y = data
    guide = GUIDES[name](model)
    result = to_arviz(model, guide, X, y, num_samples=S, seed=1, batch_size=batch_size)
    values, stats = values_of(result), values_of(result, "sample_stats")
    of_site: Any
    with torch.no_grad():
        for s in (0, 1, S - 1):
            at = {"w": values["w"][s], "sigma": values["sigma"][s]}
            trace = poutine.trace(poutine.condition(model, data=at)).get_trace(X, y)
            torch.testing.assert_close(stats["lp"][s], trace.log_prob_sum())
            torch.testing.assert_close(
                stats["log_q"][s], slow_log_q(name, guide, data, at["w"], at["sigma"])
            )
            expected = dist.Normal(X @ at["w"], at["sigma"]).log_prob(y)
            torch.testing.assert_close(values_of(result, "log_likelihood")["y"][s], expected)
            torch.testing.assert_close(values["mean"][s], X @ at["w"])
            for site, log_prior in values_of(result, "log_prior").items():
                of_site = trace.nodes[site]
                torch.testing.assert_close(log_prior[s], of_site["log_prob_sum"])
    weights = torch.softmax(stats["lp"] - stats["log_q"], 0)
    torch.testing.assert_close(stats["log_weights"].exp(), weights)
    assert len(values["w"].unique(dim=0)) == S


@pytest.mark.parametrize("name", GUIDES)
def test_groups_names_and_attributes(name: str, data: tuple[Tensor, Tensor]) -> None:
    X, y = data
    guide = GUIDES[name](model)
    result = to_arviz(model, guide, X, y, num_samples=S, prior=True, seed=1)
    found = {
        group: {str(name): x.dims for name, x in result[group].data_vars.items()}
        for group in groups_of(result)
    }
    sampled = ("chain", "draw")
    latent = {"w": (*sampled, "w_dim_0"), "sigma": sampled, "mean": (*sampled, "mean_dim_0")}
    assert found == {
        "posterior": latent,
        "sample_stats": dict.fromkeys(["lp", "log_q", "log_weights"], sampled),
        "log_prior": {"w": sampled, "sigma": sampled},
        "log_likelihood": {"y": (*sampled, "unit")},
        "posterior_predictive": {"y": (*sampled, "unit")},
        "prior": latent,
        "prior_predictive": {"y": (*sampled, "unit")},
        "observed_data": {"y": ("unit",)},
        "constant_data": {"X": ("X_dim_0", "X_dim_1")},
    }
    np.testing.assert_array_equal(result["observed_data"]["y"].values, y.numpy())
    np.testing.assert_array_equal(result["constant_data"]["X"].values, X.numpy())
    expected = khat(model, guide, X, y, num_samples=S, seed=1)
    assert result.attrs["khat"] == expected.khat
    assert result.attrs["khat_threshold"] == expected.threshold
    assert result.attrs["num_samples"] == S
    assert result.attrs["guide"] == name
    assert result.attrs["inference_library"] == "pyro_ngvi"


def test_groups_can_be_left_out(data: tuple[Tensor, Tensor]) -> None:
    result = to_arviz(
        model, hand_written, *data, num_samples=S, posterior_predictive=False, log_likelihood=False
    )
    groups = groups_of(result)
    assert "posterior" in groups
    assert not {"posterior_predictive", "log_likelihood", "prior", "prior_predictive"} & {*groups}


def test_predictive_draws_follow_the_model(data: tuple[Tensor, Tensor]) -> None:
    X, y = data
    result = to_arviz(model, hand_written, X, y, num_samples=2000, prior=True, seed=2)
    for latent, predictive in (
        ("posterior", "posterior_predictive"),
        ("prior", "prior_predictive"),
    ):
        at, drawn = values_of(result, latent), values_of(result, predictive)["y"]
        residual = (drawn - at["mean"]) / at["sigma"][:, None]
        count = residual.numel()
        assert abs(residual.mean()) < 5 / count**0.5  # standard error of the mean of N(0, 1)
        assert abs(residual.var() - 1) < 5 * (2 / count) ** 0.5  # and of its variance
        # Independent of the latents: their draws come from the same stream of random numbers.
        correlation = torch.corrcoef(torch.stack([residual[:, 0], at["w"][:, 0]]))[0, 1]
        assert abs(correlation) < 5 / len(drawn) ** 0.5
    prior = values_of(result, "prior")
    assert abs(prior["w"].var() - 1) < 5 * (2 / prior["w"].numel()) ** 0.5


def test_seed_repeats_from_the_first_call_on(data: tuple[Tensor, Tensor]) -> None:
    guide = AutoNormal(model)  # its first run ever sets it up, and draws more than the later ones
    before = torch.get_rng_state()
    first, again = (
        to_arviz(model, guide, *data, num_samples=S, prior=True, seed=4) for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    for group in ("posterior", "posterior_predictive", "prior", "sample_stats"):
        for name, x in values_of(first, group).items():
            assert torch.equal(x, values_of(again, group)[name]), (group, name)
    other = to_arviz(model, guide, *data, num_samples=S, seed=5)
    assert not torch.equal(values_of(first)["w"], values_of(other)["w"])


def test_parameters_and_gradients_are_left_alone(data: tuple[Tensor, Tensor]) -> None:
    guide = AutoMultivariateNormal(model)
    guide(*data)
    store: Any = pyro.get_param_store()
    before = {name: x.detach().clone() for name, x in store.items()}
    for x in store.values():
        x.unconstrained().grad = torch.full_like(x.unconstrained(), 3.0)
    to_arviz(model, guide, *data, num_samples=S, prior=True)
    assert {*store.keys()} == {*before}
    for name, x in store.items():
        assert torch.equal(x, before[name]) and x.requires_grad
        assert (x.unconstrained().grad == 3.0).all()


def branching_model(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(y.new_zeros(()), 1.0))
    scale = 1.0 if mu.item() > 0 else 2.0
    with pyro.plate("unit", len(y)), poutine.scale(scale=torch.tensor(3.0)):
        pyro.sample("y", dist.Normal(mu, scale), obs=y)


def test_model_that_branches_on_a_draw_runs_in_a_loop() -> None:
    y = torch.linspace(-1, 1, 5)
    with pytest.warns(UserWarning, match=r"'y' stands under poutine.scale.*az.loo .* are wrong"):
        result = to_arviz(branching_model, AutoNormal(branching_model), y, num_samples=S, seed=1)
    mu, ll = values_of(result)["mu"], values_of(result, "log_likelihood")["y"]
    scale = torch.where(mu > 0, 1.0, 2.0)
    expected = dist.Normal(mu[:, None], scale[:, None]).log_prob(y)
    torch.testing.assert_close(ll, expected)
    lp = dist.Normal(0.0, 1.0).log_prob(mu) + 3.0 * expected.sum(1)
    torch.testing.assert_close(values_of(result, "sample_stats")["lp"], lp)


@pytest.mark.parametrize("event_dim", [0, 1])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_predictive_draws_have_the_shape_of_the_data(
    shape: tuple[int, ...], event_dim: int
) -> None:
    """Many data of one distribution, without a plate."""
    if event_dim > len(shape):
        pytest.skip("an event of no dimension")

    def many(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))
        pyro.sample("y", dist.Normal(mu, 1.0).to_event(event_dim), obs=y)

    y = torch.tensor([1.0, 2.0, 3.0])
    result = to_arviz(many, AutoNormal(many), y, num_samples=S, seed=1)
    drawn = values_of(result, "posterior_predictive")["y"]
    assert drawn.shape == (S, 3)
    assert len(drawn[0].unique()) == 3
    assert result["observed_data"]["y"].shape == (3,)


def test_sites_that_vmap_can_not_draw() -> None:
    def beta_model(counts: Tensor) -> None:
        p = pyro.sample("p", dist.Beta(2.0, 2.0))
        with pyro.plate("trial", len(counts)):
            pyro.sample("k", dist.Binomial(10, p), obs=counts)

    def guide(counts: Tensor) -> None:
        total = counts.sum()
        pyro.sample("p", dist.Beta(2.0 + total, 2.0 + 10 * len(counts) - total))

    counts = torch.tensor([3.0, 5.0, 6.0])
    result = to_arviz(beta_model, guide, counts, num_samples=S, prior=True, seed=1)
    assert result.attrs["khat"] == 0.0  # conjugate: the guide is the posterior
    p, k = values_of(result)["p"], values_of(result, "posterior_predictive")["k"]
    residual = (k - 10 * p[:, None]) / (10 * p * (1 - p)).sqrt()[:, None]
    assert abs(residual.mean()) < 5 / residual.numel() ** 0.5
    kurtosis = (3 - 6 / 10 + 1 / (10 * p * (1 - p))).mean()
    assert abs((residual**2).mean() - 1) < 5 * ((kurtosis - 1) / residual.numel()) ** 0.5
    assert values_of(result, "prior_predictive")["k"].shape == (S, 3)


class Network(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        layer: Any = PyroModule[torch.nn.Linear]
        self.linear = layer(D, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, D]).to_event(2))

    def forward(self, X: Tensor, y: Tensor) -> None:
        mean = self.linear(X).squeeze(-1)
        with pyro.plate("unit", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_network_in_a_pyro_module(data: tuple[Tensor, Tensor]) -> None:
    X, y = data
    network = Network()
    result = to_arviz(network, AutoNormal(network), X, y, num_samples=S, seed=1)
    weight = values_of(result)["linear.weight"]
    mean = (weight @ X.T).squeeze(1) + network.linear.bias.detach()
    torch.testing.assert_close(
        values_of(result, "log_likelihood")["y"], dist.Normal(mean, 1.0).log_prob(y)
    )
    assert {*result["constant_data"].data_vars} == {"X", "linear.bias"}
    assert network.linear.bias.grad is None


def test_float32_stays_float32(data: tuple[Tensor, Tensor]) -> None:
    X, y = (x.float() for x in data)
    torch.set_default_dtype(torch.float32)
    result = to_arviz(model, AutoNormal(model), X, y, num_samples=S, seed=1)
    assert result["posterior"]["w"].dtype == np.float32
    assert result["log_likelihood"]["y"].dtype == np.float32


def test_arviz_reads_it(tmp_path: Path) -> None:
    def normal(x: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("unit", len(x)):
            pyro.sample("x", dist.Normal(mu, 1.0), obs=x)

    def exact(x: Tensor) -> None:
        pyro.sample("mu", dist.Normal(x.sum() / (len(x) + 1), (len(x) + 1) ** -0.5))

    x = torch.linspace(-1.0, 1.5, 20)
    draws = 4000
    result = to_arviz(normal, exact, x, num_samples=draws, seed=1)
    assert result.attrs["khat"] == 0.0
    mu, ll = values_of(result)["mu"], values_of(result, "log_likelihood")["x"]
    table: Any = az.summary(result, round_to="none")
    np.testing.assert_allclose(float(table.loc["mu", "mean"]), float(mu.mean()))
    assert not [c for c in summary(result).columns if "hat" in c or "ess" in c]
    loo: Any = az.loo(result)
    elpd = float(loo.elpd_loo if hasattr(loo, "elpd_loo") else loo.elpd)
    n = len(x)  # without x_i: mu ~ N((sum x - x_i)/n, 1/n)
    expected = dist.Normal((x.sum() - x) / n, (1 + 1 / n) ** 0.5).log_prob(x).sum()
    ratio = (-ll).exp()  # delta method on log mean(1/p_i); the errors may all add up
    assert abs(elpd - expected) < 4 * (ratio.std(0) / ratio.mean(0)).sum() / draws**0.5
    matplotlib.use("agg")
    (az.plot_posterior if hasattr(az, "plot_posterior") else az.plot_dist)(result, var_names=["mu"])
    path = str(tmp_path / "fit.nc")
    result.to_netcdf(path)
    again = az.from_netcdf(path)
    assert again.attrs["khat"] == again["posterior"].attrs["khat"] == 0.0
    np.testing.assert_array_equal(again["posterior"]["mu"].values[0], mu.numpy())


def test_unconstrained_log_det_cancels_in_the_weights(data: tuple[Tensor, Tensor]) -> None:
    """The weights are those on the unconstrained space, where autoguides live."""
    X, y = data
    guide = AutoMultivariateNormal(model)
    result = to_arviz(model, guide, X, y, num_samples=S, seed=1)
    at = values_of(result)
    transform = biject_to(constraints.positive)
    z = torch.cat([at["w"], transform.inv(at["sigma"])[:, None]], 1)
    log_q = guide.get_posterior().log_prob(z).detach()
    log_p = values_of(result, "sample_stats")["lp"] + transform.log_abs_det_jacobian(
        z[:, -1], at["sigma"]
    )
    expected = torch.log_softmax(log_p - log_q, 0)
    torch.testing.assert_close(values_of(result, "sample_stats")["log_weights"], expected)


@pytest.mark.parametrize("diagnostic", [khat, to_arviz])
def test_data_outside_the_support_are_refused(diagnostic: Any) -> None:
    def model(y: Tensor) -> None:
        p, seen = pyro.sample("p", dist.Beta(2.0, 2.0)), cast(Any, y < 5)
        with pyro.plate("data", len(y)), poutine.mask(mask=seen):
            pyro.sample("y", dist.Bernoulli(p), obs=y)

    guide = AutoNormal(model)
    diagnostic(model, guide, torch.tensor([0.0, 1.0, 7.0]), num_samples=50)  # 7 is masked
    with pytest.raises(ValueError, match=r"'y' cannot be evaluated: Expected value argument"):
        diagnostic(model, guide, torch.tensor([1.0, 2.0, 7.0]), num_samples=50)


def school_model(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("schools", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, 2.0))
        pyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def test_a_reparametrised_site_is_a_quantity_of_the_posterior() -> None:
    """Pyro leaves an observed point of it, masked out: no data."""
    y = torch.tensor([1.0, 2.0, 4.0])
    decentred = poutine.reparam(school_model, config={"theta": LocScaleReparam(0.0)})
    found = to_arviz(decentred, guide_of(decentred, y), y, num_samples=S)
    posterior = found["posterior"]
    assert list(found["observed_data"]) == list(found["log_likelihood"]) == ["y"]
    assert list(found["posterior_predictive"]) == ["y"]
    expected = posterior["mu"] + 2.0 * posterior["theta_decentered"]
    np.testing.assert_allclose(posterior["theta"], expected.transpose(*posterior["theta"].dims))


def guide_of(model: Any, *args: Any) -> Any:
    guide = AutoMultivariateNormal(model)
    guide(*args)
    return guide


def test_support_that_other_data_move_is_refused() -> None:
    """The guide would go on to draw from the support of its first call."""

    def bounded(y: Tensor) -> None:
        x = pyro.sample("x", dist.Uniform(y.max(), 10.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    y = torch.tensor([1.0, 2.0, 4.0])
    guide = guide_of(bounded, y)
    for diagnostic in (khat, to_arviz):
        diagnostic(bounded, guide, y, num_samples=S)
        with pytest.raises(ValueError, match="support of the latent site 'x' is another one"):
            diagnostic(bounded, guide, y - 1.0, num_samples=S)


@pytest.mark.parametrize("make", [AutoStructured, AutoGaussian])
def test_guides_that_empty_their_record_of_the_sites(
    make: Callable[..., Any], data: tuple[Tensor, Tensor]
) -> None:
    guide = make(model)
    result = to_arviz(model, guide, *data, num_samples=S, seed=1)
    assert result.attrs["khat"] == khat(model, guide, *data, num_samples=S, seed=1).khat
    stats = values_of(result, "sample_stats")
    terms = stats["lp"] - stats["log_q"]
    losses = torch.tensor([BatchedELBO(32).loss(model, guide, *data) for _ in range(20)])
    # means of S and of 20 * 32 draws, each with its standard error
    error = terms.std() / S**0.5 + losses.std() / 20**0.5
    assert abs(terms.mean() + losses.mean()) < 4.0 * error
