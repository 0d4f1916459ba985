"""Hessians, their absolute values, and what differences of gradients say of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

#: rows of a Hessian at once: larger batches fall out of the cache
ROWS = 16


def derivatives(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value, gradient and Hessian at one point x (d,), by reverse over reverse, which all allow."""
    # not by grad and jacrev of torch.func: these are slower, and import a compiler for two seconds
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        value = f(leaf)
        g = gradient(value, leaf, create_graph=True)
        H = torch.zeros_like(torch.outer(g, g))
        if g.requires_grad:
            H = products(g, leaf, torch.eye(len(x)).to(x))
    return value.detach(), g.detach(), 0.5 * (H + H.mT)


def products(g: Tensor, x: Tensor, vectors: Tensor) -> Tensor:
    """Products of the derivatives of g in x with each of vectors (C, *g.shape), (C, *x.shape)."""
    how: Any = {"retain_graph": True, "materialize_grads": True}
    return vmap(lambda v: torch.autograd.grad(g, x, v, **how)[0], chunk_size=ROWS)(vectors)


def values_and_gradients(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Of f at points x (S, d), one by one: (S,) and (S, d)."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        values = f(leaf)
        return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]


class Differences(NamedTuple):
    """Value, gradient (d,) and Hessian (d, d), and the ``lengths`` (d,) that it took."""

    value: Tensor
    gradient: Tensor
    hessian: Tensor
    lengths: Tensor


def differences(
    f: Callable[[Tensor], Tensor], x: Tensor, away: Tensor, lengths: Tensor | None = None
) -> Differences:
    """Of the mean of f at x (d,) + away (S, d), the Hessian by differences of gradients of f.

    Their ``lengths`` (d,) are made a twentieth of 1 / sqrt(|H_jj|), an sd where f is -log p.
    """
    d = len(x)
    lengths = 1e-3 * x.abs().clamp_min(1.0) if lengths is None else lengths
    while True:
        steps = torch.cat([torch.zeros_like(away[:1]), lengths.diag(), -lengths.diag()])
        values, each = values_and_gradients(f, (x + steps.unsqueeze(1) + away).flatten(0, 1))
        g = each.reshape(2 * d + 1, -1, d).mean(1)
        H = (g[1 : d + 1] - g[d + 1 :]) / (2.0 * lengths.unsqueeze(-1))
        best = 0.05 * H.diagonal().abs().rsqrt()
        best = torch.where(H.isfinite().all(1), best, 0.1 * lengths)
        best = best.minimum(0.1 * x.abs().clamp_min(1.0))
        best = best.maximum(torch.finfo(x.dtype).eps ** 0.5 * x.abs().clamp_min(1.0))
        if bool((lengths <= 6.0 * best).all()):
            value = values[: len(away)].mean()
            return Differences(value, g[0], 0.5 * (H + H.mT), best)
        lengths = lengths.minimum(best)


def gradient(y: Tensor, x: Tensor, **how: Any) -> Tensor:
    """That of the sum of y in x; zeros where nothing in y depends on anything."""
    if not y.requires_grad:
        return torch.zeros_like(x)
    return torch.autograd.grad(y.sum(), x, materialize_grads=True, **how)[0]


def eigen_abs(H: Tensor) -> tuple[Tensor, Tensor]:
    """|eigenvalues| (d,), kept away from zero, and eigenvectors (d, d) of a symmetric matrix."""
    h, Q = torch.linalg.eigh(H)
    h = h.abs()
    return h.maximum(torch.finfo(h.dtype).eps * h.max().clamp_min(1.0)), Q


def absolute(H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """|H| of a symmetric matrix, h (d,) > 0 and Q (d, d) with |H|^-1 = Q diag(1 / h) Q'.

    A positive H stays as it is, and h is relative to its diagonal: its scales may be as far apart as
    those of the columns of a table, when the roundings of the largest eigenvalue hide the smallest.
    """
    if bool(torch.linalg.cholesky_ex(H).info == 0):
        scale = H.diagonal().rsqrt().unsqueeze(-1)
        h, Q = eigen_abs(scale * H * scale.mT)
        return H, h, scale * Q
    h, Q = eigen_abs(H)
    return (Q * h) @ Q.mT, h, Q


def bfgs(W: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """The inverse Hessian W (..., d, d) nearest to the last with W y = s, unless s'y <= 0."""
    along = (s * y).sum(-1, keepdim=True)
    known = along > 1e-8 * (s.norm(dim=-1, keepdim=True) * y.norm(dim=-1, keepdim=True))
    root = torch.where(known, along, 1.0).sqrt()
    s, w = s / root, (W @ y.unsqueeze(-1)).squeeze(-1) / root
    across = w.unsqueeze(-1) * s.unsqueeze(-2)
    both = (1.0 + (y * w).sum(-1, keepdim=True) / root).unsqueeze(-1) * (
        s.unsqueeze(-1) * s.unsqueeze(-2)
    )
    return torch.where(known.unsqueeze(-1), W + both - across - across.mT, W)
