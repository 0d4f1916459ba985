"""The first guess of diag(F), and how soon a coordinate is believed instead of it."""

from __future__ import annotations

import torch
from torch import Tensor

from .inversion_free import finite_rows

__all__ = ["TINY", "first_guess", "trust"]

#: a coordinate seen that many times trusts its own scores and the first guess alike
FEW = 3.0
#: smallest entry of the diagonal
TINY = 1e-30


def trust(times_seen: Tensor) -> Tensor:
    """Weight in [0, 1) of the mean square of that many scores, the rest being the guess's."""
    square = times_seen.square()
    return square / (square + FEW**2)


def first_guess(scores: Tensor, sizes: list[int]) -> Tensor:
    """diag(F) (D,) from a few scores (n, D): where an entry has none, the mean of its parameter's."""
    rows, _ = finite_rows(scores)
    seen = (rows != 0).to(rows).sum(0)
    square = rows.square().mean(0)
    if sum(sizes) != len(square):  # entries of a frame do not go by parameter
        sizes = [len(square)]
    means = []
    for own, count in zip(square.split(sizes), (seen > 0).split(sizes), strict=True):
        means.append((own.sum() / count.sum().clamp_min(1)).expand_as(own))
    mean = torch.cat(means)
    mean = torch.where(mean > 0, mean, square.mean().clamp_min(TINY))
    return torch.lerp(mean, square, trust(seen))
