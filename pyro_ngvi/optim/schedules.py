"""How long a step is: the gain b_k that multiplies the natural gradient, and how it decays.

The protocol :class:`Schedule`, the signal (1) that it reads, and the default :class:`NoiseClock` stand
with the rule, in :mod:`.natural_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..families.base import Tensors
from .natural_gradient import NoiseClock, Schedule
from .rule import require


@dataclass(frozen=True)
class RobbinsMonro:
    """b_k = scale / (1 + k / offset)^power, k = 0, 1, ...

    Converges for 1/2 < power <= 1 (sum b = inf, sum b^2 < inf).  Close to power 1/2 together with
    iterate averaging is the choice of Polyak & Juditsky (1992).

    With ``patience`` p < 1 the count k stands still while the share of signal, (1) of
    :class:`Schedule`, averaged over ten steps, exceeds p: q is then still on its way.

    Raises:
        ValueError: for a scale or an offset (in steps) that is not positive, a power not in [0, 1].

    Example:
        >>> schedule = RobbinsMonro(scale=0.2, offset=1.0, power=1.0)
        >>> b_0, state = schedule.gain(torch.zeros(1), schedule.init(torch.zeros(1)))
        >>> b_1, state = schedule.gain(torch.zeros(1), state)
        >>> b_0, b_1  # 0.2 / (1 + k)
        (tensor([0.2000]), tensor([0.1000]))
    """

    scale: float = 0.2
    offset: float = 100.0
    power: float = 0.75
    patience: float = 1.0

    def __post_init__(self) -> None:
        if not (self.scale > 0 and self.offset > 0 and 0 <= self.power <= 1):
            raise ValueError(f"{self} needs scale > 0, offset > 0 and a power in [0, 1].")

    def init(self, like: Tensor) -> Tensors:
        """The count of advances and the mean signal, both zero."""
        return {"count": torch.zeros_like(like), "mean": torch.zeros_like(like)}

    def gain(self, signal: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """b_k (B,), and a count that advances where the mean signal is at most ``patience``."""
        count = state["count"]
        mean = torch.lerp(state["mean"], signal, 0.1)
        advance = mean <= self.patience
        gain = self.scale * (1.0 + count / self.offset) ** -self.power
        return gain, {"count": count + advance, "mean": mean}


@dataclass(frozen=True)
class PowerDecay:
    """scale / (1 + k^power), k = 0, 1, ...: a function of the step count for optimizers that take one.

    Raises:
        ValueError: for a scale that is not positive and finite, or a power not in [0, 1].

    Example:
        >>> PowerDecay(0.1, 0.51)(torch.tensor([0.0, 1.0, 100.0]))
        tensor([0.1000, 0.0500, 0.0087])
    """

    scale: float
    power: float = 0.51

    def __post_init__(self) -> None:
        if not (0 < self.scale < float("inf") and 0 <= self.power <= 1):
            raise ValueError(f"{self} needs a positive scale and a power in [0, 1].")

    def __call__(self, k: Tensor) -> Tensor:
        return self.scale / (1.0 + k**self.power)


@dataclass(frozen=True)
class Constant:
    """b_k = value: for exact gradients, tests and comparisons.  Does not converge under noise.

    Raises:
        ValueError: for a value that is not positive and finite.

    Example:
        >>> Constant(0.5).gain(torch.zeros(2), {})  # NGVB(guide, schedule=Constant(0.5))
        (tensor([0.5000, 0.5000]), {})
    """

    value: float = 1.0

    def __post_init__(self) -> None:
        require(0.0 < self.value < torch.inf, "A constant step", "be a positive number", self.value)

    def init(self, like: Tensor) -> Tensors:
        """Nothing: it remembers nothing."""
        return {}

    def gain(self, signal: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """``value`` at every step."""
        return torch.full_like(signal, self.value), state


@dataclass(frozen=True)
class Custom:
    """b_k = function(k), for a function of the step count k = 0, 1, ... (a 0-dim tensor)."""

    function: Callable[[Tensor], Tensor]

    def init(self, like: Tensor) -> Tensors:
        return {"count": like.new_zeros(())}

    def gain(self, signal: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        value = self.function(state["count"])
        return torch.as_tensor(value).to(signal), {"count": state["count"] + 1}


def as_schedule(schedule: Schedule | Callable[[Tensor], Tensor] | str) -> Schedule:
    """A schedule from what a user may pass: an object, a function of k, or a name."""
    if isinstance(schedule, str) and schedule in ("noise", "constant"):
        return NoiseClock() if schedule == "noise" else Constant()
    if hasattr(schedule, "gain") and hasattr(schedule, "init"):
        return schedule  # type: ignore[return-value]
    wanted = 'be "noise", "constant", a function of k, or have init() and gain()'
    require(callable(schedule), "schedule", wanted, schedule)
    return Custom(schedule)  # type: ignore[arg-type]
