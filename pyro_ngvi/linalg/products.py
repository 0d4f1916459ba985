"""Products of batches of small matrices and vectors."""

from __future__ import annotations

from torch import Tensor

__all__ = ["matvec"]


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """Products (..., m) of ``matrix`` (..., m, n) with ``vector`` (..., n).

    Example:
        >>> import torch
        >>> matvec(torch.eye(2).expand(3, 2, 2), torch.ones(3, 2)).shape
        torch.Size([3, 2])
    """
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
