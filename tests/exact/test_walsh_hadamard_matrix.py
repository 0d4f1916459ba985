"""The geometry of Walsh-Hadamard matrices against scipy's Hadamard matrices, written out in full."""

import math
from typing import Any

import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor

from pyro_ngvi.guides.reparam import WalshHadamardTransform
from pyro_ngvi.linalg.walsh_hadamard_matrix import WalshHadamardMatrix, matrix_for

SHAPES = [(50, 13), (8, 8), (1, 128), (3, 1), (5, 30), (9, 3)]
cases = pytest.mark.parametrize(
    "matrix",
    [WalshHadamardMatrix(*shape) for shape in SHAPES],
    ids=lambda m: f"{m.rows}x{m.columns}",
)


def diagonals(matrix: WalshHadamardMatrix, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Diagonals that are no signs."""
    g = torch.Generator().manual_seed(seed)
    left = torch.randn(matrix.rows, generator=g)
    return left, torch.randn(matrix.blocks, matrix.columns, generator=g)


def written_out(matrix: WalshHadamardMatrix, g: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """sqrt(D) S1 H diag(g) H S2, block under block, cut to (rows, columns); one g (num_g,)."""
    D = matrix.size
    H = torch.as_tensor(hadamard(D), dtype=g.dtype) / math.sqrt(D)
    per_block = g.reshape(matrix.blocks, D)
    blocks = []
    for b in range(matrix.blocks):
        s1, s2 = torch.zeros(D), torch.zeros(D)
        rows = left[b * D : (b + 1) * D]
        s1[: len(rows)], s2[: matrix.columns] = rows, right[b]
        blocks.append(math.sqrt(D) * torch.diag(s1) @ H @ torch.diag(per_block[b]) @ H @ s2.diag())
    return torch.cat(blocks)[: matrix.rows, : matrix.columns]


def linear_map(matrix: WalshHadamardMatrix, left: Tensor, right: Tensor) -> Tensor:
    """A (rows columns, num_g): vec(U) = A g, entry by entry: sqrt(D) s_i H_ik H_kj t_bj."""
    D, m = matrix.size, matrix.columns
    H = torch.as_tensor(hadamard(D), dtype=left.dtype) / math.sqrt(D)
    A = torch.zeros(matrix.rows, m, matrix.blocks, D)
    for i in range(matrix.rows):
        b = i // D
        t = right[b].unsqueeze(-1)
        A[i, :, b] = math.sqrt(D) * left[i] * H[i % D] * H[:m] * t
    return A.view(matrix.rows * m, matrix.num_g)


@cases
def test_sizes(matrix: WalshHadamardMatrix) -> None:
    D = matrix.size
    assert D >= matrix.columns > D // 2 and D & (D - 1) == 0
    assert matrix.blocks == math.ceil(matrix.rows / D)
    assert matrix.num_g == D * matrix.blocks


@cases
def test_dense_and_product(matrix: WalshHadamardMatrix) -> None:
    left, right = diagonals(matrix)
    g, x = torch.randn(2, 3, matrix.num_g), torch.randn(4, 1, 3, matrix.columns)
    expected = torch.stack([written_out(matrix, v, left, right) for v in g.flatten(0, 1)])
    expected = expected.unflatten(0, (2, 3))
    torch.testing.assert_close(matrix.dense(g, left, right), expected, rtol=0, atol=1e-12)
    # a g for each of the leading dimensions, and x broadcasts against it
    wanted = torch.einsum("sknm,bokm->bskn", expected, x.expand(4, 1, 3, -1))
    assert wanted.shape == (4, 2, 3, matrix.rows)
    torch.testing.assert_close(matrix.product(x, g, left, right), wanted, rtol=0, atol=1e-11)


@cases
def test_diagonals_of_each_particle(matrix: WalshHadamardMatrix) -> None:
    """Leading dimensions of the diagonals broadcast too, as under batched particles."""
    each = [diagonals(matrix, seed) for seed in (0, 1)]
    left, right = (torch.stack(pair) for pair in zip(*each, strict=True))
    g = torch.randn(2, matrix.num_g)
    expected = torch.stack([written_out(matrix, g[i], *each[i]) for i in (0, 1)])
    torch.testing.assert_close(matrix.dense(g, left, right), expected, rtol=0, atol=1e-12)


@cases
def test_moments(matrix: WalshHadamardMatrix) -> None:
    """Variances of the entries of U by the linear map: exact for any Gaussian g."""
    left, right = diagonals(matrix)
    A, K = linear_map(matrix, left, right), matrix.num_g
    root = torch.randn(K, K) / math.sqrt(K)
    expected = (A @ (root @ root.mT) @ A.mT).diagonal().view(matrix.rows, matrix.columns)
    actual = matrix.variance(root @ root.mT, left, right)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
    variance = torch.rand(K)
    expected = (A.square() @ variance).view(matrix.rows, matrix.columns)
    torch.testing.assert_close(matrix.variance(variance, left, right), expected, rtol=0, atol=1e-11)


@cases
def test_projection_solves_the_normal_equations(matrix: WalshHadamardMatrix) -> None:
    left, right = diagonals(matrix)
    A = linear_map(matrix, left, right)
    U = torch.randn(2, matrix.rows, matrix.columns)
    g = matrix.projection(U, left, right)
    residual = U.flatten(1) - g @ A.mT
    torch.testing.assert_close(residual @ A, torch.zeros(2, matrix.num_g), rtol=0, atol=1e-11)
    # of all solutions the shortest: dead numbers of h are zero
    shortest = torch.linalg.lstsq(A, U.flatten(1).mT, driver="gelsd").solution.mT
    torch.testing.assert_close(g, shortest, rtol=0, atol=1e-10)
    # the Gram matrix is diagonal in h
    H = torch.stack([matrix.transform(e) for e in torch.eye(matrix.num_g)])
    gram = H @ A.mT @ A @ H
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-11)


@pytest.mark.parametrize("n", [1, 2, 5, 7, 16, 30])
def test_vectors(n: int) -> None:
    """n entries of a square of O(sqrt n) numbers; what the square has beyond n counts for nothing."""
    matrix = matrix_for(torch.Size([n]))
    assert matrix.columns < 2 * math.sqrt(n) and matrix.num_g <= 4 * math.sqrt(n)
    assert matrix.rows * matrix.columns >= n > (matrix.rows - 1) * matrix.columns
    left, right = matrix.signs(1, torch.zeros(()))
    A = linear_map(matrix, left, right)[:n]
    loc, scale = torch.randn(n), 0.5 + torch.rand(n)
    T: Any = WalshHadamardTransform(matrix, loc, scale, lambda: (left, right))
    g = torch.randn(3, matrix.num_g)
    torch.testing.assert_close(T(g), loc + scale * (g @ A.mT))
    # nearest by direction: the projection, lengthened
    W = torch.randn(n)
    u = (W - loc) / scale
    nearest = torch.linalg.lstsq(A, u.unsqueeze(-1), driver="gelsd").solution.squeeze(-1)
    short = torch.linalg.vector_norm(A @ nearest)
    start: Tensor = T.inv(W)
    torch.testing.assert_close(start, nearest * torch.linalg.vector_norm(u) / short)


@pytest.mark.parametrize("shape", [(4, 3), (6, 2, 3), (5,), (1, 1)])
def test_transform(shape: tuple[int, ...]) -> None:
    size = torch.Size(shape)
    matrix = matrix_for(size)
    signs = diagonals(matrix)
    loc, scale = torch.randn(size), 0.5 + torch.rand(size)
    T: Any = WalshHadamardTransform(matrix, loc, scale, lambda: signs, g_scale=0.7)
    W = torch.randn(3, *shape)
    start: Tensor = T.inv(W)
    assert start.shape == (3, matrix.num_g)
    # as long as it was, and where W is of that form, W itself
    lengths = ((T(start) - loc) / scale).flatten(1).square().sum(-1)
    torch.testing.assert_close(lengths, ((W - loc) / scale).flatten(1).square().sum(-1))
    made = T(torch.randn(3, matrix.num_g))
    again: Tensor = T.inv(made)
    torch.testing.assert_close(T(again), made)
    # at the mean of the prior the start is zero, not NaN
    assert torch.equal(T.inv(loc), torch.zeros(matrix.num_g))
    g = torch.randn(3, matrix.num_g)
    p_g = torch.distributions.Normal(0.0, 0.7).log_prob(g).sum(-1)
    p_W = torch.distributions.Normal(loc, scale).log_prob(T(g)).flatten(1).sum(-1)
    torch.testing.assert_close(T.log_abs_det_jacobian(g, T(g)), p_g - p_W)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", [(6, 2, 3), (5,), (7, 5)])
def test_stddev(shape: tuple[int, ...], full: bool) -> None:
    size = torch.Size(shape)
    matrix = matrix_for(size)
    left, right = diagonals(matrix)
    scale = 0.5 + torch.rand(size)
    T: Any = WalshHadamardTransform(matrix, scale, scale, lambda: (left, right))
    A = linear_map(matrix, left, right)[: size.numel()] * scale.view(-1, 1)
    root = torch.randn(matrix.num_g, matrix.num_g) if full else torch.randn(matrix.num_g).diag()
    covariance = root @ root.mT
    expected = (A @ covariance @ A.mT).diagonal().sqrt().view(size)
    torch.testing.assert_close(T.stddev(covariance if full else covariance.diagonal()), expected)


@cases
def test_prior_variance_is_that_of_the_site(matrix: WalshHadamardMatrix) -> None:
    """With signs as diagonals and g of variance 1 every entry has variance 1."""
    left, right = matrix.signs(3, torch.zeros(()))
    assert set(torch.cat([left, right.flatten()]).tolist()) <= {-1.0, 1.0}
    A = linear_map(matrix, left, right)
    torch.testing.assert_close(A.square().sum(-1), torch.ones(matrix.rows * matrix.columns))
    ones = torch.ones(matrix.rows, matrix.columns)
    torch.testing.assert_close(matrix.variance(torch.ones(matrix.num_g), left, right), ones)


def test_signs() -> None:
    """A function of the seed alone, about as many of each, and the random state stays."""
    matrix, like = WalshHadamardMatrix(500, 300), torch.zeros(())
    before = torch.get_rng_state()
    left, right = matrix.signs(1, like)
    again = matrix.signs(1, like)
    assert torch.equal(left, again[0]) and torch.equal(right, again[1])
    assert not torch.equal(left, matrix.signs(2, like)[0])
    assert abs(float(left.mean())) < 5 / math.sqrt(500)  # 5 standard errors
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (-1, 2)])
def test_no_entries(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="entries; a matrix of"):
        WalshHadamardMatrix(*shape)


@pytest.mark.parametrize("entries", [0, 9])
def test_entries_out_of_range(entries: int) -> None:
    with pytest.raises(ValueError, match=f"has {entries} entries; .* has 8"):
        WalshHadamardMatrix(2, 4, shape=(entries,))
