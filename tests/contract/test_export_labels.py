"""to_arviz: names of dimensions, plates and masks, arguments, and what it refuses."""

import warnings
from typing import Any

import numpy as np
import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from torch import Tensor
from torch.distributions import constraints

from pyro_ngvi import NGVB, AutoExponentialFamily, BatchedELBO
from pyro_ngvi.diagnostics import khat
from pyro_ngvi.diagnostics.arviz_compat import summary
from pyro_ngvi.diagnostics.export import to_arviz
from tests.contract.export_examples import (
    N,
    S,
    dist,
    groups_of,
    hand_written,
    model,
    regression_data,
    values_of,
)

mask: Any = poutine.mask  # its annotation does not know that any tensor of bool will do


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    return regression_data()


def schools(y: Tensor, noise: Tensor, scale: float = 5.0) -> None:
    """Two plates, a deterministic site inside one, event dimensions, a mask, a plate named y."""
    mu = pyro.sample("mu", dist.Normal(y.new_zeros(()), scale))
    with pyro.plate("school", y.shape[1], dim=-1):
        eta = pyro.sample("eta", dist.Normal(y.new_zeros(2), 1.0).to_event(1))
        theta = pyro.deterministic("theta", mu + eta[..., 0])
        with pyro.plate("y", y.shape[0], dim=-2):
            seen = ~y.isnan()
            full = dist.Normal(theta, noise).mask(seen)
            with mask(mask=seen):
                pyro.sample("score", dist.Normal(theta, noise), obs=y.nan_to_num())
            pyro.sample("double", full, obs=y.nan_to_num())
    pyro.sample("total", dist.Normal(mu, 1.0).expand([4]).to_event(1), obs=y.new_zeros(4))


def test_plates_events_and_masks() -> None:
    y = torch.tensor([[1.0, 2.0, 3.0], [4.0, torch.nan, 6.0]])
    noise = torch.tensor(2.0)
    result = to_arviz(schools, AutoNormal(schools), y, noise=noise, num_samples=S, seed=1)
    sampled = ("chain", "draw")
    posterior, ll = result["posterior"], result["log_likelihood"]
    assert posterior["eta"].dims == (*sampled, "school", "eta_dim_1")
    assert posterior["theta"].dims == (*sampled, "school")
    # The argument y is not the data of a site, and no variable may have a dimension's name.
    assert ll["score"].dims == (*sampled, "y_dim", "school")
    assert ll["total"].dims == sampled
    assert result["observed_data"]["total"].dims == ("total_dim_0",)
    assert {*result["constant_data"].data_vars} == {"y", "noise"}
    theta = values_of(result)["theta"]
    expected = dist.Normal(theta[:, None, :], noise).log_prob(y.nan_to_num()) * ~y.isnan()
    for name in ("score", "double"):
        torch.testing.assert_close(values_of(result, "log_likelihood")[name], expected)


@pytest.mark.parametrize("name", ["lp", "log_q", "log_weights", "resampled_from"])
def test_a_site_may_have_the_name_of_a_statistic(name: str) -> None:
    def named(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(y.new_zeros(2), 1.0).to_event(1))
        pyro.deterministic(name, 2 * mu)
        with pyro.plate("unit", len(y)):
            pyro.sample("y", dist.Normal(mu.sum(), 1.0), obs=y)

    pyro.set_rng_seed(0)
    guide = AutoExponentialFamily(named)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of weights that are not to be relied on
        result = to_arviz(named, guide, torch.zeros(3), num_samples=S, seed=1, resample="psis")
    assert result["posterior"][name].dims == ("chain", "draw", f"{name}_dim_0")
    assert result["sample_stats"][name].dims == ("chain", "draw")
    np.testing.assert_array_equal(result["posterior"][name], 2 * result["posterior"]["mu"])


def test_labels_of_the_user(data: tuple[Tensor, Tensor]) -> None:
    X, y = data
    result = to_arviz(
        model,
        hand_written,
        X,
        y,
        num_samples=S,
        dims={"w": ["feature"], "X": ["unit", "feature"], "mean": ["unit"]},
        coords={"feature": ["a", "b", "c"], "unit": range(100, 100 + N)},
    )
    assert result["constant_data"]["X"].dims == ("unit", "feature")
    assert result["posterior"]["mean"].dims == ("chain", "draw", "unit")
    assert float(result["posterior"]["w"].sel(feature="b")[0, 0]) == values_of(result)["w"][0, 1]
    assert list(result["log_likelihood"]["y"].coords["unit"].values[:2]) == [100, 101]
    assert "w[b]" in summary(result).index


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"dims": {"v": ["feature"]}}, "dims names 'v', but the variables are"),
        ({"dims": {"w": ["a", "b"]}}, r"'w' has shape \(3,\), so give a list of 1 names"),
        ({"dims": {"w": "feature"}}, "give a list of 1 names"),
        ({"coords": {"units": [1]}}, "coords names 'units', but the dimensions are"),
        ({"coords": {"unit": [1]}}, "conflicting sizes for dimension .unit."),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    labels: dict[str, Any], message: str, data: tuple[Tensor, Tensor]
) -> None:
    with pytest.raises(ValueError, match=message):
        to_arviz(model, hand_written, *data, num_samples=S, **labels)


def test_arguments_become_constant_data(data: tuple[Tensor, Tensor]) -> None:
    X, y = data

    def variadic(*arrays: Tensor, offset: Any = None, **more: Any) -> None:
        z = pyro.sample("z", dist.Normal(arrays[0].new_zeros(()), 1.0))
        with pyro.plate("unit", N):
            pyro.sample("offset", dist.Normal(z, 1.0), obs=arrays[1] + 1.0)

    more = {"table": np.eye(2), "flag": True}
    result = to_arviz(variadic, AutoNormal(variadic), X, y, offset=y, num_samples=S, **more)
    constants = result["constant_data"]
    assert {*constants.data_vars} == {"arrays_0", "arrays_1", "offset_argument", "table"}
    np.testing.assert_array_equal(constants["offset_argument"].values, y.numpy())
    np.testing.assert_array_equal(result["observed_data"]["offset"].values, y.numpy() + 1.0)


def test_subsampled_plate_is_refused(data: tuple[Tensor, Tensor]) -> None:
    def subsampled(X: Tensor, y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(X.new_zeros(()), 1.0))
        with pyro.plate("unit", len(y), subsample_size=4) as index:
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y[index])

    with pytest.raises(ValueError, match="plate 'unit' takes 4 of 12 examples"):
        to_arviz(subsampled, AutoNormal(subsampled), *data, num_samples=S)


def test_guide_without_a_latent_site_is_refused(data: tuple[Tensor, Tensor]) -> None:
    partial = AutoNormal(poutine.block(model, hide=["sigma"]))
    with pytest.raises(ValueError, match=r"does not sample the model's latent sites \['sigma'\]"):
        to_arviz(model, partial, *data, num_samples=S)


def test_guide_in_the_place_of_the_model_is_refused(data: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(
        ValueError, match="The model is an AutoNormal, a guide: give the model first"
    ):
        to_arviz(AutoNormal(model), model, *data, num_samples=S)


def test_guide_of_another_model_is_refused(data: tuple[Tensor, Tensor]) -> None:
    def other(X: Tensor, y: Tensor) -> None:
        hand_written(X, y)
        pyro.sample("extra", dist.Normal(X.new_zeros(()), 1.0))

    with pytest.raises(ValueError, match="guide samples 'extra', which is no site of the model"):
        to_arviz(model, other, *data, num_samples=S)


def test_point_mass_is_refused(data: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(ValueError, match="same point"):
        to_arviz(model, AutoDelta(model), *data, num_samples=S)


@pytest.mark.parametrize("num_samples", [0, -3, 10])
def test_too_few_draws_are_refused(num_samples: int, data: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(ValueError, match="num_samples"):
        to_arviz(model, hand_written, *data, num_samples=num_samples)


def test_sites_that_come_and_go_are_refused() -> None:
    def changing() -> None:
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
        if z.item() > 0:
            pyro.deterministic("positive", z)

    with pytest.raises(ValueError, match=r"'positive'.*in some draws and not in others"):
        to_arviz(changing, AutoNormal(changing), num_samples=S)


def test_auxiliary_sites_of_a_guide_are_not_exported(data: tuple[Tensor, Tensor]) -> None:
    def with_helper(X: Tensor, y: Tensor) -> None:
        pyro.sample(
            "helper", dist.Normal(0.0, 1.0).expand([2]).to_event(1), infer={"is_auxiliary": True}
        )
        hand_written(X, y)

    result = to_arviz(model, with_helper, *data, num_samples=S)
    assert {*result["posterior"].data_vars} == {"w", "sigma", "mean"}


def test_prior_that_can_not_sample_is_an_error() -> None:
    def improper() -> None:
        pyro.sample("z", dist.ImproperUniform(constraints.real, (), ()))
        pyro.factor("well", -torch.ones(()))

    def guide() -> None:
        pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))

    assert "posterior" in groups_of(to_arviz(improper, guide, num_samples=S))
    with pytest.raises(NotImplementedError, match="does not support sampling"):
        to_arviz(improper, guide, num_samples=S, prior=True)


def test_a_point_mass_in_a_part_of_the_latents(data: tuple[Tensor, Tensor]) -> None:
    """No weights correct it: k-hat of the rest would say that all is well."""
    guide = AutoGuideList(model)
    guide.append(AutoDelta(poutine.block(model, expose=["sigma"])))
    guide.append(AutoNormal(poutine.block(model, hide=["sigma"])))
    with pytest.raises(ValueError, match="All draws of 'sigma' from the guide are the same point"):
        khat(model, guide, *data, num_samples=S)
    with pytest.warns(UserWarning, match="All draws of 'sigma'.*k-hat is set to infinity"):
        result = to_arviz(model, guide, *data, num_samples=S)
    assert result.attrs["khat"] == float("inf")


def test_a_factor_in_the_plate_of_the_data_is_warned_of() -> None:
    y, censored = torch.rand(20) + 0.1, torch.arange(20) % 4 == 0

    def survival(y: Tensor) -> None:
        rate = pyro.sample("rate", dist.LogNormal(0.0, 1.0))
        pyro.factor("tilt", -0.1 * rate)  # of the prior
        with pyro.plate("unit", len(y)):
            with mask(mask=~censored):
                pyro.sample("y", dist.Exponential(rate), obs=y)
            with mask(mask=censored):
                pyro.factor("censored", -rate * y)

    with pytest.warns(UserWarning, match="'censored' lies in a plate with data") as seen:
        to_arviz(survival, AutoNormal(survival), y, num_samples=S)
    assert not any("'tilt'" in str(warning.message) for warning in seen)


def test_a_parameter_fixed_by_condition_is_warned_of(data: tuple[Tensor, Tensor]) -> None:
    fixed = poutine.condition(model, data={"sigma": torch.tensor(0.1)})
    with pytest.warns(
        UserWarning, match="The observed site 'sigma' is one number, and others depend"
    ):
        to_arviz(fixed, AutoNormal(fixed), *data, num_samples=S)
    fixed = poutine.do(model, data={"sigma": torch.tensor(0.1)})
    to_arviz(fixed, AutoNormal(fixed), *data, num_samples=S)  # where warnings are errors


@pytest.mark.parametrize("successes", [0.0, 10.0, 20.0])
def test_draws_rounded_to_the_end_of_their_support_are_warned_of(successes: float) -> None:
    """Of Beta(20.1, 0.1) a quarter lies within float32's rounding of 1; none of it near 0 is lost."""
    torch.set_default_dtype(torch.float32)

    def rare() -> None:
        p = pyro.sample("p", dist.Beta(torch.tensor(0.1), 0.1))
        pyro.sample("y", dist.Binomial(20, p), obs=torch.tensor(successes))

    guide = AutoExponentialFamily(rare)
    svi = SVI(rare, guide, NGVB(guide), BatchedELBO(16))
    for _ in range(100):
        svi.step()
    if successes == 20.0:
        with pytest.warns(RuntimeWarning, match="of the draws of 'p' are rounded to the end"):
            khat(rare, guide, num_samples=1000)
        with pytest.warns(RuntimeWarning, match="of the draws of 'p' are rounded to the end"):
            to_arviz(rare, guide, num_samples=1000)
    else:
        khat(rare, guide, num_samples=1000)  # where warnings are errors


def test_a_simplex_whose_last_entry_is_rounded_away() -> None:
    torch.set_default_dtype(torch.float32)

    def model() -> None:
        pyro.sample("p", dist.Dirichlet(torch.tensor([5.0, 5.0, 0.1])))

    def guide() -> None:
        pyro.sample("p", dist.Dirichlet(torch.tensor([5.0, 5.0, 0.1])))

    with pytest.warns(RuntimeWarning, match="of the draws of 'p' are rounded to the end"):
        khat(model, guide, num_samples=1000)


def test_draws_that_the_precision_rounds_away() -> None:
    """At a million numbers of float32 are 0.06 apart, at ten thousand 0.001."""
    torch.set_default_dtype(torch.float32)

    def far(at: float) -> None:
        pyro.sample("m", dist.Normal(torch.tensor([0.0, at]), 0.07).to_event(1))

    with pytest.warns(RuntimeWarning, match="of 'm' are around 1e[+]06 with an sd of 0.07"):
        khat(far, far, 1e6)
    khat(far, far, 1e4)  # where warnings are errors
