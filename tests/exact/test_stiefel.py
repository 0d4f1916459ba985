"""Orthogonal matrices: tangents, retractions and averages against definitions and autograd."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.flows.orthogonal_forms import RETRACTIONS, retract
from pyro_ngvi.curvature.derivatives import jvp
from pyro_ngvi.linalg import stiefel


def rotation(d: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(d, d, generator=generator)
    return torch.linalg.matrix_exp(A - A.mT)


def tangent(d: int, seed: int = 1) -> Tensor:
    return torch.randn(d, d, generator=torch.Generator().manual_seed(seed)).tril(-1)


def off_orthogonal(W: Tensor) -> float:
    return float((W.mT @ W - torch.eye(len(W), dtype=W.dtype)).abs().max())


@pytest.mark.parametrize("d", [1, 2, 5])
def test_pull_is_the_transpose_of_push(d: int) -> None:
    W, a, G = rotation(d), tangent(d), torch.randn(d, d)
    left = torch.dot(stiefel.pack(stiefel.pull(W, G)), stiefel.pack(a))
    torch.testing.assert_close(left, (G * stiefel.push(W, a)).sum(), rtol=1e-12, atol=1e-12)
    assert stiefel.pack(a).shape == (d * (d - 1) // 2,)
    assert torch.equal(stiefel.unpack(stiefel.pack(a), d), a)


@pytest.mark.parametrize("method", RETRACTIONS)
def test_retraction_starts_along_the_tangent(method: str) -> None:
    W, a = rotation(4), tangent(4)
    assert torch.allclose(retract(W, torch.zeros(4, 4), method), W, rtol=0, atol=1e-14)
    velocity = jvp(lambda t: retract(W, t * a, method), (torch.zeros(()),), (torch.ones(()),))[1]
    torch.testing.assert_close(velocity, stiefel.push(W, a), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["cayley", "exponential"])
def test_second_order(method: str) -> None:
    """The error against the geodesic falls with the third power of the step."""
    W, a = rotation(4), tangent(4)

    def error(t: float) -> float:
        A = t * (a - a.mT)
        return float((retract(W, t * a, method) - W @ torch.linalg.matrix_exp(A)).norm())

    assert error(1e-2) < 1e-4 * float(a.norm()) ** 3
    assert method == "exponential" or 7.0 < error(2e-2) / error(1e-2) < 9.0


def test_cholesky_qr_is_the_orthogonal_factor() -> None:
    """Of W (I + A) = Q R with a positive diagonal of R, as in the paper's scripts."""
    W, a = rotation(5), tangent(5)
    Q, R = torch.linalg.qr(W @ (torch.eye(5) + a - a.mT))
    wanted = Q * R.diagonal().sign()
    torch.testing.assert_close(retract(W, a, "cholesky-qr"), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", RETRACTIONS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_any_step_is_orthogonal(method: str, size: float) -> None:
    for seed in range(20):
        W = retract(rotation(6, seed), size * tangent(6, seed), method)
        assert off_orthogonal(W) < 1e-10


@pytest.mark.parametrize("method", RETRACTIONS)
def test_float32_does_not_drift(method: str) -> None:
    """3,000 steps of sd 0.1 an entry; without the correction the error grows with the steps."""
    d = 8
    generator = torch.Generator().manual_seed(0)
    W = torch.eye(d, dtype=torch.float32)
    steps = 0.1 * torch.randn(3_000, d, d, generator=generator, dtype=torch.float32)
    for a in steps.tril(-1):
        W = retract(W, a, method)
    assert off_orthogonal(W) < 1e-6


def test_correction_squares_the_error() -> None:
    W = rotation(5) + 1e-4 * torch.randn(5, 5)
    before = off_orthogonal(W)
    assert off_orthogonal(stiefel.correct(W)) < 5.0 * before**2


def test_average_moves_to_the_target() -> None:
    mean, W = rotation(5, 2), rotation(5, 3)
    one, zero = torch.ones(()), torch.zeros(())
    torch.testing.assert_close(stiefel.average(mean, W, one), W, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stiefel.average(mean, W, zero), mean, rtol=1e-12, atol=1e-12)
    assert off_orthogonal(stiefel.average(mean, W, torch.tensor(0.3))) < 1e-12


def test_average_of_turns_is_the_turn_by_the_average_angle() -> None:
    """In the plane, for small angles: the mean along the group, not a chord through the inside."""
    angles = 0.05 * torch.randn(200)
    mean = torch.eye(2)
    for k, angle in enumerate(angles, 1):
        a = torch.zeros(2, 2)
        a[1, 0] = angle
        W = retract(torch.eye(2), a, "exponential")
        mean = stiefel.average(mean, W, torch.tensor(1.0 / k))
    found = torch.atan2(mean[1, 0], mean[0, 0])
    # the Cayley way departs from the geodesic in the third order of the angles
    torch.testing.assert_close(found, angles.mean(), rtol=0.0, atol=0.05**3)


def test_average_in_float32_does_not_drift() -> None:
    generator = torch.Generator().manual_seed(1)
    mean = W = torch.eye(6, dtype=torch.float32)
    for k in range(1, 2001):
        a = 0.05 * torch.randn(6, 6, generator=generator, dtype=torch.float32).tril(-1)
        W = retract(W, a)
        mean = stiefel.average(mean, W, torch.tensor(4.0 / (k + 3.0), dtype=torch.float32))
    assert off_orthogonal(mean) < 1e-6


def test_average_over_half_a_turn_starts_again() -> None:
    half_turn = torch.diag(torch.tensor([-1.0, -1.0, 1.0]))
    found = stiefel.average(torch.eye(3), half_turn, torch.tensor(0.1))
    assert torch.equal(found, half_turn)


def test_no_value_is_read() -> None:
    W: Any = torch.eye(3, device="meta")
    a: Any = torch.zeros(3, 3, device="meta")
    for method in RETRACTIONS:
        assert retract(W, a, method).shape == (3, 3)
    assert stiefel.average(W, W, torch.ones((), device="meta")).device.type == "meta"
    assert stiefel.unpack(stiefel.pack(stiefel.pull(W, W)), 3).shape == (3, 3)
