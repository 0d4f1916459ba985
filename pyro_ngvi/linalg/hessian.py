"""Hessians, their absolute values, and what differences of gradients say of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

#: rows of a Hessian at once: larger batches fall out of the cache
ROWS = 16


def derivatives(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value, gradient and Hessian at one point x (d,), by reverse over reverse, which all allow."""

    def gradient_and_value(point: Tensor) -> tuple[Tensor, Tensor]:
        made: Any = vjp(f, point)
        value, pull = made
        return pull(torch.ones_like(value))[0], value

    made: Any = vjp(gradient_and_value, x, has_aux=True)
    g, pull, value = made
    eye = torch.eye(len(x), dtype=x.dtype, device=x.device)
    H = vmap(lambda v: pull(v)[0], chunk_size=ROWS)(eye)
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
