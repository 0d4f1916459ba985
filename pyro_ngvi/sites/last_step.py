"""What a guide of sites remembers of its last step, and holds the next one against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..linalg.host import at_hand
from .algebra import SiteTensors
from .bound_model import BoundModel
from .structure import Group, ModelStructure, all_same

#: roundings by which what a datum sees of the block may be off in another minibatch
ROUNDINGS = 4096.0


class LastStep:
    """The last step of a guide of sites, as far as it matters later.  A copy begins without one.

    ``stale``: hyperparameters or sites were moved since q was made.  Where data came or went since,
    ``plan`` is the structure then and ``numbers`` have by group the number (N,) then of each datum of
    now, -1 for a new one.  ``scaled``: data that counted for more than themselves under a scale.
    ``edition``: how often data were changed; no two sweeps of different editions are compared.
    ``views``: what each datum (N, ...) saw of the block when its site was counted in; NaN: not known.
    """

    def __init__(self, stale: bool = False, edition: int = 0) -> None:
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.stale, self.edition = stale, edition
        self.plan: ModelStructure | None = None
        self.numbers: dict[str, Tensor] = {}
        self.scaled: list[Tensor] = []
        self.views: dict[str, Tensor] = {}

    def __reduce__(self) -> Any:
        return LastStep, (self.stale, self.edition)

    def remember(self, args: Any, kwargs: Any, stale: bool) -> None:
        """Take the arguments of a step, and whether it moves hyperparameters."""
        self.arguments, self.stale = (args, kwargs), stale
        self.plan, self.numbers = None, {}

    def number(self, group: Group, device: torch.device) -> Tensor:
        found = self.numbers.get(group.name)
        return torch.arange(group.size, device=device) if found is None else found

    def edited(self) -> None:
        """Data came, went or were reset by hand."""
        self.scaled, self.views = [], {}
        self.edition += 1

    def see(self, call: BoundModel, sites: SiteTensors) -> None:
        """Take what data see of the block.  A minibatch, whose ``sites`` are counted out of q by what
        they see now, is refused where they saw something else when they were counted in."""
        for name, now in call.seen().items() if at_hand(call.plan.zero()) else ():
            index = call.index[name]
            if index is None:
                self.views[name] = now
                continue
            size = call.plan.group(name).size
            known = self.views.setdefault(name, now.new_full((size, now.shape[1]), torch.nan))
            counted = (sites[name][1] != 0.0).flatten(1).any(1)
            slack = ROUNDINGS * torch.finfo(now.dtype).eps * now.abs().amax(0)
            other = counted & ((known[index] - now).abs() > slack).any(1)
            if bool(other.any()):
                what = f"{int(other.sum())} data {name!r} of this minibatch"
                raise ValueError(
                    f"AutoSites: {what} do not see what they did before: other covariates, order or "
                    f"prior. Call guide.refresh(*args) with all data as they are now."
                )
            known[index] = now

    def or_given(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """These arguments, or where there are none those of the last step."""
        return (args, kwargs) if args or kwargs else (self.arguments or ((), {}))

    def has_arguments_of(self, call: BoundModel) -> bool:
        if self.arguments is None:
            return False
        (args, kwargs), others = self.arguments, call.runner.kwargs
        named = kwargs.keys() == others.keys() and all(x is others[n] for n, x in kwargs.items())
        return named and all_same(args, call.runner.args)
