"""Calibration by simulation: PITs are uniform for exact posteriors, and say what is wrong with others.

A false alarm has probability 0.01 for a calibration; seeds are fixed.
"""

import math
from collections.abc import Callable
from itertools import count, product
from types import SimpleNamespace
from typing import Any, cast

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy import stats
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.diagnostics import Calibration, calibrate
from pyro_ngvi.diagnostics.calibration import uniformity

X = torch.tensor([[1.0, 0.0], [1.0, 0.5], [1.0, 1.0]], dtype=torch.float64)
NONE = X.new_zeros(3)


def model(y: Tensor) -> None:
    """A regression whose two coefficients have a correlation of -0.6 in the posterior."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    with pyro.plate("row", 3):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def data_of(model: Callable[..., Any], *args: Any) -> Tensor:
    trace: Any = poutine.trace(model).get_trace(*args)
    return trace.nodes["y"]["value"]


def gaussian(
    shift: float = 0.0, factor: float = 1.0, independent: bool = False
) -> Callable[..., Any]:
    """A fit: the exact posterior of w, shifted by so many sds, its sds times a factor."""
    cov = torch.linalg.inv(4.0 * X.mT @ X + 0.25 * torch.eye(2))
    sds = cov.diagonal().sqrt()
    scale = torch.diag(sds) if independent else torch.linalg.cholesky(cov)

    def fit(model: Callable[..., Any]) -> Callable[..., Any]:
        mean = 4.0 * cov @ X.mT @ data_of(model, NONE) + shift * sds
        q = dist.MultivariateNormal(mean, scale_tril=factor * scale)
        return lambda y: pyro.sample("w", q)

    return fit


def run(fit: Callable[..., Any], model: Any = model, *args: Any, **options: Any) -> Calibration:
    how: dict[str, Any] = {"num_samples": 200, "seed": 3, "progress": False} | options
    return calibrate(model, fit, *(args or (NONE,)), **how)


# --- the tests of uniformity --------------------------------------------------------------------


def test_p_values_are_those_of_the_textbook() -> None:
    """Kolmogorov's of SciPy's exact one, to 3 %; that of sup |W| by its other series, in c."""
    pit = np.random.default_rng(0).beta(0.7, 1.0, (60, 8))
    found = uniformity(pit)
    exact = [stats.kstest(x, "uniform").pvalue for x in pit.T]
    np.testing.assert_allclose(found.uniform, exact, rtol=0.03)
    k = np.arange(100)
    for p, x in zip(found.symmetric, pit.T, strict=True):
        result: Any = stats.ks_2samp(x, 1.0 - x)
        c = math.sqrt(60) * result.statistic
        terms = (-1.0) ** k / (2 * k + 1) * np.exp(-((np.pi * (2 * k + 1) / c) ** 2) / 8)
        assert abs(p - (1.0 - 4.0 / np.pi * terms.sum())) < 1e-9
    z = stats.norm.ppf(pit)
    below = stats.chi2.cdf(((z - z.mean(0)) ** 2).sum(0), 59)
    np.testing.assert_allclose(found.spread, 2 * np.minimum(below, 1 - below), rtol=1e-8)


def test_false_alarms_are_as_many_as_they_say() -> None:
    """Of 10,000 uniform samples of 200; four standard errors, and rounding of the walk at 200 steps."""
    found = uniformity(np.random.default_rng(1).random((200, 10_000)))
    for alpha, p in product((0.05, 0.01), (found.uniform, found.symmetric, found.spread)):
        error = 4.0 * math.sqrt(alpha / 10_000)
        assert abs(float((p < alpha).mean()) - alpha) < error + 0.1 * alpha


def test_symmetry_asks_nothing_of_the_rest() -> None:
    """Of a U shape without a bias, 10,000 samples of 200."""
    found = uniformity(np.random.default_rng(1).beta(0.5, 0.5, (200, 10_000)))
    assert float((found.symmetric < 0.01).mean()) < 0.01 + 4.0 * math.sqrt(0.01 / 10_000)
    assert found.spread.max() < 0.01


# --- whole calibrations -------------------------------------------------------------------------


def test_exact_posteriors_are_calibrated() -> None:
    """PITs of 200 simulations: the test of Kolmogorov and Smirnov at 0.001."""
    found = run(gaussian())
    assert found.ok and found.verdict.startswith("Nothing found wrong (200 simulations")
    assert found.pits["w"].shape == (200, 2) and found.pits["log_joint"].shape == (200,)
    for pit in (*found.pits["w"].T, found.pits["log_joint"]):
        assert stats.kstest(pit, "uniform").pvalue > 0.001


def test_halved_sds_are_too_small() -> None:
    found = run(gaussian(factor=0.5))
    assert not found.ok
    assert found.findings.keys() == {"w", "log_joint"}
    assert "sds too small by a factor of" in found.findings["w"]
    assert "biased" not in found.findings["w"]
    # the standard error of an sd of 200 is that sd over 20
    assert np.all((1.7 < found.sites["w"].ratio) & (found.sites["w"].ratio < 2.3))
    assert "biased high" in found.findings["log_joint"]  # draws near the mode


def test_how_much_too_small_does_not_end_with_the_ranks() -> None:
    """The standard error of the sd of 100 normal z is 1/14 of it, and 200 draws whose own sd is not
    known add 1 % at most; PITs of 200 draws end at 2.6."""
    found = run(gaussian(factor=1.0 / 50.0), num_simulations=100)
    assert np.abs(found.sites["w"].ratio / 50.0 - 1.0).max() < 4.0 / math.sqrt(200) + 0.01
    assert found.sites["w"].spread.max() < 1e-9


def test_a_bias_does_not_end_with_the_ranks_nor_pass_for_a_spread() -> None:
    """The standard error of a bias is 1 / sqrt(100)."""
    found = run(gaussian(shift=-10.0), num_simulations=100)
    assert np.abs(found.sites["w"].bias - 10.0).max() < 4.0 / math.sqrt(100) + 0.1
    assert "biased low by 1" in found.findings["w"] and "sds" not in found.findings["w"]


def test_tails_alone_are_no_alarm() -> None:
    """Two of 20 truths beyond all of 200 draws, 50 sds off, as heavy tails have them."""
    pit = np.array([0.001, *np.linspace(0.1, 0.9, 18), 0.999])
    far = np.array([-50.0, *np.linspace(-0.1, 0.1, 18), 50.0])
    found = uniformity(pit, far, 200)
    assert found.ratio > 10.0 and found.spread > 0.1 and not found.findings()
    unknown = uniformity(pit, np.full(20, np.nan), 200)  # of draws without a density
    assert np.isfinite(unknown.ratio) and unknown.spread == uniformity(pit).spread


def test_points_are_too_small_by_any_factor() -> None:
    def point(model: Any) -> Any:
        return lambda y: pyro.sample("w", dist.Delta(torch.zeros(2)).to_event(1))

    assert np.all(run(point, num_simulations=20).sites["w"].ratio > 1e5)


def test_doubled_sds_are_too_large() -> None:
    found = run(gaussian(factor=2.0), num_simulations=100)
    assert "sds too large by a factor of" in found.findings["w"]
    assert "biased low" in found.findings["log_joint"]  # draws far out


def test_half_an_sd_is_a_bias_and_has_a_direction() -> None:
    """The standard error of a bias is 1 / sqrt(100)."""
    shift, word = 0.5, "biased high"
    found = run(gaussian(shift), num_simulations=100)
    assert word in found.findings["w"] and f"'w' {word} by 0." in found.verdict
    assert "sds" not in found.findings["w"]
    assert np.abs(found.sites["w"].bias + shift).max() < 4.0 / math.sqrt(100)


def test_the_joint_density_tells_what_no_site_does() -> None:
    """A guide that gives back the prior, and one that has the right marginals alone."""

    def prior(model: Any) -> Any:
        return lambda y: pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))

    for fit in (prior, gaussian(independent=True)):
        assert run(fit, num_simulations=100).findings.keys() == {"log_joint"}


def test_discrete_sites_and_ties_and_deterministic_sites() -> None:
    """A coin whose posterior is known: PITs without the u of (1) take few values."""

    def coin(y: Tensor) -> None:
        z: Any = pyro.sample("z", dist.Bernoulli(0.3))
        pyro.deterministic("minus", -z)
        pyro.deterministic("one", torch.ones(2))
        pyro.sample("y", dist.Bernoulli(0.2 + 0.6 * z), obs=y)

    def fit(model: Any) -> Any:
        y = data_of(model, torch.tensor(0.0))
        one, zero = (0.3 * abs(y - 0.2), 0.7 * abs(y - 0.8))
        q = dist.Bernoulli(one / (one + zero))
        return lambda _: pyro.sample("z", q)

    found = run(fit, coin, torch.tensor(0.0), num_simulations=100)
    assert found.ok and found.pits.keys() == {"z", "minus", "one", "log_joint"}


def test_masked_data_are_not_used() -> None:
    y = torch.tensor([1.0, torch.nan, 2.0, torch.nan])

    def masked(y: Tensor) -> None:
        m, seen = pyro.sample("m", dist.Normal(0.0, 1.0)), cast(Any, ~y.isnan())
        with pyro.plate("row", 4), poutine.mask(mask=seen):
            pyro.sample("y", dist.Normal(m, 1.0), obs=y.nan_to_num())

    def fit(model: Any) -> Any:
        mean = data_of(model, y)[::2].sum() / 3.0
        return lambda _: pyro.sample("m", dist.Normal(mean, 1.0 / math.sqrt(3.0)))

    assert run(fit, masked, y, num_simulations=100).ok


def test_enumerated_sites_are_summed_out() -> None:
    """The posterior of m is a mixture of two Gaussians."""

    def mixture(y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        how: Any = {"enumerate": "parallel"}
        z: Any = pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.6])), infer=how)
        pyro.sample("y", dist.Normal(m + 3.0 * z, 1.0), obs=y)

    def fit(model: Any) -> Any:
        rest = data_of(model, torch.tensor(0.0)) - torch.tensor([0.0, 3.0])
        logits = torch.tensor([0.4, 0.6]).log() - rest.square() / 4.0
        parts = dist.Normal(rest / 2.0, math.sqrt(0.5))
        q = dist.MixtureSameFamily(dist.Categorical(logits=logits), parts)
        return lambda _: pyro.sample("m", q)

    found = run(fit, mixture, torch.tensor(0.0), num_simulations=100)
    assert found.ok and found.pits.keys() == {"m", "log_joint"}


@pytest.mark.slow
def test_a_real_fit_of_a_logistic_regression() -> None:
    X = torch.randn(30, 2)

    def logistic(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("row", len(X)):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    args = X, torch.zeros(30)
    fits: list[Any] = []

    def fit(model: Any) -> Any:
        fits.append(ngvi.fit(model, *args, progress=False))
        return fits[-1]

    found = run(fit, logistic, *args, num_simulations=20)
    assert found.ok, found
    ys = [data_of(fit.model, *args) for fit in fits]
    assert len({tuple(y.tolist()) for y in ys}) > 17  # each of its own data
    assert not any(torch.equal(y, args[1]) for y in ys)


# --- what is around it --------------------------------------------------------------------------


def test_store_and_random_state_are_left_alone() -> None:
    kept = pyro.param("kept", torch.tensor(1.0))
    guide: Any = ngvi.AutoMeanFieldNormal(model)
    guide(NONE)
    names = [*pyro.get_param_store()]
    seen: list[Any] = []

    def fit(model: Any) -> Any:
        seen.extend(pyro.get_param_store())
        pyro.param("loc", torch.zeros(()))
        pyro.set_rng_seed(1)
        return gaussian()(model)

    before = torch.get_rng_state()
    one, two = (run(fit, num_simulations=20, seed=5) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before) and not seen
    assert [*pyro.get_param_store()] == names and pyro.param("kept") is kept
    assert [*guide.parameters()] == [pyro.get_param_store()[n] for n in names if n != "kept"]
    assert all(np.array_equal(x, two.pits[name]) for name, x in one.pits.items())
    # without a seed it is that of the global state
    three, four = (run(gaussian(), num_simulations=20, seed=None) for _ in range(2))
    assert not np.array_equal(three.pits["w"], four.pits["w"])


def test_a_fit_that_fails_is_left_out_and_said() -> None:
    numbers = count()

    def fit(model: Any) -> Any:
        if next(numbers) == 7:
            raise RuntimeError("no")
        return gaussian()(model)

    with pytest.warns(
        RuntimeWarning, match=r"simulation 7 failed .*RuntimeError\('no'\).*failed\[7]"
    ):
        found = run(fit, num_simulations=30)
    assert len(found.pits["w"]) == 29 and [*found.failed] == [7] and not found.ok
    assert not found.findings and "1 more fits failed" in found.verdict


def test_the_error_of_the_first_fit_is_raised() -> None:
    def fit(model: Any) -> Any:
        raise KeyError("mistake")

    with pytest.raises(KeyError, match="mistake") as caught:
        run(fit)
    assert caught.value.__notes__ == ["in simulation 0 of 200 of calibrate"]


@pytest.mark.parametrize("by_fit", [True, False])
def test_it_can_be_broken_off(by_fit: bool) -> None:
    def stopped_at(n: int) -> Callable[..., Any]:
        numbers = count()

        def fit(model: Any) -> Any:
            ended = next(numbers) == n
            if ended and not by_fit:
                raise KeyboardInterrupt
            why = "interrupted" if ended else "converged"  # as ngvi.fit says it
            return SimpleNamespace(guide=gaussian()(model), why_stopped=why)

        return fit

    found = run(stopped_at(25))
    assert len(found.pits["w"]) == 25 and "25 simulations" in found.verdict
    with pytest.raises(KeyboardInterrupt):
        run(stopped_at(3))


def test_draws_that_are_no_numbers_are_refused() -> None:
    def fit(model: Any) -> Any:
        return lambda y: pyro.sample("w", dist.Delta(torch.full((2,), torch.nan)).to_event(1))

    with pyro.validation_enabled(False), pytest.raises(ValueError, match="'w' is NaN at draws"):
        run(fit)


def test_models_that_cannot_be_drawn_from_are_refused() -> None:
    def factor(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.factor("penalty", -w.square())
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    def parameter(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(pyro.param("rate", torch.zeros(())), 1.0))
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    def minibatch(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("row", 3, subsample_size=2) as i:
            pyro.sample("y", dist.Normal(w, 1.0), obs=y[i])

    def improper(y: Tensor) -> None:
        real: Any = dist.constraints.real
        w: Any = pyro.sample("w", dist.ImproperUniform(real, (), ()))
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    def no_data(y: Tensor) -> None:
        pyro.sample("w", dist.Normal(0.0, 1.0))

    y = torch.zeros(())
    for model, message in (
        (factor, "'penalty' is a parameter or a pyro.factor"),
        (parameter, "'rate' is a parameter or a pyro.factor"),
        (no_data, "no observed site with these arguments"),
    ):
        with pytest.raises(ValueError, match=message):
            run(gaussian(), model, y)
    with pytest.raises(ValueError, match="'row' takes 2 of 3 examples"):
        run(gaussian(), minibatch, NONE)
    with pytest.raises(NotImplementedError, match="ImproperUniform does not support sampling"):
        run(gaussian(), improper, y)
    with pytest.raises(ValueError, match="raise num_simulations to 20 or more"):
        run(gaussian(), num_simulations=19)
    assert not [*pyro.get_param_store()]


def test_a_parameter_that_condition_fixed_is_warned_of() -> None:
    def scaled(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        s = pyro.sample("s", dist.LogNormal(0.0, 1.0))
        with pyro.plate("row", 3):
            pyro.sample("y", dist.Normal(X @ w, s), obs=y)

    fixed = poutine.condition(scaled, data={"s": torch.tensor(0.5)})
    with pytest.warns(UserWarning, match="'s' is one number, and others depend on it"):
        run(gaussian(), fixed, num_simulations=20)


def test_arviz_has_the_group_that_its_plot_reads() -> None:
    def groups(y: Tensor) -> None:
        with pyro.plate("school", 4):
            t = pyro.sample("t", dist.Normal(torch.zeros(4), 1.0))
            pyro.sample("y", dist.Normal(t, 1.0), obs=y)

    def fit(model: Any) -> Any:
        mean = data_of(model, torch.zeros(4)) / 2.0

        def guide(y: Tensor) -> None:
            with pyro.plate("school", 4):
                pyro.sample("t", dist.Normal(mean, math.sqrt(0.5)))

        return guide

    found = run(fit, groups, torch.zeros(4), num_simulations=50)
    group = found.idata["prior_sbc"]
    assert group["t"].dims == ("chain", "draw", "school")
    assert group["t"].shape == (1, 50, 4) and group["log_joint"].dims == ("chain", "draw")
    np.testing.assert_array_equal(group["t"].values[0], found.pits["t"])
    if not az.__version__.startswith("0."):
        vars(az)["plot_ecdf_pit"](found.idata)
    assert str(found).splitlines()[1].startswith("  t (good): p-value ")
