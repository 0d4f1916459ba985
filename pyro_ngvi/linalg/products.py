"""Products of matrices, and of gradients, that torch has no name for."""

from __future__ import annotations

import torch
from torch import Tensor

#: columns of a triangle that are multiplied, or solved for, at once
BLOCK = 96


def eye_like(x: Tensor) -> Tensor:
    """The identity (d, d) for ``x`` (..., d)."""
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """Products (..., m) of ``matrix`` (..., m, n) with ``vector`` (..., n)."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def symmetric_product(triangle: Tensor, other: Tensor) -> Tensor:
    """L'B (R, R) for a lower triangular L (R, R) and a B with which it is symmetric, such as D L.

    A third of R^3 operations, not 2 R^3: half of the result, from the entries of L that are not 0.
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


def each_gradient(values: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of each of ``values`` (n,) in each leaf, (n, *shape); zero where there is none."""
    n = len(values)
    if n == 1:
        found = torch.autograd.grad(values.sum(), leaves, allow_unused=True, retain_graph=True)
        grads = [None if g is None else g[None] for g in found]
    else:
        unit = torch.eye(n, dtype=values.dtype, device=values.device)
        how = {"allow_unused": True, "retain_graph": True}
        try:
            grads = torch.autograd.grad(values, leaves, unit, is_grads_batched=True, **how)
        except RuntimeError:  # an operation without a batching rule
            rows = [each_gradient(v[None], leaves) for v in values]
            return [torch.cat(column) for column in zip(*rows, strict=True)]
    return [
        p.new_zeros((n, *p.shape)) if g is None else g for p, g in zip(leaves, grads, strict=True)
    ]
