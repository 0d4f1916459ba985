"""Retractions against the exponentials that they stand for: the error is of the third order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_ngvi.families import FactorNormal, FullRankNormal, MatrixNormal, MeanFieldNormal
from tests.exact.matrix_members import random_like, random_member

#: halving a step divides an error of the third order by 8, of the second by 4
THIRD_ORDER = pytest.approx(8.0, rel=0.05)


def shrinkage(error: Callable[[float], Tensor], h: float = 1e-2) -> float:
    """By how much an error falls when the step is halved."""
    return float(error(h).norm() / error(0.5 * h).norm())


def members(family: Any, d: int, seed: int = 0) -> tuple[Any, Any]:
    params = random_member(family, d, seed)
    return params, random_like(params, seed + 1)


def test_full_rank_along_the_exponential_of_the_factor() -> None:
    family = FullRankNormal()
    params, tangent = members(family, 5)
    tangent["scale_tril"] = tangent["scale_tril"].tril()

    def error(h: float) -> Tensor:
        moved = family.retract(params, tangent, h)["scale_tril"]
        return moved - params["scale_tril"] @ torch.linalg.matrix_exp(h * tangent["scale_tril"])

    assert shrinkage(error) == THIRD_ORDER


def test_full_rank_improved_along_the_exponential_of_the_whitened_precision() -> None:
    """L' P_new L = exp(-h (M + M')) to second order, positive definite in any case."""
    family = FullRankNormal()
    params, tangent = members(family, 5)
    M = tangent["scale_tril"].tril()
    L = params["scale_tril"]

    def error(h: float) -> Tensor:
        moved = family.retract(params, tangent | {"scale_tril": M}, h, "improved")
        whitened = L.T @ torch.linalg.inv(family.covariance(moved)) @ L
        return whitened - torch.linalg.matrix_exp(-h * (M + M.T))

    assert shrinkage(error) == THIRD_ORDER


def test_mean_field_improved_along_the_exponential_of_the_precision() -> None:
    """p_new / p = exp(-2 h m) to second order; the local form is that exponential."""
    family = MeanFieldNormal()
    params, tangent = members(family, 7)
    m = tangent["log_scale"]

    def error(h: float) -> Tensor:
        moved = family.retract(params, tangent, h, "improved")["log_scale"]
        return (-2.0 * (moved - params["log_scale"])).exp() - (-2.0 * h * m).exp()

    assert shrinkage(error) == THIRD_ORDER
    local = family.retract(params, tangent, 0.3)["log_scale"]
    torch.testing.assert_close(local, params["log_scale"] + 0.3 * m)


@pytest.mark.parametrize("shape", [(3, 4), (5, 2)])
def test_matrix_normal_along_the_exponentials_of_both_factors(shape: tuple[int, int]) -> None:
    """A kron B, which does not see how a scale is shared between the two."""
    family = MatrixNormal(*shape)
    params, tangent = members(family, shape[0] * shape[1])
    X, Y = (tangent[name].tril() for name in ("row_tril", "column_tril"))
    A, B = params["row_tril"].tril(), params["column_tril"].tril()

    def error(h: float) -> Tensor:
        moved = family.retract(params, {"loc": tangent["loc"], "row_tril": X, "column_tril": Y}, h)
        exact = A @ torch.linalg.matrix_exp(h * X), B @ torch.linalg.matrix_exp(h * Y)
        return family.scale_tril(moved) - torch.kron(*exact)

    assert shrinkage(error) == THIRD_ORDER


@pytest.mark.parametrize("step", [1.0, 1e3, 1e8])
def test_factors_move_by_less_than_one_in_units_of_q(step: float) -> None:
    """V of dB = c V: |V' M~^-1 V| = s / (1 + s) < 1 for s that of the tangent, and |d log c| < 1."""
    family = FactorNormal(2)
    params, tangent = members(family, 9)
    new = family.retract(params, tangent, step)
    c = params["log_scale"].exp()
    units = torch.linalg.inv(family.covariance(params) / torch.outer(c, c))

    def size(V: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(V.T @ units @ V)

    s = size(step * tangent["factor"])
    made = size((new["factor"] - params["factor"]) / c[:, None])
    torch.testing.assert_close(made, s / (1.0 + s))
    assert float((new["log_scale"] - params["log_scale"]).abs().max()) < 1.0 + 1e-12
