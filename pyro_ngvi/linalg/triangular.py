"""Solves with one triangular matrix, of which ``vmap`` makes one for all its rows.

Under ``vmap`` torch copies L for each of S rows, and solves for one column S times, which for an L of
300 x 300 numbers and 1,000 rows takes some 50 times as long as one solve for 1,000 columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: rows and columns of L from which that is worth a function of ours
LARGE = 64


def solve(L: Tensor, x: Tensor, transposed: bool = False) -> Tensor:
    """L^-1 x, or L^-T x if ``transposed``, of a lower triangular L (..., n, n) and x (..., n)."""
    if L.dim() > 2:
        L = L.mT if transposed else L
        return torch.linalg.solve_triangular(L, x.unsqueeze(-1), upper=transposed).squeeze(-1)
    found: Any = Solve.apply(L, x, transposed) if len(L) >= LARGE else _rows(L, x, transposed)
    return found


def _rows(L: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """Of L (*b, n, n) and x (*b, ..., n)."""
    columns = x.reshape(*L.shape[:-2], -1, x.shape[-1]).mT
    L = L.mT if transposed else L
    return torch.linalg.solve_triangular(L, columns, upper=transposed).mT.reshape(x.shape)


class Solve(torch.autograd.Function):
    """:func:`solve` with one L (n, n)."""

    @staticmethod
    def forward(L: Tensor, x: Tensor, transposed: bool) -> Tensor:
        return _rows(L, x, transposed)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.transposed = inputs[2]
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        L, y = ctx.saved_tensors
        u = Solve.apply(L, grads[0], not ctx.transposed)
        by_L = None
        if ctx.needs_input_grad[0]:  # L y = x, so L dy = dx - dL y; with L' likewise
            rows, columns = (y, u) if ctx.transposed else (u, y)
            n = y.shape[-1]
            by_L = -(rows.reshape(-1, n).mT @ columns.reshape(-1, n)).tril()
        return by_L, u, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        L, y = ctx.saved_tensors
        of_L, of_x, _ = tangents
        moved = torch.zeros_like(y) if of_x is None else of_x
        if of_L is not None:
            of_L = of_L.tril()
            moved = moved - y @ (of_L if ctx.transposed else of_L.mT)
        return Solve.apply(L, moved, ctx.transposed)

    @staticmethod
    def vmap(info: Any, in_dims: Any, L: Tensor, x: Tensor, transposed: bool) -> tuple[Tensor, int]:
        of_L, of_x, _ = in_dims
        x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if of_x is None else x.movedim(of_x, 0)
        if of_L is None:
            return Solve.apply(L, x, transposed), 0  # pyright: ignore[reportReturnType]
        return _rows(L.movedim(of_L, 0), x, transposed), 0
