"""Eigenvalues of small symmetric matrices without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["positive_part", "symmetric_eigen"]

#: QR iterations; neighbours a factor 1.3 apart are separated to 1e-3, closer ones stay mixed
ITERATIONS = 30


def positive_part(G: Tensor) -> Tensor:
    """The nearest positive semi-definite matrices to symmetric ones (n, k, k); NaN where not finite.

    For k > 1 a GPU waits for it.

    Example:
        >>> positive_part(torch.tensor([[[-1.0]], [[2.0]]])).flatten()
        tensor([0., 2.])
    """
    if G.shape[-1] == 1:
        return G.clamp_min(0.0)
    finite = torch.isfinite(G).flatten(1).all(-1).reshape(-1, 1, 1)
    values, vectors = torch.linalg.eigh(torch.where(finite, G, torch.zeros_like(G)))
    projected = vectors @ (values.clamp_min(0.0).unsqueeze(-1) * vectors.mT)
    return torch.where(finite, projected, torch.full_like(G, torch.nan))


def symmetric_eigen(G: Tensor, iterations: int = ITERATIONS) -> tuple[Tensor, Tensor]:
    """Eigenvalues (n,), largest first, and eigenvectors (n, n) in columns; G positive semi-definite.

    On a CPU exact.  ``torch.linalg.eigh`` waits for other devices, so there a fixed number of
    unshifted QR iterations is done: vectors of nearly equal eigenvalues stay mixed, which leaves the
    subspace that they span, and Rayleigh quotients within it, as they are.
    """
    if G.device.type == "cpu":
        # in float32 LAPACK may fail to converge where many eigenvalues are rounding error
        values, vectors = torch.linalg.eigh(G.double())
        return values.flip(-1).to(G.dtype), vectors.flip(-1).to(G.dtype)
    return qr_iteration(G, iterations)


def qr_iteration(G: Tensor, iterations: int = ITERATIONS) -> tuple[Tensor, Tensor]:
    """As :func:`symmetric_eigen`, by QR iterations on any device."""
    vectors = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    for _ in range(iterations):
        vectors, _ = torch.linalg.qr(G @ vectors)
    values = (vectors * (G @ vectors)).sum(-2)
    return values, vectors
