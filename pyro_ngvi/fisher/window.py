r"""A damped window: the mean of the last K scores, and a ridge where they say nothing.

With the last K scores phi in the rows of Phi (K, D), and weights w = rho^age that sum to n,

    F ~ sum_k w_k phi_k phi_k' / n + c I,        c = damping x mean of the diagonal of the first part.

Its inverse takes a K x K system (Woodbury).  With R the rows sqrt(w_k / n) phi_k,

    F^-1 g = [ g - R' (c I + R R')^-1 R g ] / c.

The matrix of inner products Phi Phi' is kept.  An update computes the rows of the new scores alone, so
S scores cost O(S K D), a product O(K D + K^3).  The memory is K D + K^2 numbers.

**Calibration.**  The estimate is that of the mean of the window with a ridge, exactly and at any time.
So it is of the size of F in the directions that the window spans, and too large by c in all: natural
gradients come out short, never long.  That is what nearly singular Fisher matrices want.  The networks
of a flow have thousands of parameters, many of them with next to no score, and an estimate that
resolves each (:class:`~pyro_ngvi.fisher.low_rank.LowRank`) takes huge steps there.

Not for: parameters in units that differ by orders of magnitude, since one ridge serves all (LowRank,
or :class:`~pyro_ngvi.fisher.blocks.Blocks` by layer); a Fisher matrix that is well determined and does
not move, of which a window of K scores stays a noisy estimate.

A ridge on an empirical Fisher matrix is Levenberg's and Marquardt's damping; Martens (2020, JMLR
21:146) for its part in natural gradients; the window and its units are this project's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..families.base import Tensors
from .first_guess import TINY
from .inversion_free import InverseFisher, good_rows

__all__ = ["Window"]


@dataclass(frozen=True)
class Window(InverseFisher):
    """The last ``size`` scores and a ridge; see the head of this file.

    Args:
        size: K, number of scores.
        damping: the ridge as a share of the mean of diag(F).
        decay: rho in (0, 1], the factor on the weight of a score at each further update.

    Before the first score the estimate is the ridge alone, from the first guess of the diagonal.  A
    score that is not finite leaves its place to the one that was there.

    Example:
        >>> import torch
        >>> from pyro_ngvi.fisher import Window
        >>> estimate = Window(size=4, damping=0.5)
        >>> state = estimate.init(torch.ones(2), weight=1.0)
        >>> state = estimate.update(state, torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
        >>> estimate.product(state, torch.tensor([3.0, 6.0])).round(decimals=4)  # 2 I + 0.5 x 2 I
        tensor([1., 2.])
    """

    scores_a_step: ClassVar[int] = 8

    size: int
    damping: float = 1.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(
                f"The size of a window must be a whole number of at least 1, got {self.size!r}."
            )
        if not 0.0 < self.damping < float("inf"):
            raise ValueError(f"damping must be a positive number, got {self.damping!r}.")

    def init(self, diagonal: Tensor, weight: float) -> Tensors:
        return {
            "rows": diagonal.new_zeros(self.size, len(diagonal)),
            "gram": diagonal.new_zeros(self.size, self.size),
            "weights": diagonal.new_zeros(self.size),
            "guess": diagonal.mean(),
            # a counter of the host: reading it waits for nothing
            "next": torch.zeros((), dtype=torch.long, device="cpu"),
        }

    def update(self, state: Tensors, scores: Tensor) -> Tensors:
        rows, gram, weights = (state[name].clone() for name in ("rows", "gram", "weights"))
        if self.decay != 1.0:
            weights.mul_(self.decay)
        start, left = int(state["next"]), scores[-self.size :]
        while len(left):  # a second turn at the end of the ring
            stop = min(start + len(left), self.size)
            new, left = left.tensor_split([stop - start])
            good = good_rows(new)
            place = slice(start, stop)
            rows[place] = torch.where(good, new, rows[place])
            weights[place] = torch.where(good[:, 0], 1.0, weights[place])
            products = rows[place] @ rows.mT
            gram[place] = products
            gram[:, place] = products.mT
            start = stop % self.size
        kept = {"rows": rows, "gram": gram, "weights": weights}
        return state | kept | {"next": torch.tensor(start, device="cpu")}

    def product(self, state: Tensors, g: Tensor) -> Tensor:
        rows, weights = state["rows"], state["weights"]
        total = weights.sum()
        root = (weights / total.clamp_min(torch.finfo(g.dtype).tiny)).sqrt()
        gram = root[:, None] * state["gram"] * root
        mean = torch.where(total > 0, gram.diagonal().sum() / len(g), state["guess"])
        ridge = (self.damping * mean).clamp_min(TINY)
        # in units of the ridge, which may be too small to be added in float32
        gram = gram / ridge
        gram.diagonal().add_(1.0)
        factor, _ = torch.linalg.cholesky_ex(gram)
        seen = root * (rows @ g)
        weight = torch.cholesky_solve(seen[:, None], factor)[:, 0]
        return (g - rows.mT @ (root * weight) / ridge) / ridge
