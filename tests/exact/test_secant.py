"""The gain of a sweep: a secant on slopes that are pairings of natural and mean parameters."""

import pytest
import torch

from pyro_ngvi.optim.rule import State
from pyro_ngvi.sites.cvi import Pairs, next_sweep, pairing, start_sweeps

N, K = 5, 2
NOT_EXACT = {"y": torch.zeros(N, dtype=torch.bool)}
#: of the same data and the same model in every sweep
PRINTS = {"y": torch.ones(N, K + 1)}


def random_pairs(seed: int, size: float = 1.0) -> Pairs:
    g = torch.Generator().manual_seed(seed)
    G = size * torch.randn(N, K, K, generator=g)
    return {"y": (size * torch.randn(N, K, generator=g), G + G.mT)}


def combined(a: Pairs, b: Pairs, share: float) -> Pairs:
    """a + share b."""
    return {n: (a[n][0] + share * b[n][0], a[n][1] + share * b[n][1]) for n in a}


def memory_of(step: Pairs, moments: Pairs, gain: float, elbo: float) -> State:
    """After a sweep by ``step`` with that ``gain`` from q with those ``moments``."""
    (nu, Lambda), (m, M) = step["y"], moments["y"]
    memory = start_sweeps({"linear_y": nu, "precision_y": Lambda})
    memory |= {"step": {"linear_y": nu, "precision_y": Lambda}, "print": PRINTS}
    memory |= {"moment": {"linear_y": m, "precision_y": M}}
    return memory | {"gain": torch.tensor(gain), "elbo": torch.tensor(elbo)}


def test_pairing_is_the_expected_log_of_the_sites() -> None:
    """E sum nu' f - f' Lambda f / 2 for f ~ N(m, C), by points that are exact for quadratics."""
    sites = random_pairs(0)
    nu, Lambda = sites["y"]
    m, root = torch.randn(N, K), torch.randn(N, K, K)
    x = K**0.5 * torch.cat([torch.eye(K), -torch.eye(K)])
    f = m + torch.einsum("nij,qj->qni", root, x)
    log_t = (nu * f).sum(-1) - 0.5 * torch.einsum("qni,nij,qnj->qn", f, Lambda, f)
    M = root @ root.mT + m[:, :, None] * m[:, None, :]
    torch.testing.assert_close(pairing(sites, {"y": (m, M)}), log_t.mean(0).sum())


def slopes(start: float, end: float, gain: float) -> tuple[Pairs, Pairs, Pairs, Pairs]:
    """A step, the moments at both ends, and a residual at its end.

    The slopes <residual, moments after - before> are ``start`` and ``end`` times the same number.
    """
    step, before, other = random_pairs(1), random_pairs(2), random_pairs(3, 0.3)
    direction = random_pairs(4, 0.1)
    sign = float(pairing(step, direction).sign())
    after = combined(before, direction, sign)
    moved = {"y": (sign * direction["y"][0], sign * direction["y"][1])}
    # the residual before was step / gain; of the new one only its slope matters
    first = pairing(step, moved) / gain
    wanted = first * end / start - pairing(other, moved)
    residual = combined(other, step, float(wanted / pairing(step, moved)))
    return step, before, after, residual


@pytest.mark.parametrize(
    ("start", "end", "gain", "wanted"),
    [
        (1.0, 0.5, 0.4, 0.8),  # half way to the zero of the slope: twice as far
        (1.0, -1.0, 0.8, 0.4),  # as far beyond it: half as far
        (1.0, 0.0, 0.5, 0.5),
        (1.0, 0.9, 0.5, 1.0),  # ten times as far, but lr at most
        (1.0, 2.0, 0.5, 1.0),  # slopes that grow have no zero ahead
        (1.0, -99.0, 0.5, 1.0 / 16.0),  # a hundredth, but a sixteenth of lr at the least
    ],
)
def test_the_next_gain_is_where_the_slope_is_zero(
    start: float, end: float, gain: float, wanted: float
) -> None:
    step, before, after, residual = slopes(start, end, gain)
    memory = memory_of(step, before, gain, -3.0)
    elbo = torch.tensor(-2.0)
    sweep = next_sweep(memory, residual, NOT_EXACT, after, elbo, -elbo, 1.0, PRINTS)
    assert not bool(sweep.back)
    assert float(sweep.gain) == pytest.approx(wanted)
    for found, r in zip(sweep.change["y"], residual["y"], strict=True):
        torch.testing.assert_close(found, wanted * r)


def test_where_the_elbo_fell_half_of_the_step_is_taken_back_again_and_again() -> None:
    step, before, after, residual = slopes(1.0, 0.5, 0.8)
    memory, fallen = memory_of(step, before, 0.8, -3.0), torch.tensor(-5.0)
    made, gains = 1.0, []
    for _ in range(3):
        sweep = next_sweep(memory, residual, NOT_EXACT, after, fallen, -fallen, 1.0, PRINTS)
        assert bool(sweep.back)
        for found, s in zip(sweep.change["y"], step["y"], strict=True):
            torch.testing.assert_close(found, -0.5 * made * s)
        made *= 0.5
        gains.append(float(sweep.gain))
        memory = sweep.behind
    # the gain is that of what is left of the step, so that a secant afterwards knows its length
    assert gains == pytest.approx([0.4, 0.2, 0.1])
    # once the ELBO rises: the slope before was that of step / 0.8, whatever was taken back
    left = {n: (made * a, made * b) for n, (a, b) in step.items()}
    moved = {n: (after[n][0] - before[n][0], after[n][1] - before[n][1]) for n in after}
    first, second = pairing(left, moved) / 0.1, pairing(residual, moved)
    risen = torch.tensor(-1.0)
    sweep = next_sweep(memory, residual, NOT_EXACT, after, risen, -risen, 1.0, PRINTS)
    assert not bool(sweep.back)
    assert float(sweep.gain) == pytest.approx(float(0.1 * first / (first - second)))
