"""Reductions of a per-example Jacobian against torch.func.jacrev of the whole function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jacrev, vmap

from pyro_ngvi.curvature.per_example import (
    outer_sum,
    per_example_jacobian,
    squared_sum,
    weighted_rows,
)

BUDGETS = {"one": 1, "some": 1_000, "all": 2**28}
MODES: list[Any] = ["auto", "forward", "reverse"]


def problem(d: int, n: int) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    X, y = torch.randn(n, d), torch.randn(n)

    def f(theta: Tensor) -> Tensor:
        return -0.5 * (y - (X @ theta).tanh() * theta[0].exp()) ** 2

    return f, 0.5 * torch.randn(3, d), torch.rand(n) + 0.1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize(("d", "n"), [(3, 11), (7, 4), (5, 5), (1, 1)])
def test_reductions_equal_those_of_the_whole_jacobian(
    d: int, n: int, budget: int, mode: Any
) -> None:
    f, thetas, w = problem(d, n)
    theta = thetas[0]
    J: Any = jacrev(f)(theta)
    how: Any = {"budget": budget, "mode": mode}
    close: Any = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(per_example_jacobian(f, theta, **how), J, **close)
    torch.testing.assert_close(squared_sum(f, theta, **how), J.square().sum(0), **close)
    torch.testing.assert_close(squared_sum(f, theta, w, **how), w @ J.square(), **close)
    torch.testing.assert_close(outer_sum(f, theta, **how), J.T @ J, **close)
    torch.testing.assert_close(outer_sum(f, theta, w, **how), (J.T * w) @ J, **close)
    rows = weighted_rows(f, theta, w, **how)
    torch.testing.assert_close(rows, w.sqrt()[:, None] * J, **close)


@pytest.mark.parametrize("reduction", [squared_sum, outer_sum, weighted_rows])
@pytest.mark.parametrize(("d", "n"), [(3, 11), (7, 4)])
def test_reductions_under_vmap_over_particles(reduction: Any, d: int, n: int) -> None:
    f, thetas, w = problem(d, n)
    batched = vmap(lambda theta: reduction(f, theta, w, budget=500))(thetas)
    expected = torch.stack([reduction(f, theta, w) for theta in thetas])
    torch.testing.assert_close(batched, expected, rtol=1e-12, atol=1e-12)


class Calls:
    """Counts the columns or rows that f is asked for at a time."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        self.f, self.passes = f, 0

    def __call__(self, theta: Tensor) -> Tensor:
        self.passes += 1
        return self.f(theta)


def test_budget_bounds_the_columns_of_a_block() -> None:
    d, n, width = 12, 100, 5
    f, thetas, _ = problem(d, n)
    column = n * (width + 3) * 8  # bytes
    for at_a_time in (1, 4, 12):
        calls = Calls(f)
        squared_sum(calls, thetas[0], budget=at_a_time * column, width=width)
        assert calls.passes == 1 + d // at_a_time  # one to see how many examples there are


def test_reverse_mode_where_columns_would_be_made_too_often() -> None:
    """d = 10 columns, one at a time, take 55 passes: more than the n = 20 rows."""
    f, thetas, _ = problem(10, 20)
    calls = Calls(f)
    outer_sum(calls, thetas[0], budget=1)
    assert calls.passes == 2  # the shape, and one forward pass for all pullbacks
    calls = Calls(f)
    outer_sum(calls, thetas[0], budget=1, mode="forward")
    assert calls.passes == 1 + 55


class OnlyReverse(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


def test_operation_without_forward_mode_is_differentiated_in_reverse() -> None:
    X = torch.randn(9, 2)

    def f(theta: Tensor) -> Tensor:
        return X @ OnlyReverse.apply(theta)  # type: ignore[operator]

    theta = torch.randn(2)
    expected = (2 * theta * X).square().sum(0)
    torch.testing.assert_close(squared_sum(f, theta), expected)
    with pytest.raises(NotImplementedError):
        squared_sum(f, theta, mode="forward")


def test_wrong_shapes_are_refused_in_a_sentence() -> None:
    theta = torch.zeros(2)
    with pytest.raises(ValueError, match=r"maps theta of shape \(2,\) to \(\)"):
        squared_sum(torch.sum, theta)
    with pytest.raises(ValueError, match=r"weights have shape \(3,\) for 2 examples"):
        squared_sum(torch.exp, theta, torch.ones(3))
    with pytest.raises(ValueError, match="mode is 'sideways'"):
        squared_sum(torch.exp, theta, mode="sideways")  # type: ignore[arg-type]


def test_runs_on_the_meta_device() -> None:
    X, theta = torch.empty(6, 3, device="meta"), torch.empty(3, device="meta")
    assert squared_sum(lambda t: X @ t, theta).shape == (3,)
    assert outer_sum(lambda t: X @ t, theta, budget=1).shape == (3, 3)
