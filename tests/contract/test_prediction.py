"""predict: draws at new data against Pyro's Predictive, from guides and from kept draws."""

import warnings
from typing import Any

import numpy as np
import pyro
import pyro.contrib.gp as gp
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from pyro.infer.reparam import LocScaleReparam
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.diagnostics import draws as _draws
from pyro_ngvi.runtime import model_density
from tests.contract.export_examples import GUIDES, D, dist, groups_of, values_of

S, N, M = 400, 12, 5


def model(X: Tensor, y: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[1]), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.LogNormal(X.new_zeros(()), 0.5))
    mean = pyro.deterministic("mean", X @ w)
    with pyro.plate("unit", len(X)):
        pyro.sample("y", dist.Normal(mean, sigma), obs=y)
    return mean.sum()


@pytest.fixture
def data() -> tuple[Tensor, Tensor, Tensor]:
    X = torch.randn(N, D)
    return X, X.sum(1) + 0.5 * torch.randn(N), torch.randn(M, D)


def hand_written(X: Tensor, y: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(torch.linspace(-0.5, 0.5, D), 0.3).to_event(1))
    pyro.sample("sigma", dist.LogNormal(0.1 * w.sum(), 0.2))


@pytest.mark.parametrize("name", GUIDES)
def test_deterministic_sites_and_noise_follow_the_draws(name: str, data: Any) -> None:
    X, y, new = data
    guide = hand_written if name == "hand_written" else GUIDES[name](model)
    guide(X, y)
    sites = ["w", "sigma", "mean", "y", "_RETURN"]
    found = ngvi.predict(model, guide, new, num_samples=4000, sites=sites, seed=1)
    assert list(found) == sites and found["y"].shape == (4000, M)
    torch.testing.assert_close(found["mean"], found["w"] @ new.T)
    torch.testing.assert_close(found["_RETURN"], found["mean"].sum(1))
    residual = (found["y"] - found["mean"]) / found["sigma"][:, None]
    count = residual.numel()
    assert abs(residual.mean()) < 5 / count**0.5  # standard error of the mean of N(0, 1)
    assert abs(residual.var() - 1) < 5 * (2 / count) ** 0.5  # and of its variance
    pyro.set_rng_seed(2)
    expected: Any = Predictive(model, guide=guide, num_samples=400)(new)
    for power in (1, 2):
        a, b = found["y"] ** power, expected["y"].reshape(-1, M) ** power
        error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() < 5 * error).all()


def test_given_draws_give_what_pyro_gives(data: Any) -> None:
    X, y, new = data
    guide = AutoNormal(model)
    idata = ngvi.to_arviz(model, guide, X, y, num_samples=50, seed=1)
    draws = {name: values_of(idata)[name] for name in ("w", "sigma")}
    expected: Any = Predictive(model, posterior_samples=draws)(new)
    found = ngvi.predict(model, idata, new)
    assert list(found) == ["mean", "y"]  # the sites that are no latent ones of the guide
    torch.testing.assert_close(found["mean"], expected["mean"].reshape(50, M))
    plain = ngvi.predict(model, draws, new)  # as get_samples() of MCMC gives them
    torch.testing.assert_close(plain["mean"], found["mean"])
    with pytest.raises(TypeError, match="a dict of draws"):
        ngvi.predict(model, {"w": "draws"}, new)


@pytest.mark.filterwarnings("ignore:resample=.psis. cannot be relied on")  # it is not trained
@pytest.mark.parametrize("resample", [None, "psis"])
def test_the_same_seed_gives_the_same_draws_everywhere(resample: Any, data: Any) -> None:
    X, y, new = data
    guide = AutoNormal(model)
    idata = ngvi.to_arviz(
        model, guide, X, y, num_samples=S, seed=3, resample=resample, predictions=(new,)
    )
    before = torch.get_rng_state()
    of_kept = ngvi.predict(model, idata, new, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    for name, x in values_of(idata, "predictions").items():
        assert torch.equal(of_kept[name], x)
    if resample is None:
        of_guide = ngvi.predict(model, guide, new, num_samples=S, seed=3)
        assert all(torch.equal(of_guide[name], x) for name, x in of_kept.items())
    thinned = ngvi.predict(model, idata, new, num_samples=100, sites=["w"])["w"]
    assert torch.equal(thinned, values_of(idata)["w"][::4])


def test_noise_is_not_that_of_the_latents(data: Any) -> None:
    """The same seed for the draws and for the predictions from them must not give the same noise."""
    X, y, _ = data
    guide = AutoNormal(model)
    idata = ngvi.to_arviz(model, guide, X, y, num_samples=4000, seed=0)
    found = ngvi.predict(model, idata, X[:D], seed=0, sites=["w", "mean", "sigma", "y"])
    noise = (found["y"] - found["mean"]) / found["sigma"][:, None]
    both = torch.corrcoef(torch.cat([noise, found["w"]], 1).T)[:D, D:]
    assert (both.abs() < 5 / 4000**0.5).all()


def test_groups_of_predictions(data: Any) -> None:
    X, y, new = data
    idata = ngvi.to_arviz(
        model,
        AutoNormal(model),
        X,
        y,
        num_samples=S,
        predictions={"X": new},
        dims={"X": ["unit", "feature"], "w": ["feature"]},
        coords={"unit": range(100, 100 + N)},
    )
    assert {"predictions", "predictions_constant_data"} <= {*groups_of(idata)}
    assert idata["predictions"]["y"].dims == ("chain", "draw", "unit")
    assert list(idata["predictions"]["y"].coords["unit"].values) == list(range(M))
    assert idata["predictions_constant_data"]["X"].dims == ("unit", "feature")
    np.testing.assert_array_equal(idata["predictions_constant_data"]["X"].values, new.numpy())
    assert list(idata["observed_data"]["y"].coords["unit"].values[:2]) == [100, 101]
    with pytest.raises(TypeError, match=r"predictions is a Tensor; give the tuple"):
        wrong: Any = new
        ngvi.to_arviz(model, AutoNormal(model), X, y, num_samples=S, predictions=wrong)


@pytest.mark.parametrize("batches", [True, False])
def test_a_model_that_branches_on_a_draw_and_pieces(batches: bool, data: Any) -> None:
    X, y, new = data

    def branching(X: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(X.new_zeros(D), 1.0).to_event(1))
        sign = 1.0 if batches or w[0].item() > 0 else -1.0
        with pyro.plate("unit", len(X)):
            mean = pyro.deterministic("mean", sign * (X @ w))
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    guide = AutoNormal(branching)
    guide(X, y)
    found = ngvi.predict(branching, guide, new, num_samples=70, batch_size=30, sites=["w", "mean"])
    sign = torch.where(batches | (found["w"][:, :1] > 0), 1.0, -1.0)
    torch.testing.assert_close(found["mean"], sign * (found["w"] @ new.T))


def test_the_model_sees_a_bounded_number_of_draws(data: Any) -> None:
    X, y, _ = data
    seen: list[int] = []

    def watched(X: Tensor, y: Tensor | None = None) -> None:
        seen.append(1)
        model(X, y)

    guide = AutoNormal(model)
    guide(X, y)
    rows = torch.zeros(model_density.MOST_NUMBERS // 40, D)
    found = ngvi.predict(watched, guide, rows, num_samples=100, sites=["mean"])
    assert found["mean"].shape == (100, len(rows))
    assert len(seen) == 2 + 3  # a plain run, one that measures, and pieces of 40, 40 and 20


def test_large_arrays_are_stored_in_float32(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y, _ = data
    guide = AutoNormal(model)
    exact = ngvi.to_arviz(model, guide, X, y, num_samples=S, seed=1, predictions=(X,))
    monkeypatch.setattr(_draws, "MOST_DOUBLES", S * N - 1)
    result = ngvi.to_arviz(model, guide, X, y, num_samples=S, seed=1, predictions=(X,))
    for group in ("log_likelihood", "posterior_predictive", "predictions"):
        assert result[group]["y"].dtype == np.float32
        np.testing.assert_array_equal(
            result[group]["y"].values, exact[group]["y"].values.astype(np.float32)
        )
    assert result["posterior"]["mean"].dtype == np.float64


def without_default(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), 1.0).to_event(1))
    with pyro.plate("unit", len(y)):
        pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


@pytest.mark.parametrize("missing", [(), (None,)])
def test_a_model_that_needs_its_data(missing: tuple[Any, ...], data: Any) -> None:
    X, y, new = data
    guide = AutoNormal(without_default)
    guide(X, y)
    with pytest.raises(ValueError, match=r"cannot run on these arguments: .*torch.zeros\(len\(X\)"):
        ngvi.predict(without_default, guide, new, *missing)
    y_new = ngvi.predict(without_default, guide, new, torch.zeros(M), num_samples=S)["y"]
    assert y_new.shape == (S, M) and (y_new.std(0) > 0.5).all()


def schools(sizes: Tensor, y: Tensor | None = None) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("schools", len(sizes)):
        theta = pyro.sample("theta", dist.Normal(mu, 0.5))
        pyro.sample("y", dist.Normal(theta, sizes), obs=y)


def test_latent_sites_of_each_row() -> None:
    old, new = torch.ones(8), torch.ones(3)
    guide = AutoMultivariateNormal(schools)
    idata = ngvi.to_arviz(schools, guide, old, torch.arange(8.0), num_samples=4000, seed=0)
    for kept in (guide, idata):
        with pytest.raises(ValueError, match=r"'theta' has shape \(8,\) .* and \(3,\) here"):
            ngvi.predict(schools, kept, new)
        with pytest.warns(UserWarning, match="'theta' lies in the plate 'schools'") as seen:
            ngvi.predict(schools, kept, torch.ones(8), num_samples=50)
        assert seen[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ngvi.predict(schools, kept, torch.ones(8), num_samples=50, from_prior=[])
    sites = ["mu", "theta", "y"]
    found = ngvi.predict(schools, idata, new, sites=sites, from_prior=["theta"], seed=0)
    assert torch.equal(found["mu"], values_of(idata)["mu"])
    residual = (found["theta"] - found["mu"][:, None]) / 0.5  # N(0, 1), with its standard errors
    assert abs(residual.mean()) < 5 / residual.numel() ** 0.5
    assert abs(residual.var() - 1) < 5 * (2 / residual.numel()) ** 0.5
    with pytest.raises(ValueError, match="from_prior names 'eta'"):
        ngvi.predict(schools, guide, new, from_prior=["eta"])


def test_a_function_at_the_rows_is_not_taken_for_one_at_others() -> None:
    """Two latent vectors with as many entries as there are rows: coefficients, and values at inputs."""
    kernel: Any = gp.kernels.RBF(1).requires_grad_(False)

    def process(X: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        f = pyro.sample("f", ngvi.distributions.GaussianProcess(kernel, X[:, 0]))
        with pyro.plate("unit", len(X)):
            pyro.sample("y", dist.Normal(X @ w + f, 0.5), obs=y)

    X, y = torch.randn(3, 3), torch.randn(3)
    guide = AutoMultivariateNormal(process)
    idata = ngvi.to_arviz(process, guide, X, y, num_samples=50, seed=0)
    for kept in (guide, idata):
        with pytest.warns(UserWarning, match="'f' has an entry for each row") as seen:
            ngvi.predict(process, kept, X + 5.0, num_samples=20)
        assert len(seen) == 1
        ngvi.predict(process, kept, X + 5.0, num_samples=20, from_prior=[])
        with pytest.raises(ValueError, match="function at new inputs: predict by its AutoSites"):
            ngvi.predict(process, kept, X[:2])
    with pytest.warns(UserWarning, match="'f' has an entry for each row"):
        ngvi.to_arviz(process, guide, X, y, num_samples=50, predictions=(X + 5.0,))


def test_guides_of_other_models_are_refused(data: Any) -> None:
    X, y, new = data
    decentred = poutine.reparam(schools, config={"theta": LocScaleReparam(0.0)})
    guide = AutoNormal(decentred)
    guide(torch.ones(8), torch.zeros(8))
    with pytest.raises(ValueError, match=r"'theta_decentered'\], which are no latent sites"):
        ngvi.predict(schools, guide, torch.ones(8))
    other = AutoNormal(model)
    idata = ngvi.to_arviz(model, other, X, y, num_samples=50)
    with pytest.raises(ValueError, match="which are no latent sites of the model"):
        ngvi.predict(schools, idata, torch.ones(8))
    with pytest.raises(TypeError, match="takes a guide, what to_arviz returned"):
        ngvi.predict(model, [X], new)
    with pytest.raises(ValueError, match="AutoNormal has never been called"):
        ngvi.predict(model, AutoNormal(model), new)
    with pytest.raises(ValueError, match=r"sites names \['z'\], but the sites of the model are"):
        ngvi.predict(model, other, new, sites=["z"])


def test_a_drawn_minibatch_is_refused(data: Any) -> None:
    X, y, new = data

    def subsampled(X: Tensor, y: Tensor | None = None) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("unit", len(X), subsample_size=4) as index:
            pyro.sample("y", dist.Normal(mu, 1.0), obs=None if y is None else y[index])

    guide = AutoNormal(subsampled)
    guide(X, y)
    with pytest.raises(ValueError, match="plate 'unit' takes 4 of 5 examples"):
        ngvi.predict(subsampled, guide, new)


def test_a_guide_that_reads_the_data_and_one_that_is_a_point(data: Any) -> None:
    X, y, new = data

    def reads(X: Tensor, y: Any = None) -> None:
        pyro.sample("w", dist.Normal(y.mean() * torch.ones(D), 0.1).to_event(1))
        pyro.sample("sigma", dist.LogNormal(0.0, 0.1))

    with pytest.raises(ValueError, match="guide cannot run on these arguments: 'NoneType'"):
        ngvi.predict(model, reads, new)
    kept = ngvi.to_arviz(model, reads, X, y, num_samples=S)
    assert ngvi.predict(model, kept, new)["y"].shape == (S, M)
    point = AutoDelta(model)
    point(X, y)
    found = ngvi.predict(model, point, new, num_samples=S)
    torch.testing.assert_close(found["mean"], found["mean"][:1].expand(S, M))
    assert (found["y"].std(0) > 0).all()


def test_a_parameter_fixed_by_condition_is_warned_of(data: Any) -> None:
    X, y, new = data
    fixed = poutine.condition(model, data={"sigma": torch.tensor(1e-3)})
    guide = AutoNormal(fixed)
    guide(X, y)
    with pytest.warns(UserWarning, match="'sigma' is one number, and others depend on it"):
        ngvi.predict(fixed, guide, new, num_samples=50)
    done = poutine.do(model, data={"sigma": torch.tensor(1e-3)})
    found = ngvi.predict(done, guide, new, num_samples=50)
    assert (found["y"] - found["mean"]).abs().max() < 0.01


def test_sites_with_slashes_come_back(data: Any) -> None:
    def named(X: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("net/w", dist.Normal(X.new_zeros(D), 1.0).to_event(1))
        with pyro.plate("unit", len(X)):
            pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    X, y, new = data
    idata = ngvi.to_arviz(named, AutoNormal(named), X, y, num_samples=50)
    found = ngvi.predict(named, idata, new, sites=["net/w"])
    assert torch.equal(found["net/w"], values_of(idata)["net.w"])


def test_auto_sites_predicts_with_and_without_a_process(
    data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y, new = data

    def regression(X: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(X.new_zeros(D), 1.0).to_event(1))
        with pyro.plate("unit", len(X)):
            pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    kernel: Any = gp.kernels.RBF(1).requires_grad_(False)

    def process(x: Tensor, y: Tensor | None = None) -> None:
        f = pyro.sample("f", ngvi.distributions.GaussianProcess(kernel, x))
        with pyro.plate("unit", len(x)):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)

    def chain(x: Tensor, y: Tensor | None = None) -> None:
        s = pyro.sample("s", ngvi.distributions.local_level(len(x), 1.0, 0.3))
        with pyro.plate("unit", len(x)):
            pyro.sample("y", dist.Normal(s[:, 0], 0.5), obs=y)

    cases = (regression, X, new), (process, X[:, :1], new[:, :1]), (chain, X, X)
    for program, old, at in cases:
        guide = ngvi.AutoSites(program)
        svi = SVI(program, guide, ngvi.CVI(guide), ngvi.SitesELBO())
        for _ in range(3):
            svi.step(old, y)
        with monkeypatch.context() as patch:  # all draws at once, though the arguments are new
            patch.setattr("pyro_ngvi.runtime.model_density.run_in_loop", None)
            found = ngvi.predict(program, guide, at, num_samples=2000, seed=1)["y"]
        moments = guide.predict(at)
        if "w" not in moments:
            mean, var = (x.reshape(len(at)) for x in next(iter(moments.values())))
            var = var + 0.25
            assert (
                (found.mean(0) - mean).abs() < 5 * (var / 2000).sqrt()
            ).all()  # standard error of the mean
            assert ((found.var(0) / var - 1).abs() < 5 * (2 / 2000) ** 0.5).all()
        assert found.shape == (2000, len(at))
