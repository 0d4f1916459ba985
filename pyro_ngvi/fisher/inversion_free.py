r"""The inverse Fisher matrix from scores alone, without a matrix inversion.

A score is phi = grad_lambda log q_lambda(z), z ~ q_lambda; the Fisher matrix is F = E[phi phi'].  With
H_s = H_0 + sum_{k <= s} g_k phi_k phi_k', the inverse follows by rank-one updates (Sherman-Morrison),

    H^-1 <- H^-1 - g (H^-1 phi)(H^-1 phi)' / (1 + g phi' H^-1 phi),                             (4.6)
    H^-1 <- H^-1 - w (H^-1 Z)(H^-1 Z)' / (1 + w Z' H^-1 Z),   Z ~ N(0, I),  w = c_beta s^-beta,

and n_s H_s^-1 with n_s = sum_k g_k is the estimate of F^-1.  The second line keeps H_s / s away from
singular matrices.  A block of S scores is one update of rank S (Woodbury).

:class:`Dense` holds all of H^-1, O(D^2) memory and time.  The limited-memory form as printed in the
paper is *not* an estimate of F^-1; ``benchmarks/baselines`` has it.  For large D use
:class:`~pyro_ngvi.fisher.low_rank.LowRank`, which is one.

Each estimate is a trio of pure functions over a dict of tensors, and nothing waits for the device:

    init(diagonal, weight) -> state
    update(state, scores (S, D)) -> state
    product(state, g (D,)) -> (D,)

``diagonal`` is a first guess of diag(F) that counts like ``weight`` scores.  ``update`` may reuse the
memory of the state that it is given.  Scores that are not finite are left out.

Source: Godichon-Baggioni, Nguyen & Tran (2024), Natural gradient variational Bayes without Fisher
matrix analytic calculation and its inversion, JASA; equation numbers are theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..families.base import Tensors

__all__ = ["Dense", "InverseFisher", "finite_rows", "good_rows"]


class InverseFisher(Protocol):
    """A trio of pure functions; see the head of this file.  Inherit from it for the defaults."""

    #: scores that IFVB draws for it at a step unless told how many
    scores_a_step: ClassVar[int] = 1

    @property
    def starts_from_guess(self) -> bool:
        """Whether ``init`` heeds the first guess of the diagonal, which is otherwise not made."""
        return True

    def init(self, diagonal: Tensor, weight: float) -> Tensors: ...

    def update(self, state: Tensors, scores: Tensor) -> Tensors: ...

    def product(self, state: Tensors, g: Tensor) -> Tensor: ...


def good_rows(scores: Tensor) -> Tensor:
    """Which of scores (S, D) have a finite length, (S, 1)."""
    return torch.isfinite(scores.square().sum(-1, keepdim=True))  # their squares must not overflow


def finite_rows(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (S, D) with rows of no finite length set to zero, and the number of good ones."""
    good = good_rows(scores)
    return torch.where(good, scores, 0.0), good.to(scores).sum()


def _add_outer_products(inverse: Tensor, rows: Tensor) -> Tensor:
    """(H + rows' rows)^-1 from H^-1 (D, D), for rows (S, D); symmetric to the last bit."""
    b = rows @ inverse
    if len(rows) == 1:
        b = b[0] / (1.0 + rows[0] @ b[0]).sqrt()
        # not torch.addr, whose two triangles may be rounded differently; so may those of a product
        return inverse - b[:, None] * b
    capacitance = torch.eye(len(rows), dtype=rows.dtype, device=rows.device) + rows @ b.mT
    factor, _ = torch.linalg.cholesky_ex(capacitance)
    b = torch.linalg.solve_triangular(factor, b, upper=False)
    half = 0.5 * (b.mT @ b)
    return inverse - (half + half.mT)


@dataclass(frozen=True)
class Dense(InverseFisher):
    """H^-1 as a (D, D) matrix: recursion (4.6).

    Converges to F^-1 as the number of scores grows; usable from about 2 D scores on.  Not for D above
    a few thousand, nor for fewer scores than D, where :class:`LowRank` is closer.

    Args:
        eps: H_0 = eps I, not counted as scores (the paper).  ``None``: H_0 is the first guess of the
            diagonal with its weight, so that the estimate has the right size from the start.
        c_beta, beta: size and decay of the regularisation; Z is in units of the first guess.
        growth: score k has weight k^growth.  0 is the paper; larger values follow a moving F.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> estimate = Dense(eps=1e-12, c_beta=0.0)
        >>> state = estimate.init(torch.ones(2, dtype=torch.float64), 1.0)
        >>> state = estimate.update(state, scores)
        >>> estimate.product(state, torch.ones(2, dtype=torch.float64))
        tensor([0.2222, 2.0000], dtype=torch.float64)
    """

    eps: float | None = None
    c_beta: float = 0.0
    beta: float = 0.25
    growth: float = 0.0

    def __post_init__(self) -> None:
        if self.eps is not None and not self.eps > 0:
            raise ValueError(f"eps must be positive or None, got {self.eps!r}.")
        if not (self.c_beta >= 0 and self.beta >= 0):
            raise ValueError(
                f"c_beta and beta must not be negative, got {self.c_beta!r} and {self.beta!r}."
            )

    @property
    def starts_from_guess(self) -> bool:
        return self.eps is None

    def init(self, diagonal: Tensor, weight: float) -> Tensors:
        zero = torch.zeros((), dtype=diagonal.dtype, device=diagonal.device)
        start = torch.full_like(diagonal, self.eps) if self.eps is not None else weight * diagonal
        unit = torch.ones_like(diagonal) if self.eps is not None else diagonal.sqrt()
        return {
            "inverse": torch.diag(1.0 / start),
            "unit": unit,
            "updates": zero.clone(),
            "total": zero + (0.0 if self.eps is not None else weight),
        }

    def update(self, state: Tensors, scores: Tensor) -> Tensors:
        rows, added = finite_rows(scores)
        updates = state["updates"] + 1.0
        weight = updates**self.growth
        inverse = _add_outer_products(state["inverse"], weight.sqrt() * rows)
        if self.c_beta:
            z = torch.randn_like(state["unit"]) * state["unit"]
            w = self.c_beta * updates**-self.beta * weight
            inverse = _add_outer_products(inverse, (w.sqrt() * z)[None])
        total = state["total"] + weight * added
        return {"inverse": inverse, "unit": state["unit"], "updates": updates, "total": total}

    def product(self, state: Tensors, g: Tensor) -> Tensor:
        return state["total"] * (state["inverse"] @ g)
