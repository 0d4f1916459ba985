"""The end of every rule: a step that is not finite is refused, and what was done is reported.

A refused step leaves parameters and state as they were, but for the counts of refusals.  Nothing here
waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..families.base import Tensors
from ..linalg.host_bool import choose, host_bool

__all__ = ["Report", "StepReport", "bad_entries", "finish", "part", "start_counts"]


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


def start_counts(family: Any, params: Tensors, names: tuple[str, ...]) -> Tensors:
    """What the state of every rule begins with: zeros by ``names``, "skipped", "bad_entries" (d,)."""
    like = next(iter(params.values()))
    zero = torch.zeros((), dtype=like.dtype, device=like.device)
    state = {name: zero.clone() for name in (*names, "skipped")}
    return state | {"bad_entries": torch.zeros_like(family.not_finite(params))}


def finish(
    finite: Tensor,
    before: tuple[Tensors, Tensors],
    after: tuple[Tensors, Tensors],
    refusal: Callable[[], Tensors],
    *,
    step_norm: Tensor,
    gain: Tensor,
    radius: Tensor,
    damped: Tensor,
) -> tuple[Tensors, Tensors, Report]:
    """What ``update`` of a rule returns: ``after`` where ``finite``, else ``before``.

    ``before`` and ``after`` are parameters and state, which counts its refusals in "skipped".
    ``refusal()`` makes the entries of the state that a refusal changes beside that count,
    "bad_entries" (d,) among them; it is asked only where a step may have to be refused.
    """
    new, new_state = after
    if not host_bool(finite):
        params, state = before
        refused = state | {"skipped": state["skipped"] + 1.0} | refusal()
        new = choose(finite, new, params)
        new_state = choose(finite, new_state, refused)
        step_norm = torch.where(finite, step_norm, 0.0)
    report = Report(
        finite=finite,
        step_norm=step_norm,
        gain=gain,
        radius=radius,
        damped=damped,
        skipped=new_state["skipped"],
        bad_entries=new_state["bad_entries"],
    )
    return new, new_state, report


def bad_entries(family: Any, grads: Tensors) -> Tensor:
    """Entries of z (d,) at which gradient or curvature is not finite."""
    bad = family.not_finite(grads)
    for name, curvature in part(grads, "curvature.").items():
        if name in ("diagonal", "prior"):
            bad = bad | ~torch.isfinite(curvature)
        elif name in ("dense", "rows"):  # rows stand for their products
            bad = bad | ~torch.isfinite(curvature.square().sum(0))
    return bad


def part(state: Tensors, prefix: str) -> Tensors:
    """The entries whose names start with ``prefix``, by the rest of the name."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
