r"""The matrix normal :class:`MatrixNormal`: its natural gradient.

F is the same for every q: the identity for the location, m and n times the full-rank blocks for the
factors, and a cross block 2 between any two diagonal entries x_i of X and y_j of Y.

**The null direction.**  A -> t A, B -> B / t leaves q unchanged: x = 1, y = -1 (all ones) has F u = 0.
The natural gradient is F's pseudo-inverse times the gradient, the shortest |X|^2 + |Y|^2 + |T|^2 of all
solutions.  With a and b the means of the diagonals of the gradients in X and Y,

    X_ij = g_ij / m (i > j),   x = (g_x - a) / (2 m) + m s,   s = (a + b) / (2 (n + m)^2),
    Y_ij = g_ij / n (i > j),   y = (g_y - b) / (2 n) + n s.

Then tr X = tr Y: log det A - log det B never changes along natural gradients, and the retraction,
A (I + X + X^2 / 2) and B likewise, is rescaled to keep it exactly for any tangent.  So the gauge does
not drift, and averages of A and B make sense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from ..linalg import stiefel
from .base import NormalFamily, Tensors, with_backward


def _draw(loc: Tensor, A: Tensor, B: Tensor, noise: Tensor) -> Tensor:
    E = noise.reshape(*noise.shape[:-1], A.shape[-1], B.shape[-1])
    return loc + (A @ E @ B.mT).reshape(noise.shape)


def _symmetrised(
    g: Tensor, loc: Tensor, A: Tensor, B: Tensor, noise: Tensor, z: Tensor
) -> tuple[Any, ...]:
    """Without the antisymmetric parts of H E' and H' E, pure noise, with H = A' G B of each draw."""
    n, m = A.shape[-1], B.shape[-1]
    E, H = noise.reshape(-1, n, m), A.mT @ g.reshape(-1, n, m) @ B
    rows = (H @ E.mT).sum(0)
    columns = H.reshape(-1, m).mT @ E.reshape(-1, m)
    both = zip((A, B), (0.5 * (rows + rows.mT), 0.5 * (columns + columns.mT)), strict=True)
    scales = (solve_triangular(L.mT, S, upper=True).tril() for L, S in both)
    return g.reshape(-1, n * m).sum(0), *scales, None


_draw_symmetrised = with_backward(_draw, _symmetrised)


class MatrixNormal(NormalFamily):
    """Gaussians over matrices W (n, m) whose covariance is a Kronecker product.

        W = M + A E B',   E standard normal (n, m),   Cov(W_ij, W_kl) = (A A')_ik (B B')_jl,

    with A (n, n) and B (m, m) lower triangular.  z (n m,) is W row by row, so that its covariance is
    (A A') kron (B B') and its Cholesky factor A kron B.  No nm x nm matrix is formed.

    Stored: ``loc`` = M (n m,), ``row_tril`` = A (n, n), ``column_tril`` = B (m, m).
    Local frame: dM = A T B', dA = A X, dB = B Y, with X and Y lower triangular, where

        <u, F u> = |T|^2 + m q(X) + n q(Y) + 4 tr X tr Y,   q(X) = sum_{i>j} X_ij^2 + 2 sum_i X_ii^2.

    O(n m (n + m)) a draw, O(n^3 + m^3 + n m (n + m)) a step.
    Not for matrices whose rows (columns) have covariances of different shapes: use
    :class:`FullRankNormal` while n m is below a few thousand.  Source: Dawid (1981, Biometrika 68:265);
    as a posterior of weight matrices Louizos & Welling (2016, arXiv:1603.04733).

    Args:
        rows: n, at least 1.
        columns: m, at least 1.

    Raises:
        ValueError: from ``init`` for a location that has not n m entries.

    Example:
        >>> import torch
        >>> family = MatrixNormal(2, 3)
        >>> q = family.init(torch.zeros(6), scale=0.5)
        >>> {name: tuple(v.shape) for name, v in q.items()}
        {'loc': (6,), 'row_tril': (2, 2), 'column_tril': (3, 3)}
        >>> family.stddev(q)
        tensor([0.5000, 0.5000, 0.5000, 0.5000, 0.5000, 0.5000])
    """

    names = ("loc", "row_tril", "column_tril")
    triangles: Mapping[str, int] = {"row_tril": 0, "column_tril": 0}

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns

    def init(self, loc: Tensor, scale: float) -> Tensors:
        if loc.shape != (self.rows * self.columns,):
            raise ValueError(
                f"MatrixNormal({self.rows}, {self.columns}) needs a location of shape "
                f"({self.rows * self.columns},), row after row, got {tuple(loc.shape)}."
            )
        root = scale**0.5
        return {
            "loc": loc.clone(),
            "row_tril": torch.diag(loc.new_full((self.rows,), root)),
            "column_tril": torch.diag(loc.new_full((self.columns,), root)),
        }

    def _factors(self, params: Tensors) -> tuple[Tensor, Tensor]:
        return params["row_tril"].tril(), params["column_tril"].tril()

    def rsample(self, params: Tensors, noise: Tensor) -> Tensor:
        return _draw_symmetrised(params["loc"], *self._factors(params), noise)

    def _whiten(self, params: Tensors, z: Tensor) -> Tensor:
        """A^-1 (Z - M) B^-T for the matrices of z (..., n m), as (n, s, m): s counts them."""
        n, m = self.rows, self.columns
        wide = (z - params["loc"]).reshape(-1, n, m).transpose(0, 1)
        A, B = params["row_tril"], params["column_tril"]
        left = solve_triangular(A, wide.reshape(n, -1), upper=False)
        return solve_triangular(B.mT, left.reshape(-1, m), upper=True, left=False).reshape(n, -1, m)

    def log_det(self, params: Tensors) -> Tensor:
        """log det(A kron B) = m log det A + n log det B, a 0-dim tensor."""
        A, B = params["row_tril"], params["column_tril"]
        log_a = A.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
        return self.columns * log_a + self.rows * B.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)

    def transport(self, params: Tensors, noise: Tensor) -> tuple[Tensor, Tensor]:
        z = _draw(params["loc"], *self._factors(params), noise)  # rsample's has no gradient in it
        return z, self.log_det(params).expand(noise.shape[:-1])

    def noise_of(self, params: Tensors, z: Tensor) -> Tensor:
        return self._whiten(params, z).transpose(0, 1).reshape(z.shape)

    def score(self, params: Tensors, z: Tensor) -> Tensors:
        A, B = self._factors(params)
        w = self._whiten(params, z).transpose(0, 1)
        left = solve_triangular(A.mT, w, upper=True)  # A^-T w
        right = solve_triangular(B, w, upper=False, left=False)  # w B^-1
        precise = solve_triangular(B, left, upper=False, left=False)
        return {
            "loc": precise.reshape(-1, self.rows * self.columns),
            "row_tril": (left @ w.mT).tril() - torch.diag(self.columns / A.diagonal()),
            "column_tril": (right.mT @ w).tril() - torch.diag(self.rows / B.diagonal()),
        }

    def scale_tril(self, params: Tensors) -> Tensor:
        return torch.kron(*self._factors(params))

    def stddev(self, params: Tensors) -> Tensor:
        a, b = (torch.linalg.vector_norm(L, dim=-1) for L in self._factors(params))
        return (a.unsqueeze(-1) * b).reshape(-1)

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        A, B = self._factors(params)
        loc = (A @ tangent["loc"].reshape(len(A), -1) @ B.mT).reshape(-1)
        return super().push(params, tangent) | {"loc": loc}

    def dilation(self, params: Tensors) -> Tensors:
        return {"row_tril": params["row_tril"].tril()}

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        A, B = self._factors(params)
        loc = (A.mT @ grads["loc"].reshape(len(A), -1) @ B).reshape(-1)
        return super().pull(params, grads) | {"loc": loc}

    def fisher_product(self, params: Tensors, tangent: Tensors) -> Tensors:
        X, Y = tangent["row_tril"], tangent["column_tril"]
        x, y = X.diagonal(), Y.diagonal()
        n, m = self.rows, self.columns
        return {
            "loc": tangent["loc"],
            "row_tril": torch.diagonal_scatter(m * X, 2.0 * (m * x + y.sum())),
            "column_tril": torch.diagonal_scatter(n * Y, 2.0 * (n * y + x.sum())),
        }

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        X, Y = gradient["row_tril"], gradient["column_tril"]
        x, y = X.diagonal(), Y.diagonal()
        a, b = x.mean(), y.mean()
        n, m = self.rows, self.columns
        s = (a + b) / (2.0 * (n + m) ** 2)
        return {
            "loc": gradient["loc"],
            "row_tril": torch.diagonal_scatter(X / m, (x - a) / (2.0 * m) + m * s),
            "column_tril": torch.diagonal_scatter(Y / n, (y - b) / (2.0 * n) + n * s),
        }

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        A, B = self._factors(params)
        velocity = A @ tangent["loc"].reshape(len(A), -1) @ B.mT
        A, growth_a = _grown(A, step * tangent["row_tril"])
        B, growth_b = _grown(B, step * tangent["column_tril"])
        # log det A - log det B stays what it was
        t = ((growth_b - growth_a) / (self.rows + self.columns)).exp()
        return {
            "loc": params["loc"] + step * velocity.reshape(-1),
            "row_tril": t * A,
            "column_tril": B / t,
        }


def _grown(L: Tensor, X: Tensor) -> tuple[Tensor, Tensor]:
    """L (I + X + X^2 / 2) and the growth of its log determinant."""
    x = X.diagonal()
    return stiefel.retract(L, X, 0), (1.0 + x + 0.5 * x.square()).log().sum()
