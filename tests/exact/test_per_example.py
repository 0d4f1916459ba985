"""Products of the gradients of single data against torch.func.jacrev of the whole function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jacrev, vmap

from pyro_ngvi.curvature.derivatives import products

BUDGETS = {"one": 1, "some": 1_000, "all": 2**28}
FORMS = ["diagonal", "dense", "low_rank"]


def problem(d: int, n: int) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    X, y = torch.randn(n, d), torch.randn(n)

    def f(theta: Tensor) -> Tensor:
        return -0.5 * (y - (X @ theta).tanh() * theta[0].exp()) ** 2

    return f, 0.5 * torch.randn(3, d), torch.rand(n) + 0.1


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize(("d", "n"), [(3, 11), (7, 4), (5, 5), (1, 1)])
def test_products_equal_those_of_the_whole_jacobian(d: int, n: int, budget: int) -> None:
    """By columns where d is the smaller, else by rows."""
    f, thetas, w = problem(d, n)
    theta = thetas[0]
    J: Any = jacrev(f)(theta)
    close: Any = {"rtol": 1e-12, "atol": 1e-12}
    for weights in (w, torch.ones(n)):
        diagonal, dense, rows = (products(f, theta, weights, form, budget) for form in FORMS)
        torch.testing.assert_close(diagonal, weights @ J.square(), **close)
        torch.testing.assert_close(dense, (J.T * weights) @ J, **close)
        torch.testing.assert_close(rows, weights.sqrt()[:, None] * J, **close)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("d", "n"), [(3, 11), (7, 4)])
def test_products_under_vmap_over_particles(form: str, d: int, n: int) -> None:
    f, thetas, w = problem(d, n)
    batched = vmap(lambda theta: products(f, theta, w, form, budget=500))(thetas)
    expected = torch.stack([products(f, theta, w, form) for theta in thetas])
    torch.testing.assert_close(batched, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(4,), (4, 3)])
def test_prelu_with_a_weight_a_channel_under_vmap_over_particles(shape: tuple[int, ...]) -> None:
    x, thetas, w = torch.randn(3, *shape), torch.randn(3, 4), torch.ones(3)

    def f(theta: Tensor) -> Tensor:
        return F.prelu(x * theta[0], weight=theta).square().flatten(1).sum(1)

    batched = vmap(lambda theta: products(f, theta, w, "low_rank"))(thetas)
    expected: Any = torch.stack([jacrev(f)(theta) for theta in thetas])
    torch.testing.assert_close(batched, expected, rtol=1e-12, atol=1e-12)


class Calls:
    """Counts the columns or rows that f is asked for at a time."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        self.f, self.passes = f, 0

    def __call__(self, theta: Tensor) -> Tensor:
        self.passes += 1
        return self.f(theta)


def test_budget_bounds_the_columns_of_a_block() -> None:
    d, n = 12, 100
    f, thetas, w = problem(d, n)
    column = n * 4 * 8  # bytes
    for at_a_time in (1, 4, 12):
        calls = Calls(f)
        products(calls, thetas[0], w, budget=at_a_time * column)
        assert calls.passes == d // at_a_time


def test_reverse_mode_where_columns_would_be_made_too_often() -> None:
    """d = 10 columns, one at a time, take 55 passes: more than 20 rows, and fewer than 60."""
    for n, passes in ((20, 1), (60, 55)):  # one forward pass for all pullbacks
        f, thetas, w = problem(10, n)
        calls = Calls(f)
        products(calls, thetas[0], w, "dense", budget=1)
        assert calls.passes == passes


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
    torch.testing.assert_close(products(f, theta, torch.ones(9)), expected)


def test_runs_on_the_meta_device() -> None:
    X, theta, w = (torch.empty(s, device="meta") for s in ((6, 3), (3,), (6,)))
    assert products(lambda t: X @ t, theta, w).shape == (3,)
    assert products(lambda t: X @ t, theta, w, "dense", budget=1).shape == (3, 3)
