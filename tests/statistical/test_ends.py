"""Ends of 95 % intervals: by how much weights and chains move them, and what the verdict says."""

import math
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

import pyro_ngvi as ngvi
from pyro_ngvi.diagnostics.moved import Moved, moved
from pyro_ngvi.diagnostics.shifts import COARSE_END, FEWEST_ROWS, LEVELS, Shift, shift_of

LOC, SD = 0.3, 1.2
#: of N(LOC, SD) less those of N(0, 1), in sds of the former
ENDS = (LOC + (SD - 1.0) * stats.norm.ppf(LEVELS)) / SD


def weighted(seed: int, count: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """Draws (S, 2) of N(0, 1), and the weights that make N(LOC, SD) of them."""
    x = np.random.default_rng(seed).normal(size=(count, 2))
    log_w = (stats.norm.logpdf(x, LOC, SD) - stats.norm.logpdf(x)).sum(1)
    return x, log_w - np.logaddexp.reduce(log_w)


def test_ends_under_weights_and_their_errors() -> None:
    """60 replications: means within 4 standard errors, and errors right to 25 % (that of an sd of 120
    numbers is 6 %, and they depend on the draws)."""
    found = [shift_of(*weighted(seed)) for seed in range(60)]
    ends = np.stack([shift.ends for shift in found])
    spread = ends.std(0, ddof=1).mean(1)
    error = np.stack([shift.ends_error for shift in found]).mean((0, 2))
    assert (np.abs(ends.mean((0, 2)) - ENDS) < 4.0 * spread / math.sqrt(120.0)).all()
    assert (np.abs(error / spread - 1.0) < 0.25).all()


def test_ends_of_other_draws() -> None:
    rng = np.random.default_rng(0)
    own, new = rng.normal(size=(4000, 3)), rng.normal(LOC, SD, size=(4000, 3))
    shift = shift_of(new, np.full(4000, -math.log(4000)), own)
    assert (np.abs(shift.ends - ENDS[:, None]) < 4.0 * shift.ends_error).all()
    assert (shift.ends_error < 0.08).all()
    few = FEWEST_ROWS - 1
    shift = shift_of(new[:few], np.full(few, -math.log(few)), own)
    assert not shift.ends.any() and shift.mean.all()


def test_even_weights_move_nothing_and_have_no_error() -> None:
    x = np.random.default_rng(0).normal(size=(1000, 4))
    shift = shift_of(x, np.full(1000, -math.log(1000)))
    assert np.abs(shift.ends).max() < 1e-12 and shift.ends_error.max() < 1e-12


def test_one_of_many_ends_may_look_off_by_noise() -> None:
    zero = np.zeros(1)
    one = Shift(zero, zero, zero, zero, ends=np.array([0.6, 0.0]), ends_error=np.array([0.15, 0.1]))
    assert one.end() == pytest.approx(0.45) and one.end(1.0) == pytest.approx(0.75)
    ends, error = np.full((2, 200), 0.6), np.full((2, 200), 0.15)
    many = Shift(zero, zero, zero, zero, ends=ends, ends_error=error)
    assert many.end() == pytest.approx(0.6 - 0.15 * (math.sqrt(2.0 * math.log(400.0)) - 1.0))


def test_mean_and_sd_may_be_right_where_ends_are_not() -> None:
    """Draws of N(1, 1) for an exponential: ends .99 and .73 sd too low."""
    torch.manual_seed(0)
    before = 1.0 + torch.randn(4000, dtype=torch.float64)
    found = moved(before, torch.empty(4000, dtype=torch.float64).exponential_())
    exact = stats.expon.ppf(LEVELS) - stats.norm.ppf(LEVELS, 1.0)
    assert (np.abs(found.ends.numpy() - exact) < 4.0 * found.ends_error.numpy()).all()
    assert all(float(size) < 0.15 for size in found.errors(2.0))
    assert found.is_off and not found.is_good
    assert "ends of 95 % intervals by up to" in str(found)
    # the other end of another estimate is not this one's
    small = torch.full((), 0.01)
    other = Moved(found.mean, small, found.log_sd, small, found.rho, ends=found.ends.flip(0))
    assert not found.is_far_from(found) and other.ends.shape == (2,)
    far = Moved(found.mean, small, found.log_sd, small, found.rho, ends=found.ends - 0.9)
    assert found.is_far_from(far)


def log_gamma(a: float) -> None:
    """z (3,), each the logarithm of a Gamma(a) variable."""
    z = pyro.sample("z", dist.Normal(torch.zeros(3), 100.0).to_event(1).mask(False))
    pyro.factor("g", (a * z - z.exp()).sum())


@pytest.mark.parametrize("seed", range(3))
def test_a_verdict_asks_for_ends_and_a_richer_guide_has_them(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lower end of the best Gaussian of log Gamma(2) is .59 sd too high, its mean and sd are within
    the bounds; that of log Gamma(8) is .23 sd too high.  Corrected draws have them too."""
    lower, upper = np.log(stats.gamma.ppf(LEVELS, 2.0))
    drawn = ngvi.fit(log_gamma, 2.0, seed=seed, progress=False).sample(8000, seed=seed)["z"]
    below = (drawn < lower).double().mean(0), (drawn < upper).double().mean(0)
    # 8,000 draws of weights worth half as many: .0025 is a standard error
    assert all(((x - p).abs() < 0.01).all() for x, p in zip(below, LEVELS, strict=True))
    monkeypatch.setattr("pyro_ngvi.diagnostics.by_weights.has_few", lambda guide: False)
    fit: Any = ngvi.fit(log_gamma, 2.0, seed=seed, progress=False)
    assert fit.verdict.decision != "intervals"
    z = fit.diagnosis.sites["z"]
    sd = math.sqrt(float(torch.polygamma(1, torch.tensor(2.0))))
    own = fit.guide.quantiles(LEVELS)["z"]
    exact = (torch.tensor([lower, upper]).unsqueeze(1) - own) / sd
    assert ((z.ends - exact).abs() < 4.0 * z.ends_error + 0.1).all()
    assert ngvi.fit(log_gamma, 8.0, seed=seed, progress=False).verdict.ok
    richer: Any = ngvi.fit(log_gamma, 2.0, guide="auto", seed=seed, progress=False)
    assert richer.verdict.ok and richer.diagnosis.sites["z"].end() < COARSE_END
