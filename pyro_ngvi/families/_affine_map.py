r"""Affine maps y = b + L W (s o x) of a flow, in a frame of their own.

s is a positive diagonal (stored as logs), W an orthogonal matrix, L a lower triangle with positive
diagonal; any of them may be left out.  The local frame is

    b + L W (s o t),   log s + m,   W (a - a') with a strictly lower,   L (I + M) with M lower:

so shifts are counted in units of the map's own input.  With delta = d log q / dx at fixed y,

    g_v = delta / s,   g_w = W g_v,   g_y = L^-T g_w,       v = s o x,  w = W v

    score of b  -g_y,   of log s  -delta o x - 1,   of W  w g_v',   of L  -tril(g_y w') - diag(1 / L_ii)

and pulled to the frame the score of b is -delta.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from ..linalg import stiefel
from .base import Tensors, clamp_exponent

__all__ = ["AffineMap"]


@dataclass(frozen=True)
class AffineMap:
    """y = b + L W (s o x); the fields are the names of the parts in ``params``, or ``None``."""

    shift: str
    log_scale: str | None = None
    rotation: str | None = None
    triangle: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        parts = (self.shift, self.log_scale, self.rotation, self.triangle)
        return tuple(name for name in parts if name is not None)

    @property
    def triangles(self) -> dict[str, int]:
        """The highest diagonals of matrices of a tangent."""
        both = {self.rotation: -1, self.triangle: 0}
        return {name: k for name, k in both.items() if name is not None}

    def start(self, like: Tensor, factor: float, shift: float) -> Tensors:
        """The parts of x -> factor x + shift, for x of the shape (d,) of ``like``."""
        part = {self.shift: torch.full_like(like, shift)}
        if self.log_scale is not None:
            part[self.log_scale] = torch.full_like(like, factor).log()
        if self.rotation is not None:
            part[self.rotation] = torch.diag(torch.ones_like(like))
        if self.triangle is not None:
            part[self.triangle] = torch.diag(torch.full_like(like, factor))
        return part

    def _linear(self, params: Tensors, x: Tensor) -> Tensor:
        if self.log_scale is not None:
            x = x * params[self.log_scale].exp()
        if self.rotation is not None:
            x = x @ params[self.rotation].mT
        if self.triangle is not None:
            x = x @ params[self.triangle].tril().mT
        return x

    def _transposed(self, params: Tensors, g: Tensor) -> Tensor:
        if self.triangle is not None:
            g = g @ params[self.triangle].tril()
        if self.rotation is not None:
            g = g @ params[self.rotation]
        if self.log_scale is not None:
            g = g * params[self.log_scale].exp()
        return g

    def forward(self, params: Tensors, x: Tensor) -> Tensor:
        """y (..., d) of x (..., d)."""
        return params[self.shift] + self._linear(params, x)

    def inverse(self, params: Tensors, y: Tensor) -> Tensor:
        """x (..., d) of y (..., d)."""
        x = y - params[self.shift]
        if self.triangle is not None:
            flat = x.reshape(-1, x.shape[-1])
            L = params[self.triangle].tril()
            x = solve_triangular(L, flat.mT, upper=False).mT.reshape(x.shape)
        if self.rotation is not None:
            x = x @ params[self.rotation]
        if self.log_scale is not None:
            x = x * (-params[self.log_scale]).exp()
        return x

    def log_det(self, params: Tensors) -> Tensor:
        """log |det dy/dx|, the same for all x: a 0-dim tensor."""
        total = params[self.shift].new_zeros(())
        if self.log_scale is not None:
            total = total + params[self.log_scale].sum()
        if self.triangle is not None:
            total = total + params[self.triangle].diagonal().abs().log().sum()
        return total

    def score(self, params: Tensors, x: Tensor, delta: Tensor) -> tuple[Tensors, Tensor]:
        """Scores (n, ...) of the parts, and g_y (n, d), from x and delta (n, d) at the same draws."""
        score: Tensors = {}
        g, w = delta, x
        if self.log_scale is not None:
            score[self.log_scale] = -delta * x - 1.0
            g = delta * (-params[self.log_scale]).exp()
            w = x * params[self.log_scale].exp()
        if self.rotation is not None:
            v, W = w, params[self.rotation]
            w = v @ W.mT
            score[self.rotation] = w.unsqueeze(-1) * g.unsqueeze(-2)
            g = g @ W.mT
        if self.triangle is not None:
            L = params[self.triangle].tril()
            g = solve_triangular(L.mT, g.mT, upper=True).mT
            outer = g.unsqueeze(-1) * w.unsqueeze(-2)
            score[self.triangle] = -outer.tril() - torch.diag(1.0 / L.diagonal())
        score[self.shift] = -g
        return score, g

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        """The velocity of the parts along a tangent."""
        velocity = {self.shift: self._linear(params, tangent[self.shift])}
        if self.log_scale is not None:
            velocity[self.log_scale] = tangent[self.log_scale]
        if self.rotation is not None:
            velocity[self.rotation] = stiefel.push(params[self.rotation], tangent[self.rotation])
        if self.triangle is not None:
            velocity[self.triangle] = params[self.triangle].tril() @ tangent[self.triangle]
        return velocity

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        """Gradients in the frame: the transpose of ``push``."""
        pulled = {self.shift: self._transposed(params, grads[self.shift])}
        if self.log_scale is not None:
            pulled[self.log_scale] = grads[self.log_scale]
        if self.rotation is not None:
            pulled[self.rotation] = stiefel.pull(params[self.rotation], grads[self.rotation])
        if self.triangle is not None:
            L = params[self.triangle].tril()
            pulled[self.triangle] = (L.mT @ grads[self.triangle]).tril()
        return pulled

    def retract(self, params: Tensors, tangent: Tensors, step: Tensor | float) -> Tensors:
        """The parts moved by ``step`` along ``tangent``; they stay in their domains."""
        moved = self._linear(params, tangent[self.shift])
        new = {self.shift: params[self.shift] + step * moved}
        if self.log_scale is not None:
            new[self.log_scale] = clamp_exponent(
                params[self.log_scale] + step * tangent[self.log_scale]
            )
        if self.rotation is not None:
            new[self.rotation] = stiefel.retract(
                params[self.rotation], step * tangent[self.rotation]
            )
        if self.triangle is not None:
            L, A = params[self.triangle].tril(), step * tangent[self.triangle]
            LA = L @ A
            new[self.triangle] = L + LA + 0.5 * LA @ A
        return new
