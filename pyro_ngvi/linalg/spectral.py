r"""Eigenvalues, leading subspaces, and systems with the square of a projection, without waiting.

**Leading rows.**  The best approximation of A'A by r outer products, for rows A (m, d):

    A'A ~ Y'Y,   Y = Q'A (r, d),   Q (m, r) with orthonormal columns.

A'A - Y'Y = A'(I - Q Q')A is positive semi-definite, and its diagonal not negative, for any such Q.
Exact where the smaller side of A is at most ``EXACT``, on a CPU: O(m d min(m, d)).  Else a range finder
(Halko, Martinsson & Tropp 2011, algorithm 4.4), O(m d r): p = 2 r + 2 columns, started at the first r
rows of A, where the caller puts the approximation of the step before, and at cosines over all rows.

**Squared projection.**  (Pi o Pi) v = b with Pi = I - Q'Q, for Q (r, d) with orthonormal rows and
leverages l_i = sum_k Q_ki^2:

    (Pi o Pi) v = (1 - 2 l) o v + diag(Q' (Q diag(v) Q') Q),

O(d r^2) without a d x d matrix.  The diagonal, (1 - l)^2, is the preconditioner.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .positive import conjugate_gradients
from .products import eye_like

#: QR iterations; neighbours a factor 1.3 apart are separated to 1e-3, closer ones stay mixed
ITERATIONS = 30
#: largest smaller side of A whose eigenvectors are all computed
EXACT = 128
#: passes Q <- orth(A (A'Q)) of the range finder
POWER = 3
#: rounds of a factor analysis, and the share of the diagonal that no factor takes
ROUNDS, SHARE = 100, 1e-3
#: largest d for which Pi is built: a dense factor costs less there than a few iterations
DENSE = 128


def positive_part(G: Tensor) -> Tensor:
    """The nearest positive semi-definite matrices to symmetric ones (n, k, k); NaN where not finite.

    For k > 1 a GPU waits for it.
    """
    if G.shape[-1] == 1:
        return G.clamp_min(0.0)
    finite = torch.isfinite(G).flatten(1).all(-1).reshape(-1, 1, 1)
    values, vectors = torch.linalg.eigh(torch.where(finite, G, torch.zeros_like(G)))
    projected = vectors @ (values.clamp_min(0.0).unsqueeze(-1) * vectors.mT)
    return torch.where(finite, projected, torch.full_like(G, torch.nan))


def square_root(covariance: Tensor) -> Tensor:
    """S (n, k, k) with S S' = C for positive semi-definite C (n, k, k): D U w^1/2, with D the sds and
    U w U' the correlations."""
    sd = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt().unsqueeze(-1)
    if covariance.shape[-1] == 1:
        return sd
    unit = torch.where(sd > 0.0, sd, torch.inf).reciprocal()
    values, vectors = torch.linalg.eigh((unit * covariance * unit.mT).clamp(-1.0, 1.0))
    return sd * vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)


def symmetric_eigen(G: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (n,), largest first, and eigenvectors (n, n) in columns; G positive semi-definite."""
    if G.device.type != "cpu":  # eigh waits for the device
        return qr_iteration(G)
    # in float32 LAPACK may fail to converge where many eigenvalues are rounding error
    values, vectors = torch.linalg.eigh(G.double())
    return values.flip(-1).to(G.dtype), vectors.flip(-1).to(G.dtype)


def qr_iteration(G: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`symmetric_eigen`; vectors of nearly equal eigenvalues stay mixed."""
    vectors = eye_like(G)
    for _ in range(ITERATIONS):
        vectors, _ = torch.linalg.qr(G @ vectors)
    values = (vectors * (G @ vectors)).sum(-2)
    return values, vectors


def leading_rows(A: Tensor, rank: int) -> Tensor:
    """Y (rank, d), largest first, with Y'Y the best (or nearly best) approximation of A'A (m, d).

    Rows of zeros fill up where A has fewer than ``rank`` rows.
    """
    m, d = A.shape
    if m < rank:
        A = torch.cat([A, A.new_zeros(rank - m, d)])
        m = rank
    if A.device.type != "cpu" or min(m, d) > EXACT:
        return _range_finder(A, rank)
    if m <= d:
        _, Q = symmetric_eigen(A @ A.mT)
        return Q[:, :rank].mT @ A
    values, V = symmetric_eigen(A.mT @ A)
    rows = values[:rank].clamp_min(0.0).sqrt().unsqueeze(-1) * V[:, :rank].mT
    return torch.nn.functional.pad(rows, (0, 0, 0, rank - len(rows)))


def principal_factors(M: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B (d, rank) and s (d,) with B B' + diag(s) near M (d, d), by factor analysis (Joreskog 1967).

    For a given s the best B spans the leading eigenvectors of s^-1/2 M s^-1/2; the diagonal of M
    then gives s.  The limit has the least KL(N(0, M) || N(0, B B' + diag(s))).
    """
    diagonal = M.diagonal()
    s, B = 0.5 * diagonal, M[:, :rank]
    for _ in range(ROUNDS):
        c = s.sqrt()
        values, V = symmetric_eigen(M / torch.outer(c, c))
        B = c.unsqueeze(-1) * V[:, :rank] * (values[:rank] - 1.0).clamp_min(0.0).sqrt()
        s = (diagonal - B.square().sum(-1)).maximum(SHARE * diagonal)
    return B, s


def _range_finder(A: Tensor, rank: int) -> Tensor:
    m, like = len(A), {"dtype": A.dtype, "device": A.device}
    i = torch.arange(m, **like).unsqueeze(-1)
    k = torch.arange(min(2 * rank + 2, m) - rank, **like)
    # frequencies that are no multiples of each other, hence no rows that all of them miss
    cosines = torch.cos(math.pi * (i + 0.5) * torch.frac(0.5 + 0.6180339887 * (k + 1.0)))
    Q = torch.cat([torch.eye(m, rank, **like), cosines], -1)
    for _ in range(POWER):
        Q, _ = torch.linalg.qr(A @ (A.mT @ Q))
    Y = Q.mT @ A
    _, V = symmetric_eigen(Y @ Y.mT)
    return V[:, :rank].mT @ Y


def solve_squared_projection(Q: Tensor, b: Tensor, iterations: int) -> Tensor:
    """v (d,) with (Pi o Pi) v = ``b`` (d,).

    Exact for d up to ``DENSE``, else by at most ``iterations`` of conjugate gradients.  A coordinate
    with leverage 1 has a zero row: a floor of sqrt(eps) on the diagonal holds v there.
    """
    eps = torch.finfo(Q.dtype).eps
    floor = math.sqrt(eps)
    if Q.shape[-1] > DENSE:
        leverage = Q.square().sum(-2).clamp(0.0, 1.0)
        diagonal = 1.0 - 2.0 * leverage + floor
        preconditioner = 1.0 / ((1.0 - leverage).square() + floor)

        def product(v: Tensor) -> Tensor:
            inner = Q @ (v * Q).mT
            return torch.addcmul((inner @ Q).mul_(Q).sum(-2), diagonal, v)

        return conjugate_gradients(product, b, preconditioner.mul, iterations, eps**2)
    identity = eye_like(Q)
    squared = torch.addmm(identity, Q.mT, Q, alpha=-1.0).square()
    root, _ = torch.linalg.cholesky_ex(torch.add(squared, identity, alpha=floor))
    return torch.cholesky_solve(b.unsqueeze(-1), root).squeeze(-1)
