"""Pareto-smoothed weights against ArviZ's and at the edges; systematic resampling."""

import arviz as az
import numpy as np
import pytest

from pyro_ngvi.diagnostics import khat_from_log_weights
from pyro_ngvi.diagnostics.weights import find_tail, systematic_resample
from tests.exact.test_khat import LOG_WEIGHTS


@pytest.mark.skipif(not hasattr(az, "psislw"), reason="ArviZ 1.x cuts the tail elsewhere")
@pytest.mark.parametrize("size", [25, 100, 1000, 4001])
@pytest.mark.parametrize("kind", LOG_WEIGHTS)
def test_agrees_with_arviz(kind: str, size: int) -> None:
    log_weights = LOG_WEIGHTS[kind](size)
    expected = np.asarray(az.psislw(log_weights.copy())[0])
    found = khat_from_log_weights(log_weights).psis_log_weights
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["normal", "wide normal", "Pareto"])
def test_keeps_the_order_the_body_and_the_largest_weight(kind: str) -> None:
    raw = LOG_WEIGHTS[kind](1000)
    result = khat_from_log_weights(raw)
    found = result.psis_log_weights
    np.testing.assert_allclose(np.exp(found).sum(), 1.0, rtol=1e-12)
    order = np.argsort(raw)
    assert (np.diff(found[order]) >= -1e-12).all()
    length = int(np.ceil(3 * np.sqrt(1000)))
    body = order[:-length]
    shift = found[body] - raw[body]  # normalised anew, otherwise untouched
    np.testing.assert_allclose(shift, shift[0], atol=1e-10)
    assert found.max() - shift[0] <= raw.max() + 1e-10
    assert not np.allclose(found[order[-length:]] - shift[0], raw[order[-length:]])
    before = result.log_weights.copy()
    _ = result.psis_log_weights
    np.testing.assert_array_equal(result.log_weights, before)


@pytest.mark.parametrize("k", [0.2, 0.6, 0.9])
def test_quantiles_of_a_pareto_tail_stay_what_they_are(k: float) -> None:
    size = 200_000
    uniform = (np.arange(size) + 0.5) / size
    raw = -k * np.log1p(-uniform)
    tail = find_tail(raw - raw.max())
    # excesses over u of a Pareto tail of shape k have scale k u, in units of the largest weight; the
    # pull of the shape towards 1/2 is 10 of M + 10 draws
    pull = 10 / (len(tail.at) + 10)
    assert abs(tail.scale / (k * tail.cutoff) - 1) < (1 + k) / np.sqrt(len(tail.at))
    # the smoothed tail is off by what shape and scale are off: k log(1/p) times the pull, at p = 1/2M
    found = khat_from_log_weights(raw).psis_log_weights
    largest = np.log(2 * len(tail.at))
    off = found[tail.at] - found[0] - raw[tail.at] + raw[0]
    assert np.abs(off).max() < 2 * (pull + (1 + k) / np.sqrt(len(tail.at))) * largest


@pytest.mark.parametrize("k", [0.2, 0.5])
def test_a_pareto_tail_beyond_weights_that_are_nearly_equal(k: float) -> None:
    """Of 16,000 weights 1.2 % exceed 1 by a Pareto distribution, the others pile up below 1: the 2.4 %
    that are taken for a tail at first are none, and their upper quarter is."""
    size, share = 16_000, 0.012
    p = (np.arange(size) + 0.5) / size
    above = np.clip((p - 1.0 + share) / share, 0.0, 1.0)
    raw = np.where(p < 1.0 - share, -0.001 * (1.0 - p), -k * np.log1p(-above))
    whole = find_tail(raw - raw.max())
    found = khat_from_log_weights(raw)
    assert whole.shape > 1.0 and found.ess > 0.5 * size
    quarter = np.ceil(0.25 * 3 * np.sqrt(size))
    # within one standard error, and the pull of ten draws towards 1/2, as in test_khat
    assert abs(found.khat - k) < (1 + k) / np.sqrt(quarter) + 10 / (quarter + 10) * abs(k - 0.5)
    assert found.ok


def test_equal_weights_and_no_tail_stay_as_they_are() -> None:
    # ArviZ says k = inf for equal weights, and leaves them too
    equal = khat_from_log_weights(np.full(400, -3.0))
    np.testing.assert_array_equal(equal.psis_log_weights, equal.log_weights)
    few = khat_from_log_weights(np.repeat([0.0, 1.0], [97, 3]))
    np.testing.assert_array_equal(few.psis_log_weights, few.log_weights)


def test_zero_weights_stay_zero() -> None:
    log_weights = LOG_WEIGHTS["normal"](1000)
    log_weights[:300] = -np.inf
    found = khat_from_log_weights(log_weights).psis_log_weights
    assert np.isneginf(found[:300]).all() and np.isfinite(found[300:]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_numbers_are_refused(bad: float) -> None:
    log_weights = LOG_WEIGHTS["normal"](100)
    log_weights[3] = bad
    with pytest.raises(ValueError, match="nothing to smooth"):
        _ = khat_from_log_weights(log_weights).psis_log_weights


@pytest.mark.parametrize("offset", [0.0, 0.3, 1.0 - 2**-53])
def test_systematic_resampling_keeps_to_the_weights(offset: float) -> None:
    rng = np.random.default_rng(1)
    weights = rng.exponential(size=997)
    weights[:50] = 0.0
    weights /= weights.sum()
    with np.errstate(divide="ignore"):
        places = systematic_resample(np.log(weights), offset)
    counts = np.bincount(places, minlength=997)
    assert counts.sum() == 997 and (counts[:50] == 0).all()
    assert (np.abs(counts - 997 * weights) < 1 + 1e-9).all()
    equal = systematic_resample(np.full(997, -np.log(997)), min(offset, 0.999))
    np.testing.assert_array_equal(equal, np.arange(997))


def test_systematic_resampling_is_unbiased() -> None:
    weights = np.array([0.05, 0.61, 0.001, 0.339])
    offsets = (np.arange(20_000) + 0.5) / 20_000
    counts = sum(np.bincount(systematic_resample(np.log(weights), u), minlength=4) for u in offsets)
    # each count is a step function of the offset: a midpoint rule is off by two steps at most
    np.testing.assert_allclose(counts / 20_000, 4 * weights, atol=2 / 20_000)
