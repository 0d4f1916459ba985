r"""Linear systems with the entrywise square of a projection, (Pi o Pi) v = b, Pi = I - Q' Q.

For Q (r, d) with orthonormal rows and leverages l_i = sum_k Q_ki^2,

    (Pi o Pi) v = (1 - 2 l) o v + diag(Q' (Q diag(v) Q') Q),

which costs O(d r^2) and no d x d matrix.  The diagonal is (1 - l)^2: the preconditioner.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["solve_squared_projection"]


def solve_squared_projection(Q: Tensor, b: Tensor, iterations: int) -> Tensor:
    """v (d,) with (Pi o Pi) v = ``b`` (d,), by at most ``iterations`` of conjugate gradients.

    A coordinate with leverage 1 has a zero row: a floor of sqrt(eps) on the diagonal holds v there.
    """
    leverage = Q.square().sum(-2).clamp(0.0, 1.0)
    floor = math.sqrt(torch.finfo(Q.dtype).eps)
    diagonal = 1.0 - 2.0 * leverage + floor
    preconditioner = 1.0 / ((1.0 - leverage).square() + floor)

    def product(v: Tensor) -> Tensor:
        inner = Q @ (v * Q).mT
        return torch.addcmul((inner @ Q).mul_(Q).sum(-2), diagonal, v)

    v = torch.zeros_like(b)
    residual = b
    y = direction = preconditioner * residual
    rho = torch.dot(residual, y)
    tiny = torch.finfo(Q.dtype).tiny
    stop = rho * torch.finfo(Q.dtype).eps ** 2  # converged: further steps are set to zero
    for _ in range(iterations):
        if _known_to_hold(rho <= stop):
            break
        image = product(direction)
        alpha = torch.where(rho > stop, rho / torch.dot(direction, image).clamp_min(tiny), 0.0)
        v = torch.addcmul(v, alpha, direction)
        residual = torch.addcmul(residual, alpha, image, value=-1.0)
        y = preconditioner * residual
        rho_next = torch.dot(residual, y)
        direction = torch.addcmul(y, rho_next / rho.clamp_min(tiny), direction)
        rho = rho_next
    return v


def _known_to_hold(condition: Tensor) -> bool:
    """Whether a 0-dim condition holds, asked only where nobody has to wait for the answer."""
    if condition.device.type != "cpu":
        return False
    try:
        return bool(condition)
    except RuntimeError:  # under vmap and in tracing there is no single answer
        return False
