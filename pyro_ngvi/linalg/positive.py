"""Solving with a symmetric positive definite matrix that is known by its products alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .host import host_bool
from .products import eye_like

#: rows up to which the matrix is made whole, and conjugate gradient steps that cost about as much
WHOLE, STEPS = 2000, 50
#: shares of the squared residual that are left by solutions and by quadrature
RESIDUAL, QUADRATURE = 1e-10, 1e-8


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

    By a Cholesky factor where P is at most 2,000 or K above P / 50, else by conjugate gradients for all
    rows at once, preconditioned by a ``diagonal`` (P,) near H; ``ArithmeticError`` where P steps of
    these do not do.  Second comes ``None``, or a direction (P,) along which H is not positive.
    """
    K, P = B.shape
    if P <= max(WHOLE, STEPS * K):
        H = product(eye_like(B))
        H = 0.5 * (H + H.mT)
        factor, info = torch.linalg.cholesky_ex(H)
        if bool(info):
            return B, torch.linalg.eigh(H)[1][:, 0]
        return torch.cholesky_solve(B.mT, factor).mT, None
    X, ended, flat, _ = descend(product, B, P, diagonal)
    if not ended:
        raise ArithmeticError(
            f"Conjugate gradients have not solved for a Hessian of {P} rows, nearly singular or of "
            f"rounded products. Use torch.float64, or train a guide of fewer latent variables."
        )
    return X, flat


def descend(
    product: Callable[[Tensor], Tensor],
    B: Tensor,
    steps: int,
    diagonal: Tensor | float = 1.0,
    share: float = RESIDUAL,
) -> tuple[Tensor, bool, Tensor | None, Tensor]:
    """Conjugate gradients for all rows of ``B`` (K, P) at once; arguments of :func:`solve_positive`.

    Returns X, and whether ``steps`` did for it; ``None``, or a direction (P,) along which H is not
    positive; length and turn (T, 2, K) of each step, with length 0 of rows that were done before.
    """
    X, R, V = torch.zeros_like(B), B, B / diagonal
    energy = (R * V).sum(1, keepdim=True)
    # in one piece, since small tensors that are kept between large ones scatter the heap
    enough, taken, flat = share * energy, B.new_zeros(steps, 2, len(B)), None
    for i in range(steps):
        going = energy > enough
        if not bool(going.any()):
            break
        image = product(V)
        curvature = (V * image).sum(1, keepdim=True)
        bent = (going & ~(curvature > 0.0))[:, 0]
        if bool(bent.any()):
            flat = V[bent][0]
            break
        rate = torch.where(going, energy / curvature, 0.0)
        X, R = X + rate * V, R - rate * image
        before, energy = energy, (R * R / diagonal).sum(1, keepdim=True)
        turn = torch.where(going, energy / before, 0.0)
        V = R / diagonal + turn * V
        taken[i, 0], taken[i, 1] = rate[:, 0], turn[:, 0]
    ended = flat is not None or not bool((energy > enough).any())
    return X, ended, flat, taken[: int((taken[:, 0] > 0.0).any(1).sum())]


def log_forms(product: Callable[[Tensor], Tensor], V: Tensor, steps: int) -> Tensor:
    """v' log(H) v (K,) for rows v of ``V`` (K, P), by Lanczos quadrature (Golub & Meurant 1994).

    The steps of conjugate gradients for H x = v are those of Lanczos from v, whose matrix T has v' f(H)
    v = |v|^2 (f(T))_11; exact once they have ended, up to the square of the residual that they leave.
    """
    share = max(QUADRATURE, torch.finfo(V.dtype).eps)
    lengths, turns = descend(product, V, steps, share=share)[3].permute(1, 2, 0)  # (K, T) each
    there = lengths > 0.0
    inverse = torch.where(there, 1.0 / lengths, 1.0)
    before = torch.nn.functional.pad((turns * inverse)[:, :-1], (1, 0))
    T = torch.diag_embed(inverse + torch.where(there, before, 0.0))
    beside = (turns.sqrt() * inverse)[:, :-1] * there[:, 1:]
    T = T + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    values, vectors = torch.linalg.eigh(T)
    return V.square().sum(1) * (vectors[:, 0].square() * values.log()).sum(1)
