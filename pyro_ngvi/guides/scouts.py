"""Many points at once: whether f is convex as far as they see, and where BFGS steps lead them.

A search that follows one path after the other ends when a few agree, and six may all miss a mode to
which a third of the prior leads.  Most of the time of a small model is that of calls, so that many
points in one batch cost what a path or two do.  A convex f has one minimum, and needs no more paths.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..linalg.hessian import bfgs, values_and_gradients

#: steps at most, lengths of them that are tried, nats of promised decrease that end a point's, and the
#: share of points behind the last of which nobody waits
STEPS, LENGTHS, DECREASE, ENOUGH = 30, (1.0, 0.3, 0.1, 0.01), 0.05, 0.75
#: roundings of a sum that a tangent may be off by
ROUNDING = 16.0


def looks_convex(f: Callable[[Tensor], Tensor], theta: Tensor, W: Tensor) -> bool:
    """Whether f lies above its tangents at points (S, d), and where a step with an inverse Hessian W
    (d, d) leads from there, at all of these, most of it is finite, and roundings are small."""
    x, values, gradients = theta[:0], theta[:0, 0], theta[:0]
    for _ in range(2):
        value, g = values_and_gradients(f, theta)
        x, theta = torch.cat([x, theta]), theta - g @ W
        values, gradients = torch.cat([values, value]), torch.cat([gradients, g])
        along = torch.einsum("id,ijd->ij", gradients, x - x.unsqueeze(1))
        above = values - values.unsqueeze(1) - along
        size = values.abs() + values.abs().unsqueeze(1) + along.abs()
        rounding = ROUNDING * torch.finfo(x.dtype).eps * size
        unknown = (above.isfinite().double().mean() < 0.5) | (rounding.amin() > 1.0)
        if bool((above < -DECREASE - rounding).any() | unknown):
            return False
    return True


def led(
    f: Callable[[Tensor], Tensor],
    theta: Tensor,
    W: Tensor,
    is_known: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """From points (S, d), with W (d, d) for an inverse Hessian at first: those that come to rest
    (R, d), f there (R,), and what the ways say of log |H^-1| (R,).  Points that come to what
    ``is_known`` (S, d) -> (S,) are left there."""
    value, g = values_and_gradients(f, theta)
    W = W.expand(len(theta), *W.shape)
    ended = ~(value.isfinite() & g.isfinite().all(-1))
    rests = torch.zeros_like(ended)
    for _ in range(STEPS):
        step = -torch.einsum("sij,sj->si", W, g)
        slope = (g * step).sum(-1)
        ended |= is_known(theta)
        rests |= ~ended & (-slope < DECREASE)
        ended |= rests
        moves = (~ended).nonzero()[:, 0]
        for length in LENGTHS:
            if not len(moves):
                break
            new = theta[moves] + length * step[moves]
            there, g_there = values_and_gradients(f, new)
            falls = there <= value[moves] + 1e-4 * length * slope[moves]
            falls &= g_there.isfinite().all(-1)
            done, new, there, g_there = moves[falls], new[falls], there[falls], g_there[falls]
            W = W.index_copy(0, done, bfgs(W[done], new - theta[done], g_there - g[done]))
            theta, g = theta.index_copy(0, done, new), g.index_copy(0, done, g_there)
            value, moves = value.index_copy(0, done, there), moves[~falls]
        ended = ended.index_fill(0, moves, True)  # none of the lengths lowers f there
        if bool(ended.sum() > ENOUGH * len(ended)):
            break
    return theta[rests], value[rests], torch.logdet(W[rests])
