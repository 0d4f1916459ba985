"""What a guide of sites remembers of its last step: arguments, and what became of the data since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .bound_model import BoundModel
from .check_new_data import check_later_data, check_scaled_data, likelihood_learns
from .structure import ModelStructure

__all__ = ["Arguments", "Changes", "LastStep"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Changes:
    """What became of the data since the last step: the plan then, and its number (N,) of each datum
    of now, -1 for one that was not there."""

    plan: ModelStructure
    numbers: dict[str, Tensor]

    @staticmethod
    def none(plan: ModelStructure) -> Changes:
        """The data are those of the last step."""
        every = {g.name: torch.arange(g.size, device=plan.device) for g in plan.groups}
        return Changes(plan, every)


class LastStep:
    """The last step of a guide of sites, as far as it matters later.  A copy begins without one.

    Attributes:
        arguments: positional and keyword arguments of the model; ``None`` before the first step.
        stale: whether hyperparameters or sites were moved since q was made.
        changes: of the data since; ``None`` for none.
        edition: how often data were changed; an optimizer compares no two sweeps of different editions.
    """

    def __init__(self, stale: bool = False, edition: int = 0) -> None:
        self.arguments: Arguments | None = None
        self.stale = stale
        self.changes: Changes | None = None
        self.edition = edition
        self._scaled: list[Tensor] | None = None

    def __reduce__(self) -> Any:
        return LastStep, (self.stale, self.edition)

    def remember(self, args: Any, kwargs: Any, stale: bool) -> None:
        """Take the arguments of a step, and whether it moves hyperparameters."""
        self.arguments, self.stale, self.changes = (args, kwargs), stale, None

    def changed(self, changes: Changes | None) -> None:
        """Data came, went or were reset by hand."""
        self.changes, self._scaled = changes, None
        self.edition += 1

    def has_arguments_of(self, call: BoundModel) -> bool:
        """Whether a call has the very same arguments and keyword arguments."""
        if self.arguments is None:
            return False
        (args, kwargs), others, other_kwargs = self.arguments, call.runner.args, call.runner.kwargs
        if len(args) != len(others) or kwargs.keys() != other_kwargs.keys():
            return False
        same = all(x is y for x, y in zip(args, others, strict=True))
        return same and all(x is other_kwargs[name] for name, x in kwargs.items())

    def check_data(self, call: BoundModel) -> None:
        """Refuse data unlike the first call's, and batch after batch under a scale."""
        self._scaled = check_scaled_data(call, self._scaled)
        if not self.has_arguments_of(call) or likelihood_learns(call):
            check_later_data(call)
