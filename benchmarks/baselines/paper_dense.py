r"""The recursion for H^-1 that the paper on IFVB prints, equation (4.6), as a (D, D) matrix.

    H_0 = eps I
    H^-1 <- H^-1 - (H^-1 phi)(H^-1 phi)' / (1 + phi' H^-1 phi)
    H^-1 <- H^-1 - w (H^-1 Z)(H^-1 Z)' / (1 + w Z' H^-1 Z),   Z ~ N(0, I),  w = c_beta s^-beta,

and n_s H_s^-1 after n_s scores is the estimate of F^-1.  The last line keeps H_s / s away from singular
matrices.

Not for use beyond comparisons: :class:`pyro_ngvi.fisher.Dense` has the right size from the start.

Source: Godichon-Baggioni, Nguyen & Tran (2024, JASA).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_ngvi.families.base import Tensors
from pyro_ngvi.fisher import InverseFisher
from pyro_ngvi.fisher.inverse import add_outer_products, finite_rows

__all__ = ["PaperDense"]


@dataclass(frozen=True)
class PaperDense(InverseFisher):
    """H^-1 from eps I on; ``c_beta``, ``beta``: size and decay of the regularisation."""

    starts_from_guess: ClassVar[bool] = False

    eps: float = 1.0
    c_beta: float = 0.0
    beta: float = 0.25

    def init(self, diagonal: Tensor, weight: float) -> Tensors:
        inverse = torch.diag(1.0 / torch.full_like(diagonal, self.eps))
        zero = diagonal.new_zeros(())
        return {"inverse": inverse, "updates": zero, "total": zero.clone()}

    def update(self, state: Tensors, scores: Tensor) -> Tensors:
        rows, added = finite_rows(scores)
        updates = state["updates"] + 1.0
        inverse = add_outer_products(state["inverse"], rows)
        if self.c_beta:
            w = self.c_beta * updates**-self.beta
            inverse = add_outer_products(inverse, (w.sqrt() * torch.randn_like(rows[0]))[None])
        return {"inverse": inverse, "updates": updates, "total": state["total"] + added}

    def product(self, state: Tensors, g: Tensor) -> Tensor:
        return state["total"] * (state["inverse"] @ g)
