"""The gains against what theory says of them, in the model that they are derived from."""

import math
from itertools import pairwise

import pytest
import torch

from pyro_ngvi.families import MeanFieldNormal
from pyro_ngvi.families.base import interpolate
from pyro_ngvi.optim import Constant, LogPower, NoiseClock, RobbinsMonro, Tail
from pyro_ngvi.optim.rule import as_averaging, start_average, step_average
from pyro_ngvi.optim.schedules import as_schedule


def linear_model(schedule, d, steps, additive, multiplicative=0.0, start=1.0, seed=0):
    """x <- x - b G with G = x + noise: the local form of natural-gradient VI.  Errors and gains."""
    g = torch.Generator().manual_seed(seed)
    x = torch.full((d,), start)
    state = schedule.init(x.new_zeros(()))
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


def test_noise_clock_takes_nearly_full_steps_without_noise():
    """After n signals of one: 1 - 2 (1 / 4 n^2)^(1/2), so that the error falls as 1 / n!."""
    errors, gains = linear_model(NoiseClock(), 20, 30, additive=0.0)
    assert gains[2:9] == pytest.approx([1.0 - 1.0 / n for n in range(2, 9)])
    assert errors[-1] < 1e-20


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


def noise_clock_by_hand(signals, schedule):
    """The gains, with every mean and standard error formed anew from the weights of all signals."""
    clock, weights, gains = schedule.start, [], [1.0 / schedule.start]
    squares = []
    for k in range(1, len(signals)):
        # an average over the last max(10, c / 2) signals, at first over those there are
        a = max(1.0 / max(schedule.min_window, clock / 2), 1.0 / k)
        weights = [w * (1.0 - a) for w in weights] + [a]
        mean = sum(w * s for w, s in zip(weights, signals[1:], strict=False))
        squares.append((signals[k] - mean) ** 2)
        variance = sum(w * q for w, q in zip(weights, squares, strict=True))
        # of a weighted mean of independent numbers
        error = math.sqrt((variance + 0.25 / k) * sum(w * w for w in weights))
        certain = min(max(mean - schedule.standard_errors * error, 1e-12), 1.0)
        clock = max(min(clock + schedule.increment, 1.0 / certain), 1.0)
        gains.append(1.0 / clock)
    return gains


@pytest.mark.parametrize("start", [10.0, 80.0])  # a window of 10, and one of half the clock
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
def test_noise_clock_by_hand(start, share):
    schedule = NoiseClock(start=start)
    signals = (share + 0.1 * torch.randn(150)).clamp(-1.0, 1.0)
    state, gains = schedule.init(torch.zeros(1)), []
    for signal in signals:
        gain, state = schedule.gain(signal, state)
        gains.append(float(gain))
    assert gains == pytest.approx(noise_clock_by_hand(signals.tolist(), schedule), rel=1e-9)
    if share == 0.3:
        assert any(before < after for before, after in pairwise(gains))


def test_robbins_monro_waits_for_noise():
    """The count stands still while signal dominates, and goes on when it does not."""
    schedule = RobbinsMonro(scale=1.0, offset=10.0, power=1.0, patience=0.5)
    state = schedule.init(torch.zeros(1))
    counts = []
    for signal in [1.0] * 40 + [0.0] * 50:
        _, state = schedule.gain(torch.tensor(signal), state)
        counts.append(float(state["count"]))
    # 1 - 0.9^k passes a half at the seventh step, and halves again seven steps after the signal
    assert counts[5] == counts[39] == counts[45] == 6.0
    assert counts[46] == 7.0 and counts[-1] == 50.0
    assert float(schedule.gain(torch.zeros(()), state)[0]) == pytest.approx(1 / 6)


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


@pytest.mark.parametrize("averaging", [LogPower(2.0), Tail(4.0)], ids=["log", "tail"])
def test_average_square_is_what_averaging_leaves_of_the_noise_of_a_step(averaging):
    """The sum of the squares of all weights: the variance of a mean of independent numbers."""
    family, params = MeanFieldNormal(), {"loc": torch.zeros(2), "log_scale": torch.zeros(2)}
    state, weights = start_average(averaging, params), []
    for k in range(1, 40):
        rate = float(averaging.rate(torch.tensor(float(k)), state["average_total"])[0])
        weights = [w * (1.0 - rate) for w in weights] + [rate]
        state = step_average(averaging, family, state, params, torch.tensor(float(k)))
        wanted = sum(w * w for w in weights)
        assert sum(weights) == pytest.approx(1.0)
        assert float(state["average_square"]) == pytest.approx(wanted)


@pytest.mark.parametrize("eta", [1.0, 3.0, 4.0])
def test_weights_of_the_tail_grow_as_a_power(eta):
    """w_k+1 / w_k = (k + eta - 1) / k, that of k^(eta - 1) in the long run; the mean for eta = 1."""
    weights = []
    for k in range(1, 31):
        rate = float(Tail(eta).rate(torch.tensor(float(k)), torch.zeros(()))[0])
        weights = [w * (1.0 - rate) for w in weights] + [rate]
    for k in range(1, 30):
        assert weights[k] / weights[k - 1] == pytest.approx((k + eta - 1.0) / k)


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
    assert as_averaging(False) is None
    with pytest.raises(ValueError, match="negative"):
        as_averaging(-1.0)
    with pytest.raises(ValueError, match="rate"):
        as_averaging("mean")  # pyright: ignore[reportArgumentType]
