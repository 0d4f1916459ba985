r"""The inverse Fisher matrix from scores alone: the protocol, and the estimates but for the low rank.

A score is phi = grad_lambda log q_lambda(z), z ~ q_lambda; the Fisher matrix is F = E[phi phi'].  Each
estimate is a trio of pure functions over a nested dict of tensors, and nothing waits for the device.
``update`` may reuse the memory of the state that it is given.  Scores that are not finite are left out.

Source: Godichon-Baggioni, Nguyen & Tran (2024), Natural gradient variational Bayes without Fisher
matrix analytic calculation and its inversion, JASA; equation numbers are theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..families.base import Tensors

#: a nested dict of tensors
State = dict[str, Any]

#: a coordinate seen that many times trusts its own scores and the first guess alike
FEW = 3.0
#: smallest entry of the diagonal
TINY = 1e-30


class InverseFisher(Protocol):
    """An estimate of F^-1 from scores (:mod:`pyro_ngvi.fisher.inverse`), as a trio of pure functions.

    They are called as in the example of :class:`Window`.  Inherit for the defaults.
    """

    #: scores that IFVB draws for it at a step unless told how many
    scores_a_step: ClassVar[int] = 1

    #: whether ``init`` heeds the first guess of the diagonal, which is otherwise not made
    starts_from_guess: ClassVar[bool] = True

    def init(self, diagonal: Tensor, weight: float) -> State:
        """The state before any score, from a guess of F's diagonal (D,) worth ``weight`` scores."""
        ...

    def update(self, state: State, scores: Tensor) -> State:
        """The state after more scores, (S, D)."""
        ...

    def product(self, state: State, g: Tensor) -> Tensor:
        """F^-1 g (D,) for a gradient g (D,)."""
        ...


def host_count(number: int) -> Tensor:
    """A counter that stays with the host: reading it waits for nothing."""
    return torch.tensor(number, device="cpu")


def good_rows(scores: Tensor) -> Tensor:
    """Which of scores (S, D) have a finite length, (S, 1)."""
    return torch.isfinite(scores.square().sum(-1, keepdim=True))  # their squares must not overflow


def finite_rows(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (S, D) with rows of no finite length set to zero, and the number of good ones."""
    good = good_rows(scores)
    return torch.where(good, scores, 0.0), good.to(scores).sum()


def trust(times_seen: Tensor) -> Tensor:
    """Weight in [0, 1) of the mean square of that many scores, the rest being the guess's."""
    square = times_seen.square()
    return square / (square + FEW**2)


def first_guess(scores: Tensor, sizes: list[int]) -> Tensor:
    """diag(F) (D,) from a few scores (n, D): where an entry has none, the mean of its parameter's."""
    rows, _ = finite_rows(scores)
    seen = (rows != 0).to(rows).sum(0)
    square = rows.square().mean(0)
    means = []
    for own, count in zip(square.split(sizes), (seen > 0).split(sizes), strict=True):
        means.append((own.sum() / count.sum().clamp_min(1)).expand_as(own))
    mean = torch.cat(means)
    mean = torch.where(mean > 0, mean, square.mean().clamp_min(TINY))
    return torch.lerp(mean, square, trust(seen))


def add_outer_products(inverse: Tensor, rows: Tensor) -> Tensor:
    """(H + rows' rows)^-1 from H^-1 (D, D), for rows (S, D); symmetric to the last bit."""
    b = rows @ inverse
    capacitance = torch.eye(len(rows), dtype=rows.dtype, device=rows.device) + rows @ b.mT
    factor, _ = torch.linalg.cholesky_ex(capacitance)
    b = torch.linalg.solve_triangular(factor, b, upper=False)
    half = 0.5 * (b.mT @ b)  # the two triangles of a product may be rounded differently
    return inverse - (half + half.mT)


@dataclass(frozen=True)
class Dense(InverseFisher):
    """H^-1 as a (D, D) matrix, O(D^2) memory and time.

    With H_s = H_0 + sum_{k <= s} g_k phi_k phi_k', the inverse follows by rank-one updates,

        H^-1 <- H^-1 - g (H^-1 phi)(H^-1 phi)' / (1 + g phi' H^-1 phi),                         (4.6)

    and n_s H_s^-1, n_s = n_0 + sum_k g_k, is the estimate of F^-1.  H_0 is the first guess of the
    diagonal times its weight n_0.  A block of S scores is one update of rank S (Woodbury).

    Not for D above a few thousand, nor for fewer than 2 D scores, where :class:`LowRank` is closer.

    Args:
        growth: score k has weight k^growth; larger values than 0 follow a moving F.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
        >>> state = Dense().init(torch.ones(2), 1.0)
        >>> Dense().product(Dense().update(state, scores), torch.ones(2))  # 3 (I + diag(9, 1))^-1
        tensor([0.3000, 1.5000])
    """

    growth: float = 0.0

    def init(self, diagonal: Tensor, weight: float) -> Tensors:
        zero, inverse = diagonal.new_zeros(()), torch.diag(1.0 / (weight * diagonal))
        return {"inverse": inverse, "updates": zero, "total": zero + weight}

    def update(self, state: Tensors, scores: Tensor) -> Tensors:
        rows, added = finite_rows(scores)
        updates = state["updates"] + 1.0
        weight = updates**self.growth
        inverse = add_outer_products(state["inverse"], weight.sqrt() * rows)
        total = state["total"] + weight * added
        return {"inverse": inverse, "updates": updates, "total": total}

    def product(self, state: Tensors, g: Tensor) -> Tensor:
        return state["total"] * (state["inverse"] @ g)


@dataclass(frozen=True)
class Window(InverseFisher):
    r"""A damped window: the mean of the last ``size`` scores, and a ridge where they say nothing.

    With the last K scores phi in the rows of Phi (K, D), of which n are there,

        F ~ sum_k phi_k phi_k' / n + c I,     c = damping x mean of the diagonal of the first part.

    With R the rows phi_k / sqrt(n), its inverse takes a K x K system (Woodbury),

        F^-1 g = [ g - R' (c I + R R')^-1 R g ] / c.

    The matrix Phi Phi' is kept: S scores cost O(S K D), a product O(K D + K^3).

    It is too large by c in all directions: natural gradients come out short, never long.

    Not for: parameters in units that differ by orders of magnitude, as one ridge serves all (LowRank);
    a Fisher matrix that is well determined and does not move.

    Source of the ridge: Martens (2020, JMLR 21:146); the window and its units are this project's.

    Args:
        size: K, number of scores.
        damping: the ridge as a share of the mean of diag(F).

    Raises:
        ValueError: for a size below 1, or a damping that is not positive.

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

    def __post_init__(self) -> None:
        if not (isinstance(self.size, int) and self.size >= 1 and 0.0 < self.damping < torch.inf):
            raise ValueError(f"{self} needs a whole number size >= 1 and a positive damping.")

    def init(self, diagonal: Tensor, weight: float) -> Tensors:
        return {
            "rows": diagonal.new_zeros(self.size, len(diagonal)),
            "gram": diagonal.new_zeros(self.size, self.size),
            "weights": diagonal.new_zeros(self.size),
            "guess": diagonal.mean(),
            "next": host_count(0),
        }

    def update(self, state: Tensors, scores: Tensor) -> Tensors:
        rows, gram, weights = (state[name].clone() for name in ("rows", "gram", "weights"))
        new = scores[-self.size :]
        ring = (state["next"] + torch.arange(len(new), device=new.device)) % self.size
        good = good_rows(new)
        rows[ring] = torch.where(good, new, rows[ring])
        weights[ring] = torch.where(good[:, 0], 1.0, weights[ring])
        gram[ring] = rows[ring] @ rows.mT
        gram[:, ring] = gram[ring].mT
        kept = {"rows": rows, "gram": gram, "weights": weights}
        return state | kept | {"next": (state["next"] + len(new)) % self.size}

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
