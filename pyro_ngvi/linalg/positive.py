"""Solving with a symmetric positive definite matrix that is known by its products alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .host import host_bool

#: rows up to which the matrix is made whole, and conjugate gradient steps that cost about as much
WHOLE, STEPS = 2000, 50
#: share of the squared residual that is left
RESIDUAL = 1e-10


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    b: Tensor,
    precondition: Callable[[Tensor], Tensor],
    iterations: int,
    share: float,
    dot: Callable[[Tensor, Tensor], Tensor] = torch.dot,
) -> Tensor:
    """x with H x = ``b`` (d,), nearly: from zero, by conjugate gradients (Hestenes & Stiefel 1952).

    They end after ``iterations``, or where the squared residual, in the norm of ``precondition``, is
    down to this ``share``.  Where H has blocks, and ``dot`` gives each entry the inner product of its
    own block, each is solved by itself.
    """
    tiny = torch.finfo(b.dtype).tiny
    x, r, p = torch.zeros_like(b), b, precondition(b)
    energy = dot(r, p)
    enough = share * energy
    for _ in range(iterations):
        done = (energy <= enough).all()
        if host_bool(done):
            break
        image = product(p)
        # no further steps where nobody could ask
        rate = torch.where(done, 0.0, energy / dot(p, image).clamp_min(tiny))
        x, r = x + rate * p, r - rate * image
        z = precondition(r)
        before, energy = energy, dot(r, z)
        p = z + energy / before.clamp_min(tiny) * p
    return x


def solve_positive(
    product: Callable[[Tensor], Tensor], B: Tensor, diagonal: Tensor
) -> tuple[Tensor, Tensor | None]:
    """X (K, P) with X H = B (K, P), where ``product(V) = V H`` for V (n, P), n rows at a time.

    By a Cholesky factor where P is at most 2,000 or K above P / 50, else by conjugate gradients
    (Hestenes & Stiefel 1952) for all rows at once, preconditioned by a ``diagonal`` (P,) near H.

    Returns:
        X, and ``None``; or a direction (P,) along which H is not positive.

    Raises:
        ArithmeticError: when P steps of conjugate gradients do not do.

    Example:
        >>> H = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
        >>> X, _ = solve_positive(lambda V: V @ H, torch.tensor([[3.0, 3.0]]), torch.ones(2))
        >>> X.round(decimals=4)
        tensor([[1., 1.]])
    """
    K, P = B.shape
    if P <= max(WHOLE, STEPS * K):
        H = product(torch.eye(P, dtype=B.dtype, device=B.device))
        H = 0.5 * (H + H.mT)
        factor, info = torch.linalg.cholesky_ex(H)
        if bool(info):
            return B, torch.linalg.eigh(H)[1][:, 0]
        return torch.cholesky_solve(B.mT, factor).mT, None
    X, R, V = torch.zeros_like(B), B, B / diagonal
    energy = (R * V).sum(1, keepdim=True)
    enough = RESIDUAL * energy
    for _ in range(P):
        going = energy > enough
        if not bool(going.any()):
            return X, None
        image = product(V)
        curvature = (V * image).sum(1, keepdim=True)
        flat = (going & ~(curvature > 0.0))[:, 0]
        if bool(flat.any()):
            return X, V[flat][0]
        rate = torch.where(going, energy / curvature, 0.0)
        X, R = X + rate * V, R - rate * image
        before, energy = energy, (R * R / diagonal).sum(1, keepdim=True)
        V = R / diagonal + torch.where(going, energy / before, 0.0) * V
    raise ArithmeticError(
        f"Conjugate gradients have not solved for a Hessian of {P} rows, nearly singular or of rounded "
        f"products. Use torch.float64, or train a guide of fewer latent variables."
    )
