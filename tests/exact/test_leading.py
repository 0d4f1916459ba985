"""The leading rows of A'A: exact on the smaller side, nearly so by the range finder."""

import pytest
import torch
from torch import Tensor

from pyro_ngvi.linalg.spectral import EXACT, _range_finder, leading_rows


def with_spectrum(m: int, d: int, values: Tensor, seed: int = 0) -> Tensor:
    """A (m, d) with these eigenvalues of A'A, largest first."""
    g = torch.Generator().manual_seed(seed)
    left, _ = torch.linalg.qr(torch.randn(m, len(values), generator=g))
    right, _ = torch.linalg.qr(torch.randn(d, len(values), generator=g))
    return (left * values.sqrt()) @ right.T


def best(A: Tensor, rank: int) -> Tensor:
    _, values, V = torch.linalg.svd(A, full_matrices=False)
    return (V[:rank].T * values[:rank].square()) @ V[:rank]


@pytest.mark.parametrize(("m", "d"), [(6, 40), (40, 6), (6, 6), (EXACT, 300), (300, EXACT)])
@pytest.mark.parametrize("rank", [1, 5])
def test_exact_against_the_singular_values(m: int, d: int, rank: int) -> None:
    A = torch.randn(m, d)
    Y = leading_rows(A, rank)
    assert Y.shape == (rank, d)
    torch.testing.assert_close(Y.T @ Y, best(A, rank), rtol=1e-9, atol=1e-9)
    sizes = Y.square().sum(-1)
    assert (sizes[:-1] >= sizes[1:]).all(), "the largest come first"


@pytest.mark.parametrize(("m", "d"), [(2, 7), (7, 2)])
def test_fewer_directions_than_asked_for(m: int, d: int) -> None:
    A = torch.randn(m, d)
    Y = leading_rows(A, 4)
    assert Y.shape == (4, d)
    torch.testing.assert_close(Y.T @ Y, A.T @ A, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize(("power", "limit"), [(1.0, 1e-3), (2.0, 1e-5)])
def test_range_finder_on_falling_eigenvalues(rank: int, power: float, limit: float) -> None:
    """1/i and 1/i^2, from scratch: the shares of energy that the head of spectral.py states."""
    values = torch.arange(1.0, 301.0) ** -power
    Y = leading_rows(with_spectrum(400, 300, values), rank)
    missing = 1.0 - float(Y.square().sum() / values[:rank].sum())
    assert -1e-12 < missing < limit


def test_range_finder_never_takes_more_than_there_is() -> None:
    """A'A - Y'Y is positive semi-definite even where no eigenvalue stands out."""
    A = torch.randn(300, 200)
    Y = _range_finder(A, 3)
    assert torch.linalg.eigvalsh(A.T @ A - Y.T @ Y)[0] > -1e-9


def test_a_start_at_the_answer_before_is_kept() -> None:
    """The first rows of A hold nearly all there is to find: what the next step of an average sees."""
    g = torch.Generator().manual_seed(1)
    past = 10.0 * torch.randn(3, 200, generator=g)
    A = torch.cat([past, 0.1 * torch.randn(300, 200, generator=g)])
    Y = leading_rows(A, 3)
    torch.testing.assert_close(Y.T @ Y, best(A, 3), rtol=1e-6, atol=1e-6 * float(past.norm() ** 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "d"), [(2, 9), (20, 9), (200, 300)])
def test_waits_for_nobody(m: int, d: int, dtype: torch.dtype) -> None:
    Y = leading_rows(torch.empty(m, d, dtype=dtype, device="meta"), 4)
    assert Y.shape == (4, d) and Y.dtype == dtype and Y.device.type == "meta"


def test_zeros_have_no_directions() -> None:
    for A in (torch.zeros(5, 8), torch.zeros(200, 200)):
        assert torch.equal(leading_rows(A, 2), torch.zeros(2, A.shape[1]))
