"""Programs that ``vmap`` cannot run: all particles in one vectorised plate, or one after the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import torch
from torch import Tensor

from ..runtime.density import free_dim, site_log_prob, sum_per_particle, with_density
from ..runtime.run import CannotBatch, Conditioned, at_particle, look, run_in_loop


class WithoutVmap:
    """Runs one program as ``run_particles`` does, in another way.

    A model that agrees with plain runs at the first draws runs in a plate of particles.  It may
    broadcast wrongly at others, so each step compares one of its particles with a plain run, in turn;
    where it differs the loop takes over for good.
    """

    def __init__(self, program: Callable[..., Any]) -> None:
        self.program = program
        self._dim: int | None = None  # that of the plate; None: a loop
        self._gaps: dict[str, int] = {}  # by site, dimensions between the particles and its plates
        self._turn = 0

    def first(
        self, reason: CannotBatch | None, reduce: Any, values: Any, S: int, *call: Any, **how: Any
    ) -> Any:
        """The first run; where there is a ``reason``, with a notice."""
        result = self._loop(reduce, values, S, *call, **how)  # shows what is wrong in any run
        # two runs a step are what the loop takes too
        if isinstance(result, Tensor) and result.shape == (S,) and S > 2:
            try:
                at = at_particle(0, values, how["shared"])
                sites = look(self.program, at, *call, minibatches=how["minibatches"])
                self._dim = free_dim(sites)
                self._gaps = {n: -1 - self._dim - len(sites[n]["fn"].batch_shape) for n in values}
                with torch.no_grad():
                    agrees = _alike(self._in_plate(values, S, *call, **how), result.detach())
            except Exception:  # whatever keeps it from running there
                agrees = False
            self._dim = self._dim if agrees else None
        if reason is not None:
            told = (
                f"each of {S} particles has a run of its own, at so many times the cost. Keep latent "
                f"values out of in-place writes (take index_put), .item() and if."
                if self._dim is None
                else f"its {S} particles run in one vectorised plate, which agrees with runs one by "
                f"one; a step compares one of them, at the cost of a second run."
            )
            warnings.warn(
                f"BatchedELBO: vmap cannot run the program ({reason.where}): {told}",
                RuntimeWarning,
                stacklevel=6,
            )
        return result

    def __call__(self, reduce: Any, values: Any, S: int, *call: Any, **how: Any) -> Any:
        """What ``run_particles`` makes of the program."""
        if self._dim is not None:
            self._turn = (self._turn + 1) % S
            try:
                total = self._in_plate(values, S, *call, **how)
            except Exception:  # a course that it did not take before: the loop shows what is wrong
                total = None
            if total is not None:
                at = at_particle(self._turn, values, how["shared"])
                alone = reduce(look(self.program, at, *call, minibatches=how["minibatches"]))
                if _alike(total[self._turn].detach(), alone):
                    return total
            self._dim = None
        return self._loop(reduce, values, S, *call, **how)

    def _loop(self, *given: Any, **how: Any) -> Any:
        with pyro.validation_enabled(False):
            return run_in_loop(self.program, *given, **how)

    def _in_plate(
        self, values: Any, S: int, args: Any, kwargs: Any, *, minibatches: Any, shared: Any
    ) -> Tensor:
        """log p (S,); fails in any way where the model does not run so."""
        assert self._dim is not None
        gaps = self._gaps
        at = {k: v.reshape(S, *[1] * gaps[k], *v.shape[1:]) for k, v in values.items()}
        handler = Conditioned(at | dict(shared or {}), minibatches)
        with pyro.validation_enabled(False), handler, pyro.plate("_particles", S, dim=self._dim):
            self.program(*args, **kwargs)
        terms = [site_log_prob(site)[1] for site in with_density(handler.sites).values()]
        return torch.stack([sum_per_particle(x.movedim(self._dim, 0)) for x in terms]).sum(0)


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether log probabilities agree but for rounding; it waits for the device."""
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    return a.shape == b.shape and torch.allclose(a, b.to(a), rtol=tolerance, atol=tolerance)
