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
        ngvi.predict(schools, guide, old, from_prior=["eta"])


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


def field(x: Tensor, y: Tensor | None = None, observed: bool = False) -> None:
    """A smooth function with a random scale, latent or observed itself."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    covariance = scale**2 * torch.exp(-(x[:, None] - x).square()) + 0.1 * torch.eye(len(x))
    process = dist.MultivariateNormal(torch.zeros(len(x)), covariance)
    if observed:
        pyro.sample("y", process, obs=y)
    else:
        f = pyro.sample("f", process)
        with pyro.plate("unit", len(x)):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)


@pytest.mark.parametrize("observed", [False, True])
def test_draws_of_a_process_that_know_nothing_of_the_data_are_warned_of(observed: bool) -> None:
    x, new = torch.linspace(0.0, 4.0, 8), torch.tensor([1.0, 5.0])
    how: Any = {"observed": observed, "max_steps": 2, "seed": 0, "progress": False}
    fit = ngvi.fit(field, x, x.sin(), **how)
    idata = fit.to_arviz(num_samples=50, seed=0)
    options: Any
    name, options = ("y", {}) if observed else ("f", {"from_prior": ["f"]})
    message = rf"'{name}' is one joint draw, of shape \(2,\) here and \(8,\) in the fit"
    at: Any = {"x": new, "observed": observed}
    with pytest.warns(UserWarning, match=message):
        fit.predict(**at, num_samples=20, **options)
    with pytest.warns(UserWarning, match=message):
        ngvi.predict(field, idata, **at, **options)
    if observed:
        with pytest.warns(UserWarning, match=message):
            ngvi.to_arviz(field, fit.guide, *fit.args, num_samples=50, predictions=at, **fit.kwargs)
        return
    with pytest.raises(ValueError, match="here, as one joint draw"):
        fit.predict(**at)
    with pytest.raises(ValueError, match="here, as one joint draw"):
        ngvi.predict(field, idata, **at)


def test_vectors_of_new_units_are_drawn_without_a_warning() -> None:
    def units(n: int, y: Tensor | None = None) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with pyro.plate("units", n):
            u = pyro.sample("u", dist.MultivariateNormal(m * torch.ones(2), torch.eye(2)))
            pyro.sample("y", dist.MultivariateNormal(u, torch.eye(2)), obs=y)

    guide = AutoMultivariateNormal(units)
    idata = ngvi.to_arviz(units, guide, 4, torch.randn(4, 2), num_samples=50, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (1, 4, 6):
            found = ngvi.predict(units, idata, n, from_prior=["u"])
            assert found["y"].shape == (50, n, 2)


def test_the_next_steps_of_a_chain_follow_its_last() -> None:
    def steps(T: int, y: Tensor | None = None) -> None:
        q, x = pyro.sample("q", dist.LogNormal(-1.0, 0.3)), torch.zeros(())
        for t in range(T):
            x = pyro.sample(f"x_{t}", dist.Normal(x, q))
            obs = y[t] if y is not None and t < len(y) else None
            pyro.sample(f"y_{t}", dist.Normal(x, 0.3), obs=obs)

    fit = ngvi.fit(steps, 5, torch.randn(5).cumsum(0), max_steps=2, seed=0, progress=False)
    assert "block" in str(fit.advice)
    idata = ngvi.to_arviz(steps, fit.guide, 5, torch.zeros(5), num_samples=50, seed=0)
    sites: Any = ["q", "x_4", "x_5", "x_6", "y_6"]
    how: Any = {"sites": sites, "num_samples": 4000, "seed": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fit.predict(7, from_prior=["x_5", "x_6"], **how)
        ngvi.predict(steps, idata, 7, from_prior=["x_5", "x_6"])
    assert torch.equal(found["x_4"], fit.sample(4000, seed=0)["x_4"])
    for a, b, sd in (("x_4", "x_5", found["q"]), ("x_5", "x_6", found["q"]), ("x_6", "y_6", 0.3)):
        z = (found[b] - found[a]) / sd  # N(0, 1), with its standard errors
        assert abs(z.mean()) < 5 / 4000**0.5 and abs(z.var() - 1) < 5 * (2 / 4000) ** 0.5
    message = "no draws of the latent sites 'x_5', 'x_6': they are drawn from the model"
    with pytest.warns(UserWarning, match=message) as seen:
        again = fit.predict(7, **how)
    assert len(seen) == 1 and all(torch.equal(again[name], found[name]) for name in sites)
    with pytest.warns(UserWarning, match=message):
        ngvi.predict(steps, idata, 7)
    with pytest.raises(ValueError, match=r"from_prior names 'x_9'; the latent sites here are 'q'"):
        fit.predict(7, from_prior=["x_9"])


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
    with pytest.raises(ValueError, match=r"AutoNormal has never been called\. Train it first"):
        ngvi.predict(model, AutoNormal(model), new)
    loaded, fresh = ngvi.AutoFullRankNormal(model), ngvi.AutoFullRankNormal(model)
    loaded(X, y)
    fresh.load_state_dict(loaded.state_dict())
    with pytest.raises(ValueError, match="It takes the state that was loaded when you call it"):
        ngvi.predict(model, fresh, new)
    fresh(X, y)
    same = (ngvi.predict(model, g, new, num_samples=3, seed=0) for g in (loaded, fresh))
    assert all(torch.equal(a, b) for a, b in zip(*(p.values() for p in same), strict=True))
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
