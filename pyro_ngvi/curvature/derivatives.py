"""Hessians of functions of one draw, and averages over draws in bounded memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, vmap

from ..linalg.host import fixed_normal
from .forward import jvp

__all__ = ["at_a_time", "average", "hessian", "hessian_diagonal", "is_diagonal", "row_sums"]

#: columns of a Hessian that are computed at a time, for each draw
CHUNK = 64
#: and for all draws together
COLUMNS = 1024
#: random halves of the entries that are tried at each of three points
HALVES = 8

Function = Callable[[Tensor], Tensor]


def average(function: Function, theta: Tensor, columns: int | None = None) -> Tensor:
    """The mean of ``function`` over the rows of ``theta`` (S, d), as many at a time as fit.

    ``columns`` is how many passes through the model one value holds at a time; by default d.
    """
    chunk = at_a_time(theta, columns)
    return vmap(function, chunk_size=chunk, randomness="same")(theta).mean(0)


def at_a_time(theta: Tensor, columns: int | None = None) -> int:
    """How many draws are taken together where each holds so many ``columns``."""
    return max(1, min(len(theta), COLUMNS // (columns or theta.shape[1])))


def hessian(function: Function, t: Tensor) -> Tensor:
    """The Hessian at t (d,), by forward over reverse mode, ``CHUNK`` columns at a time."""

    def column(e: Tensor) -> Tensor:
        return jvp(grad(function), (t,), (e,))[1]

    basis = torch.eye(len(t), dtype=t.dtype, device=t.device)
    H = vmap(column, out_dims=-1, chunk_size=CHUNK, randomness="same")(basis)
    return 0.5 * (H + H.mT)


def hessian_diagonal(function: Function, t: Tensor) -> Tensor:
    """The diagonal of the Hessian at t (d,), in as many passes as it has columns."""

    def entry(i: Tensor) -> Tensor:
        e = (torch.arange(len(t), device=t.device) == i).to(t)
        return (jvp(grad(function), (t,), (e,))[1] * e).sum()

    indices = torch.arange(len(t), device=t.device)
    return vmap(entry, chunk_size=CHUNK, randomness="same")(indices)


def row_sums(function: Function, t: Tensor) -> Tensor:
    """H 1 at t (d,): the diagonal, for a diagonal H."""
    return _product(function, t, torch.ones_like(t))


def _product(function: Function, t: Tensor, v: Tensor) -> Tensor:
    """H v, by reverse over reverse mode: for one v far cheaper than forward over reverse."""
    return grad(lambda t: grad(function)(t) @ v)(t)


def is_diagonal(function: Function, t: Tensor) -> bool:
    """Whether the Hessian is diagonal: for v that is zero in half of the entries, so is H v there.

    Zero to the bit, as products with 0 are, whatever the units of the latents and the rounding of the
    diagonal.  Of two entries that are coupled one half has one of them, and not the other, as often as
    not; over all halves it escapes once in 2^24.  It waits for the device.
    """
    values = fixed_normal(len(t), seed=len(t)).to(t)
    halves = (fixed_normal(HALVES, len(t), seed=len(t) + 1) > 0.0).to(t)
    away = torch.arange(1, len(t) + 1, dtype=t.dtype, device=t.device).sin()
    # at points away from the draw too: where it lies, terms may vanish that do so nowhere else
    for point in (t, t + away, t - 0.7 * away):
        for half in halves:
            if bool(((1.0 - half) * _product(function, point, half * values) != 0.0).any()):
                return False
    return True
