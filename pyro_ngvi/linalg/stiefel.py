r"""Square orthogonal matrices and lower triangles: tangents, retractions, averages on O(d).

A velocity of W in O(d) is W A with A skew, A = a - a' and a strictly lower triangular: a (d, d) is the
tangent here, d (d - 1) / 2 free numbers (:func:`pack`).  In this *left-trivialised* frame whoever keeps
``a`` (momentum) has transported it.

    push    W (a - a')
    pull    tril(W'G - G'W, -1), so that sum(pull(G) * a) = sum(G * push(a))
    retract W (I - A/2)^-1 (I + A/2), Cayley's: the geodesic W exp(A) to second order

After it one Newton-Schulz step, W (3 I - W'W) / 2, makes an error e in W'W - I to 3 e^2 / 4, so that
roundings do not add up.  Nothing waits for a device, and no step changes the sign of det W.

Source: Absil, Mahony & Sepulchre (2008), chapters 4 and 8.  Not for d x k matrices with k < d.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .products import eye_like

#: triangles up to that size are multiplied as if they were squares, and on a GPU all of them are:
#: there the many small products of the halves take longer than the one they replace
BLOCK = 150


def tril_product(L: Tensor, A: Tensor, transpose: bool = False) -> Tensor:
    """tril(L A), or tril(L' A), of lower triangles (..., d, d) by halves: a third of the products."""
    d = L.shape[-1]
    if d <= BLOCK or L.device.type != "cpu":
        return ((L.mT if transpose else L) @ A).tril()
    k = d // 2
    top = tril_product(L[..., :k, :k], A[..., :k, :k], transpose)
    end = tril_product(L[..., k:, k:], A[..., k:, k:], transpose)
    if transpose:
        top = top + (L[..., k:, :k].mT @ A[..., k:, :k]).tril()
        corner = L[..., k:, k:].mT @ A[..., k:, :k]
    else:
        corner = L[..., k:, :] @ A[..., :k]
    return torch.cat([pad(top, (0, d - k)), torch.cat([corner, end], -1)], -2)


def push(W: Tensor, tangent: Tensor, offset: int = -1) -> Tensor:
    """The velocity W (a - a') of W (d, d) along a strictly lower triangular ``tangent`` a.

    ``offset`` 0 here and below: of a lower triangle L, and L a for a lower triangle a.
    """
    return W @ (tangent - tangent.mT) if offset else tril_product(W.tril(), tangent)


def pull(W: Tensor, grad: Tensor, offset: int = -1) -> Tensor:
    """The gradient in the tangent a of a gradient (d, d) in W: the transpose of :func:`push`."""
    if not offset:
        return tril_product(W.tril(), grad, transpose=True)
    M = W.mT @ grad
    return (M - M.mT).tril(-1)


def pack(tangent: Tensor, offset: int = -1) -> Tensor:
    """The free entries of a tangent, row by row: those below the diagonal, d (d - 1) / 2 or more."""
    i, j = torch.tril_indices(*tangent.shape[-2:], offset=offset, device=tangent.device)
    return tangent[..., i, j]


def unpack(vector: Tensor, d: int, offset: int = -1) -> Tensor:
    """The inverse of :func:`pack`, (..., d, d)."""
    i, j = torch.tril_indices(d, d, offset=offset, device=vector.device)
    whole = vector.new_zeros(d, d, *vector.shape[:-1])
    return whole.index_put((i, j), vector.movedim(-1, 0)).movedim((0, 1), (-2, -1))


def correct(W: Tensor) -> Tensor:
    """One Newton-Schulz step towards the nearest orthogonal matrix."""
    return 1.5 * W - 0.5 * (W @ (W.mT @ W))


def retract(W: Tensor, tangent: Tensor, offset: int = -1) -> Tensor:
    """The orthogonal matrix (d, d) that W reaches along ``tangent``; no step is too long.

    Of a triangle L (I + a + a^2 / 2), the exponential to second order, whose diagonal keeps its sign.

    Example:
        >>> quarter_turn = torch.tensor([[0.0, 0.0], [2.0, 0.0]])  # 2 tan(angle / 2)
        >>> (retract(torch.eye(2), quarter_turn).round(decimals=4) + 0.0).tolist()
        [[0.0, -1.0], [1.0, 0.0]]
    """
    if not offset:
        L = W.tril()
        La = tril_product(L, tangent)
        return L + La + 0.5 * tril_product(La, tangent)
    half, identity = 0.5 * (tangent - tangent.mT), eye_like(W)
    # I - A/2 has singular values of at least 1 for every skew A
    return correct(W @ torch.linalg.solve_ex(identity - half, identity + half)[0])


def average(mean: Tensor, W: Tensor, rate: Tensor) -> Tensor:
    """One step of a running Riemannian mean: from ``mean`` the share ``rate`` of the way to W.

    The way is the inverse of Cayley's retraction, A = 2 (Q + I)^-1 (Q - I) with Q = mean'W.  Where W
    is a half turn away there is no such way, and the mean starts again at W.
    """
    Q, identity = mean.mT @ W, eye_like(W)
    A, _ = torch.linalg.solve_ex(Q + identity, Q - identity)
    new = retract(mean, rate * (A - A.mT).tril(-1))
    return torch.where(torch.isfinite(new).all(), new, W)
