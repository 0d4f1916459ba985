"""Steps and cost of IFVB beside NGVB where both are possible: our guides on wdbc."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any

import pyro
from pyro.infer import SVI, Trace_ELBO

import pyro_ngvi

from ..methods import SVIRun
from ..problems import load
from ..problems.problem import FAMILIES
from ..stepping import Setting, Step, Timing, compare, heading, line
from ..time_to_target import TARGETS, evaluator, measure

__all__ = ["Result", "run", "table"]

PARTICLES, STEP_CAP = 8, 20_000
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "NGVB": pyro_ngvi.NGVB,
    "IFVB": pyro_ngvi.IFVB,
    "AIFVB": pyro_ngvi.AIFVB,
}


@dataclass(frozen=True)
class Result:
    """Steps to each target, a number for each seed; ``timing`` compares a step with one of NGVB."""

    family: str
    method: str
    steps: dict[str, list[float]]
    timing: Timing | None


def run(seeds: int, rounds: int) -> list[Result]:
    """All optimizers with default settings; the time of a step is that of a guide on its way."""
    problem, results = load("wdbc"), list[Result]()
    elbo = evaluator(problem)
    for family in FAMILIES:
        setting = Setting(problem.model, problem.args, family, PARTICLES)
        found = {name: {str(t): list[float]() for t in TARGETS} for name in OPTIMIZERS}
        for seed in range(seeds):
            for name, make in OPTIMIZERS.items():
                pyro.clear_param_store()
                pyro.set_rng_seed(seed)
                guide = setting.our_guide()
                one = SVIRun(problem, guide, make(guide), PARTICLES)
                hits, _, _ = measure(one, elbo, problem.optimum[family].elbo, STEP_CAP, inf)
                for t in TARGETS:
                    found[name][str(t)].append(hits[t][0] if t in hits else inf)
        for name, make in OPTIMIZERS.items():
            pair = _step(setting, make), _step(setting, pyro_ngvi.NGVB)
            timing = None if name == "NGVB" else compare(*pair, rounds)
            results.append(Result(family, name, found[name], timing))
    return results


def _step(setting: Setting, make: Callable[[Any], Any]) -> Step:
    guide = setting.our_guide()
    loss = Trace_ELBO(PARTICLES, vectorize_particles=True)
    svi = SVI(setting.model, guide, make(guide), loss)
    return lambda: svi.step(*setting.args)


def table(results: list[Result]) -> str:
    """Median steps with their range, and ratios to NGVB's median."""
    seeds = len(next(iter(results[0].steps.values())))
    columns = [c for t in TARGETS for c in (f"steps to {t}", "/ NGVB's")]
    title = f"### wdbc, {seeds} seeds\n"
    lines = [title, heading("", "", *columns, "ms a step", "NGVB's ms", "ratio")]
    own = {result.family: result for result in results if result.method == "NGVB"}
    for result in results:
        cells = []
        for t in map(str, TARGETS):
            steps, base = result.steps[t], median(own[result.family].steps[t])
            cells.append(f"{median(steps):.0f} ({min(steps):.0f}-{max(steps):.0f})")
            cells.append(f"{median(steps) / base:.2f}")
        cells += ["", "", ""] if result.timing is None else result.timing.cells()
        lines.append(line(result.family, result.method, *cells))
    return "\n".join(lines)
