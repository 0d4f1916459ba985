"""k-hat against ArviZ's, against tails of known shape, and at the edges."""

import math

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoNormal

from pyro_ngvi.diagnostics import KHat, khat, khat_from_log_weights, to_arviz

RNG = np.random.default_rng(7)
LOG_WEIGHTS = {
    "normal": lambda n: RNG.normal(size=n),
    "wide normal": lambda n: 5.0 * RNG.normal(size=n),
    "Student t": lambda n: RNG.standard_t(2.0, size=n),
    "Pareto": lambda n: RNG.exponential(0.6, size=n),
    "bounded": lambda n: RNG.uniform(-3.0, 0.0, size=n),
    "far away": lambda n: RNG.normal(size=n) - 1e4,
}


@pytest.mark.skipif(not hasattr(az, "psislw"), reason="ArviZ 1.x cuts the tail elsewhere")
@pytest.mark.parametrize("size", [25, 100, 225, 1000, 4001])
@pytest.mark.parametrize("kind", LOG_WEIGHTS)
def test_agrees_with_arviz(kind: str, size: int) -> None:
    log_weights = LOG_WEIGHTS[kind](size)
    expected = float(az.psislw(log_weights.copy())[1])
    np.testing.assert_allclose(khat_from_log_weights(log_weights).khat, expected, rtol=1e-10)


@pytest.mark.parametrize("k", [0.1, 0.5, 0.9, 1.3])
def test_finds_the_shape_of_a_pareto_tail(k: float) -> None:
    size = 200_000
    uniform = (np.arange(size) + 0.5) / size
    found = khat_from_log_weights(-k * np.log1p(-uniform)).khat
    tail = np.ceil(3 * np.sqrt(size))
    # Quantiles in place of random draws: within one standard error (1 + k)/sqrt(M) of the
    # maximum-likelihood estimate, and the pull towards 1/2 by ten of M + 10 draws.
    assert abs(found - k) < (1 + k) / np.sqrt(tail) + 10 / (tail + 10) * abs(k - 0.5)


def test_log_weights_are_normalised_and_a_constant_changes_nothing() -> None:
    log_weights = RNG.normal(size=500)
    result, shifted = khat_from_log_weights(log_weights), khat_from_log_weights(log_weights + 700)
    np.testing.assert_allclose(np.exp(result.log_weights).sum(), 1.0, rtol=1e-12)
    np.testing.assert_allclose(result.log_weights, shifted.log_weights, atol=1e-11)
    np.testing.assert_allclose(result.khat, shifted.khat, rtol=1e-9)
    weights = np.exp(log_weights)
    np.testing.assert_allclose(result.ess, weights.sum() ** 2 / (weights**2).sum(), rtol=1e-12)


@pytest.mark.parametrize(("size", "threshold"), [(100, 0.5), (1000, 2 / 3), (10_000, 0.7)])
def test_threshold(size: int, threshold: float) -> None:
    result = khat_from_log_weights(RNG.normal(size=size))
    assert result.threshold == pytest.approx(threshold, rel=1e-12)


def test_equal_weights_have_no_tail() -> None:
    result = khat_from_log_weights(np.full(400, -3.0))
    assert result.khat == 0.0 and result.ok
    assert result.ess == pytest.approx(400, rel=1e-12)


def test_zero_weights_are_weights() -> None:
    log_weights = RNG.normal(size=1000)
    log_weights[:300] = -np.inf
    result = khat_from_log_weights(log_weights)
    assert np.isfinite(result.khat) and np.isneginf(result.log_weights[:300]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_log_weights_that_are_not_numbers_are_not_ok(bad: float) -> None:
    log_weights = RNG.normal(size=100)
    log_weights[3] = bad
    result = khat_from_log_weights(log_weights)
    assert result.khat == np.inf and not result.ok and result.ess == 0.0


def test_no_posterior_mass_at_any_draw_is_not_ok() -> None:
    assert not khat_from_log_weights(np.full(100, -np.inf)).ok


def test_few_distinct_weights_are_not_ok() -> None:
    assert khat_from_log_weights(np.repeat([0.0, 1.0], [97, 3])).khat == np.inf


@pytest.mark.parametrize("shape", [(24,), (2, 100), ()])
def test_too_few_or_misshapen_log_weights_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a vector of at least 25 log weights"):
        khat_from_log_weights(np.zeros(shape))


def test_verdict_says_what_to_do() -> None:
    equal = np.full(100, -np.log(100.0))
    apart = equal - np.linspace(-1.0, 1.0, 100) - 0.16  # normalised: a KL of .16 nats
    assert KHat(0.2, 0.5, 80.0, equal).verdict.startswith("Take the intervals as they are")
    assert 'resample="psis"' in KHat(0.2, 0.5, 80.0, apart).verdict
    assert "raise num_samples to 400." in KHat(0.6, 0.5, 30.0, apart).verdict
    assert khat_from_log_weights(np.zeros(400)).threshold >= 0.6
    wanted = KHat(0.2, 0.5, 80.0, apart, wanted=1600)
    assert wanted.verdict.endswith('to_arviz(..., resample="psis", num_samples=1600).')
    assert "check against NUTS" in KHat(0.9, 0.5, 3.0, apart).verdict
    even = KHat(2.02, 0.7, 99.9, equal)
    assert even.ok and "worth 100 exact ones, where k-hat says nothing;" in even.verdict


def target() -> None:
    pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))


@pytest.mark.parametrize(
    ("scale", "decision"), [(0.3, "unusable"), (0.9, "intervals"), (1.5, "resample")]
)
def test_judges_a_gaussian_guide_by_its_scale(scale: float, decision: str) -> None:
    # The weights of q = N(0, scale^2) for p = N(0, 1) have a tail of shape 1 - scale^2: good for a wide
    # guide, whose raw intervals are half as wide again.
    def guide() -> None:
        pyro.sample("z", dist.Normal(torch.zeros(()), scale))

    result = khat(target, guide, num_samples=4000, seed=1)
    # the derivative of the ELBO in log scale, 1 - scale^2, says that the fit of 1.5 has not ended
    assert result.reliable is (scale != 0.3)
    assert (result.decision, result.ok) == (decision, decision == "intervals")
    assert len(result.log_weights) == 4000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_guide_has_no_tail_whatever_the_rounding(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 50, dtype=dtype)
    precision = len(x) + 1

    def model(x: torch.Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(mu, 1.0), obs=x)

    def guide(x: torch.Tensor) -> None:
        pyro.sample("mu", dist.Normal(x.sum() / precision, precision**-0.5))

    result = khat(model, guide, x, seed=3)
    assert result.khat == 0.0 and result.ok


def test_seed_repeats_and_leaves_the_random_state() -> None:
    def guide() -> None:
        pyro.sample("z", dist.Normal(torch.zeros(()), 0.8))

    before = torch.get_rng_state()
    first, again, other = (khat(target, guide, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(first.log_weights, again.log_weights)
    assert first.khat == again.khat != other.khat


def test_data_of_a_seed_are_not_the_draws_of_the_same_seed() -> None:
    """Rows of a design as noise of draws made the ELBO of 300 coefficients 20 nats too large."""
    n = d = 200
    torch.manual_seed(0)
    X = torch.randn(n, d)
    y = torch.bernoulli(torch.sigmoid(X.sum(1)))

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(d), 1.0).to_event(1))
        with pyro.plate("data", n):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    def prior() -> None:
        pyro.sample("w", dist.Normal(torch.zeros(d), 1.0).to_event(1))

    # given w from the prior, log p(y) is - sum_i log(1 + exp(+-f_i)), f_i ~ N(0, |x_i|^2)
    found = khat(model, prior, num_samples=n, seed=0)
    f = X.square().sum(1).sqrt() * torch.randn(10_000, n)
    exact = float(torch.nn.functional.logsigmoid((2.0 * y - 1.0) * f).sum(1).mean())
    assert abs(found.elbo - exact) < 4.0 * found.elbo_error


def test_point_mass_is_refused() -> None:
    with pytest.raises(ValueError, match="same point"):
        khat(target, AutoDelta(target))


def test_few_draws_are_refused() -> None:
    with pytest.raises(ValueError, match="raise num_samples"):
        khat(target, AutoNormal(target), num_samples=20)


def counts(y: torch.Tensor) -> None:
    rate = pyro.sample("rate", dist.Gamma(y.new_tensor(1.0), y.new_tensor(1.0)))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(rate), obs=y)


def lognormal(y: torch.Tensor) -> None:
    """The best Gaussian of log(rate) for the posterior, Gamma(5, 6); KL 0.017 nats."""
    loc, scale = y.new_tensor(5.0 / 6.0).log() - 0.1, 5.0**-0.5
    pyro.sample("rate", dist.LogNormal(loc, scale))


COUNTS = torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_a_khat_of_nearly_equal_weights_is_made_sure_of(seed: int) -> None:
    """Its mean is exact and its sd 5 % too large, and k-hat of 1,000 draws about 3."""
    found = khat(counts, lognormal, COUNTS, seed=seed)
    assert found.ok and len(found.log_weights) == 16_000 and "from 16000 draws" in found.verdict
    data = to_arviz(counts, lognormal, COUNTS, seed=seed)
    assert data.attrs["khat"] == found.khat and data.attrs["khat_samples"] == 16_000
    assert data["sample_stats"]["log_weights"].shape == (1, 1000)


@pytest.mark.parametrize("patience", [15.0, 0.0])
def test_weights_that_are_nearly_equal_need_no_more_draws(
    monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """A k-hat above its bound is that of noise where all weights together are worth their number; it is
    made sure of where that costs little."""
    monkeypatch.setattr("pyro_ngvi.diagnostics.verdict.PATIENCE", patience)

    def exact_but_for_noise() -> None:
        z = pyro.sample("z", dist.Normal(torch.zeros(20, dtype=torch.float64), 1.0).to_event(1))
        pyro.factor("noise", 1e-3 * (z[0] > 2.5).double() * (z[1] * 40.0).sin().exp())

    def guide() -> None:
        pyro.sample("z", dist.Normal(torch.zeros(20, dtype=torch.float64), 1.0).to_event(1))

    found = khat(exact_but_for_noise, guide, seed=0)
    assert found.nearly_equal and found.ok
    assert len(found.log_weights) == (16_000 if patience else 1000)
    if not patience:
        assert found.khat > found.threshold and "k-hat says nothing" in found.verdict


@pytest.mark.parametrize("seed", [9, 28])
def test_few_draws_of_the_prior_that_miss_a_mode_are_no_word_on_it(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """x and -x give the same data, and the guide has one of them; of 250 draws of the prior so few are
    near either that they show no more than the guide's do."""
    monkeypatch.setattr("pyro_ngvi.diagnostics.verdict.PATIENCE", 0.0)  # 1,000 draws of the guide

    def model(y: torch.Tensor) -> None:
        x = pyro.sample("x", dist.Normal(y.new_zeros(()), 3.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x.square(), 1.0), obs=y)

    def one(y: torch.Tensor) -> None:
        pyro.sample("x", dist.Normal(y.new_tensor(3.009), 0.0838))

    y = torch.tensor([8.0, 9.0, 9.5, 10.0], dtype=torch.float64)
    found = khat(model, one, y, seed=seed)
    assert len(found.log_weights) == 1000 and found.decision == "unusable"
    assert found.missed is not None and 0.0 < found.missed < math.log(2.0)


def test_no_more_draws_than_memory_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_ngvi.diagnostics.verdict.MOST", 16_000 * 6 - 1)  # a latent, five data
    found = khat(counts, lognormal, COUNTS, seed=0)
    assert found.doubtful and found.khat > 1.0 and len(found.log_weights) == 1000
    monkeypatch.setattr("pyro_ngvi.diagnostics.verdict.MOST", 16_000 * 7)
    before = torch.get_rng_state()
    assert khat(counts, lognormal, COUNTS, seed=0).ok
    assert torch.equal(before, torch.get_rng_state())


def test_heavy_tails_stay_unusable() -> None:
    """Student's t of 3 degrees, whose sd is 1.73: a Gaussian of 1.1 misses its tails."""

    def heavy() -> None:
        pyro.sample("z", dist.StudentT(torch.tensor(3.0), 0.0, 1.0))

    def light() -> None:
        pyro.sample("z", dist.Normal(torch.tensor(0.0), 1.1))

    # at these a thousand draws leave it open; at 2 and 8 they are enough to refuse
    found = [khat(heavy, light, seed=seed) for seed in (0, 1, 3, 4, 5, 6, 7, 9)]
    assert sum(x.ok for x in found) <= 4 and all(len(x.log_weights) == 16_000 for x in found)
