"""Deterministic points and weights for Gaussian expectations."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def sphere_points(
    d: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Tensor:
    """The 2d points +-sqrt(d) e_i, equally weighted, shape (2d, d).

    They integrate every polynomial of degree 3 in d dimensions exactly against N(0, I)
    (Stroud 1971, the spherical-radial rule of degree 3).  Used as noise they make a natural-gradient
    step on a conjugate Gaussian model exact, without a seed.

    Example:
        >>> points = sphere_points(2)
        >>> (points.T @ points / 4).round(decimals=6)
        tensor([[1., 0.],
                [0., 1.]])
    """
    if d < 1:
        raise ValueError(f"sphere_points needs a dimension of at least 1, got {d}.")
    points = math.sqrt(d) * torch.eye(d, dtype=dtype, device=device)
    return torch.cat([points, -points])


def gauss_hermite(
    order: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Nodes and weights with sum_i w_i f(x_i) = E f(x), x ~ N(0, 1), exact to degree 2 order - 1.

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
