r"""The window of K vectors that the paper on IFVB prints (Remark 4.2, with its misprint mended).

With scores phi and H = eps I + sum phi phi', each new score adds one vector,

    psi = H^-1 phi / sqrt(1 + phi' H^-1 phi),   H^-1 g = g / eps - sum (psi' g) psi,

and the sum is over the last K of them in place of all.

Used in the examples 3 and 4 of the paper.  Once more than K vectors have been seen, the product
s H^-1 g after s scores grows like s in every direction that the window does not span: it is *no*
estimate of F^-1, and works only where the step is clipped to a fixed length.

Not for use beyond comparisons: :class:`pyro_ngvi.fisher.LowRank` and ``Window`` are estimates.

Source: Godichon-Baggioni, Nguyen & Tran (2024, JASA).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_ngvi.families.base import Tensors
from pyro_ngvi.fisher import InverseFisher
from pyro_ngvi.fisher.inverse import finite_rows

__all__ = ["PaperWindow"]


@dataclass(frozen=True)
class PaperWindow(InverseFisher):
    """The last K vectors psi = H^-1 phi / sqrt(1 + phi' H^-1 phi) of H^-1 = I / eps - sum psi psi'.

    Args:
        window: K.  Scores and regularisation vectors share it.
        eps, c_beta, beta: as in :class:`~benchmarks.baselines.PaperDense`.
    """

    starts_from_guess: ClassVar[bool] = False

    window: int
    eps: float = 1.0
    c_beta: float = 0.0
    beta: float = 0.25

    def init(self, diagonal: Tensor, weight: float) -> Tensors:
        zero = torch.zeros((), dtype=diagonal.dtype, device=diagonal.device)
        return {
            "psi": diagonal.new_zeros(self.window, len(diagonal)),
            "next": torch.zeros((1,), dtype=torch.long, device=diagonal.device),
            "updates": zero.clone(),
            "total": zero.clone(),
        }

    def _inverse_times(self, psi: Tensor, g: Tensor) -> Tensor:
        return g / self.eps - (psi @ g) @ psi

    def _append(self, psi: Tensor, position: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        b = self._inverse_times(psi, row)
        b = b / (1.0 + row @ b).sqrt()
        return psi.index_copy(0, position, b[None]), (position + 1) % self.window

    def update(self, state: Tensors, scores: Tensor) -> Tensors:
        rows, added = finite_rows(scores)
        psi, position = state["psi"], state["next"]
        updates = state["updates"] + 1.0
        for row in rows:
            psi, position = self._append(psi, position, row)
        if self.c_beta:
            z = torch.randn_like(rows[0])
            w = self.c_beta * updates**-self.beta
            psi, position = self._append(psi, position, w.sqrt() * z)
        total = state["total"] + added
        return {"psi": psi, "next": position, "updates": updates, "total": total}

    def product(self, state: Tensors, g: Tensor) -> Tensor:
        return state["total"] * self._inverse_times(state["psi"], g)
