"""What a guide knows of an optimizer that averages: how far the iterate is from the answer it holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..families.base import Tensors
from ..linalg.host import choose, equal, host_bool

__all__ = ["HoldsAverage"]


class HoldsAverage:
    """Mixed into a guide: its parameters may hold the average, and the lag leads to the iterate."""

    #: under an optimizer that averages, the guide itself holds the average
    holds_average = True
    #: whether its optimizer averages
    averaged = False

    _lag: Tensors | None = None
    _lag_of: Tensors | None = None

    def natural_params(self) -> dict[str, nn.Parameter]:
        """The tensors of the family, by name; empty before the first call."""
        raise NotImplementedError

    def set_iterate_offset(self, lag: Tensors | None, answer: Tensors | None = None) -> None:
        """For optimizers that average: iterate minus average, by name; ``None`` for no averaging.

        The lag belongs to ``answer``, the parameters as the optimizer left them.  Whoever writes to
        them next (another optimizer, ``load_state_dict``) thereby drops it.
        """
        self._lag, self._lag_of = lag, answer

    def iterate_offset(self, intact: Tensor | None = None) -> Tensors:
        """The lag of each parameter, by name; empty where there is none.

        ``intact`` spares a caller who already has :meth:`offset_is_intact` a second look.
        """
        if self._lag is None:
            return {}
        intact = self.offset_is_intact() if intact is None else intact
        if host_bool(intact):
            return dict(self._lag)
        return choose(intact, self._lag, {k: torch.zeros_like(v) for k, v in self._lag.items()})

    def offset_is_intact(self) -> Tensor:
        """Whether the parameters are as the optimizer left them: a 0-dim tensor, not waited for."""
        params = self.natural_params()
        if self._lag_of is None:
            return torch.ones((), dtype=torch.bool, device=next(iter(params.values())).device)
        return equal(params, self._lag_of)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        # .to(), .double() and the like move the parameters, and the lag with them
        module: Any = super()
        moved = module._apply(fn, *args, **kwargs)
        for name in ("_lag", "_lag_of"):
            tensors = getattr(self, name)
            setattr(self, name, None if tensors is None else {k: fn(v) for k, v in tensors.items()})
        return moved

    def __getstate__(self) -> dict[str, Any]:
        # the lag belongs to a running optimizer; a copy is the answer alone
        module: Any = super()
        return {**module.__getstate__(), "_lag": None, "_lag_of": None, "averaged": False}
