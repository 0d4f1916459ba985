"""Steps and seconds until the ELBO is within 0.5 and 0.1 nat of its optimum.

Run from the root of the repository: ``python -m benchmarks.time_to_target --help``.
See ``benchmarks/README.md`` for what is measured and how.
"""

import argparse
import json
import logging
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import methods
from .jax_methods import numpyro_factory
from .problems import LogJoint, Problem, load_present
from .problems.problem import FAMILIES
from .problems.sample_average import gaussian_elbo, standard_noise
from .report import Result, table

TARGETS = (0.5, 0.1)
PROBLEMS = (
    "wdbc",
    "australian_presplit",
    "breast_cancer_presplit",
    "german_credit",
    "a1a",
    "arK",
    "kidscore_interaction",
    "varying_intercepts",
)
METHODS = ("ngvb", "ngvb_point", "pyro", "numpyro")
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
EVALUATION_DRAWS = 4096
Elbo = Callable[[Tensor, Tensor], float]
# A method, its learning rate if it has one, and how to start a run of it.
Contestant = tuple[str, float | None, Callable[..., methods.Run]]


@dataclass(frozen=True)
class Settings:
    """What a run of the benchmark does; written into its JSON."""

    problems: tuple[str, ...]
    families: tuple[str, ...]
    methods: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: int
    particles: int
    start: str
    step_cap: int
    time_cap: float


def evaluator(problem: Problem) -> Elbo:
    """The ELBO of a Gaussian: by quadrature where possible, else on one fixed noise sample."""
    if problem.exact_elbo is not None:
        return problem.exact_elbo
    log_joint = LogJoint(problem)
    noise = standard_noise(EVALUATION_DRAWS, problem.dim, seed=20)

    def elbo(loc: Tensor, scale_tril: Tensor) -> float:
        with torch.no_grad():
            return float(gaussian_elbo(log_joint, loc, scale_tril, noise))

    return elbo


def checkpoints(cap: int, first: int = 1, ratio: float = 1.15) -> Iterator[int]:
    """Step counts that grow by about a constant factor, the last of them ``cap``."""
    step = first
    while step < cap:
        yield step
        step = max(step + 1, int(step * ratio))
    yield cap


def measure(
    run: methods.Run, elbo: Elbo, optimum: float, step_cap: int, time_cap: float
) -> tuple[dict[float, tuple[int, float]], float, float]:
    """Steps and seconds to each target that is reached, seconds in all, and the best ELBO.

    Only ``run.advance`` is timed. The run ends at the first checkpoint past all targets or a cap.
    """
    hits: dict[float, tuple[int, float]] = {}
    done, seconds, best = 0, 0.0, -float("inf")
    for step in checkpoints(step_cap):
        start = time.process_time()
        try:
            run.advance(step - done)
        except ValueError as error:  # Pyro's validation, once a parameter is NaN
            print(f"A run stopped before step {step}. {str(error).splitlines()[0]}")
            break
        finally:
            seconds += time.process_time() - start
        done = step
        value = elbo(*run.gaussian())
        if not value > -float("inf"):  # NaN or diverged: nothing more will come of it
            break
        best = max(best, value)
        for target in TARGETS:
            if target not in hits and optimum - value <= target:
                hits[target] = (step, seconds)
        if len(hits) == len(TARGETS) or seconds > time_cap:
            break
    return hits, seconds, best


def contestants(settings: Settings) -> list[Contestant]:
    """All methods, Adam once for every learning rate."""
    entries: list[Contestant] = []
    if "ngvb" in settings.methods:
        entries.append(("ngvb", None, methods.ngvb))
    if "ngvb_point" in settings.methods:
        entries.append(("ngvb_point", None, methods.ngvb_point))
    if "pyro" in settings.methods:
        entries += [("pyro", rate, methods.pyro_adam) for rate in settings.rates]
    if "numpyro" in settings.methods:
        try:
            begin = numpyro_factory()
        except ImportError:
            print("NumPyro is not installed: its rows are left out.")
            return entries
        entries += [("numpyro", rate, begin) for rate in settings.rates]
    return entries


def compare(
    problem: Problem, family: str, entries: list[Contestant], settings: Settings
) -> list[Result]:
    """All methods on one problem and family, one after the other for every seed."""
    if family not in problem.optimum:
        print(f"{problem.name}, {family} is left out: its optimum is not known.")
        return []
    elbo, optimum = evaluator(problem), problem.optimum[family].elbo
    results, absent, warm = [], set[str](), set[str]()
    for seed in range(settings.seeds):
        for method, rate, begin in entries:
            if method in absent:
                continue
            options = (seed, settings.particles, settings.start) + ((rate,) if rate else ())
            try:
                if method not in warm:  # what a process does only once is no method's cost
                    begin(problem, family, *options).advance(3)
                    warm.add(method)
                run = begin(problem, family, *options)
            except LookupError as error:  # a model without a NumPyro form
                print(error)
                absent.add(method)
                continue
            hits, seconds, best = measure(run, elbo, optimum, settings.step_cap, settings.time_cap)
            reached = {str(target): hits[target] for target in hits}
            results.append(
                Result(
                    problem.name,
                    family,
                    method,
                    rate,
                    seed,
                    reached,
                    seconds,
                    run.compile_seconds,
                    best,
                    optimum,
                )
            )
    return results


def parse(arguments: list[str] | None = None) -> tuple[Settings, Path | None]:
    """Settings and the path of the JSON file from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--problems", nargs="+", default=PROBLEMS, metavar="NAME")
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--rates", nargs="+", default=RATES, type=float, help="for Adam")
    parser.add_argument("--seeds", default=3, type=int)
    parser.add_argument("--particles", default=8, type=int)
    parser.add_argument("--start", default="feasible", choices=tuple(methods.STARTS))
    parser.add_argument("--step-cap", default=50_000, type=int)
    parser.add_argument("--time-cap", default=30.0, type=float, help="seconds for one run")
    parser.add_argument("--quick", action="store_true", help="wdbc, one seed, under 3 minutes")
    parser.add_argument("--json", type=Path, help="write all runs to this file")
    p = parser.parse_args(arguments)
    if p.quick:
        p.problems, p.rates, p.seeds, p.time_cap = ("wdbc",), (0.003, 0.01, 0.03), 1, 12.0
    settings = Settings(
        tuple(p.problems),
        tuple(p.families),
        tuple(p.methods),
        tuple(p.rates),
        p.seeds,
        p.particles,
        p.start,
        p.step_cap,
        p.time_cap,
    )
    return settings, p.json


def one_core() -> None:
    """Keeps this process, and every thread that a library starts in it, on one core."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def prepare() -> None:
    """One core, float64, and no word from Pyro between the rows of a table."""
    one_core()
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    logging.getLogger("pyro").setLevel(logging.WARNING)


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark, prints the table and writes the JSON file."""
    settings, path = parse(arguments)
    prepare()
    entries, results = contestants(settings), list[Result]()
    for problem in load_present(settings.problems):
        for family in settings.families:
            new = compare(problem, family, entries, settings)
            results += new
            if new:
                print(table(new, TARGETS), flush=True)
    if path is not None:
        record = {
            "settings": asdict(settings),
            "machine": {"processor": platform.processor() or platform.machine()},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "results": [asdict(result) for result in results],
        }
        path.write_text(json.dumps(record, indent=1))
        print(f"All runs are in {path}.")


if __name__ == "__main__":
    main()
