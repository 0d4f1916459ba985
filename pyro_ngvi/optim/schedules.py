r"""How long a step is: the gain b_k that multiplies the natural gradient, and how it decays.

A schedule is a pair of pure functions on 0-dim tensors, so it neither waits for the device nor
keeps state of its own:

    init(like) -> state,   gain(signal, state) -> (b_k, state)

``signal``, in [-1, 1], is what the step before says about this one: the estimate

    snr_k = (<G_k, G_{k-1}> + <G_{k-1}, move_{k-1}>) / |G_k|^2                                   (1)

of the share of signal in the energy of the natural gradient G_k, in the Fisher metric.  Near the
optimum the expected natural gradient x moves by x_k = x_{k-1} - move_{k-1} (the Fisher metric makes
every curvature 1), and noises of different steps are independent; so the numerator is an unbiased
estimate of |x_{k-1}|^2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..families.base import Tensors

#: a rate of a published rule: a number, or a function of the step count k = 0, 1, ... (0-dim tensor)
Rate = float | Callable[[Tensor], Tensor]


class Schedule(Protocol):
    """A pair of pure functions; see the head of this file."""

    def init(self, like: Tensor) -> Tensors: ...

    def gain(self, signal: Tensor, state: Tensors) -> tuple[Tensor, Tensors]: ...


@dataclass(frozen=True)
class NoiseClock:
    r"""The default: a Kalman gain whose clock runs on the noise that the gradients show.

    With error energy p and noise energy s in an isotropic linear model, the best step is the Kalman
    gain b = p / (p + s), the share of signal in the energy of the gradient.  Once noise dominates,
    b_k = 1 / c_k with c growing by a constant per step: c -> c + 1 is the plain average of all
    noise, c -> c + 1/2 forgets the past twice as fast.  Whenever the measured share of signal is
    *significantly* larger than 1/c, the clock is set back:

        c <- min(c + 1/2, 1 / max(0, mean(snr) - 2 se(snr))),   b = 1 / c,

    where the mean and its standard error come from (1) over the last max(10, c / 2) steps.

    Multiplicative noise (few particles for many dimensions) shows from the first step on, hence a small
    but *constant* gain, about S / (S + d + 1) for S particles, which is exact in the end where the
    posterior is Gaussian.  Additive noise shows only near the optimum; the gain then falls as 2/k.

    Not for: losses that change between steps (annealing); use :class:`RobbinsMonro` there.
    """

    increment: float = 0.5
    standard_errors: float = 2.0
    start: float = 10.0
    min_window: float = 10.0

    def init(self, like: Tensor) -> Tensors:
        names = ("mean", "variance", "weight", "count")
        return {"clock": like.new_zeros(()) + self.start, **{n: like.new_zeros(()) for n in names}}

    def gain(self, signal: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        clock, count = state["clock"], state["count"]
        first = count == 0  # nothing came before the first step: no signal to read
        window = torch.clamp(0.5 * clock, min=self.min_window)
        a = torch.where(first, 0.0, torch.maximum(1.0 / window, 1.0 / count.clamp_min(1.0)))
        mean = torch.lerp(state["mean"], signal, a)
        variance = torch.lerp(state["variance"], (signal - mean).square(), a)
        weight = (1 - a).square() * state["weight"] + a.square()  # sum of squared weights
        certain = (mean - self.standard_errors * (variance * weight).sqrt()).clamp(1e-12, 1.0)
        advanced = torch.minimum(clock + self.increment, 1.0 / certain).clamp_min(1.0)
        clock = torch.where(first, clock, advanced)
        moments = {"mean": mean, "variance": variance, "weight": weight}
        return 1.0 / clock, {"clock": clock, **moments, "count": count + 1}


@dataclass(frozen=True)
class RobbinsMonro:
    """b_k = scale / (1 + k / offset)^power, k = 0, 1, ...

    Converges for 1/2 < power <= 1 (sum b = inf, sum b^2 < inf).  Close to power 1/2 together with
    iterate averaging is the choice of Polyak & Juditsky (1992).

    With ``patience`` p < 1 the count k stands still while the share of signal (1), averaged over ten
    steps, exceeds p: q is then still on its way, and the decay, which is there for noise, waits.
    """

    scale: float = 0.2
    offset: float = 100.0
    power: float = 0.75
    patience: float = 1.0

    def __post_init__(self) -> None:
        if not (self.scale > 0 and self.offset > 0 and 0 <= self.power <= 1):
            raise ValueError(
                f"{self} needs scale > 0, offset > 0 and a power in [0, 1]; the iterates converge "
                f"for powers above 1/2."
            )

    def init(self, like: Tensor) -> Tensors:
        return {"count": like.new_zeros(()), "mean": like.new_zeros(())}

    def gain(self, signal: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        count = state["count"]
        mean = torch.lerp(state["mean"], signal, 0.1)
        advance = mean <= self.patience
        gain = self.scale * (1.0 + count / self.offset) ** -self.power
        return gain, {"count": count + advance, "mean": mean}


@dataclass(frozen=True)
class PowerDecay:
    """scale / (1 + k^power), k = 0, 1, ...: a function of the step count for optimizers that take one.

    Example:
        >>> PowerDecay(0.1, 0.51)(torch.tensor(0.0))
        tensor(0.1000)
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
    """b_k = value: for exact gradients, tests and comparisons.  Does not converge under noise."""

    value: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.value < float("inf"):
            raise ValueError(f"The step of {self} must be a positive number.")

    def init(self, like: Tensor) -> Tensors:
        return {}

    def gain(self, signal: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
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


def slowing_rate(k: Tensor) -> Tensor:
    """max(0.01, 1 / (10 + k^0.75)): an average over all, later over the last hundred steps."""
    return (1.0 / (10.0 + k**0.75)).clamp_min(0.01)


def require(holds: bool, name: str, what: str, value: Any) -> None:
    """Refuse an argument out of range."""
    if not holds:
        raise ValueError(f"{name} must {what}, got {value!r}.")


def as_rate(name: str, rate: Rate) -> Rate:
    """A checked rate: a number in (0, 1], or a function of the step count."""
    number = isinstance(rate, int | float) and not isinstance(rate, bool) and 0.0 < rate <= 1.0
    require(number or callable(rate), name, "be in (0, 1] or a function of the step count", rate)
    return rate


def rate_at(rate: Rate, k: Tensor) -> Tensor:
    """The value of a rate at the step count ``k``, a 0-dim tensor."""
    return torch.as_tensor(rate(k)).to(k) if callable(rate) else torch.full_like(k, rate)


def as_schedule(schedule: Schedule | Callable[[Tensor], Tensor] | str) -> Schedule:
    """A schedule from what a user may pass: an object, a function of k, or a name."""
    if isinstance(schedule, str) and schedule in ("noise", "constant"):
        return NoiseClock() if schedule == "noise" else Constant()
    if hasattr(schedule, "gain") and hasattr(schedule, "init"):
        return schedule  # type: ignore[return-value]
    wanted = 'be "noise", "constant", a function of k, or have init() and gain()'
    require(callable(schedule), "schedule", wanted, schedule)
    return Custom(schedule)  # type: ignore[arg-type]


def check_convergence(alpha: float, beta: float | None = None) -> None:
    """Refuse exponents outside the theorems: 1/2 < alpha < 1 and 0 < beta < alpha - 1/2."""
    paper = "(Godichon-Baggioni et al. 2024, theorem 5.1)"
    if not 0.5 < alpha < 1.0:
        raise ValueError(
            f"Steps c / (c' + k)^alpha converge for 1/2 < alpha < 1 {paper}, and alpha = {alpha:g}."
        )
    if beta is not None and not 0.0 < beta < alpha - 0.5:
        raise ValueError(
            f"The regularisation c_beta k^-beta needs 0 < beta < alpha - 1/2 = {alpha - 0.5:g} "
            f"{paper}, and beta = {beta:g}. Lower beta, raise alpha, or set c_beta=0."
        )
