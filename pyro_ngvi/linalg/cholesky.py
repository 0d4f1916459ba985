"""Cholesky factors without inverses and without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

#: number of step halvings that are tried at once; 2^-20 of a step is no step
HALVINGS = 20

#: a step leaves at least this share of the precision in any direction: variances grow at most 4-fold
SMALLEST = 0.25

__all__ = ["HALVINGS", "SMALLEST", "inverse_cholesky_of_shifted"]


def inverse_cholesky_of_shifted(
    H: Tensor, step: Tensor | float, halvings: int = HALVINGS
) -> tuple[Tensor, Tensor]:
    """Lower triangular T with T T' = (I + s H)^-1 for the largest s = step / 2^j that has one.

    H is symmetric (d, d).  The smallest eigenvalue gives the number of halvings j <= ``halvings``
    after which I + s H keeps eigenvalues of at least 1/4; if even s = step / 2^halvings does
    not, s is 0.  Returns (T, s / step).  No result travels to the host.
    """
    identity = torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)
    worst = -torch.linalg.eigvalsh(step * H)[..., 0]
    room = 1.0 - SMALLEST
    needed = torch.log2(worst.clamp_min(room) / room).ceil()
    shrink = torch.where(needed <= halvings, torch.exp2(-needed), torch.zeros_like(needed))
    K = identity + shrink * step * H
    # K = N' N with N lower triangular: Cholesky of the matrix read from its last corner; T = N^-1
    C, _ = torch.linalg.cholesky_ex(K.flip(-2, -1))
    N = C.flip(-2, -1).mT
    return torch.linalg.solve_triangular(N, identity, upper=False), shrink
