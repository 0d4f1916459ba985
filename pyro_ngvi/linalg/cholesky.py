"""Cholesky factors without inverses and without waiting for the device; many small ones at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .products import eye_like

#: number of step halvings that are tried; 2^-20 of a step is no step
HALVINGS = 20

#: a step leaves at least this share of the precision in any direction: variances grow at most 4-fold
SMALLEST = 0.25

#: up to here a loop over entries is many times faster than LAPACK, which takes a matrix at a time
SMALL = 4


def cholesky_or_nan(K: Tensor) -> tuple[Tensor, Tensor]:
    """Lower Cholesky factors (..., d, d), NaN where there is none, and where there is one (...)."""
    root, info = torch.linalg.cholesky_ex(K)
    exists = info == 0
    return torch.where(exists[..., None, None], root, torch.nan), exists


def inverse_triangle(L: Tensor) -> Tensor:
    """L^-1 of lower triangular matrices (..., d, d)."""
    return torch.linalg.solve_triangular(L, eye_like(L), upper=False)


def inverse_cholesky(K: Tensor) -> Tensor:
    """Lower triangular T (d, d) with T T' = K^-1, for K positive definite."""
    # K = N' N with N lower triangular: Cholesky of the matrix read from its last corner; T = N^-1
    C, _ = torch.linalg.cholesky_ex(K.flip(-2, -1))
    return inverse_triangle(C.flip(-2, -1).mT)


def inverse_cholesky_of_improved(H: Tensor, step: Tensor | float) -> tuple[Tensor, Tensor]:
    """Lower triangular T with T T' = (I + A + A^2 / 2)^-1, A = s H, and s / step.

    That is positive definite for every A, but it stands for exp(A) only near 0, and below -1 it rises
    again.  So s is shortened until the eigenvalues of A lie within [-1, 1], by the bound |A^4|^(1/4),
    at most d^(1/8) times the largest.
    """
    A = step * H
    size = torch.linalg.matrix_norm(A).clamp_min(torch.finfo(H.dtype).tiny)
    unit = A / size
    square = unit @ unit
    largest = size * torch.linalg.matrix_norm(square @ square) ** 0.25
    shrink = (1.0 / largest).clamp_max(1.0)
    identity = eye_like(H)
    shifted = identity + shrink * A
    return inverse_cholesky(0.5 * (identity + shifted @ shifted)), shrink


def inverse_cholesky_of_shifted(H: Tensor, step: Tensor | float) -> tuple[Tensor, Tensor]:
    """Lower triangular T with T T' = (I + s H)^-1, s = step / 2^j, H symmetric (d, d), and s / step.

    j <= ``HALVINGS`` is the smallest number that leaves I + s H eigenvalues of at least 1/4; where none
    does, s is 0.  No result travels from a device to the host.
    """
    identity = eye_like(H)
    # eigvalsh waits for the device, but needs a fifth of the time of the factorisations at d = 31
    needed = _by_eigenvalues if H.device.type == "cpu" else _by_factorisations
    j = needed(step * H, HALVINGS)
    shrink = torch.where(j <= HALVINGS, torch.exp2(-j), torch.zeros_like(j))
    return inverse_cholesky(identity + shrink * step * H), shrink


def _by_eigenvalues(H: Tensor, halvings: int) -> Tensor:
    """The smallest j with I + H / 2^j >= 1/4 I, from the smallest eigenvalue of H."""
    room = 1.0 - SMALLEST
    worst = -torch.linalg.eigvalsh(H)[..., 0]
    return torch.log2(worst.clamp_min(room) / room).ceil()


def _by_factorisations(H: Tensor, halvings: int) -> Tensor:
    """The same j, or ``halvings`` + 1 if it is larger, by bisection: 5 factorisations for 20.

    3/4 I + H / 2^j has a Cholesky factor for this j and above it.  The margin of a few roundings
    lets a matrix pass that is singular exactly.
    """
    margin = 8.0 * H.shape[-1] * torch.finfo(H.dtype).eps
    room = (1.0 - SMALLEST + margin) * eye_like(H)
    low = torch.zeros(H.shape[:-2], dtype=H.dtype, device=H.device)
    high = torch.full_like(low, halvings + 1)
    for _ in range((halvings + 1).bit_length()):
        j = ((low + high) / 2.0).floor()
        _, info = torch.linalg.cholesky_ex(room + torch.exp2(-j)[..., None, None] * H)
        fits = info == 0
        high, low = torch.where(fits, j, high), torch.where(fits, low, j + 1)
    return high


# --- many small triangular factors, and solutions with them


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
