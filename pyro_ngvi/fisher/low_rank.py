r"""A limited-memory estimate of the inverse Fisher matrix that stays calibrated: O(K D).

    F ~ W (U' diag(l - r) U + r I) W,   W = diag(F)^(1/2),
    F^-1 g = W^-1 [ y / r + U' ((1 / l - 1 / r) o U y) ],   y = W^-1 g,

with U (K, D) the leading eigenvectors, in rows, of the second moment of *all* whitened scores W^-1 phi,
and one level r for the rest.

**Streaming.**  Scores wait in a buffer of m rows; when it is full, the K old rows and the m new ones
are merged through the eigenvectors of their Gram matrix.  What leaves the K rows stays in the diagonal.

**Calibration.**  The eigenvalues of a second moment over n scores in D dimensions are spread by noise
even where F = W^2.  For a "spike" l over a level r, the sample shows (Baik & Silverstein 2006)

    x = l (1 + (D/n) / (l/r - 1))     if l/r > 1 + sqrt(D/n),  else nothing beyond the edge,

which is inverted here; eigenvalues inside the edge count as r.  So the estimate starts as the diagonal,
takes up directions as soon as they are significant, and has the right size for any n.

Not for: a Fisher matrix whose whitened spectrum has much more than K separate directions.

The estimate is this project's (measured by tests/statistical/test_inverse_fisher.py); the debiasing is
that of Donoho, Gavish & Johnstone (2018, AoS 46:1742).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..families.base import Tensors
from ..linalg.spectral import symmetric_eigen
from .inverse import TINY, InverseFisher, finite_rows, host_count, trust

#: rows in the buffer at the first merge; doubled until the buffer is full
FIRST_MERGE = 8


@dataclass(frozen=True)
class LowRank(InverseFisher):
    """F ~ W (U' diag(l - r) U + r I) W, W = diag(F)^(1/2): :mod:`pyro_ngvi.fisher.low_rank`.

    Args:
        rank: K, number of eigenvectors.
        growth: score k has weight k^growth, so that a moving F is followed: weights k^3 average over
            about the last two fifths of the run.

    Memory: (K + max(8, K/2) + 5) D numbers, and twice as many again during a merge.

    Raises:
        ValueError: for a rank below 1.

    Example:
        >>> import torch
        >>> from pyro_ngvi.fisher import LowRank
        >>> estimate = LowRank(rank=2)
        >>> state = estimate.init(torch.ones(3), weight=1.0)
        >>> for _ in range(2000):
        ...     state = estimate.update(state, torch.tensor([1.0, 2.0, 3.0]) * torch.randn(1, 3))
        >>> bool((estimate.product(state, torch.tensor([1.0, 4.0, 9.0])) - 1.0).abs().max() < 0.3)
        True
    """

    rank: int
    growth: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank must be a whole number of at least 1, got {self.rank!r}.")

    def init(self, diagonal: Tensor, weight: float) -> Tensors:
        D, buffer = len(diagonal), max(8, self.rank // 2)
        rank, zero = min(self.rank, D), diagonal.new_zeros(())
        return {
            "diagonal": diagonal.clone(),
            "guess": diagonal.clone(),
            "times_seen": torch.zeros_like(diagonal),
            # of the diagonal as it is, and square roots of that of the last merge
            "inverse_unit": diagonal.clamp_min(TINY).rsqrt(),
            "merged_unit": diagonal.clamp_min(TINY).sqrt(),
            "diagonal_total": zero + weight,
            "total": zero.clone(),
            "mean_weight": zero.clone(),
            "basis": diagonal.new_zeros(rank, D),
            "values": diagonal.new_zeros(rank),
            "level": zero + 1.0,
            "spikes": diagonal.new_ones(rank),
            "buffer": diagonal.new_zeros(buffer, D),
            # they decide when to merge
            "updates": host_count(0),
            "waiting": host_count(0),
            "next_merge": host_count(min(FIRST_MERGE, buffer)),
        }

    def update(self, state: Tensors, scores: Tensor) -> Tensors:
        for rows in scores.split(int(state["next_merge"])):
            state = self._take(state, rows)
        return state

    def _take(self, state: Tensors, scores: Tensor) -> Tensors:
        waiting = int(state["waiting"])
        if waiting + len(scores) > len(state["buffer"]):
            state, waiting = self._merge(state), 0
        updates = int(state["updates"]) + 1
        weight = float(updates) ** self.growth
        vectors, added = self._write(state, scores, weight)
        seen = state["total"] + weight * added
        # sum w^2 / sum w, as a running mean: the sums of squares would overflow in float32
        share = weight * added / seen.clamp_min(torch.finfo(seen.dtype).tiny)
        waiting += len(scores)
        state = state | vectors
        state["diagonal_total"] = state["diagonal_total"] + weight * added
        state["total"] = seen
        state["mean_weight"] = state["mean_weight"] + share * (weight - state["mean_weight"])
        state["updates"], state["waiting"] = host_count(updates), host_count(waiting)
        return self._merge(state) if waiting >= int(state["next_merge"]) else state

    def _write(self, state: Tensors, scores: Tensor, weight: float) -> tuple[Tensors, Tensor]:
        """Write scores into the free rows of the buffer: the new vectors, and how many are finite.

        The unit is the root of the diagonal, but near the first guess where few scores were not zero:
        of a local parameter in minibatches, the mean square of one or two may be next to nothing.
        """
        rows, added = finite_rows(scores)
        rate = weight * added / (state["diagonal_total"] + weight * added)
        start = int(state["waiting"])
        torch.mul(rows, weight**0.5, out=state["buffer"][start : start + len(rows)])
        times = state["times_seen"] + (rows != 0.0).to(rows).sum(0)
        squares = rows.square_().sum(0) / added.clamp_min(1.0)
        diagonal = torch.lerp(state["diagonal"], squares, rate)
        believed = torch.lerp(state["guess"], diagonal, trust(times)).clamp_min(TINY)
        new = {"diagonal": diagonal, "times_seen": times, "inverse_unit": believed.rsqrt()}
        return new, added

    def _merge(self, state: Tensors) -> Tensors:
        """Take the waiting rows into the leading eigenvectors."""
        waiting, rank = int(state["waiting"]), len(state["basis"])
        scale = state["values"].clamp_min(0.0).sqrt()
        scale = torch.cat([scale, scale.new_ones(waiting)])
        change = state["merged_unit"] * state["inverse_unit"]
        whitened = state["basis"] * change, state["buffer"][:waiting] * state["inverse_unit"]
        rows = torch.cat(whitened)
        gram = scale[:, None] * (rows @ rows.mT) * scale
        values, vectors = symmetric_eigen(gram)
        values, vectors = values[:rank].clamp_min(0.0), vectors[:, :rank]
        tiny = torch.finfo(values.dtype).tiny
        # a direction that is rounding error has no unit vector
        real = values > values[0] * torch.finfo(values.dtype).eps * len(gram) + tiny
        values = torch.where(real, values, 0.0)
        project = torch.where(real, vectors * values.clamp_min(tiny).rsqrt(), 0.0).mT
        total = state["total"].clamp_min(tiny)
        n = total / state["mean_weight"].clamp_min(tiny)
        # coordinates that never had a score have no share in the trace and none in the noise
        seen = torch.count_nonzero(state["times_seen"]).to(total).clamp_min(1.0)
        # the scores alone, without the first guess, may have another trace than the diagonal
        guessed = state["diagonal_total"] - state["total"]
        alone = (state["diagonal"] * state["diagonal_total"] - state["guess"] * guessed) / total
        trace = (alone * state["inverse_unit"].square()).sum().clamp_min(tiny)
        spikes, level = _debias(values / total * (seen / trace), seen, n)
        # the first guess has no spikes, and counts like its weight of scores
        share = state["total"] / state["diagonal_total"].clamp_min(tiny)
        spikes, level = 1.0 + share * (spikes - 1.0), 1.0 + share * (level - 1.0)
        grown = min(2 * int(state["next_merge"]), len(state["buffer"]))
        return state | {
            "basis": (project * scale) @ rows,
            "merged_unit": state["inverse_unit"].reciprocal(),
            # the rows before belong to the state before
            "buffer": torch.zeros_like(state["buffer"]),
            "values": values,
            "spikes": spikes,
            "level": level,
            "waiting": host_count(0),
            "next_merge": host_count(grown),
        }

    def product(self, state: Tensors, g: Tensor) -> Tensor:
        y = g * state["inverse_unit"]
        weights = state["level"] / state["spikes"] - 1.0
        y = y + (weights * (state["basis"] @ y)) @ state["basis"]
        return y.mul_(state["inverse_unit"]).div_(state["level"])


def _debias(values: Tensor, D: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Spikes l (K,) and level r of the whitened Fisher matrix, whose trace is D, from n scores."""
    ratio = D / n
    edge = (1.0 + ratio.sqrt()).square()
    level = torch.ones_like(n)
    spikes = torch.ones_like(values)
    # of all directions at least one has the level
    free = torch.arange(len(values), device=values.device) < D - 1.0
    above = torch.zeros_like(free)
    for _ in range(20):  # what exceeds the level, and the level of what does not, in turn
        x = values / level
        b = x + 1.0 - ratio
        spikes = level * 0.5 * (b + (b.square() - 4.0 * x).clamp_min(0.0).sqrt())
        above = (x > edge) & free
        rest = D - torch.where(above, spikes, 0.0).sum()
        # n scores cannot show that a direction has less than a share of about 1/n
        level = torch.maximum(rest / (D - above.sum()), 1.0 / (1.0 + n))
    return torch.where(above, spikes, level), level
