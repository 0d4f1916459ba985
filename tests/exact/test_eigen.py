"""QR iterations, which wait for no device, against eigh."""

import pytest
import torch
from torch import Tensor

from pyro_ngvi.linalg.spectral import qr_iteration, symmetric_eigen


def with_spectrum(values: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix with eigenvalues ``values``, largest first, and its eigenvectors in columns."""
    g = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=g))
    return (Q * values) @ Q.T, Q


def test_on_a_cpu_exact_and_largest_first() -> None:
    values = torch.tensor([5.0, 4.9, 1.0, 0.0])
    G, _ = with_spectrum(values)
    got, vectors = symmetric_eigen(G)
    torch.testing.assert_close(got, values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((vectors * got) @ vectors.T, G, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [2, 12, 40])
def test_separated_eigenvalues(n: int) -> None:
    """Neighbours a factor 2 apart: vectors to 2^-30, values to the square of it."""
    values = 2.0 ** -torch.arange(n, dtype=torch.float64)
    G, Q = with_spectrum(values)
    got, vectors = qr_iteration(G)
    torch.testing.assert_close(got, values, rtol=1e-12, atol=1e-15)
    # the largest ones: those near rounding error of the whole have no accurate vectors
    k = min(n, 10)
    overlap = (vectors[:, :k] * Q[:, :k]).sum(0).abs()
    torch.testing.assert_close(overlap, torch.ones(k), rtol=0, atol=1e-6)


def test_neighbours_a_factor_of_1_3_apart() -> None:
    """As the note at ITERATIONS says: 1.3^-30 = 4e-4 is left of each in the other."""
    values = 1.3 ** -torch.arange(8, dtype=torch.float64)
    G, Q = with_spectrum(values)
    _, vectors = qr_iteration(G)
    mixed = (Q.T @ vectors).abs() - torch.eye(8)
    # the start decides the factor before 4e-4; its square root of the sum over 7 others
    assert mixed.abs().max() < 1e-2


def test_clusters_keep_their_subspace_and_their_quotients() -> None:
    values = torch.cat([torch.tensor([100.0, 99.9, 99.8]), 1.0 + 1e-3 * torch.rand(9)])
    values = values.sort(descending=True).values
    G, Q = with_spectrum(values)
    got, vectors = qr_iteration(G)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(12), rtol=0, atol=1e-12)
    for cluster in (slice(0, 3), slice(3, 12)):
        P, wanted = vectors[:, cluster] @ vectors[:, cluster].T, Q[:, cluster] @ Q[:, cluster].T
        torch.testing.assert_close(P, wanted, rtol=0, atol=1e-12)
        # Rayleigh quotients lie within the cluster and have its sum
        assert (got[cluster] > values[cluster].min() - 1e-9).all()
        assert (got[cluster] < values[cluster].max() + 1e-9).all()
        torch.testing.assert_close(got[cluster].sum(), values[cluster].sum())


def test_rank_deficient() -> None:
    x = torch.randn(3, 10)
    got, vectors = qr_iteration(x.T @ x)
    assert vectors.isfinite().all()
    torch.testing.assert_close((vectors * got) @ vectors.T, x.T @ x, rtol=0, atol=1e-2)
    torch.testing.assert_close(got[3:], torch.zeros(7), rtol=0, atol=1e-12)


def test_zero_matrix() -> None:
    got, vectors = qr_iteration(torch.zeros(4, 4))
    assert torch.equal(got, torch.zeros(4)) and vectors.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_runs_on_meta_tensors(dtype: torch.dtype) -> None:
    values, vectors = symmetric_eigen(torch.empty(6, 6, dtype=dtype, device="meta"))
    assert values.shape == (6,) and vectors.shape == (6, 6)
    assert values.dtype == vectors.dtype == dtype and vectors.device.type == "meta"
