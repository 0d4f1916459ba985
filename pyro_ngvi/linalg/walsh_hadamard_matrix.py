r"""Matrices S1 H diag(g) H S2 of any shape, made of Walsh-Hadamard blocks.

Rossi, Marmin & Filippone (2020, NeurIPS, "Walsh-Hadamard variational inference for Bayesian deep
learning") write a D x D matrix as S1 H diag(g) H S2 with H the orthonormal Hadamard matrix
(D, D), S1 and S2 diagonal.  A matrix (n, m) is a stack of ceil(n / D) blocks, D the power of two from m
on; rows and columns beyond n and m are cut off.  Times sqrt(D), so that independent g_k of variance 1
and diagonals of +-1 make entries of variance 1, block b is

    U_ij = s_i t_bj h_b[i xor j],        h_b = H g_b,                                        (1)

because H_ik H_jk sqrt(D) = H_(i xor j)k in Sylvester's order (i counts within the block).  So a block
holds D different numbers up to the diagonals: entries of one class i xor j are fully correlated,
and for diagonal Cov(g) all entries have the same variance, s_i^2 t_bj^2 mean_k Var(g_k).

(1) builds U in O(n m), and a product with x never builds it:

    U x = sqrt(D) s o H (g o H (t o x))        in O(D log D) for each block.                 (2)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .walsh_hadamard import walsh_hadamard_transform


@dataclass(frozen=True)
class WalshHadamardMatrix:
    """The shape of a matrix (rows, columns) of Walsh-Hadamard blocks; it holds no numbers.

    ``g`` is (..., num_g), ``left`` (rows,) and ``right`` (blocks, columns): the diagonals S1 and S2
    of all blocks, without the entries that are cut off.

    Args:
        rows, columns: n and m, at least 1.
        shape: that of U, by default (rows, columns); its entries in a row are the matrix's first.

    Raises:
        ValueError: for a ``shape`` without entries or with too many.

    Example:
        >>> import torch
        >>> matrix = WalshHadamardMatrix(50, 13)
        >>> matrix.size, matrix.blocks, matrix.num_g
        (16, 4, 64)
        >>> left, right = torch.ones(50), torch.ones(4, 13)
        >>> g, x = torch.randn(64), torch.randn(5, 13)
        >>> U = matrix.dense(g, left, right)
        >>> torch.allclose(matrix.product(x, g, left, right), x @ U.mT, atol=1e-4)
        True
    """

    rows: int
    columns: int
    shape: tuple[int, ...] = ()
    size: int = field(init=False)
    blocks: int = field(init=False)

    def __post_init__(self) -> None:
        size = 1 << (self.columns - 1).bit_length()
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "blocks", -(-self.rows // size))
        object.__setattr__(self, "shape", tuple(self.shape) or (self.rows, self.columns))
        if not 0 < self.entries <= self.rows * self.columns:
            raise ValueError(
                f"The shape {self.shape} has {self.entries} entries; a matrix of {self.rows} rows and "
                f"{self.columns} columns has {self.rows * self.columns}."
            )

    @property
    def entries(self) -> int:
        """Number of entries of U."""
        return math.prod(self.shape)

    @property
    def num_g(self) -> int:
        """Length of g."""
        return self.blocks * self.size

    def signs(self, seed: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Diagonals of +-1 drawn from ``seed``: ``left`` and ``right``; torch's random state stays."""
        size = self.rows + self.blocks * self.columns
        drawn = torch.from_numpy(np.random.RandomState(seed).choice((-1.0, 1.0), size))
        left, right = drawn.to(like.device, like.dtype).split([self.rows, size - self.rows])
        return left.clone(), right.reshape(self.blocks, self.columns).clone()

    def classes(self, device: torch.device) -> Tensor:
        """For each entry the index of its number in the vector h of all blocks, (entries,)."""
        i = torch.arange(self.rows, device=device)
        return self._classes(i.unsqueeze(-1), torch.arange(self.columns, device=device))

    def has_entries(self) -> np.ndarray:
        """Which numbers of h any entry holds, (num_g,): from the shape alone, whatever torch's mode."""
        live = np.zeros(self.num_g, dtype=bool)
        live[self._classes(np.arange(self.rows)[:, None], np.arange(self.columns))] = True
        return live

    def _classes(self, i: Any, j: Any) -> Any:
        within = ((i % self.size) ^ j) + i // self.size * self.size
        return within.reshape(-1)[: self.entries]

    def weights(self, left: Tensor, right: Tensor) -> Tensor:
        """s_i t_bj for each entry, (..., entries)."""
        every_row = right.repeat_interleave(self.size, dim=-2, output_size=self.blocks * self.size)
        weights = left.unsqueeze(-1) * every_row[..., : self.rows, :]
        return weights.flatten(-2)[..., : self.entries]

    def transform(self, g: Tensor) -> Tensor:
        """h = H g, block by block: (..., num_g) to (..., num_g).  It is its own inverse."""
        return walsh_hadamard_transform(g.unflatten(-1, (-1, self.size))).flatten(-2)

    def dense(self, g: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """U of equation (1), (..., *shape)."""
        h = self.transform(g).index_select(-1, self.classes(g.device))
        return (h * self.weights(left, right)).unflatten(-1, self.shape)

    def product(self, x: Tensor, g: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """x U' by (2): ``x`` (..., columns) with ``g`` (..., num_g), broadcast, to (..., rows)."""
        g = g.unflatten(-1, (-1, self.size))  # (..., blocks, size)
        y = torch.nn.functional.pad(x.unsqueeze(-2) * right, (0, self.size - self.columns))
        y = walsh_hadamard_transform(walsh_hadamard_transform(y) * g)
        return y.flatten(-2)[..., : self.rows] * (left * math.sqrt(self.size))

    def projection(self, U: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """g (..., num_g) whose matrix (1) is nearest to U (..., *shape), entry by entry.

        Numbers of h that no entry holds, because all of theirs are cut off, are zero.
        """
        weights, classes = self.weights(left, right), self.classes(U.device)
        weighted = U.flatten(-len(self.shape)) * weights
        sums = weighted.new_zeros((*weighted.shape[:-1], self.num_g))
        # the Gram matrix of (1) in h is diagonal
        gram = weights.new_zeros(self.num_g).index_add(0, classes, weights.square())
        h = sums.index_add(-1, classes, weighted)
        return self.transform(h / torch.where(gram > 0.0, gram, 1.0))

    def variance(self, g_variance: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Var(U) in its shape, from variances (num_g,) of g or its covariance (num_g, num_g)."""
        if g_variance.dim() == 1:
            mean = g_variance.unflatten(-1, (-1, self.size)).mean(-1)
            numbers = mean.repeat_interleave(self.size)
        else:
            numbers = self.transform(self.transform(g_variance).mT).diagonal()
        variance = numbers[self.classes(left.device)] * self.weights(left, right).square()
        return variance.unflatten(-1, self.shape)


def matrix_for(shape: torch.Size) -> WalshHadamardMatrix:
    """The blocks for values of that shape.

    (n, m) is a matrix; (n, m, k, ...) the matrix (n, m k ...); a vector (n,) fills the rows of a square
    matrix of the power of two from sqrt(n) on, so that it needs O(sqrt n) numbers.
    """
    if len(shape) >= 2:
        return WalshHadamardMatrix(shape[0], shape[1:].numel(), tuple(shape))
    (n,) = shape
    side = 1 << ((n - 1).bit_length() + 1) // 2
    return WalshHadamardMatrix(-(-n // side), side, (n,))
