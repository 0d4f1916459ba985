"""The three decisions about a guide's draws: closed forms for Gaussians, and the ways to be wrong."""

import time
import warnings
from functools import partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_ngvi as ngvi
from pyro_ngvi.diagnostics.draws import Fitted, random_state
from pyro_ngvi.diagnostics.shifts import shift_of
from pyro_ngvi.diagnostics.verdict import weighed
from pyro_ngvi.diagnostics.weights import Evidence, Slope, prior_evidence, steepest

S = 4000


def gaussian_log_ratio(x: np.ndarray, mean: float, sd: float) -> np.ndarray:
    """log N(x; 0, 1) - log N(x; mean, sd^2)."""
    return -0.5 * x**2 + 0.5 * ((x - mean) / sd) ** 2 + np.log(sd)


def slope_of(x: np.ndarray, log_ratio: np.ndarray) -> Slope:
    found = steepest({"z": x}, log_ratio)
    assert found is not None
    return found


def normalised(x: np.ndarray) -> np.ndarray:
    return x - np.logaddexp.reduce(x)


@pytest.mark.parametrize(("mean", "sd"), [(0.0, 1.0), (0.3, 1.0), (0.0, 1.3), (-0.2, 0.9)])
def test_shifts_are_those_of_gaussians(mean: float, sd: float) -> None:
    x = mean + sd * np.random.default_rng(3).standard_normal((S, 1))
    shift = shift_of(x, normalised(gaussian_log_ratio(x[:, 0], mean, sd)))
    # both moments come from the same draws, so their difference has the stated standard error
    assert abs(shift.mean[0] + mean) < 4 * shift.mean_error[0] + 1e-9
    assert abs(shift.log_sd[0] + np.log(sd)) < 4 * shift.log_sd_error[0] + 1e-9


def test_standard_errors_of_shifts_are_those_of_many_runs() -> None:
    runs = 400
    rng, found = np.random.default_rng(5), []
    for _ in range(runs):
        x = 0.2 + 1.2 * rng.standard_normal((500, 1))
        found.append(shift_of(x, normalised(gaussian_log_ratio(x[:, 0], 0.2, 1.2))))
    for name in ("mean", "log_sd"):
        spread = np.std([getattr(f, name) for f in found])
        stated = np.mean([getattr(f, f"{name}_error") for f in found])
        # the sd of 400 numbers has a relative standard error of 1 / sqrt(800) = 3.5 %
        assert abs(stated / spread - 1) < 4 * 0.035


def test_slopes_are_the_natural_gradient_of_the_elbo() -> None:
    # -KL(N(m, s^2) || N(0, 1)) has the derivatives -m in m and 1 - s^2 in log s; over the Fisher
    # information, 1 / s^2 and 2, the first in sds of q: -m s and (1 - s^2) / 2
    for mean, sd in ((0.5, 1.0), (0.0, 1.4), (0.0, 0.5)):
        x = mean + sd * np.random.default_rng(7).standard_normal(S)
        slope = slope_of(x, gaussian_log_ratio(x, mean, sd))
        expected = {"mean": -mean * sd, "sd": (1 - sd**2) / 2}[slope.what]
        assert abs(slope.size - expected) < 4 * slope.error
    x = np.random.default_rng(7).standard_normal(S)
    assert slope_of(x, gaussian_log_ratio(x, 0.0, 1.0)).excess <= 0.0


def test_constant_and_infinite_draws_have_an_answer() -> None:
    log_weights = np.full(100, -np.log(100.0))
    still = shift_of(np.array([[0.3, -np.inf]] * 100), log_weights)
    assert not still.mean.any() and not still.log_sd.any()
    # a number that is constant but for rounding, as L @ L.T on its diagonal, under uneven weights
    random = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        ones = (1.0 + np.finfo(dtype).eps * random.integers(-2, 3, (100, 2))).astype(dtype)
        uneven = np.log(random.dirichlet(np.full(100, 0.3)))
        rounded = shift_of(ones * np.array([1.0, 1e6], dtype), uneven)
        assert not rounded.mean.any() and not rounded.log_sd.any() and not rounded.ends.any()
    wild = shift_of(np.array([[0.0], [np.inf]] * 50), log_weights)
    assert all(np.isinf(size).all() for size in wild.errors(2.0))


def target() -> None:
    pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))


def normal_guide(mean: float, sd: float):
    def guide() -> None:
        pyro.sample("z", dist.Normal(torch.full((), mean), sd))

    return guide


@pytest.mark.parametrize(
    ("mean", "sd", "decision", "ended"),
    [
        (0.0, 1.0, "intervals", True),
        (0.08, 1.0, "intervals", True),
        (0.5, 1.0, "resample", False),
        (0.0, 1.6, "resample", False),
        (0.0, 0.3, "unusable", False),
        (4.0, 1.0, "unusable", False),
    ],
)
def test_decision_on_gaussians(mean: float, sd: float, decision: str, ended: bool) -> None:
    found = ngvi.khat(target, normal_guide(mean, sd), num_samples=2000, seed=2)
    assert (found.decision, found.ok) == (decision, decision == "intervals")
    assert ("has not ended" in found.verdict) is not ended


def test_a_good_khat_licenses_no_raw_draws_of_a_heavy_tail() -> None:
    # In log space the best Gaussians of Gamma(0.1, 0.1) have far too long a right tail: the raw sd is
    # hundreds where the exact one is 3.2, and the smoothed weights take these draws away.
    def model() -> None:
        pyro.sample("x", dist.Gamma(torch.tensor(0.1), torch.tensor(0.1)))

    def guide() -> None:
        pyro.sample("x", dist.LogNormal(torch.tensor(-8.0), 9.0))

    found = ngvi.khat(model, guide, num_samples=1000, seed=0)
    assert found.reliable and found.kl > 10.0
    assert not found.ok and "x" in found.verdict


def test_a_mode_that_the_prior_knows_is_missed() -> None:
    def model() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros(()), 5.0))
        near, far = -0.5 * ((x - 4) / 0.3) ** 2, 10.0 - 0.5 * ((x + 7) / 0.3) ** 2
        pyro.factor("likelihood", torch.logaddexp(near, far))

    def guide() -> None:  # the smaller mode, to within its own shape
        pyro.sample("x", dist.Normal(torch.tensor(4.0), 0.3))

    found = ngvi.khat(model, guide, seed=0)
    assert found.reliable and found.missed is not None and found.missed > 0.0
    assert found.decision == "unusable" and "misses a mode" in found.verdict


def test_a_mode_with_a_few_times_the_mass_is_missed_too() -> None:
    y = torch.linspace(1.0, 2.0, 30)

    def model(y: torch.Tensor) -> None:
        z = pyro.sample("z", dist.Normal(torch.tensor(1.5), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(z.abs(), 0.5), obs=y)

    def guide(y: torch.Tensor) -> None:  # the mode at -1.46, which has some 1 % of the mass
        precision = 1.0 + len(y) / 0.25
        mean = (1.5 - y.sum() / 0.25) / precision
        pyro.sample("z", dist.Normal(mean, precision**-0.5))

    found = ngvi.khat(model, guide, y, num_samples=4000, seed=0)
    assert found.khat < 0.5 and found.decision == "unusable"


def test_the_luck_of_one_of_few_draws_of_the_prior_is_no_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of 250 draws may lie where all of the posterior is; of 4,000 that many more lie there."""
    counts, luck = [], {250: Evidence(10.0, 1.0), 4000: Evidence(-1.0, 1.0)}

    def lucky(*args: Any) -> Evidence:
        counts.append(args[2])
        return luck[args[2]]

    def model() -> None:
        pyro.sample("z", dist.Normal(0.0, 1.0))

    monkeypatch.setattr("pyro_ngvi.diagnostics.verdict.prior_evidence", lucky)
    assert ngvi.khat(model, model, seed=0).ok and counts == [250, 4000]
    luck[4000] = Evidence(8.0, 0.5)
    assert not ngvi.khat(model, model, seed=0).ok


def test_evidence_from_the_prior() -> None:
    y = torch.tensor(0.7, dtype=torch.float64)

    def model(y: torch.Tensor) -> None:
        z = pyro.sample("z", dist.Normal(y.new_zeros(()), 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    before = torch.get_rng_state()
    found = prior_evidence(partial(model, y), ["z"], 100_000)
    assert torch.equal(torch.get_rng_state(), before)
    exact = float(dist.Normal(0.0, 2.0**0.5).log_prob(y))
    assert found is not None
    assert abs(found.log - exact) < 4 * found.error
    assert 0.4 / 100_000**0.5 < found.error < 0.6 / 100_000**0.5  # its sd is about half its mean

    def improper(y: torch.Tensor) -> None:
        support = dist.constraints.real
        z = pyro.sample("z", dist.ImproperUniform(support, (), ()))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    assert prior_evidence(partial(improper, y), ["z"], 100) is None


@pytest.mark.parametrize("rows", [50_000])
def test_float32_with_many_rows_has_a_khat(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(rows, generator=generator)
    precision = rows + 1

    def model(y: torch.Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(y.new_zeros(()), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    def guide(y: torch.Tensor) -> None:
        pyro.sample("mu", dist.Normal(y.sum() / precision, 1.2 * precision**-0.5))

    single = ngvi.khat(model, guide, y, seed=3, batch_size=100)
    assert np.isfinite(single.khat)
    # KL of the wide guide: (1.44 - 1) / 2 - log 1.2, the sd over draws of the ratio is about .3
    assert abs(single.kl - (0.22 - np.log(1.2))) < 4 * 0.32 / 1000**0.5


def test_summary_says_the_verdict_and_marks_the_rows_that_move() -> None:
    def model() -> None:
        pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("b", dist.Normal(torch.zeros(()), 1.0))

    def guide() -> None:
        sds = torch.tensor([1.0, 1.0, 1.5])
        pyro.sample("w", dist.Normal(torch.tensor([0.0, 0.6, 0.0]), sds).to_event(1))
        pyro.sample("b", dist.Normal(torch.zeros(()), 1.0))

    def exported(guide, **how):
        return ngvi.to_arviz(model, guide, num_samples=2000, seed=1, **how)

    data = exported(guide, coords={"k": ["p", "q", "r"]}, dims={"w": ["k"]})
    assert data.attrs["decision"] == "resample"
    table = ngvi.summary(data)
    assert data.attrs["verdict"] in repr(table) and data.attrs["verdict"] == table.attrs["verdict"]
    assert data.attrs["verdict"].split(":")[0] in table._repr_html_()
    assert list(table.index) == ["w[p]", "w[q]", "w[r]", "b"]
    moved = table["mean_shift"].notna()
    assert list(moved) == [False, True, True, False]
    assert table["mean_shift"]["w[q]"] == pytest.approx(-0.6, abs=0.1)
    assert table["sd_ratio"]["w[r]"] == pytest.approx(1 / 1.5, abs=0.05)
    assert list(ngvi.summary(data, var_names="b").index) == ["b"]

    part = ngvi.summary(data.sel(draw=slice(0, 499)))
    assert part["sd_ratio"]["w[r]"] == pytest.approx(1 / 1.5, abs=0.1)
    assert list(ngvi.summary(data["posterior"]).columns[:2]) == ["mean", "sd"]

    good = ngvi.summary(exported(model))
    assert "Take the intervals as they are" in repr(good) and "mean_shift" not in good
    again = ngvi.summary(exported(guide, resample="psis"))
    assert "Resampled" in repr(again) and "mean_shift" not in again


def scale() -> None:
    pyro.sample("s", dist.HalfNormal(torch.ones((), dtype=torch.float64)))


def away_from_zero() -> None:
    """The best Gaussian of log s, whose posterior falls as s does: its weights have no mean at all."""
    pyro.sample("s", dist.LogNormal(torch.tensor(-0.5, dtype=torch.float64), 0.5**0.5))


@pytest.mark.parametrize("seed", [29, 51])
def test_a_tail_that_a_thousand_draws_do_not_show_is_looked_for(seed: int) -> None:
    fitted = Fitted(scale, away_from_zero, (), {})
    with random_state(seed):
        own = weighed(fitted, fitted.draw(1000, None))
    assert own.decision == "resample" and own.unsure
    found = ngvi.khat(scale, away_from_zero, seed=seed)
    assert found.decision == "unusable" and len(found.log_weights) == 16_000
    with pytest.warns(
        RuntimeWarning, match=r"^resample=.psis. cannot be relied on here. Not usable"
    ):
        ngvi.to_arviz(scale, away_from_zero, seed=seed, resample="psis")
    # no more are drawn where weights are far from their bound
    wide = ngvi.khat(target, normal_guide(0.0, 1.6), seed=seed)
    assert wide.decision == "resample" and len(wide.log_weights) == 1000


def test_more_draws_are_not_taken_where_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_ngvi.diagnostics.verdict.PATIENCE", 0.0)
    found = ngvi.khat(scale, away_from_zero, seed=29)
    assert found.decision == "resample" and len(found.log_weights) == 1000


def test_few_uneven_draws_are_told_how_many_would_do() -> None:
    """The mean field of two Gaussians of correlation .6, whose weights have a tail of that shape."""
    rho = 0.6
    tril = torch.tensor([[1.0, 0.0], [rho, (1.0 - rho**2) ** 0.5]])

    def correlated() -> None:
        pyro.sample("x", dist.MultivariateNormal(torch.zeros(2), scale_tril=tril))

    def mean_field() -> None:
        pyro.sample("x", dist.Normal(torch.zeros(2), (1.0 - rho**2) ** 0.5).to_event(1))

    def exported(n: int) -> Any:
        how: Any = {"num_samples": n, "seed": 13, "resample": "psis"}
        return ngvi.to_arviz(correlated, mean_field, **how).attrs["khat_samples"]

    with pytest.warns(RuntimeWarning, match="wants more draws, num_samples=800. Take"):
        assert exported(50) == 800
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert exported(800) == 12_800


def test_a_busy_machine_does_not_change_a_verdict() -> None:
    """More draws are taken where they are cheap, by the time of the thread and not of the clock."""

    def slow() -> None:
        time.sleep(0.5)  # as if others had the processor
        pyro.sample("x", dist.Normal(0.0, 1.0))

    guide = ngvi.AutoMeanFieldNormal(slow, init=None)
    fitted = Fitted(slow, guide, (), {})
    fitted.draw(100, None)
    assert 0.0 < fitted.seconds < 0.5
