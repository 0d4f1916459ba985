"""Deterministic points and weights for Gaussian expectations."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def sobol_normal(count: int, dim: int) -> Tensor:
    """Scrambled Sobol points (count, dim) of N(0, I), in float64 on the CPU; always the same ones."""
    u = torch.quasirandom.SobolEngine(dim, scramble=True, seed=0).draw(count).double()
    return torch.special.ndtri(u.clamp(1e-6, 1.0 - 1e-6))


def gauss_hermite(
    order: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Nodes and weights, (order,), with sum_i w_i f(x_i) = E f(x), x ~ N(0, 1), exact for polynomials f
    to degree 2 order - 1; a ``ValueError`` for an order below 1.

    Example:
        >>> x, w = gauss_hermite(5)
        >>> round(float((w * x**4).sum()), 5)
        3.0
    """
    if order < 1:
        raise ValueError(f"gauss_hermite needs an order of at least 1, got {order}.")
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return (
        torch.as_tensor(nodes, dtype=dtype, device=device),
        torch.as_tensor(weights / weights.sum(), dtype=dtype, device=device),
    )
