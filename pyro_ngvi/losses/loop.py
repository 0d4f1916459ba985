"""Particles under ``vmap``, or one after the other where a program cannot run under it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import torch

from ..runtime.vmap import run_in_loop, run_particles
from ..runtime.vmap_error import CannotBatch

__all__ = ["Runs"]

Program = Callable[..., Any]


class Runs:
    """Runs programs as ``run_particles`` does; what it cannot run, in a loop, with one notice."""

    def __init__(self) -> None:
        self._looped: list[Program] = []
        self._noticed = False

    def forget(self) -> None:
        """Try ``vmap`` again for every program."""
        self._looped = []

    def __call__(
        self, loops: bool, *given: Any, minibatches: Any, shared: Any = None, **how: Any
    ) -> Any:
        """What ``run_particles`` makes of ``given``; ``loops`` allows the loop.

        Raises:
            CannotBatch: where ``vmap`` cannot run the program and ``loops`` is False.
        """
        program, _, _, num_particles, *_ = given
        common: Any = {"minibatches": minibatches, "shared": shared}
        reason: CannotBatch | None = None
        if all(program is not known for known in self._looped):
            try:
                return run_particles(*given, **common, **how)
            except CannotBatch as error:
                if not loops or isinstance(error.__cause__, torch.OutOfMemoryError):
                    raise
                reason = error
        with pyro.validation_enabled(False):
            result = run_in_loop(
                *given, **common
            )  # shows the error of a program that is just wrong
        if reason is not None:
            self._looped.append(program)
            if not self._noticed:
                self._noticed = True
                warnings.warn(
                    f"BatchedELBO: vmap cannot run the program ({reason.where}): each of "
                    f"{num_particles} particles has a run of its own, at so many times the cost. If "
                    f"pyro_ngvi.diagnostics.check_vectorized passes, take "
                    f"Trace_ELBO(vectorize_particles=True).",
                    RuntimeWarning,
                    stacklevel=5,
                )
        return result
