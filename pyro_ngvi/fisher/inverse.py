r"""The inverse Fisher matrix from scores alone: the protocol, and the estimates but for the low rank.

A score is phi = grad_lambda log q_lambda(z), z ~ q_lambda; the Fisher matrix is F = E[phi phi'].  Each
estimate is a trio of pure functions over a nested dict of tensors, and nothing waits for the device:

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
    """A trio of pure functions; see the head of this file.  Inherit for the defaults."""

    #: scores that IFVB draws for it at a step unless told how many
    scores_a_step: ClassVar[int] = 1

    @property
    def starts_from_guess(self) -> bool:
        """Whether ``init`` heeds the first guess of the diagonal, which is otherwise not made."""
        return True

    def init(self, diagonal: Tensor, weight: float) -> State:
        """The state before any score, from a guess of F's diagonal (D,) worth ``weight`` scores."""
        ...

    def update(self, state: State, scores: Tensor) -> State:
        """The state after more scores, (S, D)."""
        ...

    def product(self, state: State, g: Tensor) -> Tensor:
        """F^-1 g for a gradient g (D,)."""
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


def _add_outer_products(inverse: Tensor, rows: Tensor) -> Tensor:
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
        H^-1 <- H^-1 - w (H^-1 Z)(H^-1 Z)' / (1 + w Z' H^-1 Z),   Z ~ N(0, I),  w = c_beta s^-beta,

    and n_s H_s^-1, n_s = sum_k g_k, is the estimate of F^-1.  The second line keeps H_s / s away from
    singular matrices.  A block of S scores is one update of rank S (Woodbury).

    Usable from about 2 D scores on.  Not for D above a few thousand, nor for fewer scores than D, where
    :class:`LowRank` is closer.

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
        if not ((self.eps is None or self.eps > 0) and self.c_beta >= 0 and self.beta >= 0):
            raise ValueError(f"{self} needs a positive eps (or None), and c_beta, beta >= 0.")

    @property
    def starts_from_guess(self) -> bool:
        return self.eps is None

    def init(self, diagonal: Tensor, weight: float) -> Tensors:
        zero, start, unit = diagonal.new_zeros(()), weight * diagonal, diagonal.sqrt()
        if self.eps is not None:
            start, unit, weight = (
                torch.full_like(diagonal, self.eps),
                torch.ones_like(diagonal),
                0.0,
            )
        inverse = torch.diag(1.0 / start)
        return {"inverse": inverse, "unit": unit, "updates": zero, "total": zero + weight}

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


@dataclass(frozen=True)
class Window(InverseFisher):
    r"""A damped window: the mean of the last ``size`` scores, and a ridge where they say nothing.

    With the last K scores phi in the rows of Phi (K, D), and weights w = rho^age that sum to n,

        F ~ sum_k w_k phi_k phi_k' / n + c I,     c = damping x mean of the diagonal of the first part.

    With R the rows sqrt(w_k / n) phi_k, its inverse takes a K x K system (Woodbury),

        F^-1 g = [ g - R' (c I + R R')^-1 R g ] / c.

    The matrix Phi Phi' is kept: S scores cost O(S K D), a product O(K D + K^3).

    The estimate is of the size of F in the directions that the window spans, and too large by c in all:
    natural gradients come out short, never long, as is right for nearly singular Fisher matrices.

    Not for: parameters in units that differ by orders of magnitude, as one ridge serves all (LowRank,
    or :class:`Blocks` by layer); a Fisher matrix that is well determined and does not move.

    Source of the ridge: Martens (2020, JMLR 21:146); the window and its units are this project's.

    Args:
        size: K, number of scores.
        damping: the ridge as a share of the mean of diag(F).
        decay: rho in (0, 1], the factor on the weight of a score at each further update.

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
        if self.decay != 1.0:
            weights.mul_(self.decay)
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


@dataclass(frozen=True)
class Blocks(InverseFisher):
    """A block-diagonal inverse: ``inner``, an estimate, for consecutive slices of those ``sizes``.

    Each slice has its own size of steps (a ridge or a level of its own); what is lost are the entries
    of F between slices.  Those of a flow are its affine map and its layers
    (:meth:`~pyro_ngvi.families.Family.layer_sizes`).  A score that is not finite in one is left out
    of all.

    Not for: slices that say the same, such as two affine layers in a row: each is moved as if it were
    alone, and the sum of the steps is twice too long.

    Source: Martens & Grosse (2015, ICML), section 4.2, for Fisher matrices of networks by layer.

    Example:
        >>> import torch
        >>> from pyro_ngvi.fisher import Blocks, Window
        >>> estimate = Blocks((1, 2), Window(size=2, damping=1.0))
        >>> state = estimate.init(torch.ones(3), weight=1.0)
        >>> state = estimate.update(state, torch.tensor([[1.0, 2.0, 0.0], [1.0, 0.0, 2.0]]))
        >>> estimate.product(state, torch.tensor([2.0, 4.0, 4.0])).round(decimals=4)  # diag(2, 4, 4)
        tensor([1., 1., 1.])
    """

    sizes: tuple[int, ...]
    inner: InverseFisher

    def init(self, diagonal: Tensor, weight: float) -> State:
        parts = enumerate(diagonal.split(self.sizes))
        return {str(b): self.inner.init(part, weight) for b, part in parts}

    def update(self, state: State, scores: Tensor) -> State:
        scores = torch.where(good_rows(scores), scores, torch.nan)
        parts = enumerate(scores.split(self.sizes, 1))
        return {str(b): self.inner.update(state[str(b)], part) for b, part in parts}

    def product(self, state: State, g: Tensor) -> Tensor:
        parts = enumerate(g.split(self.sizes))
        return torch.cat([self.inner.product(state[str(b)], part) for b, part in parts])
