"""The gains against what theory says of them, in the model that they are derived from."""

import math

import pytest
import torch

from pyro_ngvi.families.base import interpolate
from pyro_ngvi.optim import Constant, LogPower, NoiseClock, RobbinsMonro, Tail
from pyro_ngvi.rules.averaging import as_averaging
from pyro_ngvi.rules.schedules import as_schedule


def linear_model(schedule, d, steps, additive, multiplicative=0.0, start=1.0, seed=0):
    """x <- x - b G with G = x + noise: the local form of natural-gradient VI.  Errors and gains."""
    g = torch.Generator().manual_seed(seed)
    x = torch.full((d,), start)
    state = schedule.init(x)
    previous, length2, descent = torch.zeros(d), torch.ones(()), torch.zeros(())
    errors, gains = [], []
    for _ in range(steps):
        noise = torch.randn(d, generator=g)
        G = x + (additive + multiplicative * x.norm() / math.sqrt(d)) * noise
        length2 = G @ G
        signal = (G @ previous + descent) / length2.clamp_min(1e-300)
        b, state = schedule.gain(signal.clamp(-1, 1), state)
        x = x - b * G
        previous, descent = G, b * length2
        errors.append(float(x.norm()))
        gains.append(float(b))
    return errors, gains


def test_noise_clock_takes_full_steps_without_noise():
    errors, gains = linear_model(NoiseClock(), 20, 30, additive=0.0)
    assert gains[1] == 1.0
    assert errors[-1] == 0.0


def test_noise_clock_contracts_linearly_under_multiplicative_noise():
    """Share of signal 1/(1 + m^2) = 0.2 for m = 2: gain near 0.2, error falls without a floor."""
    errors, gains = linear_model(NoiseClock(), 100, 400, additive=0.0, multiplicative=2.0)
    late = torch.tensor(gains[100:])
    assert 0.1 < float(late.mean()) < 0.25
    # E|x|^2 shrinks by 1 - 2 b + 5 b^2 >= 0.8 a step; half of that rate is demanded
    assert errors[-1] < errors[0] * 0.8 ** (0.25 * 400)


def test_noise_clock_decays_like_two_over_k_under_additive_noise():
    d, steps = 50, 4000
    errors, gains = linear_model(NoiseClock(), d, steps, additive=1.0)
    # Robbins-Monro: k b_k settles, near 1 / increment = 2
    assert 1.5 < steps * gains[-1] < 3.0
    assert 1.5 < steps / 2 * gains[steps // 2] < 3.5
    # b = 2/k leaves E|x|^2 = (4/3) d / k; a chi-square with d degrees has sd sqrt(2/d) of its mean
    mean_square = torch.tensor(errors[-200:]).square().mean() * steps / d
    assert abs(float(mean_square) - 4 / 3) < 4 * 4 / 3 * math.sqrt(2 / d)


def test_noise_clock_is_set_back_when_signal_returns():
    schedule = NoiseClock()
    state = schedule.init(torch.zeros(1))
    for _ in range(300):
        gain, state = schedule.gain(torch.zeros(()), state)
    assert gain < 0.01
    for _ in range(400):
        gain, state = schedule.gain(torch.full((), 0.5), state)
    assert gain > 0.3


def test_robbins_monro_formula():
    schedule = RobbinsMonro(scale=0.5, offset=10.0, power=0.75)
    state = schedule.init(torch.zeros(1))
    for k in range(5):
        gain, state = schedule.gain(torch.zeros(()), state)
        assert float(gain) == pytest.approx(0.5 / (1 + k / 10) ** 0.75)


def test_named_and_custom_schedules():
    assert as_schedule("noise") == NoiseClock()
    assert as_schedule("constant") == Constant(1.0)
    custom = as_schedule(lambda k: 1.0 / (k + 2.0))
    state = custom.init(torch.zeros(1))
    gain, state = custom.gain(torch.zeros(()), state)
    assert float(gain) == 0.5
    gain, state = custom.gain(torch.zeros(()), state)
    assert float(gain) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="schedule"):
        as_schedule("cosine")
    with pytest.raises(ValueError, match="power in"):
        RobbinsMonro(power=1.5)
    with pytest.raises(ValueError, match="positive"):
        Constant(-1.0)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_log_power_average_is_the_weighted_mean(power):
    averaging = LogPower(power)
    x = torch.randn(20)
    average, total = {"x": torch.zeros(())}, torch.zeros(())
    for k, value in enumerate(x, start=1):
        rate, total = averaging.rate(torch.tensor(float(k)), total)
        average = interpolate(average, {"x": value}, rate)
    weights = torch.log(torch.arange(1.0, 21.0) + 1.0) ** power
    torch.testing.assert_close(average["x"], (weights * x).sum() / weights.sum())


def test_tail_average_forgets_the_start():
    averaging = Tail(4.0)
    average, total = {"x": torch.full((), 7.0)}, torch.zeros(())
    for k in range(1, 101):
        value = 1e6 if k <= 10 else 1.0
        rate, total = averaging.rate(torch.tensor(float(k)), total)
        average = interpolate(average, {"x": torch.full((), value)}, rate)
    # the first tenth keeps a share of about 0.1^4
    assert 1.0 < float(average["x"]) < 1.0 + 1e6 * 2e-4


def test_averaging_arguments():
    assert as_averaging(True) == Tail()
    assert as_averaging(2) == LogPower(2.0)
    assert as_averaging(False) is False
    with pytest.raises(ValueError, match="negative"):
        as_averaging(-1.0)
    with pytest.raises(ValueError, match="rate"):
        as_averaging("mean")  # pyright: ignore[reportArgumentType]
