"""Solves with one triangular matrix for all rows: values and derivatives are those of torch."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import pyro_ngvi as ngvi
from pyro_ngvi.curvature.derivatives import _load_rules, jvp
from pyro_ngvi.linalg.triangular import LARGE, Solve, solve
from pyro_ngvi.runtime.stand_ins import stand_ins

L = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double().tril()
L = L + 3.0 * torch.eye(4).double()
X = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(1)).double()

transposed = pytest.mark.parametrize("transposed", [False, True])


def plain(L: Tensor, x: Tensor, transposed: bool) -> Tensor:
    L = L.mT if transposed else L
    return torch.linalg.solve_triangular(L, x.unsqueeze(-1), upper=transposed).squeeze(-1)


def solved(L: Tensor, x: Tensor, transposed: bool) -> Any:
    return Solve.apply(L.tril(), x, transposed)


@transposed
def test_first_and_second_derivatives(transposed: bool) -> None:
    _load_rules()
    inputs = L.clone().requires_grad_(), X.clone().requires_grad_()

    def f(L: Tensor, x: Tensor) -> Any:
        return solved(L, x, transposed)

    assert gradcheck(f, inputs, check_forward_ad=True)
    assert gradgradcheck(f, inputs)


@transposed
@pytest.mark.parametrize("dims", [(None, 0), (None, 1), (0, None), (0, 0)])
def test_under_vmap(transposed: bool, dims: Any) -> None:
    given = L if dims[0] is None else torch.stack([k * L for k in range(1, 6)])
    x = X[0] if dims[1] is None else X
    found, expected = (
        vmap(lambda a, b, f=f: f(a, b, transposed), dims)(given, x) for f in (solved, plain)
    )
    torch.testing.assert_close(found, expected)


@transposed
def test_hessians_under_vmap(transposed: bool) -> None:
    _load_rules()

    def of(f: Any) -> list[Tensor]:
        def total(z: Tensor) -> Tensor:
            return f(L, z, transposed).pow(4).sum()

        along = vmap(lambda v: jvp(grad(total), (X[0, 0],), (v,))[1])(X[:, 0])
        return [vmap(hessian(total))(X[:, 0]), along]  # pyright: ignore[reportReturnType]

    torch.testing.assert_close(of(solved), of(plain))


class Solves(TorchDispatchMode):
    """The shapes of all triangular matrices that are solved with."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "solve_triangular" in str(func):
            self.shapes.append(args[0].shape)
        return func(*args, **(kwargs or {}))


def test_a_gaussian_vector_has_one_matrix_for_all_particles() -> None:
    A = torch.randn(LARGE, LARGE, generator=torch.Generator().manual_seed(2)).double()
    prior = dist.MultivariateNormal(torch.ones(LARGE).double(), A @ A.mT + torch.eye(LARGE))
    x = torch.randn(6, LARGE).double().requires_grad_()
    with stand_ins(), Solves() as seen:
        found = vmap(prior.log_prob)(x)
        (slope,) = torch.autograd.grad(found.sum(), x)
    assert set(seen.shapes) == {(LARGE, LARGE)}
    torch.testing.assert_close(found, prior.log_prob(x))
    torch.testing.assert_close(slope, -(x - 1.0) @ prior.precision_matrix)


@pytest.mark.parametrize("d", [5, LARGE])
@transposed
def test_rows_of_any_shape(d: int, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(d)
    many = torch.randn(3, d, d, generator=generator).double().tril() / d + torch.eye(d).double()
    for shape in [(d,), (2, d), (2, 3, d)]:
        x = torch.randn(shape, generator=generator).double()
        torch.testing.assert_close(solve(many[0], x, transposed), plain(many[0], x, transposed))
    x = torch.randn(3, d, generator=generator).double()
    torch.testing.assert_close(solve(many, x, transposed), plain(many, x, transposed))


@pytest.mark.parametrize("kind", [ngvi.AutoFullRankNormal, ngvi.AutoSites, AutoMultivariateNormal])
def test_draws_of_a_guide_have_one_matrix(kind: Any) -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Normal(torch.zeros(LARGE), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=torch.ones(LARGE))

    guide = kind(model)
    guide()
    with Solves() as seen:
        ngvi.khat(model, guide, num_samples=30, seed=0)
    assert seen.shapes and all(len(shape) == 2 for shape in seen.shapes)
