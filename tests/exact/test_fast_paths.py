"""The fast forms inside the families against the plain ones, at sizes where they differ."""

import pytest
import torch
from torch.func import vmap

from pyro_ngvi.families import FactorNormal
from pyro_ngvi.linalg import spectral
from pyro_ngvi.linalg.spectral import solve_squared_projection
from pyro_ngvi.linalg.stiefel import BLOCK, tril_product


@pytest.mark.parametrize("d", [BLOCK, BLOCK + 1, 2 * BLOCK + 37])
@pytest.mark.parametrize("transpose", [False, True])
def test_triangular_product_by_halves(d, transpose):
    L, A = torch.randn(2, d, d).tril()
    expected = ((L.mT if transpose else L) @ A).tril()
    torch.testing.assert_close(tril_product(L, A, transpose), expected, rtol=1e-11, atol=1e-11)


def test_triangular_product_under_vmap():
    d = BLOCK + 10
    L, A = torch.randn(2, 3, d, d).tril()
    expected = (L.mT @ A).tril()
    actual = vmap(lambda x, y: tril_product(x, y, transpose=True))(L, A)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


dense_or_not = pytest.mark.parametrize("largest_dense", [0, 128], ids=["iterated", "dense"])


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("d", [20, 120])
@dense_or_not
def test_squared_projection_against_the_dense_solve(rank, d, largest_dense, monkeypatch):
    monkeypatch.setattr(spectral, "DENSE", largest_dense)
    Q = torch.linalg.qr(torch.randn(d, rank)).Q.mT
    Pi = torch.eye(d) - Q.mT @ Q
    b = torch.randn(d)
    v = solve_squared_projection(Q, b, iterations=60)
    torch.testing.assert_close(v, torch.linalg.solve(Pi.square(), b), rtol=1e-5, atol=1e-6)


@dense_or_not
def test_squared_projection_with_a_coordinate_that_the_factors_explain(largest_dense, monkeypatch):
    """A zero row of Pi: the floor keeps the solution finite, and the others are as without it."""
    monkeypatch.setattr(spectral, "DENSE", largest_dense)
    d = 12
    Q = torch.zeros(2, d)
    Q[0, 0] = 1.0
    Q[1, 1:] = (d - 1) ** -0.5
    b = torch.randn(d)
    b[0] = 0.0
    v = solve_squared_projection(Q, b, iterations=60)
    rest = solve_squared_projection(Q[1:, 1:], b[1:], iterations=60)
    assert v[0] == 0.0
    torch.testing.assert_close(v[1:], rest)


@pytest.mark.parametrize("d", [20, 200])
def test_squared_projection_waits_for_nobody(d):
    Q, b = torch.zeros(3, d, device="meta"), torch.zeros(d, device="meta")
    assert solve_squared_projection(Q, b, iterations=3).shape == (d,)


@pytest.mark.parametrize(
    "dtype, log_c, limit", [(torch.float32, -2.0, 2e-2), (torch.float64, -10.0, 1e-6)]
)
@dense_or_not
def test_factor_family_where_the_factors_dwarf_the_rest(
    dtype, log_c, limit, largest_dense, monkeypatch
):
    """|B / c|^2 near 1e9 in float64, as a well-determined posterior makes it: F F^-1 g is still g.

    The condition number of Sigma is of that size too, so float32 gets a milder case.
    """
    monkeypatch.setattr(spectral, "DENSE", largest_dense)
    d, rank = 40, 3
    g = torch.Generator().manual_seed(0)
    family = FactorNormal(rank, cg_iterations=40)
    params = family.init(torch.zeros(d), 1.0)
    params["factor"] = params["factor"] + 0.3 * torch.randn(d, rank, generator=g)
    params["log_scale"] = torch.full((d,), log_c) + 0.5 * torch.randn(d, generator=g)
    root = torch.randn(d, d, generator=g)
    gamma = torch.linalg.inv(family.covariance(params)) + root @ root.T  # of the size of Sigma^-1
    grads = {
        "loc": torch.randn(d, generator=g),
        "factor": 2 * gamma @ params["factor"],
        "log_scale": 2 * gamma.diagonal() * (2 * params["log_scale"]).exp(),
    }
    params = {k: v.to(dtype) for k, v in params.items()}
    gradient = family.pull(params, {k: v.to(dtype) for k, v in grads.items()})
    back = family.fisher_product(params, family.natural_gradient(params, gradient))
    for key in params:
        error = (back[key] - gradient[key]).norm() / gradient[key].norm()
        assert error < limit, f"{key}: relative residual {float(error):.1e}"
