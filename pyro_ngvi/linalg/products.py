"""Matrix products that torch has no name for."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BLOCK", "matvec", "symmetric_product"]

#: columns of a triangle that are multiplied, or solved for, at once
BLOCK = 96


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """Products (..., m) of ``matrix`` (..., m, n) with ``vector`` (..., n).

    Example:
        >>> import torch
        >>> matvec(torch.eye(2).expand(3, 2, 2), torch.ones(3, 2)).shape
        torch.Size([3, 2])
    """
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def symmetric_product(triangle: Tensor, other: Tensor) -> Tensor:
    """L'B (R, R) for a lower triangular L (R, R) and a B with which it is symmetric, such as D L.

    A third of R^3 operations, not 2 R^3: half of the result, from the entries of L that are not 0.

    Example:
        >>> import torch
        >>> L = torch.tensor([[1.0, 0.0], [2.0, 3.0]])
        >>> symmetric_product(L, L)
        tensor([[5., 6.],
                [6., 9.]])
    """
    if triangle.requires_grad or other.requires_grad:  # slices would each leave a gradient (R, R)
        return triangle.mT @ other
    product = torch.empty_like(other)
    for start in range(0, len(triangle), BLOCK):
        stop = start + BLOCK
        rows = triangle[start:, start:stop].mT @ other[start:, :stop]
        product[start:stop, :stop] = rows
        product[:start, start:stop] = rows[:, :start].mT
    return product
