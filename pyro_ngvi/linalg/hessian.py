"""Hessians, their absolute values, and what differences of gradients say of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad_and_value, jacrev

#: rows of a Hessian at once: larger batches fall out of the cache
ROWS = 16


def derivatives(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value, gradient and Hessian at one point x (d,), by reverse over reverse, which all allow."""

    def gradient(point: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        g, value = grad_and_value(f)(point)
        return g, (value, g)

    H, (value, g) = jacrev(gradient, has_aux=True, chunk_size=ROWS)(x)
    return value, g, 0.5 * (H + H.mT)


def eigen_abs(H: Tensor) -> tuple[Tensor, Tensor]:
    """|eigenvalues| (d,), kept away from zero, and eigenvectors (d, d) of a symmetric matrix."""
    h, Q = torch.linalg.eigh(H)
    h = h.abs()
    return h.maximum(torch.finfo(h.dtype).eps * h.max().clamp_min(1.0)), Q


def bfgs(W: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """The inverse Hessian W (d, d) nearest to the last with W y = s, unless s'y <= 0."""
    along = s @ y
    if not bool(along > 1e-8 * s.norm() * y.norm()):
        return W
    s, w = s / along.sqrt(), (W @ y) / along.sqrt()
    grown = W + (1.0 + y @ w / along.sqrt()) * torch.outer(s, s)
    return grown - torch.outer(w, s) - torch.outer(s, w)
