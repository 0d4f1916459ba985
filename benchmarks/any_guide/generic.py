"""ELBO at equal time on guides without a closed-form Fisher matrix: IFVB, AIFVB, and Adam on a grid."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import PyroOptim

import pyro_ngvi

from ..stepping import Spread, heading, line
from .guides import Problem

__all__ = ["STEPS", "Run", "by_steps", "compare", "table"]

RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
#: rates that fall to zero along a cosine, too
COSINE = (0.03, 0.1, 0.3)
PARTICLES = 8
#: shares of the budget after which the ELBO is evaluated
MARKS = (1 / 32, 1 / 16, 0.125, 0.25, 0.5, 1.0)
#: steps after which it is evaluated in the table by steps
STEPS = (30, 100, 300)
Maker = Callable[[Any], Any]


@dataclass(frozen=True)
class Run:
    """One optimisation: ELBOs and their standard errors (nats) at the marks, and the steps in all."""

    problem: str
    method: str
    seed: int
    elbos: tuple[float, ...]
    errors: tuple[float, ...]
    steps: int


class CosineAdam(PyroOptim):
    """Adam whose rate falls from ``lr`` to zero along a cosine, as ``share`` of the run goes to 1."""

    def __init__(self, lr: float) -> None:
        super().__init__(torch.optim.Adam, {"lr": lr})
        self.lr, self.share = lr, 0.0

    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        params = list(params)
        rate = self.lr * 0.5 * (1.0 + math.cos(math.pi * min(self.share, 1.0)))
        for optimizer in self.optim_objs.values():
            for group in optimizer.param_groups:
                group["lr"] = rate
        super().__call__(params, *args, **kwargs)


def contestants() -> dict[str, Maker]:
    """Optimizers by name, each made for a guide; all arguments at their defaults but Adam's rate."""
    makers: dict[str, Maker] = {"IFVB": pyro_ngvi.IFVB, "AIFVB": pyro_ngvi.AIFVB}
    makers |= {f"Adam {r:g}": lambda _, r=r: PyroOptim(torch.optim.Adam, {"lr": r}) for r in RATES}
    makers |= {f"Adam {r:g}, cosine": lambda _, r=r: CosineAdam(r) for r in COSINE}
    return makers


def _begin(problem: Problem, make: Maker, seed: int) -> tuple[Any, Any, SVI]:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = problem.make_guide()
    guide(*problem.args)  # draws the start, before the methods draw different noise
    optim = make(guide)
    loss = Trace_ELBO(PARTICLES, vectorize_particles=True, max_plate_nesting=1)
    return guide, optim, SVI(problem.model, guide, optim, loss)


def _evaluate(problem: Problem, guide: Any, optim: Any) -> tuple[float, float]:
    """ELBO and its standard error; of the average, where AIFVB keeps one."""
    if isinstance(optim, pyro_ngvi.AIFVB):
        with optim.use_average():
            return problem.evaluate(problem, guide)
    return problem.evaluate(problem, guide)


def _run(problem: Problem, name: str, make: Maker, seed: int, budget: float) -> Run:
    guide, optim, svi = _begin(problem, make, seed)
    seconds, steps, found = 0.0, 0, []
    for mark in MARKS:
        while seconds < mark * budget:
            if isinstance(optim, CosineAdam):
                optim.share = seconds / budget
            start = time.thread_time()
            svi.step(*problem.args)
            seconds += time.thread_time() - start
            steps += 1
        found.append(_evaluate(problem, guide, optim))
    elbos, errors = zip(*found, strict=True)
    return Run(problem.name, name, seed, elbos, errors, steps)


def compare(problem: Problem, seeds: int, budget: float) -> list[Run]:
    """All methods from the same start, one after the other for each seed."""
    makers, runs = contestants(), list[Run]()
    for make in makers.values():  # what a process does only once is no method's cost
        _, _, svi = _begin(problem, make, 0)
        for _ in range(3):
            svi.step(*problem.args)
    for seed in range(seeds):
        for name, make in makers.items():
            runs.append(_run(problem, name, make, seed, budget))
    return runs


def by_steps(problem: Problem, seeds: int) -> str:
    """-ELBO after :data:`STEPS`: IFVB, and Adam at the rate that is best there; medians over seeds."""
    makers = contestants()
    found: dict[str, list[list[float]]] = {}
    for name in ("IFVB", *(f"Adam {r:g}" for r in RATES)):
        for seed in range(seeds):
            guide, optim, svi = _begin(problem, makers[name], seed)
            values, done = [], 0
            for steps in STEPS:
                while done < steps:
                    svi.step(*problem.args)
                    done += 1
                values.append(-_evaluate(problem, guide, optim)[0])
            found.setdefault(name, []).append(values)
    medians = {n: [median(column) for column in zip(*v, strict=True)] for n, v in found.items()}
    adam = [min(v[k] for n, v in medians.items() if n != "IFVB") for k in range(len(STEPS))]
    both = medians["IFVB"], adam
    return line(problem.name, *(" / ".join(f"{value:,.1f}" for value in row) for row in both))


def _of(runs: list[Run], method: str) -> list[Run]:
    return [run for run in runs if run.method == method]


def best_adam(runs: list[Run]) -> str:
    """The rate with the highest median ELBO at the end."""
    names = dict.fromkeys(run.method for run in runs if run.method.startswith("Adam"))
    return max(names, key=lambda name: median(run.elbos[-1] for run in _of(runs, name)))


def _cells(runs: list[Run]) -> Iterator[str]:
    for k in range(len(MARKS)):
        spread = Spread.of([run.elbos[k] for run in runs])
        yield f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


def table(runs: list[Run], budget: float) -> str:
    """Medians with quartiles, and each method's lead over the best Adam, seed by seed."""
    best = best_adam(runs)
    seeds = len(_of(runs, best))
    marks = [f"ELBO at {mark * budget:g} s" for mark in MARKS]
    title = f"### {runs[0].problem}, {seeds} seeds\n"
    lines = [title, heading("", "steps", *marks, f"lead over {best}", "better in", "se")]
    for name in dict.fromkeys(run.method for run in runs):
        own = _of(runs, name)
        pairs = zip(own, _of(runs, best), strict=True)
        leads = [a.elbos[-1] - b.elbos[-1] for a, b in pairs]
        lead, better = f"{median(leads):.2f}", f"{sum(v > 0 for v in leads)} of {seeds}"
        if name == best:
            lead = better = "-"
        error = f"{median(run.errors[-1] for run in own):.3f}"
        steps = f"{median(run.steps for run in own):.0f}"
        lines.append(line(name, steps, *_cells(own), lead, better, error))
    return "\n".join(lines)
