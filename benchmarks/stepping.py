"""One step of our guide and optimizer beside one of Pyro's: what `step_cost` and `gpu` time."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import ELBO, SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    init_to_feasible,
)
from torch import Tensor

import pyro_ngvi

Step = Callable[[], object]
clock = time.process_time
FAMILIES = ("mean_field", "full_rank", "factor")


def independent_gaussians(y: Tensor) -> None:
    """z ~ N(0, I), y ~ N(z, I / 4): a model whose own cost is that of a few passes over z."""
    z = pyro.sample("z", dist.Normal(torch.zeros_like(y), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(z, 0.5).to_event(1), obs=y)


def gaussian_args(d: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    """The data of ``independent_gaussians``, (d,)."""
    return (torch.linspace(-1.0, 1.0, d, dtype=dtype, device=device),)


@dataclass(frozen=True)
class Setting:
    """What a step is taken on.  ``rank`` matters to the family "factor" alone."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    family: str
    particles: int
    rank: int = 1

    def loss(self) -> ELBO:
        return Trace_ELBO(num_particles=self.particles, vectorize_particles=True)

    def our_guide(self) -> Any:
        if self.family == "factor":
            return pyro_ngvi.AutoFactorNormal(
                self.model, rank=self.rank, init_loc_fn=init_to_feasible
            )
        guides = {
            "mean_field": pyro_ngvi.AutoMeanFieldNormal,
            "full_rank": pyro_ngvi.AutoFullRankNormal,
        }
        return guides[self.family](self.model, init_loc_fn=init_to_feasible)

    def pyro_guide(self) -> Any:
        if self.family == "factor":
            return AutoLowRankMultivariateNormal(
                self.model, rank=self.rank, init_loc_fn=init_to_feasible
            )
        guides = {"mean_field": AutoDiagonalNormal, "full_rank": AutoMultivariateNormal}
        return guides[self.family](self.model, init_loc_fn=init_to_feasible)

    def ours(self, loss: ELBO | None = None) -> Step:
        """A step of `NGVB` on our guide."""
        guide = self.our_guide()
        return self._step(guide, pyro_ngvi.NGVB(guide), loss)

    def pyros(self, loss: ELBO | None = None) -> Step:
        """A step of Adam on Pyro's guide of the same family."""
        pyro.clear_param_store()  # Pyro's guides of one class share their parameters
        return self._step(self.pyro_guide(), pyro.optim.Adam({"lr": 1e-3}), loss)

    def _step(self, guide: Any, optim: Any, loss: ELBO | None) -> Step:
        svi = SVI(self.model, guide, optim, loss=loss or self.loss())
        return lambda: svi.step(*self.args)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)


@dataclass(frozen=True)
class Timing:
    """Seconds of a step of either, and their ratio, over the rounds of an interleaved run."""

    ours: Spread
    theirs: Spread
    ratio: Spread


def nothing() -> None:
    """The wait for the device where there is nothing to wait for."""


def compare(
    ours: Step,
    theirs: Step,
    rounds: int,
    block_seconds: float,
    wait: Callable[[], object] = nothing,
) -> Timing:
    """Times blocks of steps of the two in turn; the ratio is taken within each round.

    Slow minutes of a shared machine so hit both.  ``wait`` is called before the clock is read.
    """
    steps = (ours, theirs)
    counts = [max(1, math.ceil(block_seconds / _block(step, 3, wait))) for step in steps]
    seconds: tuple[list[float], list[float]] = ([], [])
    for k in range(rounds):
        for i in (0, 1) if k % 2 == 0 else (1, 0):
            seconds[i].append(_block(steps[i], counts[i], wait))
    ratios = [a / b for a, b in zip(*seconds, strict=True)]
    return Timing(Spread.of(seconds[0]), Spread.of(seconds[1]), Spread.of(ratios))


def _block(step: Step, count: int, wait: Callable[[], object]) -> float:
    wait()
    start = clock()
    for _ in range(count):
        step()
    wait()
    return (clock() - start) / count


def row(name: str, timing: Timing, notes: Mapping[str, object]) -> str:
    """One line of a table in Markdown."""
    cells = [name, f"{1e3 * timing.ours.median:.2f}", f"{1e3 * timing.theirs.median:.2f}"]
    r = timing.ratio
    cells += [f"{r.median:.2f} ({r.low:.2f}-{r.high:.2f})", *map(str, notes.values())]
    return f"| {' | '.join(cells)} |"
