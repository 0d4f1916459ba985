r"""A limited-memory estimate of the inverse Fisher matrix that stays calibrated: O(K D).

    F ~ W (U' diag(l - r) U + r I) W,   W = diag(F)^(1/2),

with U (K, D) the leading eigenvectors, in rows, of the second moment of *all* whitened scores W^-1 phi,
and one level r for the rest.  The inverse needs no solve,

    F^-1 g = W^-1 [ y / r + U' ((1 / l - 1 / r) o U y) ],   y = W^-1 g.

**Streaming.**  Scores wait in a buffer of m rows; when it is full, the K old rows and the m new ones
are merged through the eigenvectors of their (K + m) x (K + m) Gram matrix: O(K D) a score.  Unlike in
the window of the paper nothing is forgotten: what leaves the K rows stays in the diagonal.

**Calibration.**  The eigenvalues of a second moment over n scores in D dimensions are spread by noise
even where F = W^2: the largest lies near (1 + sqrt(D/n))^2, not at 1.  For a "spike" l over a level r,
the sample shows (Baik & Silverstein 2006)

    x = l (1 + (D/n) / (l/r - 1))     if l/r > 1 + sqrt(D/n),  else nothing beyond the edge,

which is inverted here; eigenvalues inside the edge count as r.  So the estimate starts as the diagonal,
takes up directions as soon as they are significant, and has the right size for any n.

Measured (tests/statistical/test_inverse_fisher.py): cosine, in the Fisher metric, with the exact
natural gradient on four spectra; above the dense recursion up to some ten D scores.

Not for: a Fisher matrix whose whitened spectrum has much more than K separate directions.

The estimate is this project's; the debiasing is that of Donoho, Gavish & Johnstone (2018, AoS 46:1742).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..families.base import Tensors
from ..linalg.spectral import symmetric_eigen
from .inverse import TINY, InverseFisher, good_rows, trust

#: numbers treated at once on a processor, so that what is computed from them stays in its cache
CHUNK = 1 << 20
#: the same on other devices, where every call costs
CHUNK_ELSEWHERE = 1 << 25
#: rows in the buffer at the first merge; doubled until the buffer is full
FIRST_MERGE = 8


@dataclass(frozen=True)
class LowRank(InverseFisher):
    """Running diagonal and leading eigenvectors of the whitened scores; see the head of this file.

    Args:
        rank: K, number of eigenvectors.
        growth: score k has weight k^growth, so that a moving F is followed: weights k^3 average over
            about the last two fifths of the run.

    Memory: (K + max(8, K/2) + 5) D numbers, and as many again during a merge.  The state that
    ``update`` is given stays as it was, but for rows of its buffer that do not count yet.

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

    def _buffer_rows(self) -> int:
        return max(8, self.rank // 2)

    def init(self, diagonal: Tensor, weight: float) -> Tensors:
        D = len(diagonal)
        zero = torch.zeros((), dtype=diagonal.dtype, device=diagonal.device)
        rank = min(self.rank, D)
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
            "buffer": diagonal.new_zeros(self._buffer_rows(), D),
            # counters of the host: they decide when to merge, and reading them waits for nothing
            "updates": torch.zeros((), dtype=torch.long, device="cpu"),
            "waiting": torch.zeros((), dtype=torch.long, device="cpu"),
            "next_merge": torch.tensor(min(FIRST_MERGE, self._buffer_rows()), device="cpu"),
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
        vectors, added = _write(state, scores, weight)
        total = state["diagonal_total"] + weight * added
        seen = state["total"] + weight * added
        # sum w^2 / sum w, as a running mean: the sums of squares would overflow in float32
        share = weight * added / seen.clamp_min(torch.finfo(seen.dtype).tiny)
        state = (
            state
            | vectors
            | {
                "diagonal_total": total,
                "total": seen,
                "mean_weight": state["mean_weight"] + share * (weight - state["mean_weight"]),
                "updates": torch.tensor(updates, device="cpu"),
                "waiting": torch.tensor(waiting + len(scores), device="cpu"),
            }
        )
        return self._merge(state) if waiting + len(scores) >= int(state["next_merge"]) else state

    def _merge(self, state: Tensors) -> Tensors:
        """Take the waiting rows into the leading eigenvectors."""
        waiting, rank = int(state["waiting"]), len(state["basis"])
        if not waiting:
            return state
        scale = state["values"].clamp_min(0.0).sqrt()
        scale = torch.cat([scale, scale.new_ones(waiting)])
        gram = scale.new_zeros(len(scale), len(scale))
        for _, rows in _whitened(state, state["basis"]):
            gram.addmm_(rows, rows.mT)
        gram = scale[:, None] * gram * scale
        values, vectors = symmetric_eigen(gram)
        values, vectors = values[:rank].clamp_min(0.0), vectors[:, :rank]
        tiny = torch.finfo(values.dtype).tiny
        # a direction that is rounding error has no unit vector
        real = values > values[0] * torch.finfo(values.dtype).eps * len(gram) + tiny
        values = torch.where(real, values, 0.0)
        project = torch.where(real, vectors * values.clamp_min(tiny).rsqrt(), 0.0).mT
        basis = torch.empty_like(state["basis"])
        for new, rows in _whitened(state, basis):
            torch.mm(project * scale, rows, out=new)
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
            "basis": basis,
            "merged_unit": state["inverse_unit"].reciprocal(),
            # the rows before belong to the state before
            "buffer": torch.zeros_like(state["buffer"]),
            "values": values,
            "spikes": spikes,
            "level": level,
            "waiting": torch.zeros((), dtype=torch.long, device="cpu"),
            "next_merge": torch.tensor(grown, device="cpu"),
        }

    def product(self, state: Tensors, g: Tensor) -> Tensor:
        y = g * state["inverse_unit"]
        weights = state["level"] / state["spikes"] - 1.0
        y = y + (weights * (state["basis"] @ y)) @ state["basis"]
        return y.mul_(state["inverse_unit"]).div_(state["level"])


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same columns of all ``tensors`` (..., D)."""
    chunk = CHUNK if tensors[0].device.type == "cpu" else CHUNK_ELSEWHERE
    size = max(1, chunk // sum(t.numel() // t.shape[-1] for t in tensors))
    return zip(*(t.split(size, -1) for t in tensors), strict=True)


def _write(state: Tensors, scores: Tensor, weight: float) -> tuple[Tensors, Tensor]:
    """Write scores into the free rows of the buffer; returns the new vectors by name, and the number of
    scores that are finite.

    The unit is the root of the diagonal, but near the first guess where few scores were not zero.  In
    minibatches of a plate a local parameter has a score once in a while.  The mean square of one or
    two may be next to nothing, and its inverse anything.
    """
    good = good_rows(scores)
    added = good.to(scores).sum()
    rate = weight * added / (state["diagonal_total"] + weight * added)
    start = int(state["waiting"])
    waiting = state["buffer"][start : start + len(scores)]
    new = {name: state[name].clone() for name in ("diagonal", "times_seen", "inverse_unit")}
    vectors = new["diagonal"], state["guess"], new["times_seen"], new["inverse_unit"]
    for rows, kept, diagonal, guess, times, inverse in _parts(scores, waiting, *vectors):
        rows = torch.where(good, rows, 0.0)
        torch.mul(rows, weight**0.5, out=kept)
        squares = rows.square()
        seen = rows.ne_(0.0)  # in floats: adding up booleans takes many times longer
        # the sum of one row would cost as much as another step
        one = len(rows) == 1
        diagonal.lerp_(squares[0] if one else squares.sum(0) / added.clamp_min(1.0), rate)
        times.add_(seen[0] if one else seen.sum(0))
        believed = torch.lerp(guess, diagonal, trust(times))
        torch.rsqrt(believed.clamp_min_(TINY), out=inverse)
    return new, added


def _whitened(state: Tensors, result: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Columns of ``result``, to be written, and those of the basis and the waiting rows whitened.

    The whitened ones of all turns share their memory.
    """
    basis, waiting = state["basis"], state["buffer"][: int(state["waiting"])]
    change = state["merged_unit"] * state["inverse_unit"]
    memory: Tensor | None = None
    every = _parts(result, basis, waiting, change, state["inverse_unit"])
    for written, old, new, changed, inverse in every:
        if memory is None:
            memory = basis.new_empty(len(old) + len(new), len(inverse))
        rows = memory[:, : len(inverse)]
        torch.mul(old, changed, out=rows[: len(old)])
        torch.mul(new, inverse, out=rows[len(old) :])
        yield written, rows


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
