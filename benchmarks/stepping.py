"""One step of our guide and optimizer beside one of Pyro's: what `step_cost` and `gpu` time."""

import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
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
from pyro.optim import PyroOptim
from torch import Tensor

import pyro_ngvi
from pyro_ngvi.compiled import CompiledSVI
from pyro_ngvi.runtime.store import claim_name, rename

Step = Callable[[], object]
FAMILIES = ("mean_field", "full_rank", "factor")


def independent_gaussians(y: Tensor) -> None:
    """z ~ N(0, I), y ~ N(z, I / 4): a model that costs no more than a few passes over z."""
    z = pyro.sample("z", dist.Normal(torch.zeros_like(y), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(z, 0.5).to_event(1), obs=y)


def gaussian_args(d: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor]:
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

    def our_guide(self) -> Any:
        if self.family == "factor":
            return pyro_ngvi.AutoFactorNormal(self.model, self.rank, init_loc_fn=init_to_feasible)
        guides: dict[str, Any] = {
            "mean_field": pyro_ngvi.AutoMeanFieldNormal,
            "full_rank": pyro_ngvi.AutoFullRankNormal,
        }
        return guides[self.family](self.model, init_loc_fn=init_to_feasible)

    def pyro_guide(self) -> Any:
        if self.family == "factor":
            guide: Any = AutoLowRankMultivariateNormal(
                self.model, rank=self.rank, init_loc_fn=init_to_feasible
            )
        else:
            guides = {"mean_field": AutoDiagonalNormal, "full_rank": AutoMultivariateNormal}
            guide = guides[self.family](self.model, init_loc_fn=init_to_feasible)
        # two guides of one class would share their parameters
        rename(guide, claim_name(type(guide).__name__))
        return guide

    def ngvb(self, loss: ELBO | None = None) -> Step:
        """A step of `NGVB` on our guide."""
        guide = self.our_guide()
        return self._step(guide, pyro_ngvi.NGVB(guide), loss)

    def svi(self) -> SVI:
        """`NGVB` on our guide, all of whose step is on the device of the data."""
        guide, loss = self.our_guide(), pyro_ngvi.BatchedELBO(self.particles)
        return SVI(self.model, guide, pyro_ngvi.NGVB(guide), loss)

    def compiled(self) -> CompiledSVI:
        """The same as a graph of the recorded operations."""
        return pyro_ngvi.compile(self.svi(), inductor=False)

    def adam(self, loss: ELBO | None = None) -> Step:
        """A step of Adam on Pyro's guide of the same family."""
        return self._step(self.pyro_guide(), PyroOptim(torch.optim.Adam, {"lr": 1e-3}), loss)

    def _step(self, guide: Any, optim: Any, loss: ELBO | None) -> Step:
        trace = Trace_ELBO(num_particles=self.particles, vectorize_particles=True)
        svi = SVI(self.model, guide, optim, loss=loss or trace)
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
    """Seconds for a step of each of two, and the first over the second."""

    first: Spread
    second: Spread
    ratio: Spread

    def cells(self) -> list[str]:
        """Milliseconds and ratio as cells of a table, quartiles of the ratio in brackets."""
        r = self.ratio
        milliseconds = [f"{1e3 * s.median:.2f}" for s in (self.first, self.second)]
        return [*milliseconds, f"{r.median:.2f} ({r.low:.2f}-{r.high:.2f})"]


def compare(
    first: Step,
    second: Step,
    rounds: int,
    clock: Callable[[], float] = time.process_time,
    wait: Callable[[], object] = lambda: None,
    block_seconds: float = 0.1,
) -> Timing:
    """Times blocks of steps of the two in turn; the ratio is taken within each round.

    Slow minutes of a shared machine so hit both.  The default clock counts the seconds in which the
    process had a core.  ``wait`` is called before the clock is read.
    """

    def block(step: Step, count: int) -> float:
        wait()
        start = clock()
        for _ in range(count):
            step()
        wait()
        return (clock() - start) / count

    steps, seconds = (first, second), ([], [])
    for step in steps:
        block(step, 2)  # the first steps build the guide and load code
    counts = [max(1, math.ceil(block_seconds / block(step, 3))) for step in steps]
    for k in range(rounds):
        for i in (0, 1) if k % 2 == 0 else (1, 0):
            seconds[i].append(block(steps[i], counts[i]))
    ratios = [a / b for a, b in zip(*seconds, strict=True)]
    return Timing(Spread.of(seconds[0]), Spread.of(seconds[1]), Spread.of(ratios))


def line(*cells: object) -> str:
    """One line of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def heading(*cells: str) -> str:
    """The first two lines of a table in Markdown."""
    return f"{line(*cells)}\n{line(*('---' for _ in cells))}"


def circumstances() -> dict[str, object]:
    """Date and versions, for the head of a JSON file."""
    return {
        "date": date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "pyro": pyro.__version__,
            "pyro_ngvi": pyro_ngvi.__version__,
        },
    }
