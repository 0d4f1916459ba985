"""The ArviZ shim under whichever ArviZ is installed: CI runs this file under 0.x and under 1.x.

The shim is loaded by its path: it needs neither torch nor Pyro.
"""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import arviz as az
import numpy as np
import pytest

SHIM = Path(__file__).parents[2] / "pyro_ngvi" / "diagnostics" / "arviz_compat.py"
DRAWS, N = 4000, 7


def load_shim() -> ModuleType:
    spec = importlib.util.spec_from_file_location("arviz_shim_under_test", SHIM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


shim = load_shim()


def normal_log_pdf(x: np.ndarray, mean: Any, var: Any) -> np.ndarray:
    return -0.5 * (np.log(2 * np.pi * var) + (x - mean) ** 2 / var)


@pytest.fixture(scope="module")
def conjugate() -> dict[str, Any]:
    """x_i ~ N(mu, 1), mu ~ N(0, 10^2): exact posterior draws, and the elpd in closed form."""
    rng = np.random.default_rng(20)
    x = rng.normal(0.5, 1.0, N)
    var = 1 / (N + 0.01)
    mu = var * x.sum() + np.sqrt(var) * rng.standard_normal((1, DRAWS))
    var_without = 1 / (N - 1 + 0.01)
    mean_without = var_without * (x.sum() - x)
    return {
        "x": x,
        "mu": mu,
        "log_likelihood": normal_log_pdf(x, mu[..., None], 1.0),
        "elpd": normal_log_pdf(x, mean_without, 1 + var_without).sum(),
    }


@pytest.fixture
def data(conjugate: dict[str, Any]) -> Any:
    mu, x = conjugate["mu"], conjugate["x"]
    return shim.from_groups(
        {
            "posterior": {"mu": mu, "w": np.stack([mu, 2 * mu], -1)},
            "sample_stats": {"lp": -(mu**2), "log_q": mu},
            "log_likelihood": {"x": conjugate["log_likelihood"]},
            "log_prior": {name: normal_log_pdf(mu, 0.0, 100.0) for name in ("mu", "w")},
            "posterior_predictive": {"x": mu[..., None] + np.zeros(N)},
            "prior": {"mu": 10 * mu},
            "prior_predictive": {"x": mu[..., None] + np.ones(N)},
            "observed_data": {"x": x},
            "constant_data": {"design": np.ones((N, 2))},
        },
        coords={"feature": ["a", "b"]},
        dims={"w": ["feature"], "x": ["unit"], "design": ["unit", "feature"]},
        attrs={"inference_library": "pyro_ngvi", "khat": 0.25},
    )


def test_every_group_arrives_with_values_dims_and_coords(
    data: Any, conjugate: dict[str, Any]
) -> None:
    sampled = {"x": ("chain", "draw", "unit"), "mu": ("chain", "draw")}
    expected = {
        "posterior": {"mu": sampled["mu"], "w": ("chain", "draw", "feature")},
        "sample_stats": {"lp": sampled["mu"], "log_q": sampled["mu"]},
        "log_likelihood": {"x": sampled["x"]},
        "log_prior": {"mu": sampled["mu"], "w": sampled["mu"]},
        "posterior_predictive": {"x": sampled["x"]},
        "prior": {"mu": sampled["mu"]},
        "prior_predictive": {"x": sampled["x"]},
        "observed_data": {"x": ("unit",)},
        "constant_data": {"design": ("unit", "feature")},
    }
    found = {
        group: {name: data[group][name].dims for name in data[group].data_vars}
        for group in expected
    }
    assert found == expected
    assert list(data["posterior"]["w"].coords["feature"].values) == ["a", "b"]
    assert list(data["observed_data"]["x"].coords["unit"].values) == list(range(N))
    np.testing.assert_array_equal(data["posterior"]["mu"].values, conjugate["mu"])
    np.testing.assert_array_equal(data["observed_data"]["x"].values, conjugate["x"])


def test_attrs_are_on_the_root_and_on_the_posterior(data: Any) -> None:
    for attrs in (data.attrs, data["posterior"].attrs):
        assert attrs["inference_library"] == "pyro_ngvi"
        assert attrs["khat"] == 0.25


def test_log_likelihood_may_lack_the_event_dimensions() -> None:
    data = shim.from_groups(
        {
            "posterior": {"mu": np.zeros((1, 5))},
            "log_likelihood": {"y": np.zeros((1, 5, 3))},
            "observed_data": {"y": np.zeros((3, 2))},
        },
        dims={"y": ["row", "y_dim_0"]},
    )
    assert data["log_likelihood"]["y"].dims == ("chain", "draw", "row")
    assert data["observed_data"]["y"].dims == ("row", "y_dim_0")


def test_pits_come_in_a_group_of_their_own() -> None:
    """That which ``plot_ecdf_pit`` of ArviZ 1.x reads, with PITs of more than one entry."""
    pits = np.random.default_rng(0).random((1, 40, 2))
    data = shim.from_groups(
        {"prior_sbc": {"w": pits, "s": pits[..., 0]}},
        dims={"w": ["feature"]},
        coords={"feature": ["a", "b"]},
    )
    assert data["prior_sbc"]["w"].dims == ("chain", "draw", "feature")
    assert list(data["prior_sbc"]["w"].coords["feature"].values) == ["a", "b"]
    np.testing.assert_array_equal(data["prior_sbc"]["w"].values, pits)
    if not az.__version__.startswith("0."):
        assert vars(az)["plot_ecdf_pit"](data, backend="none") is not None


def test_a_statistic_of_the_draws_has_no_dimensions_of_a_site_of_its_name() -> None:
    lp = np.zeros((1, 5))
    data = shim.from_groups(
        {"posterior": {"lp": np.zeros((1, 5, 2))}, "sample_stats": {"lp": lp}},
        dims={"lp": ["feature"]},
    )
    assert data["posterior"]["lp"].dims == ("chain", "draw", "feature")
    assert data["sample_stats"]["lp"].dims == ("chain", "draw")


def test_slashes_in_names_become_dots() -> None:
    data = shim.from_groups(
        {"posterior": {"scope/w": np.zeros((1, 5, 2))}},
        dims={"scope/w": ["scope/w_dim_0"]},
        coords={"scope/w_dim_0": ["a", "b"]},
    )
    assert data["posterior"]["scope.w"].dims == ("chain", "draw", "scope.w_dim_0")
    assert list(data["posterior"].coords["scope.w_dim_0"].values) == ["a", "b"]


def test_inputs_are_not_changed() -> None:
    attrs, dims = {"created_at": "then"}, {"w": ("feature",)}
    shim.from_groups({"posterior": {"w": np.zeros((1, 5, 2))}}, attrs=attrs, dims=dims)
    assert attrs == {"created_at": "then"} and dims == {"w": ("feature",)}


def test_summary_has_moments_and_no_figure_of_a_chain(data: Any, conjugate: dict[str, Any]) -> None:
    table = shim.summary(data, round_to="none")
    assert list(table.index) == ["mu", "w[a]", "w[b]"]
    assert not [c for c in table.columns if any(s in c for s in ("r_hat", "ess", "mcse"))]
    np.testing.assert_allclose(float(table.loc["mu", "mean"]), conjugate["mu"].mean(), rtol=1e-12)
    np.testing.assert_allclose(
        float(table.loc["w[b]", "sd"]), 2 * conjugate["mu"].std(), rtol=1 / DRAWS
    )
    assert list(shim.summary(data, var_names=["mu"]).index) == ["mu"]


@pytest.mark.skipif(not az.__version__.startswith("0."), reason="ArviZ 1 rounds in its own way")
def test_summary_shows_what_is_small() -> None:
    small, usual = 1e-6 * (3 + np.random.randn(1, DRAWS)), np.random.randn(1, DRAWS)
    table = shim.summary(shim.from_groups({"posterior": {"small": small, "usual": usual}}))
    assert float(table.loc["small", "sd"]) == pytest.approx(small.std(), rel=0.06)
    alone = shim.summary(shim.from_groups({"posterior": {"usual": usual}}))
    assert table.loc["usual"].astype(str).tolist() == alone.loc["usual"].astype(str).tolist()


def test_summary_refuses_diagnostics_of_chains(data: Any) -> None:
    with pytest.raises(ValueError, match="diagnostics of Markov chains"):
        shim.summary(data, kind="all")


def test_plain_arviz_summary_still_works(data: Any) -> None:
    assert "sd" in az.summary(data).columns


def test_loo_finds_the_closed_form(data: Any, conjugate: dict[str, Any]) -> None:
    loo: Any = az.loo(data, pointwise=True)
    elpd = loo.elpd_loo if az.__version__.startswith("0.") else loo.elpd
    # Delta method on log mean(1/p_i) over independent draws; the N errors may all add up.
    ratio = np.exp(-conjugate["log_likelihood"][0])
    error = (ratio.std(0) / ratio.mean(0) / np.sqrt(DRAWS)).sum()
    assert abs(float(elpd) - conjugate["elpd"]) < 4 * error
    assert float(np.max(loo.pareto_k)) < 0.7


def test_elpd_of_terms_is_arvizs_and_compares(data: Any, conjugate: dict[str, Any]) -> None:
    old = az.__version__.startswith("0.")
    whole: Any = az.loo(data, pointwise=True)
    terms = "loo_i" if old else "elpd_i"
    held = conjugate["log_likelihood"][0]
    of_all = np.log(np.exp(held).mean(0))
    parts = getattr(whole, terms).values, of_all, whole.pareto_k.values
    found = shim.elpd_data(*parts, {"unit": N}, DRAWS)
    for name in ("elpd_loo", "se", "p_loo") if old else ("elpd", "se", "p"):
        np.testing.assert_allclose(getattr(found, name), getattr(whole, name), rtol=1e-12)
    assert getattr(found, terms).dims == found.pareto_k.dims == ("unit",)
    assert found.n_data_points == N and found.n_samples == DRAWS and not found.warning
    assert found.good_k == whole.good_k and f"{N} observations" in str(found)
    worse = shim.elpd_data(parts[0] - 1.0, *parts[1:], {"unit": N}, DRAWS)
    assert list(shim.compare({"worse": worse, "better": found}).index) == ["better", "worse"]
    with pytest.warns(UserWarning, match=f"greater than 0.70 for 1 of {N} data"):
        bad = shim.elpd_data(*parts[:2], np.linspace(0.2, 0.75, N), {"unit": N}, DRAWS)
    assert bad.warning


def test_power_scaling_sees_data_and_a_weak_prior(data: Any) -> None:
    old = az.__version__.startswith("0.")
    psense = getattr(az, "psens" if old else "psense")
    which = "component" if old else "group"
    by = {name: float(psense(data, **{which: name})["mu"]) for name in ("prior", "likelihood")}
    # the sd goes with the root of the power of the likelihood; the prior is 70 times as wide
    assert by["prior"] < 0.01 < 0.05 < by["likelihood"]


@pytest.mark.skipif(az.__version__.startswith("0."), reason="new in ArviZ 1")
def test_loo_of_a_subsample_of_the_data(data: Any) -> None:
    whole: Any = az.loo(data)  # type: ignore[attr-defined]
    some: Any = az.loo_subsample(data, observations=4)  # type: ignore[attr-defined]
    # the terms less their log predictive density, which is all that is extrapolated, differ little
    assert abs(some.elpd - whole.elpd) < 1.0 and some.n_data_points == N


def test_plots_draw(data: Any) -> None:
    if az.__version__.startswith("0."):
        matplotlib = pytest.importorskip("matplotlib")
        matplotlib.use("agg")
        axes = az.plot_posterior(data, var_names=["mu"])
        assert "mu" in axes.get_title()
    else:
        drawn = az.plot_dist(data, var_names=["mu"], backend="none")
        assert "mu" in drawn.viz["dist"].data_vars
