r"""Weighted averages of the iterates, kept beside them: x_bar_k = sum_j w_j x_j / sum_j w_j."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..families.base import Tensors
from ..linalg.host import choose

__all__ = [
    "Averaging",
    "LogPower",
    "Tail",
    "UsingAverage",
    "as_averaging",
    "restart_average",
    "start_average",
    "step_average",
]


class Averaging(Protocol):
    """``rate(k, total)``: the weight w_k / sum_{j<=k} w_j of iterate k = 1, 2, ... and the total."""

    def rate(self, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class LogPower:
    """w_k = (log(k + 1))^power: nearly uniform, lighter at the start.

    The weights of averaged stochastic Newton and of AIFVB (Godichon-Baggioni, Nguyen & Tran 2024,
    power 2), with the count moved by one so that the first weight is positive.
    """

    power: float = 2.0

    def rate(self, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        weight = torch.log(k + 1.0) ** self.power
        total = total + weight
        return weight / total, total


@dataclass(frozen=True)
class Tail:
    """Rate eta / (k + eta - 1): weights that grow as k^(eta - 1) (Shamir & Zhang 2013).

    The mean age of an iterate is 1 / (eta + 1) of the run, that of the last 2 / (eta + 1) of it alike:
    two fifths for eta = 4.
    """

    eta: float = 4.0

    def rate(self, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return (self.eta / (k + (self.eta - 1.0))).clamp_max(1.0), total


def as_averaging(averaging: Averaging | float | bool) -> Averaging | bool:
    """``False``: none; ``True``: :class:`Tail`; a number w: :class:`LogPower` (w)."""
    if averaging is False:
        return False
    if averaging is True:
        return Tail()
    if isinstance(averaging, int | float):
        if not 0.0 <= averaging < float("inf"):
            raise ValueError(
                f"averaging: the power of log k must not be negative, got {averaging}."
            )
        return LogPower(float(averaging))
    if not hasattr(averaging, "rate"):
        raise ValueError(f"averaging must be a number, a bool or have rate(), got {averaging!r}.")
    return averaging


def start_average(averaging: Averaging | None, params: Tensors) -> Tensors:
    """The state of an average that nothing has entered yet; empty for ``None``."""
    if averaging is None:
        return {}
    like = next(iter(params.values()))
    zero = torch.zeros((), dtype=like.dtype, device=like.device)
    state = {"average_total": zero, "average_square": zero.clone()}
    return state | {"average." + name: v.clone() for name, v in params.items()}


def step_average(
    averaging: Averaging | None, family: Any, state: Tensors, params: Tensors, count: Tensor
) -> Tensors:
    """The entries of ``state`` after iterate number ``count`` has entered, by the family's mean."""
    if averaging is None:
        return {}
    rate, total = averaging.rate(count, state["average_total"])
    past = {name: state["average." + name] for name in params}
    average = family.average(past, params, rate)
    # sum of squared weights: what averaging leaves of the noise of one step
    square = (1.0 - rate).square() * state["average_square"] + rate.square()
    new = {"average_total": total, "average_square": square}
    return new | {"average." + name: v for name, v in average.items()}


def restart_average(state: Tensors, params: Tensors, keep: Tensor) -> Tensors:
    """``state``, with the average begun afresh at ``params`` unless ``keep``; its count too."""
    fresh = {"average." + name: v for name, v in params.items()}
    zeros = ("count", "average_total", "average_square")
    fresh |= {name: torch.zeros_like(state[name]) for name in zeros}
    return state | choose(keep, {k: state[k] for k in fresh}, fresh)


class UsingAverage:
    """Averages put in the place of the iterates, until the end of a ``with`` block."""

    @torch.no_grad()
    def __init__(self, averages: list[tuple[Tensors, Tensors]]) -> None:
        self._iterates = [
            (params, {name: p.clone() for name, p in params.items()}) for params, _ in averages
        ]
        for params, average in averages:
            for name, p in params.items():
                p.copy_(average[name])

    def __enter__(self) -> None:
        pass

    @torch.no_grad()
    def __exit__(self, *exception: Any) -> None:
        for params, iterate in self._iterates:
            for name, p in params.items():
                p.copy_(iterate[name])
