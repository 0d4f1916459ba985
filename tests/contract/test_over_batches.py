"""What is read of all data that are seen by minibatches, beside what is read of them at once."""

from functools import partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import pyro_ngvi as ngvi
from pyro_ngvi.diagnostics import OverBatches
from pyro_ngvi.fitting import Batches

N = 50
G = torch.Generator().manual_seed(0)
X = torch.randn(N, 2, generator=G, dtype=torch.float64)
Y = X.sum(-1) + torch.randn(N, generator=G, dtype=torch.float64)


def regression(X: Any, y: Any = None, size: Any = None, index: Any = None) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
    s = pyro.sample("s", dist.LogNormal(torch.zeros((), dtype=torch.float64), 1.0))
    pyro.factor("beside", -(s.square()))
    how: Any = {"subsample_size": len(X)} if index is None else {"subsample": index}
    with pyro.plate("data", size or len(X), **how):
        mean = pyro.deterministic("mean", X @ w)
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def mixture(X: Any, y: Any, size: Any = None) -> None:
    m = pyro.sample("m", dist.Normal(torch.zeros(2, dtype=torch.float64), 3.0).to_event(1))
    with pyro.plate("data", size or len(y), subsample_size=len(y)):
        z = pyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(m[z.long()], 1.0), obs=y)


def parts(*sizes: int) -> list[tuple[Any, ...]]:
    return list(zip(X.split(list(sizes)), Y.split(list(sizes)), strict=True))


@pytest.mark.parametrize("model", [regression, mixture])
def test_weights_are_those_of_all_data_at_once(model) -> None:
    guide = AutoNormal(pyro.poutine.block(model, hide=["z"]), init_scale=0.2)
    at_once = ngvi.khat(model, guide, X, Y, seed=0, num_samples=200)
    for batches in (parts(7, 13, 30), parts(N)):
        first = batches[0]
        found = ngvi.khat(
            OverBatches(model, batches), guide, *first, size=N, seed=0, num_samples=200
        )
        np.testing.assert_allclose(found.log_weights, at_once.log_weights, rtol=0, atol=1e-10)
        assert found.elbo == pytest.approx(at_once.elbo, abs=1e-10)
        assert found.shifts.keys() == at_once.shifts.keys() - {"mean"}


def test_rows_by_number_and_single_arguments() -> None:
    index = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    guide = AutoNormal(regression, init_scale=0.2)
    at_once = ngvi.khat(regression, guide, X, Y, seed=0, num_samples=100)

    def by_number(index) -> None:
        regression(X[index], Y[index], N, index)

    batches = index.split(20)
    found = ngvi.khat(OverBatches(by_number, batches), guide, batches[0], seed=0, num_samples=100)
    np.testing.assert_allclose(found.log_weights, at_once.log_weights, rtol=0, atol=1e-10)


def test_the_container_has_draws_and_their_weights_and_nothing_by_datum() -> None:
    guide = AutoNormal(regression, init_scale=0.2)
    how: Any = {"seed": 0, "num_samples": 100}
    at_once = ngvi.to_arviz(regression, guide, X, Y, **how)
    batches = parts(20, 30)
    found = ngvi.to_arviz(OverBatches(regression, batches), guide, *batches[0], size=N, **how)
    assert {n for n in ("posterior", "log_prior", "sample_stats") if n in found} and set(
        found["posterior"]
    ) == {"w", "s"}
    for name in ("log_likelihood", "posterior_predictive", "observed_data", "constant_data"):
        assert name in at_once and name not in found
    for name in ("lp", "log_q", "log_weights"):
        ours, theirs = (data["sample_stats"][name].values for data in (found, at_once))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)
    assert found.attrs["khat"] == pytest.approx(at_once.attrs["khat"], abs=1e-8)


def shuffled(drop_last: bool = False) -> Any:
    own = torch.Generator().manual_seed(3)
    data = TensorDataset(X, Y)
    return DataLoader(data, 20, shuffle=True, generator=own, drop_last=drop_last)


def test_a_fit_of_minibatches_alone_is_read_as_one_of_all_data() -> None:
    loader = shuffled()
    fit = ngvi.fit(regression, data=loader, size=N, seed=0, max_steps=20, progress=False)
    before, own = torch.get_rng_state(), loader.generator.get_state()
    assert "No verdict" not in repr(fit) and fit.verdict is fit.khat
    at_once = ngvi.khat(regression, fit.guide, X, Y, seed=0)
    assert fit.elbo[0] == pytest.approx(at_once.elbo, abs=1e-9)
    assert set(fit.idata["posterior"]) == {"w", "s"} and fit.summary() is not None
    assert fit.sample(3)["w"].shape == (3, 2)
    assert torch.equal(own, loader.generator.get_state())
    for read in (fit.loo, lambda: fit.diagnosis):
        with pytest.raises(ValueError, match="Give all data as arguments beside data="):
            read()
    fit.resume(max_steps=5)
    other = ngvi.fit(regression, data=shuffled(), size=N, seed=0, max_steps=20, progress=False)
    torch.set_rng_state(before)
    other.resume(max_steps=5)
    np.testing.assert_array_equal(fit.losses[:20], other.losses[:20])


def test_minibatches_of_one_of_several_processes_are_not_all_data(monkeypatch) -> None:
    fit = ngvi.fit(regression, data=parts(N), seed=0, max_steps=3, progress=False)
    monkeypatch.setattr(type(fit), "is_spread", True)
    with pytest.raises(ValueError, match="Give all data as arguments beside data="):
        fit.khat  # noqa: B018


def test_epochs_that_do_not_have_each_datum_once_are_refused() -> None:
    fit = ngvi.fit(regression, data=shuffled(True), size=N, seed=0, max_steps=9, progress=False)
    assert "No verdict: The minibatches of an epoch hold 0.8 times the data" in repr(fit)
    with pytest.warns(
        UserWarning, match="takes each of 3 minibatches for all data.*subsample_size"
    ):
        fit = ngvi.fit(regression, data=shuffled(), seed=0, max_steps=9, progress=False)
    assert "No verdict: The minibatches of an epoch hold 3 times the data" in repr(fit)


def test_other_arguments_of_a_resumed_run_are_looked_at_too() -> None:
    how: Any = {"seed": 0, "tol": 0.0, "progress": False}
    whole = ngvi.fit(regression, X, Y, size=N, max_steps=8, **how)
    fit = ngvi.fit(regression, X, Y, size=N, max_steps=4, **how)
    fit.resume(X, Y, size=N, max_steps=4, progress=False)
    np.testing.assert_array_equal(fit.losses, whole.losses)
    with pytest.warns(UserWarning, match="takes each of 3 minibatches for all data"):
        fit.resume(X, Y, data=shuffled(), max_steps=4, progress=False)


def test_other_diagnostics_refuse_minibatches() -> None:
    guide, model = AutoNormal(regression), OverBatches(regression, parts(20, 30))
    for ask in (ngvi.diagnose, ngvi.diagnostics.loo, ngvi.diagnostics.linear_response):
        with pytest.raises(ValueError, match="needs all data at once"):
            ask(model, guide, X[:20], Y[:20], size=N)


def test_latent_variables_of_single_data_and_two_plates_are_refused() -> None:
    def local(y) -> None:
        with pyro.plate("data", 10, subsample_size=len(y)):
            u = pyro.sample("u", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(u, 1.0), obs=y)

    def crossed(y) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        rows = pyro.plate("rows", 10, subsample_size=len(y), dim=-1)
        with rows, pyro.plate("columns", 4, subsample_size=2, dim=-2):
            pyro.sample("y", dist.Normal(m, 1.0), obs=y.expand(2, -1))

    batches = torch.zeros(10).split(5)
    for model, words in ((local, "'u' is latent in the plate 'data'"), (crossed, "at once")):
        guide = AutoNormal(model)
        with pytest.raises(ValueError, match=words):
            ngvi.khat(OverBatches(model, batches), guide, batches[0])


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(N), replacement=True),
        RandomSampler(range(N), replacement=True, generator=torch.Generator()),
        WeightedRandomSampler([1.0] * N, N),
    ],
)
def test_samplers_with_replacement_are_refused(sampler: Any) -> None:
    """An epoch of them has the right number of data, and some of them twice."""
    data = TensorDataset(X, Y)
    whole = DataLoader(data, sampler=sampler)
    for loader in (whole, DataLoader(data, batch_sampler=BatchSampler(sampler, 10, False))):
        with pytest.raises(ValueError, match="draws with replacement"):
            OverBatches(regression, loader)


def test_a_fit_of_data_drawn_again_has_no_verdict() -> None:
    again = RandomSampler(range(N), replacement=True)
    loader = DataLoader(TensorDataset(X, Y), batch_size=10, sampler=again)
    model = partial(regression, size=N)
    fit = ngvi.fit(model, data=loader, guide="AutoFullRankNormal", max_steps=10, progress=False)
    assert "No verdict: The loader draws with replacement" in str(fit)
    with pytest.raises(ValueError, match="or give fit all data as arguments beside data="):
        fit.sample()
    assert "No verdict" not in str(fit.resume(X, Y, max_steps=1, progress=False))


def test_data_drawn_by_weights_are_warned_of() -> None:
    sampler = WeightedRandomSampler([1.0] * N, N)
    loader = DataLoader(TensorDataset(X, Y), sampler=sampler)
    with pytest.warns(UserWarning, match="draws data by weights"):
        Batches(loader)
    with pytest.warns(UserWarning, match="draws data by weights") as told:
        fit = ngvi.fit(regression, X, Y, size=N, data=loader, max_steps=2, progress=False)
    assert len(told) == 1
    with pytest.warns(UserWarning, match="draws data by weights") as told:
        fit.resume(data=DataLoader(loader.dataset, sampler=sampler), max_steps=2, progress=False)
    assert len(told) == 1
