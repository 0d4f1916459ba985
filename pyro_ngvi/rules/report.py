"""What one step did, in tensors for the optimizer and in numbers for people."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..families.base import Tensors

__all__ = ["Report", "StepReport", "part"]


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
