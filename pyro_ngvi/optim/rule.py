"""A rule says where to go; whether we go is decided here, once for all rules.

A rule is a frozen dataclass with a ``family`` and the method ``step``.  Around each of its steps
:meth:`Rule.update` refuses one that is not finite, counts, averages the iterates and reports.  These
are pure functions of tensors, and nothing in them waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..families.base import Tensors
from ..linalg.host import choose, host_bool


@dataclass(frozen=True)
class Report:
    """What one update did, as tensors: nothing here waits for the device."""

    finite: Tensor
    step_norm: Tensor
    gain: Tensor
    radius: Tensor
    damped: Tensor
    skipped: Tensor
    bad_entries: Tensor


@dataclass(frozen=True)
class StepReport:
    """What the last step did, in numbers.

    Attributes:
        outcome: "accepted", "damped" (by the trust region, or as an outlier) or "skipped" (not finite).
        step_norm: Fisher length of the step; KL from the q before is about step_norm^2 / 2 nats.  With
            ``VON`` and its kin (``VOGN``, ``IVON``, ``Vadam``, ``SLANG``) and the matrices of
            ``NoisyKFAC`` it is that of the move of the mean alone: small while variances still move.
        gain: factor on the natural gradient that the schedule asked for.
        radius: trust radius in force.
        skipped: number of steps skipped so far.
        skipped_sites: latent sites whose gradient was not finite at the last skipped step.
    """

    outcome: str
    step_norm: float
    gain: float
    radius: float
    skipped: int
    skipped_sites: tuple[str, ...]


def part(state: Tensors, prefix: str) -> Tensors:
    """The entries whose names start with ``prefix``, by the rest of the name."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


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


@dataclass(frozen=True)
class Step:
    """Where a rule goes from the iterate.

    Attributes:
        params: the next iterate.
        length: its distance in the Fisher norm, nats^(1/2), 0-dim.
        gain: the factor on the direction that was asked for, 0-dim.
        state: those entries of the rule's state that change.
        radius: bound on the length, 0-dim; ``None``: there is none.
        damped: whether the bound was met, 0-dim; ``None``: it never is.
        finite: whether what the step was made of is finite, 0-dim, where ``params`` may hide that it
            is not.
        keep_average: whether the average so far goes on, 0-dim; else it begins anew at the iterate.
    """

    params: Tensors
    length: Tensor
    gain: Tensor
    state: Tensors = field(default_factory=dict)
    radius: Tensor | None = None
    damped: Tensor | None = None
    finite: Tensor | None = None
    keep_average: Tensor | None = None


class Rule(ABC):
    """The base of rules: ``init(params) -> state``, ``update(params, grads, state)``.

    ``grads`` has the Euclidean gradient of the loss by parameter, and beside it, as "curvature." and a
    name, what the loss left of the curvature.  Write :meth:`step`, and :meth:`start` if it remembers
    anything.

    Example:
        A step of fixed length along the natural gradient.

        >>> import torch
        >>> from pyro_ngvi.families import MeanFieldNormal
        >>> @dataclass(frozen=True)
        ... class FixedLength(Rule):
        ...     family: MeanFieldNormal
        ...     length: float = 0.1
        ...     def step(self, params, grads, state):
        ...         G = self.family.natural_gradient(params, self.family.pull(params, grads))
        ...         gain = self.length / self.family.fisher_norm(params, G)
        ...         new = self.family.retract(params, G, -gain)
        ...         return Step(new, length=torch.tensor(self.length), gain=gain)
        >>> params = {"loc": torch.zeros(2), "log_scale": torch.zeros(2)}
        >>> rule = FixedLength(MeanFieldNormal())
        >>> grads = {"loc": torch.tensor([3.0, 4.0]), "log_scale": torch.zeros(2)}
        >>> rule.update(params, grads, rule.init(params))[0]["loc"]
        tensor([-0.0600, -0.0800])
    """

    #: kinds of curvature of a loss that the rule takes; ``None`` stands for a loss without any
    accepts: ClassVar[tuple[str | None, ...]] = (None,)

    family: Any
    averaging: Averaging | None = None

    @abstractmethod
    def step(self, params: Tensors, grads: Tensors, state: Tensors) -> Step:
        """The step from ``params``; ``state["count"]`` iterates came before."""

    def start(self, params: Tensors) -> Tensors:
        """What the rule remembers before its first step."""
        return {}

    def refused(self, state: Tensors) -> Tensors:
        """The entries of the state that a refused step changes."""
        return {}

    def bad_entries(self, grads: Tensors) -> Tensor:
        """Entries of z (d,) at which gradient or curvature is not finite."""
        bad = self.family.not_finite(grads)
        for name, curvature in part(grads, "curvature.").items():
            if name in ("diagonal", "prior"):
                bad = bad | ~torch.isfinite(curvature)
            elif name in ("dense", "rows"):  # rows stand for their products
                bad = bad | ~torch.isfinite(curvature.square().sum(0))
        return bad

    def init(self, params: Tensors) -> Tensors:
        """The state before the first step."""
        zero = next(iter(params.values())).new_zeros(())
        state = {"count": zero, "skipped": zero.clone()}
        state["bad_entries"] = torch.zeros_like(self.family.not_finite(params))
        return state | self.start(params) | start_average(self.averaging, params)

    def update(
        self, params: Tensors, grads: Tensors, state: Tensors
    ) -> tuple[Tensors, Tensors, Report]:
        """One step from ``params`` (the iterate), or none where it is not finite."""
        step = self.step(params, grads, state)
        # a length that overflows is refused too: nothing says how far such a step should go
        total = reduce(torch.add, (v.sum() for v in step.params.values())) + step.length
        finite = total.abs() < torch.inf
        if step.finite is not None:
            finite = finite & step.finite

        keep = step.keep_average
        before = state if keep is None else restart_average(state, params, keep)
        count = before["count"] + 1.0
        new, length = step.params, step.length
        new_state = state | {"count": count} | step.state
        new_state |= step_average(self.averaging, self.family, before, new, count)
        if not host_bool(finite):
            refused = state | {"skipped": state["skipped"] + 1.0} | self.refused(state)
            refused["bad_entries"] = self.bad_entries(grads)
            new = choose(finite, new, params)
            new_state = choose(finite, new_state, refused)
            length = torch.where(finite, length, 0.0)
        return (
            new,
            new_state,
            Report(
                finite=finite,
                step_norm=length,
                gain=step.gain,
                radius=torch.full_like(length, torch.inf) if step.radius is None else step.radius,
                damped=torch.zeros_like(finite) if step.damped is None else step.damped,
                skipped=new_state["skipped"],
                bad_entries=new_state["bad_entries"],
            ),
        )
