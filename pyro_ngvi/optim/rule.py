"""A rule says where to go; whether we go is decided here, once for all rules.

These are pure functions of nested dicts of tensors, and nothing in them waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from numbers import Real
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..families.base import Tensors
from ..linalg.host import choose, host_bool

#: a nested dict of tensors
State = dict[str, Any]
#: a rate of a published rule: a number, or a function of the step count k = 0, 1, ... (0-dim tensor)
Rate = float | Callable[[Tensor], Tensor]
#: mean share of signal, of ten steps or so, above which q is on its way, and how many iterates lag then
ON_ITS_WAY, OLD = 0.5, 100.0


@dataclass(frozen=True)
class Step:
    """Where a rule goes from the iterate; :class:`Rule` has an example.

    Attributes:
        params: the next iterate, a tensor by name in the shape that it had.
        length: its distance in the Fisher norm, nats^(1/2), 0-dim.
        gain: the factor on the direction that was asked for, 0-dim; only reported.
        state: those entries of the rule's state that change.
        radius: bound on the length, nats^(1/2), 0-dim; ``None``: there is none.
        damped: whether the bound was met, 0-dim; ``None``: it never is.
        finite: whether what the step was made of is finite, 0-dim, where ``params`` may hide that it
            is not.
        keep_average: whether the average so far goes on, 0-dim; else it begins anew at the iterate.
        if_refused: those entries of the state that change where the step is refused.
    """

    params: Tensors
    length: Tensor
    gain: Tensor
    state: State = field(default_factory=dict)
    radius: Tensor | None = None
    damped: Tensor | None = None
    finite: Tensor | None = None
    keep_average: Tensor | None = None
    if_refused: State = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What one update did, as tensors that nobody waits for."""

    finite: Tensor
    step_norm: Tensor
    gain: Tensor
    radius: Tensor
    damped: Tensor
    skipped: Tensor
    bad_entries: Tensor


@dataclass(frozen=True)
class StepReport:
    """What the last step did, in numbers: of ``optim.report()``, as in the example of ``NGVB``.

    Attributes:
        outcome: "accepted", "damped" (by the trust region, or as an outlier) or "skipped" (not finite).
        step_norm: Fisher length of the step; KL from the q before is about step_norm^2 / 2 nats.  With
            ``VON`` and its kin and the matrices of ``NoisyKFAC`` that of the move of the mean alone.
        gain: factor on the natural gradient that the schedule asked for; of a Gaussian on that of its
            location.
        radius: trust radius in force, which grows while steps agree.
        skipped: number of steps skipped so far.
        skipped_sites: latent sites whose gradient was not finite at the last skipped step.
    """

    outcome: str
    step_norm: float
    gain: float
    radius: float
    skipped: int
    skipped_sites: tuple[str, ...]


class Rule(ABC):
    """The base of rules: write :meth:`step`, and :meth:`start` if it remembers anything.

    A rule is a frozen dataclass of pure functions: it holds no state and never waits for the device.
    ``params`` and ``grads`` hold by name the tensors of the family and the Euclidean gradients of the
    loss (nats) in them, in the same shapes.  A rule that ``accepts`` curvature takes it as a further
    argument of :meth:`step`, a dict by the names of its parts: ``{"dense": H}``, H (d, d), say.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch, pyro_ngvi as ngvi
        >>> @dataclass(frozen=True)
        ... class Halfway(ngvi.optim.Rule):
        ...     family: ngvi.families.Family
        ...     def step(self, params, grads, state):
        ...         G = self.family.natural_gradient(params, self.family.pull(params, grads))
        ...         length = 0.5 * self.family.fisher_norm(params, G)
        ...         new = self.family.retract(params, G, -0.5)  # along -G / 2
        ...         return ngvi.optim.Step(new, length, gain=torch.tensor(0.5))
        >>> rule = Halfway(ngvi.families.MeanFieldNormal())
        >>> params = rule.family.init(torch.zeros(1), 1.0)
        >>> grads = {"loc": torch.tensor([2.0]), "log_scale": torch.zeros(1)}
        >>> new, state, report = rule.update(params, grads, rule.init(params))
        >>> new["loc"], report.step_norm
        (tensor([-1.]), tensor(1.))
    """

    #: kinds of curvature of a loss that the rule takes; ``None`` stands for a loss without any
    accepts: ClassVar[tuple[str | None, ...]] = (None,)
    #: whether the rule learns the Fisher matrix of families that do not know it
    learns_fisher: ClassVar[bool] = False

    family: Any
    averaging: Averaging | None = None

    @abstractmethod
    def step(self, params: Tensors, grads: Tensors, state: State) -> Step:
        """The step from ``params``; ``state["count"]`` (0-dim) iterates came before."""

    def refuses(self, family: Any) -> str | None:
        """Why the rule cannot step ``family``, and what to use; ``None``: it can."""
        if self.learns_fisher or family.known_fisher:
            return None
        return (
            "its Fisher matrix has no closed form. Use pyro_ngvi.optim.SPRING, pyro_ngvi.IFVB or "
            "pyro_ngvi.AIFVB, which learn it from scores."
        )

    def start(self, params: Tensors) -> State:
        """What the rule remembers before its first step: a dict of tensors, or of such dicts."""
        return {}

    def bad_entries(self, grads: Tensors, curvature: Any) -> Tensor:
        """Which entries of z have a gradient or curvature that is not finite, (d,) bool."""
        bad = self.family.not_finite(grads)
        for name, value in curvature.items():
            if name in ("diagonal", "prior"):
                bad = bad | ~torch.isfinite(value)
            elif name in ("dense", "rows"):  # rows stand for their products
                bad = bad | ~torch.isfinite(value.square().sum(0))
        return bad

    def init(self, params: Tensors) -> State:
        """The state before the first step: that of :meth:`start`, counts and the average."""
        zero = next(iter(params.values())).new_zeros(())
        state: State = {"count": zero, "skipped": zero.clone()}
        state["bad_entries"] = torch.zeros_like(self.family.not_finite(params))
        return state | self.start(params) | start_average(self.averaging, params)

    def update(
        self, params: Tensors, grads: Tensors, state: State, curvature: Any = None
    ) -> tuple[Tensors, State, Report]:
        """One step from ``params`` (the iterate), or none where it is not finite; state and report."""
        further = (curvature,) if curvature else ()
        step = self.step(params, grads, state, *further)
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
            refused = state | {"skipped": state["skipped"] + 1.0} | step.if_refused
            refused["bad_entries"] = self.bad_entries(grads, curvature or {})
            new = choose(finite, new, params)
            new_state = choose(finite, new_state, refused)
            length = torch.where(finite, length, 0.0)
        report = Report(
            finite=finite,
            step_norm=length,
            gain=step.gain,
            radius=torch.full_like(length, torch.inf) if step.radius is None else step.radius,
            damped=torch.zeros_like(finite) if step.damped is None else step.damped,
            skipped=new_state["skipped"],
            bad_entries=new_state["bad_entries"],
        )
        return new, new_state, report


class Averaging(Protocol):
    """Weights w_j of an average sum_j w_j x_j / sum_j w_j of the iterates.

    x_j holds parameters as stored (log sds, Cholesky factors); of rotations Riemannian means are taken.

    Example:
        >>> class Even:  # w_j = 1, for NGVB(guide, averaging=Even())
        ...     def rate(self, k, total):
        ...         return 1.0 / k, total
    """

    def rate(self, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """w_k / sum_{j<=k} w_j in (0, 1] for iterate k = 1, 2, ..., and the new total, all 0-dim."""
        ...


@dataclass(frozen=True)
class LogPower:
    """w_k = (log(k + 1))^power: nearly uniform, lighter at the start (Algorithm 2 of IFVB's paper).

    Example:
        >>> LogPower(2.0).rate(torch.tensor(1.0), torch.tensor(0.0))  # (log 2)^2 = 0.48
        (tensor(1.), tensor(0.4805))
    """

    power: float = 2.0

    def rate(self, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """w_k over the total of the weights up to iterate k, and that total."""
        weight = torch.log(k + 1.0) ** self.power
        total = total + weight
        return weight / total, total


@dataclass(frozen=True)
class Tail:
    """Rate eta / (k + eta - 1): weights that grow as k^(eta - 1) (Shamir & Zhang 2013).

    The mean age of an iterate is that of an even average over the last 2 / (eta + 1) of the run.

    Example:
        >>> Tail().rate(torch.tensor(5.0), torch.tensor(0.0))[0]  # 4 / (5 + 4 - 1)
        tensor(0.5000)
    """

    eta: float = 4.0

    def rate(self, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """The rate at iterate k, at most 1, and the total as it was: none is needed."""
        return (self.eta / (k + (self.eta - 1.0))).clamp_max(1.0), total

    def lags(self, trend: Tensor, k: Tensor) -> Tensor:
        """Whether an average of k iterates has to begin anew, where so much of the last gradients, the
        ``trend`` (B,), is signal that q is on its way: of other data, say."""
        return (trend > ON_ITS_WAY).any() & (k >= OLD)


def as_averaging(averaging: Averaging | float | bool) -> Averaging | None:
    """``False``: none; ``True``: :class:`Tail`; a number w: :class:`LogPower` (w)."""
    if isinstance(averaging, bool):
        return Tail() if averaging else None
    if isinstance(averaging, int | float) and 0.0 <= averaging < torch.inf:
        return LogPower(float(averaging))
    if not hasattr(averaging, "rate"):
        raise ValueError(
            f"averaging must be a bool, a power of log k that is not negative, or have rate(), "
            f"got {averaging!r}."
        )
    return averaging  # type: ignore[return-value]


def start_average(averaging: Averaging | None, params: Tensors) -> State:
    """The state of an average that nothing has entered yet; empty for ``None``."""
    if averaging is None:
        return {}
    zero = next(iter(params.values())).new_zeros(())
    average = {name: v.clone() for name, v in params.items()}
    return {"average_total": zero, "average_square": zero.clone(), "average": average}


def step_average(
    averaging: Averaging | None, family: Any, state: State, params: Tensors, count: Tensor
) -> State:
    """The entries of ``state`` after iterate number ``count`` has entered, by the family's mean."""
    if averaging is None:
        return {}
    rate, total = averaging.rate(count, state["average_total"])
    average = family.average(state["average"], params, rate)
    # sum of squared weights: what averaging leaves of the noise of one step
    square = (1.0 - rate).square() * state["average_square"] + rate.square()
    return {"average_total": total, "average_square": square, "average": average}


def restart_average(state: State, params: Tensors, keep: Tensor) -> State:
    """``state``, with the average begun afresh at ``params`` unless ``keep``; its count too."""
    zeros = ("count", "average_total", "average_square")
    fresh: State = {name: torch.zeros_like(state[name]) for name in zeros}
    fresh["average"] = params
    return state | choose(keep, {k: state[k] for k in fresh}, fresh)


def require(holds: bool, name: str, what: str, value: Any) -> None:
    """Refuse an argument out of range."""
    if not holds:
        raise ValueError(f"{name} must {what}, got {value!r}.")


def require_rate(name: str, rate: Rate) -> None:
    """Refuse what is neither a number in (0, 1] nor a function of the step count."""
    number = isinstance(rate, Real) and not isinstance(rate, bool) and 0.0 < float(rate) <= 1.0
    require(number or callable(rate), name, "be in (0, 1] or a function of the step count", rate)


def rate_at(rate: Rate, k: Tensor) -> Tensor:
    """The value of a rate at the step count ``k``, a 0-dim tensor."""
    return torch.as_tensor(rate(k)).to(k) if callable(rate) else torch.full_like(k, rate)
