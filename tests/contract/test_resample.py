"""to_arviz(resample="psis"): a wrong guide is put right, and what is stored says so."""

import re
import warnings
from typing import Any

import numpy as np
import pyro
import pytest
import torch
from pyro.infer import SVI
from scipy.stats import truncnorm
from torch import Tensor

import pyro_ngvi as ngvi
from tests.contract.export_examples import dist, values_of

S = 4000


def model(x: Tensor) -> None:
    """mu ~ N(0, 1), five data: mu | x ~ N(sum x / 6, 1/6)."""
    mu = pyro.sample("mu", dist.Normal(x.new_zeros(()), 1.0))
    pyro.deterministic("twice", 2.0 * mu)
    with pyro.plate("unit", len(x)):
        pyro.sample("x", dist.Normal(mu, 1.0), obs=x)


X = torch.tensor([0.2, -1.0, 1.5, 0.7, 2.0], dtype=torch.float64)
MEAN, VARIANCE = X.sum() / 6, 1 / 6


def guide_of(shift: float, scale: float) -> Any:
    """The posterior, moved by ``shift`` of its sds and ``scale`` times as wide."""

    def guide(x: Tensor) -> None:
        loc = MEAN + shift * VARIANCE**0.5
        pyro.sample("mu", dist.Normal(loc, scale * VARIANCE**0.5))

    return guide


@pytest.mark.parametrize(("shift", "scale"), [(0.0, 0.75), (0.5, 1.0), (-0.6, 0.9), (0.3, 1.5)])
def test_moments_of_a_wrong_guide_are_corrected(shift: float, scale: float) -> None:
    guide = guide_of(shift, scale)
    raw = ngvi.to_arviz(model, guide, X, num_samples=S, seed=3)
    data = ngvi.to_arviz(model, guide, X, num_samples=S, seed=3, resample="psis")
    assert data.attrs["khat"] < 0.7
    weights = values_of(data, "sample_stats")["log_weights"].exp()
    drawn, mu = values_of(raw)["mu"], values_of(data)["mu"]
    wrong = 0
    for f, truth in [(lambda v: v, MEAN), (lambda v: (v - MEAN) ** 2, VARIANCE)]:
        # error of the self-normalised estimate by the delta method; the systematic choice adds less
        # than independent draws in proportion to the weights would
        error = (weights**2 * (f(drawn) - truth) ** 2).sum() + f(mu).var() / S
        assert abs(f(mu).mean() - truth) < 5 * error.sqrt()
        wrong += abs(f(drawn).mean() - truth) > 5 * error.sqrt()
    assert wrong  # without the correction
    # a draw of the data has the variance of mu and its own
    y = values_of(data, "posterior_predictive")["x"]
    assert abs(y.mean() - MEAN) < 5 * (error_of_mean(weights, drawn) + y.var() / S) ** 0.5


def error_of_mean(weights: Tensor, drawn: Tensor) -> Tensor:
    return (weights**2 * (drawn - MEAN) ** 2).sum()


def test_what_is_stored() -> None:
    guide = guide_of(0.5, 1.1)
    raw = ngvi.to_arviz(model, guide, X, num_samples=500, seed=3)
    data = ngvi.to_arviz(model, guide, X, num_samples=500, seed=3, resample="psis")
    before, after = values_of(raw, "sample_stats"), values_of(data, "sample_stats")
    chosen = after.pop("resampled_from")
    torch.testing.assert_close(after, before)
    for group in ("posterior", "log_likelihood"):
        old, new = values_of(raw, group), values_of(data, group)
        torch.testing.assert_close(new, {name: v[chosen] for name, v in old.items()})
    assert chosen.dtype == torch.int64 and (chosen.diff() >= 0).all()
    found = ngvi.khat(model, guide, X, num_samples=500, seed=3)
    counts = torch.bincount(chosen, minlength=500)
    expected = 500 * torch.from_numpy(np.exp(found.psis_log_weights))
    assert ((counts - expected).abs() < 1 + 1e-9).all()
    assert data.attrs["resample"] == data["posterior"].attrs["resample"] == "psis"
    assert data.attrs["resample_ess"] == pytest.approx(500**2 / float((expected**2).sum()))
    assert "resample" not in raw.attrs
    again = ngvi.to_arviz(model, guide, X, num_samples=500, seed=3, resample="psis")
    torch.testing.assert_close(values_of(again), values_of(data), rtol=0, atol=0)
    torch.testing.assert_close(
        values_of(again, "posterior_predictive"), values_of(data, "posterior_predictive")
    )


def test_an_exact_guide_is_left_alone() -> None:
    exact = guide_of(0.0, 1.0)
    raw = ngvi.to_arviz(model, exact, X, num_samples=200, seed=1)
    data = ngvi.to_arviz(model, exact, X, num_samples=200, seed=1, resample="psis")
    torch.testing.assert_close(values_of(data), values_of(raw), rtol=0, atol=0)
    assert data.attrs["resample_ess"] == pytest.approx(200)


def test_warns_where_weights_can_not_correct() -> None:
    with pytest.warns(
        RuntimeWarning, match=r"cannot be relied on here. Not usable: k-hat is .* above"
    ) as seen:
        ngvi.to_arviz(model, guide_of(0.0, 0.2), X, num_samples=S, seed=1, resample="psis")
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ngvi.to_arviz(model, guide_of(0.0, 0.2), X, num_samples=S, seed=1)


def test_a_mean_field_guide_gets_the_correlation_it_can_not_have() -> None:
    rho = 0.5
    tril = torch.tensor([[1.0, 0.0], [rho, (1 - rho**2) ** 0.5]])

    def correlated() -> None:
        pyro.sample("x", dist.MultivariateNormal(torch.zeros(2), scale_tril=tril))

    guide = ngvi.AutoMeanFieldNormal(correlated)
    svi = SVI(correlated, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    pyro.set_rng_seed(0)
    for _ in range(200):
        svi.step()
    # the sds of q are sqrt(1 - rho^2), so that k-hat is 1 - (1 - rho^2) / (1 + rho) = 1/2
    raw = values_of(ngvi.to_arviz(correlated, guide, num_samples=S, seed=2))["x"]
    data = ngvi.to_arviz(correlated, guide, num_samples=S, seed=2, resample="psis")
    x, weights = values_of(data)["x"], values_of(data, "sample_stats")["log_weights"].exp()

    def product(v: Tensor) -> Tensor:
        return v[:, :, None] * v[:, None, :]

    error = product(raw) - tril @ tril.T  # of each draw, by the delta method; then of the choice
    error = (weights[:, None, None] ** 2 * error**2).sum(0) + product(x).var(0) / S
    assert ((product(x).mean(0) - tril @ tril.T).abs() < 5 * error.sqrt()).all()
    assert (raw.square().mean(0) < 0.85).all() and (raw[:, 0] * raw[:, 1]).mean() < 0.2


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="resample must be None or \"psis\", got 'sir'"):
        ngvi.to_arviz(model, guide_of(0.0, 1.0), X, resample="sir")


def test_weights_that_are_not_finite_are_refused() -> None:
    def broken(x: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.factor("infinite", torch.where(mu > 0.0, torch.inf, mu))

    with pytest.raises(ValueError, match="nothing to smooth"):
        ngvi.to_arviz(broken, guide_of(0.0, 1.0), X, num_samples=50, resample="psis")


def test_draw_whose_support_misses_the_data_has_no_weight() -> None:
    """Uniform(0, z) at a draw z below the datum: impossible, not wrong."""

    def model() -> None:
        z = pyro.sample("z", dist.Uniform(1.0, 3.0))
        pyro.sample("y", dist.Uniform(0.0, z), obs=torch.tensor(2.0))

    def guide() -> None:
        pyro.sample("z", dist.Uniform(1.0, 3.0))

    for seed in range(3):  # the run that looks at the sites is impossible or not
        weights = np.exp(ngvi.khat(model, guide, num_samples=200, seed=seed).log_weights)
        assert 50 < (weights == 0).sum() < 150  # Binomial(200, 1/2): 100, with standard deviation 7


def test_a_tail_without_a_mean_is_not_smoothed() -> None:
    """Of a uniform prior cut by its bounds a thousand draws show such a tail, 16,000 do not: smoothed
    the former gave an sd 30 % too large."""
    y = torch.tensor([1.0, 2.0, 3.0])

    def bounded(y: Tensor) -> None:
        p = pyro.sample("p", dist.Uniform(2.0, 7.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(p, 3.0), obs=y)

    pyro.set_rng_seed(0)
    guide = ngvi.fit(bounded, y, seed=0, progress=False).guide
    with pytest.warns(RuntimeWarning, match="wants more draws, num_samples=") as seen:
        data = ngvi.to_arviz(bounded, guide, y, seed=0, resample="psis")
    assert data.attrs["decision"] == "intervals" and data.attrs["khat_samples"] == 16_000
    log_w = data["sample_stats"]["log_weights"].values[0]
    counts = np.bincount(data["sample_stats"]["resampled_from"].values[0], minlength=1000)
    assert (np.abs(counts - 1000 * np.exp(log_w)) < 1 + 1e-9).all()
    more = int(re.search(r"num_samples=(\d+)", str(seen[0].message))[1])  # pyright: ignore
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = ngvi.to_arviz(bounded, guide, y, num_samples=more, seed=0, resample="psis")
    # N(2, 3) cut to [2, 7] in closed form; standard errors of 11,000 draws about 0.01
    draws, exact = data["posterior"]["p"].values, truncnorm(0.0, 5.0 / 3**0.5, 2.0, 3**0.5)
    assert abs(draws.mean() - exact.mean()) < 0.05 and abs(draws.std() - exact.std()) < 0.05
