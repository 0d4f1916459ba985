"""Many small triangular factors at once: Cholesky, and solutions with it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .cholesky import cholesky_or_nan

#: up to here a loop over entries is many times faster than LAPACK, which takes a matrix at a time
SMALL = 4


def cholesky(A: Tensor) -> Tensor:
    """Lower triangular R (..., k, k) with R R' = A; NaN where A is not positive definite."""
    k = A.shape[-1]
    if k > SMALL:
        return cholesky_or_nan(A)[0]
    rows: list[list[Tensor]] = []
    for i in range(k):
        row: list[Tensor] = []
        for j in range(i + 1):
            rest = A[..., i, j]
            for m in range(j):
                rest = rest - row[m] * (rows[j][m] if j < i else row[m])
            row.append(rest.sqrt() if i == j else rest / rows[j][j])
        rows.append(row)
    zero = torch.zeros_like(A[..., 0, 0])
    full = [torch.stack([*row, *[zero] * (k - len(row))], -1) for row in rows]
    return torch.stack(full, -2)


def solve(R: Tensor, b: Tensor) -> Tensor:
    """x (..., k) with R x = b."""
    if b.shape[-1] > SMALL:
        return torch.linalg.solve_triangular(R, b.unsqueeze(-1), upper=False).squeeze(-1)
    return _substitute(R, b, range(b.shape[-1]))


def solve_transposed(R: Tensor, b: Tensor) -> Tensor:
    """x (..., k) with R' x = b."""
    if b.shape[-1] > SMALL:
        return torch.linalg.solve_triangular(R.mT, b.unsqueeze(-1), upper=True).squeeze(-1)
    return _substitute(R.mT, b, reversed(range(b.shape[-1])))


def _substitute(A: Tensor, b: Tensor, order: Iterable[int]) -> Tensor:
    """x with A x = b, whose entries depend on those before them in this order."""
    x: dict[int, Tensor] = {}
    for i in order:
        rest = b[..., i]
        for j in sorted(x):
            rest = rest - A[..., i, j] * x[j]
        x[i] = rest / A[..., i, i]
    return torch.stack([x[i] for i in sorted(x)], -1)


def solve_columns(R: Tensor, B: Tensor) -> Tensor:
    """X (..., k, m) with R X = B."""
    if R.shape[-1] > SMALL:
        return torch.linalg.solve_triangular(R, B, upper=False)
    return solve(R.unsqueeze(-3), B.mT).mT
