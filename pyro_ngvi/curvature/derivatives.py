"""Derivatives of functions of one draw t (d,): Hessians, their diagonals, and forward mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from ..linalg.host import fixed_normal

#: columns of a Hessian that are computed at a time, for each draw
CHUNK = 64
#: random halves of the entries that are tried at each of three points
HALVES = 8

Function = Callable[[Tensor], Tensor]


@cache
def _load_rules() -> None:
    """The first use of forward mode compiles rules by torch.jit.script, which is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script")
        one = torch.ones((), device="cpu")
        torch.func.jvp(torch.sin, (one,), (one,))


def jvp(f: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    """``torch.func.jvp``, without torch's warning about itself."""
    _load_rules()
    return torch.func.jvp(f, primals, tangents)


def hessian(function: Function, t: Tensor) -> Tensor:
    """The Hessian, by forward over reverse mode, ``CHUNK`` columns at a time."""

    def column(e: Tensor) -> Tensor:
        return jvp(grad(function), (t,), (e,))[1]

    basis = torch.eye(len(t), dtype=t.dtype, device=t.device)
    H = vmap(column, out_dims=-1, chunk_size=CHUNK, randomness="same")(basis)
    return 0.5 * (H + H.mT)


def hessian_diagonal(function: Function, t: Tensor) -> Tensor:
    """The diagonal of the Hessian, in as many passes as it has columns."""

    def entry(i: Tensor) -> Tensor:
        e = (torch.arange(len(t), device=t.device) == i).to(t)
        return (jvp(grad(function), (t,), (e,))[1] * e).sum()

    indices = torch.arange(len(t), device=t.device)
    return vmap(entry, chunk_size=CHUNK, randomness="same")(indices)


def hessian_product(function: Function, t: Tensor, v: Tensor) -> Tensor:
    """H v, by reverse over reverse mode: for one v far cheaper than forward over reverse."""
    return grad(lambda t: grad(function)(t) @ v)(t)


def is_diagonal(function: Function, t: Tensor) -> bool:
    """Whether the Hessian is diagonal: for v that is zero in half of the entries, so is H v there.

    Zero to the bit, as products with 0 are, whatever the units of the latents.  A pair of coupled
    entries is missed by one half in two, by all of them once in 2^24.  It waits for the device.
    """
    values = fixed_normal(len(t), seed=len(t)).to(t)
    halves = (fixed_normal(HALVES, len(t), seed=len(t) + 1) > 0.0).to(t)
    away = torch.arange(1, len(t) + 1, dtype=t.dtype, device=t.device).sin()
    # at points away from the draw too: where it lies, terms may vanish that do so nowhere else
    for point in (t, t + away, t - 0.7 * away):
        for half in halves:
            if ((1.0 - half) * hessian_product(function, point, half * values) != 0.0).any():
                return False
    return True
