"""How long a step is, in a plane whose Fisher matrix is the identity: every length is a plain norm."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_ngvi.families import MeanFieldNormal
from pyro_ngvi.families.base import Tensors
from pyro_ngvi.optim.blocks import Coordinates, EstimatedGeometry
from pyro_ngvi.optim.natural_gradient import NaturalGradientRule
from pyro_ngvi.optim.schedules import Constant
from pyro_ngvi.optim.von import VONRule

FLAT: Any = EstimatedGeometry(Coordinates(("x",)), lambda g: g)
D = 20


class Watched:
    """A constant gain that keeps every signal it is told."""

    def __init__(self, gain: float) -> None:
        self.value, self.signals = gain, []

    def init(self, like: Tensor) -> Tensors:
        return {}

    def gain(self, signal: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        self.signals.append(float(signal))
        return torch.full_like(signal, self.value), state


def flat_rule(**arguments: Any) -> NaturalGradientRule:
    free = dict.fromkeys(("trust_radius", "noise_radius", "outlier"), torch.inf)
    return NaturalGradientRule(FLAT, **{**free, **arguments})


def moves(rule: NaturalGradientRule, gradients: Any) -> list[Tensor]:
    """What is subtracted from the parameters at every step."""
    params = {"x": torch.zeros_like(gradients[0])}
    state, found = rule.init(params), []
    for g in gradients:
        new, state, _ = rule.update(params, {"x": g}, state)
        found.append(params["x"] - new["x"])
        params = new
    return found


@pytest.mark.parametrize(
    ("usual", "unusual", "kept"),
    [
        (0.01, 0.5, 0.5),  # fifty times the usual length, and short of 1 nat^(1/2) all the same
        (0.01, 2.9, 2.9),
        (0.01, 10.0, 3.0),  # outliers are of three times 1 nat^(1/2)
        (2.0, 5.9, 5.9),
        (2.0, 100.0, 6.0),  # and of three times what is usual, where that is more
    ],
)
def test_outliers_are_of_three_times_the_usual_length_and_of_at_least_three_nats(
    usual: float, unusual: float, kept: float
) -> None:
    rule = flat_rule(outlier=3.0, schedule=Constant(0.1))
    direction = torch.nn.functional.normalize(torch.randn(D), dim=0)
    *_, last = moves(rule, [usual * direction] * 5 + [unusual * direction])
    torch.testing.assert_close(last, 0.1 * kept * direction)


def test_the_usual_length_is_the_geometric_mean_of_the_last_ten() -> None:
    rule = flat_rule(schedule=Constant(0.1))
    params = {"x": torch.zeros(D)}
    state = rule.init(params)
    direction = torch.nn.functional.normalize(torch.randn(D), dim=0)
    logs = torch.linspace(-1.0, 2.0, 10)
    for k, log_length in enumerate(logs, 1):
        _, state, _ = rule.update(params, {"x": log_length.exp() * direction}, state)
        torch.testing.assert_close(state["log_typical"], logs[:k].mean().reshape(1))
    _, after, _ = rule.update(params, {"x": 9.0 * direction}, state)
    wanted = 0.9 * logs.mean() + 0.1 * torch.tensor(9.0).log()
    torch.testing.assert_close(after["log_typical"], wanted.reshape(1))


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("radius", [0.5, 1e9])  # nearly every step is shortened, or none
def test_signal_is_told_of_the_moves_that_were_made(momentum: float, radius: float) -> None:
    """(<G_k, G_k-1> + <G_k-1, move_k-1>) / |G_k|^2, as the schedules have it."""
    schedule = Watched(0.3)
    rule = flat_rule(trust_radius=radius, schedule=schedule, momentum=momentum)
    G = 2.0 * torch.randn(12, D)
    made = moves(rule, G)
    shortened = [float(m.norm()) == pytest.approx(radius) for m in made]
    assert any(shortened) == (radius < 1.0)
    for k in range(1, len(G)):
        share = (G[k] @ G[k - 1] + G[k - 1] @ made[k - 1]) / G[k].square().sum()
        assert schedule.signals[k] == pytest.approx(float(share.clamp(-1.0, 1.0)))


@pytest.mark.parametrize("radius", [2.0, 1e9])
def test_moves_remember_the_moves_before(radius: float) -> None:
    b, beta = 0.3, 0.8
    rule = flat_rule(trust_radius=radius, schedule=Constant(b), momentum=beta)
    # b G alone lies within the radius, and sums of moves do not
    G = torch.randn(12, D) + 0.5
    assert float(b * G.norm(dim=1).max()) < 2.0
    wanted, past = [], torch.zeros(D)
    for g in G:
        past = b * g + beta * past
        past = past * (radius / past.norm()).clamp_max(1.0)
        wanted.append(past)
    torch.testing.assert_close(torch.stack(moves(rule, G)), torch.stack(wanted))


@pytest.mark.parametrize(("gain", "radius"), [(1.0, 1.0), (0.04, 0.6), (0.0001, 0.03)])
def test_radius_follows_the_root_of_the_gain(gain: float, radius: float) -> None:
    """The energy b^2 |noise|^2 of a step stays in proportion to the gain b: R^2 ~ b."""
    rule = flat_rule(trust_radius=1.0, noise_radius=3.0, schedule=Constant(gain))
    params = {"x": torch.zeros(D)}
    new, _, report = rule.update(params, {"x": torch.full((D,), 1e9)}, rule.init(params))
    assert float(report.radius) == pytest.approx(radius)
    assert float(new["x"].norm()) == pytest.approx(radius)


def test_every_further_refused_step_halves_the_radius_and_none_counts() -> None:
    rule = flat_rule(trust_radius=0.5, schedule=Constant(1.0))
    params, large = {"x": torch.zeros(D)}, {"x": torch.full((D,), 1e9)}
    for refused, radius in ((0, 0.5), (3, 0.5), (4, 0.25), (6, 0.0625)):
        state = rule.init(params)
        for _ in range(refused):
            _, state, report = rule.update(params, {"x": torch.full((D,), torch.nan)}, state)
            assert not bool(report.finite)
        assert state["skipped"] == refused and state["count"] == 0.0
        new, state, _ = rule.update(params, large, state)
        assert float(new["x"].norm()) == pytest.approx(radius)
        # a step that is taken ends the run of refused ones; the reach learns nothing of this one
        across = {"x": large["x"] * torch.tensor([1.0, -1.0]).repeat(D // 2)}
        new, state, _ = rule.update(params, across, state)
        assert float(new["x"].norm()) == pytest.approx(0.5) and state["count"] == 2.0


@pytest.mark.parametrize("d", [1, 9, 100])
def test_radius_of_von_is_a_root_mean_square_in_sds(d: int) -> None:
    family = MeanFieldNormal()
    rule = VONRule(family, 1.0, 0.1, trust_radius=0.5)
    params = family.init(torch.randn(d), 0.3)
    grads = {"loc": 1e6 * torch.randn(d), "log_scale": 0.1 * torch.randn(d)}
    new, _, report = rule.update(params, grads, rule.init(params))
    sds = (new["loc"] - params["loc"]) / family.stddev(new)
    assert float(sds.square().mean().sqrt()) == pytest.approx(0.5)
    # and the length reported is the Fisher norm of that move
    assert float(report.step_norm) == pytest.approx(float(sds.norm())) and bool(report.damped)
