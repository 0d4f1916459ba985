r"""Sums over the per-example gradients of any function, in bounded memory.

For f: theta (d,) -> (N,), one log probability an example, with Jacobian J (N, d) and weights w (N,),

    squared_sum    sum_i w_i J_i^2        (d,)
    outer_sum      sum_i w_i J_i J_i'     (d, d)
    weighted_rows  sqrt(w_i) J_i          (N, d)

J comes in blocks: of columns by forward mode (d directional derivatives) where d <= N, else of rows by
reverse mode (N gradients), which is also taken where an operation of f has no forward mode.

Memory: a block has as many columns or rows as ``budget`` bytes allow, one at the least. A column is
counted as N (width + 3) numbers, a row as 3 d + N width; ``width`` is what f holds for an example at a
time (1 for a regression, about the sum of a network's layer widths). The result is not counted.
Under ``vmap`` over S particles each particle takes its budget: pass a part of it.

Cost: min(d, N) passes through all of f. For the weights of a network's layers see
:mod:`pyro_ngvi.curvature.taps.taps`, which needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vjp, vmap

from .forward import jvp

__all__ = ["BUDGET", "outer_sum", "per_example_jacobian", "squared_sum", "weighted_rows"]

BUDGET = 2**28
"""Default bytes for a block of the Jacobian."""

Function = Callable[[Tensor], Tensor]
Mode = Literal["auto", "forward", "reverse"]


def squared_sum(
    f: Function,
    theta: Tensor,
    weights: Tensor | None = None,
    *,
    budget: int = BUDGET,
    width: int = 1,
    mode: Mode = "auto",
) -> Tensor:
    """sum_i w_i J_i^2, (d,).

    Args:
        f: maps theta (d,) to (N,), without side effects.
        theta: the point, (d,).
        weights: w (N,); ones by default.
        budget: bytes for a block of the Jacobian.
        width: numbers that f holds for an example at a time.
        mode: "forward", "reverse", or by default the cheaper one.

    Raises:
        ValueError: when theta or f(theta) is not a vector, or the weights are not (N,).

    >>> X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> squared_sum(lambda t: X @ t, torch.zeros(2), torch.tensor([1.0, 10.0]))
    tensor([ 91., 164.])
    """

    def combine(jacobian: _Jacobian) -> Tensor:
        if jacobian.forward:
            return torch.cat([jacobian.weigh(J.square()).sum(0) for _, J in jacobian])
        return reduce(torch.add, (jacobian.weigh(J.square(), rows).sum(0) for rows, J in jacobian))

    return _reduced(combine, f, theta, weights, budget=budget, width=width, mode=mode)


def outer_sum(f: Function, theta: Tensor, weights: Tensor | None = None, **how: Any) -> Tensor:
    """sum_i w_i J_i J_i', (d, d); arguments as in :func:`squared_sum`.

    Columns that do not fit into ``budget`` together are made again for each block before them;
    reverse mode is taken where that is cheaper.

    >>> X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> outer_sum(lambda t: X @ t, torch.zeros(2))
    tensor([[10., 14.],
            [14., 20.]])
    """

    def combine(jacobian: _Jacobian) -> Tensor:
        if not jacobian.forward:
            return reduce(torch.add, (jacobian.weigh(J, rows).mT @ J for rows, J in jacobian))
        slices = jacobian.slices()
        lower = []
        for a, columns in enumerate(slices):
            J = jacobian.block(columns)
            left = jacobian.weigh(J).mT
            lower.append([left @ jacobian.block(other) for other in slices[:a]] + [left @ J])
        # The blocks above the diagonal are those below it, transposed.
        n = range(len(slices))
        return torch.cat(
            [torch.cat([lower[a][b] if b <= a else lower[b][a].mT for b in n], 1) for a in n]
        )

    return _reduced(combine, f, theta, weights, pairs=True, **how)


def weighted_rows(f: Function, theta: Tensor, weights: Tensor | None = None, **how: Any) -> Tensor:
    """sqrt(w_i) J_i, (N, d), for w_i >= 0; arguments as in :func:`squared_sum`.

    >>> X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> weighted_rows(lambda t: X @ t, torch.zeros(2), torch.tensor([1.0, 4.0]))
    tensor([[1., 2.],
            [6., 8.]])
    """

    def combine(jacobian: _Jacobian) -> Tensor:
        return torch.cat([J for _, J in jacobian], 1 if jacobian.forward else 0)

    J = _reduced(combine, f, theta, weights, **how)
    return J if weights is None else weights.sqrt().unsqueeze(-1) * J


def per_example_jacobian(f: Function, theta: Tensor, **how: Any) -> Tensor:
    """J, (N, d); arguments as in :func:`squared_sum`.

    >>> per_example_jacobian(lambda t: t**2, torch.tensor([1.0, 3.0]))
    tensor([[2., 0.],
            [0., 6.]])
    """
    return weighted_rows(f, theta, **how)


class _Jacobian:
    """The Jacobian of f in blocks: of columns (N, k) in forward mode, else of rows (k, d)."""

    def __init__(
        self, f: Function, theta: Tensor, weights: Tensor | None, n: int, size: int, forward: bool
    ) -> None:
        self.f, self.theta, self.weights = f, theta, weights
        self.n, self.size, self.forward = n, size, forward
        self._pullback: Any = None if forward else vjp(f, theta)[1]

    def slices(self) -> list[slice]:
        length = len(self.theta) if self.forward else self.n
        return [slice(i, min(i + self.size, length)) for i in range(0, length, self.size)]

    def block(self, part: slice) -> Tensor:
        """The columns or rows ``part``."""
        length = len(self.theta) if self.forward else self.n
        kind: Any = {"dtype": self.theta.dtype, "device": self.theta.device}
        directions = torch.zeros(part.stop - part.start, length, **kind)
        directions.diagonal(part.start).fill_(1.0)
        if not self.forward:
            return vmap(lambda e: self._pullback(e)[0], randomness="same")(directions)

        def column(e: Tensor) -> Tensor:
            return jvp(self.f, (self.theta,), (e,))[1]

        return vmap(column, out_dims=-1, randomness="same")(directions)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        return ((part, self.block(part)) for part in self.slices())

    def weigh(self, J: Tensor, rows: slice | None = None) -> Tensor:
        """Multiply rows (those of the weights' part ``rows``) by their weights."""
        if self.weights is None:
            return J
        w = self.weights if rows is None else self.weights[rows]
        return w.unsqueeze(-1) * J


def _reduced(
    combine: Callable[[_Jacobian], Tensor],
    f: Function,
    theta: Tensor,
    weights: Tensor | None,
    budget: int = BUDGET,
    width: int = 1,
    mode: Mode = "auto",
    pairs: bool = False,
) -> Tensor:
    """``combine`` of the Jacobian in the cheaper mode; ``pairs``: of each two of its blocks."""
    if mode not in ("auto", "forward", "reverse"):
        raise ValueError(f"mode is {mode!r}; it must be 'auto', 'forward' or 'reverse'.")
    f = _checked(f, weights)
    n = len(f(theta.detach())) if weights is None else weights.numel()
    d = len(theta)
    room = budget // theta.element_size()
    columns = max(1, room // max(1, n * (width + 3)))
    rows = max(1, room // (3 * d + n * width))
    passes = d
    if pairs:  # a block is made once, and once more for each block after it
        passes = sum(d - start for start in range(0, d, columns))
    forward = passes <= n or n == 0 if mode == "auto" else mode == "forward"
    if forward:
        try:
            return combine(_Jacobian(f, theta, weights, n, columns, True))
        except NotImplementedError:  # an operation without forward mode
            if mode == "forward":
                raise
    return combine(_Jacobian(f, theta, weights, n, rows, False))


def _checked(f: Function, weights: Tensor | None) -> Function:
    """f, whose shapes are looked at when it is called: a run for that alone would cost a pass."""

    def checked(theta: Tensor) -> Tensor:
        shape = (value := f(theta)).shape
        if theta.dim() != 1 or len(shape) != 1:
            raise ValueError(
                f"f maps theta of shape {tuple(theta.shape)} to {tuple(shape)}; both must be vectors, "
                f"(d,) and (N,)."
            )
        if weights is not None and weights.shape != shape:
            raise ValueError(
                f"The weights have shape {tuple(weights.shape)} for {shape[0]} examples; give (N,)."
            )
        return value

    return checked
