"""Particles under ``vmap``; where a program cannot run under it, in a plate, or one after the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import torch

from ..runtime.run import CannotBatch, at_particle, look, run_in_loop, run_particles
from .in_plate import InPlate, alike

__all__ = ["Runs"]

Program = Callable[..., Any]


class Runs:
    """Runs programs as ``run_particles`` does; what it cannot run, in another way, with one notice.

    A model whose runs in a vectorised plate agree with plain ones runs in the plate.  That they agreed
    at some draws does not mean that they do at all, so each step compares one of its particles with a
    plain run, in turn; where it differs the loop takes over for good.
    """

    def __init__(self) -> None:
        self._without_vmap: list[tuple[Program, InPlate | None]] = []
        self._noticed = False
        self._turn = 0

    def forget(self) -> None:
        """Try ``vmap`` again for every program."""
        self._without_vmap = []

    def __call__(
        self,
        loops: bool,
        *given: Any,
        minibatches: Any,
        shared: Any = None,
        totals: bool = False,
        **how: Any,
    ) -> Any:
        """What ``run_particles`` makes of ``given``; ``loops`` allows other ways.

        ``totals`` says that the result is the log probability of each particle.

        Raises:
            CannotBatch: where ``vmap`` cannot run the program and ``loops`` is False.
        """
        program = given[0]
        common: Any = {"minibatches": minibatches, "shared": shared}
        known = [way for other, way in self._without_vmap if other is program]
        reason: CannotBatch | None = None
        if not known:
            try:
                return run_particles(*given, **common, **how)
            except CannotBatch as error:
                if not loops or isinstance(error.__cause__, torch.OutOfMemoryError):
                    raise
                reason = error
        elif known[0] is not None:
            found = self._in_plate(known[0], *given, **common)
            if found is not None:
                return found
            self._without_vmap = [(other, None) for other, _ in self._without_vmap]
        with pyro.validation_enabled(False):
            # shows the error of a program that is just wrong
            result = run_in_loop(*given, **common)
        if reason is not None:
            way = self._agreeing(result, *given, **common) if totals else None
            self._without_vmap.append((program, way))
            self._notice(reason, given[3], way)
        return result

    def _in_plate(self, plated: InPlate, *given: Any, minibatches: Any, shared: Any) -> Any:
        """The log probabilities (S,) in one run; ``None`` where one differs from a plain run."""
        program, reduce, values, num_particles, args, kwargs = given
        self._turn = (self._turn + 1) % num_particles
        try:
            total = plated(values, num_particles, args, kwargs, minibatches, shared)
        except Exception:  # a course that it did not take before: the loop shows what is wrong
            return None
        at = at_particle(self._turn, values, shared)
        alone = reduce(look(program, at, args, kwargs, minibatches))
        return total if alike(total[self._turn].detach(), alone) else None

    def _agreeing(self, result: Any, *given: Any, minibatches: Any, shared: Any) -> InPlate | None:
        """The run in a plate, if it gives the log probabilities of ``result`` for every particle."""
        program, _, values, num_particles, args, kwargs = given
        common = args, kwargs, minibatches, shared
        if num_particles < 3:  # two runs a step are what the loop takes too
            return None
        try:
            plated = InPlate(program, values, *common)
            with torch.no_grad():
                total = plated(values, num_particles, *common)
        except Exception:  # whatever keeps it from running there
            return None
        return plated if alike(total, result.detach()) else None

    def _notice(self, reason: CannotBatch, num_particles: int, way: InPlate | None) -> None:
        if self._noticed:
            return
        self._noticed = True
        if way is None:
            told = (
                f"each of {num_particles} particles has a run of its own, at so many times the "
                f"cost. Where pyro_ngvi.diagnostics.check_vectorized passes, one run is enough."
            )
        else:
            told = (
                f"its {num_particles} particles run in one vectorised plate, which agrees with "
                f"runs one by one; a step compares one of them, at the cost of a second run."
            )
        warnings.warn(
            f"BatchedELBO: vmap cannot run the program ({reason.where}): {told}",
            RuntimeWarning,
            stacklevel=6,
        )
