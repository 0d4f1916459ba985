r"""Linear systems with the entrywise square of a projection, (Pi o Pi) v = b, Pi = I - Q' Q.

For Q (r, d) with orthonormal rows and leverages l_i = sum_k Q_ki^2,

    (Pi o Pi) v = (1 - 2 l) o v + diag(Q' (Q diag(v) Q') Q),

which costs O(d r^2) and no d x d matrix.  The diagonal is (1 - l)^2: the preconditioner.  Where d is
small a dense Cholesky factor is exact and costs less than the overhead of a few iterations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .host import host_bool

__all__ = ["solve_squared_projection"]

#: largest d for which the d x d matrix is built (on a CPU the two cost the same near d = 250)
DENSE = 128


def solve_squared_projection(Q: Tensor, b: Tensor, iterations: int) -> Tensor:
    """v (d,) with (Pi o Pi) v = ``b`` (d,).

    Exact for d up to ``DENSE``, else by at most ``iterations`` of conjugate gradients.  A coordinate
    with leverage 1 has a zero row: a floor of sqrt(eps) on the diagonal holds v there.
    """
    floor = math.sqrt(torch.finfo(Q.dtype).eps)
    if Q.shape[-1] <= DENSE:
        return _dense(Q, b, floor)
    return _conjugate_gradients(Q, b, floor, iterations)


def _dense(Q: Tensor, b: Tensor, floor: float) -> Tensor:
    identity = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    squared = torch.addmm(identity, Q.mT, Q, alpha=-1.0).square()
    root, _ = torch.linalg.cholesky_ex(torch.add(squared, identity, alpha=floor))
    return torch.cholesky_solve(b.unsqueeze(-1), root).squeeze(-1)


def _conjugate_gradients(Q: Tensor, b: Tensor, floor: float, iterations: int) -> Tensor:
    leverage = Q.square().sum(-2).clamp(0.0, 1.0)
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
        if host_bool(rho <= stop):
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
