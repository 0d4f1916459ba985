"""No tuning: on how many problems is a method within 0.1 nat of the best Gaussian, and by when?

Run from the root of the repository: ``python -m benchmarks.leaderboard --help``.  For each problem,
seed and family (full-rank or mean-field Gaussian in the unconstrained space) one run of every method,
with one setting for all problems.  Only in "best of five" are rates, of Pyro's or NumPyro's Adam,
chosen afterwards, for each problem and budget, and the other four runs cost nothing.  The error at a
budget is the optimum of the family minus the ELBO of the Gaussian that the method holds then; "none"
where it holds none.

- **The clock** is the processor time of the process, one thread, and stands still while answers are
  copied and judged, and while JAX compiles.  Every method runs for a moment first, so that loading code
  is not on it.
- **The ELBO**: by quadrature for the logistic regressions, else on 4,096 quasi-random draws with exact
  mean and covariance, the same for all.  Its standard error is that of four other such samples.
- **A run ends early** where its error was below 0.02 at four looks in a row, each a quarter later than
  the one before (on 512 draws; the same rule for all): it then keeps its answer.
- **Adam's rates**: all five up to the budget ``--race``, then the best two there and 0.01.

``--json`` keeps the runs as they come, and the same command goes on where it was ended.
``--report`` prints the tables of such a file.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .contestants import CONTESTANTS, RACERS, Gaussian, Watch, advance, present
from .leaderboard_report import report
from .problems import LogJoint, Problem, load_present, names
from .problems.problem import FAMILIES
from .problems.sample_average import gaussian_elbo, standard_noise
from .stepping import circumstances
from .time_to_target import Elbo, prepare

BUDGETS = (0.3, 1.0, 3.0)
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
FIXED_RATE = 0.01
DRAWS, LOOK_DRAWS = 4096, 512


def judges(problem: Problem) -> tuple[Elbo, Elbo, Callable[[Tensor, Tensor], float]]:
    """The ELBO of an answer, a cheaper one for looks, and the standard error of the first."""
    if problem.exact_elbo is not None:
        return problem.exact_elbo, problem.exact_elbo, lambda loc, scale_tril: 0.0
    log_joint = LogJoint(problem)

    def on(noise: Tensor) -> Elbo:
        def elbo(loc: Tensor, scale_tril: Tensor) -> float:
            with torch.no_grad():
                return float(gaussian_elbo(log_joint, loc, scale_tril, noise))

        return elbo

    def error(loc: Tensor, scale_tril: Tensor) -> float:
        others = [standard_noise(DRAWS, problem.dim, seed) for seed in range(21, 25)]
        return float(torch.tensor([on(noise)(loc, scale_tril) for noise in others]).std())

    large, small = (standard_noise(size, problem.dim, seed=20) for size in (DRAWS, LOOK_DRAWS))
    return on(large), on(small), error


def compare(problem: Problem, family: str, seed: int, p: Any) -> list[dict[str, Any]]:
    """All methods on one problem and family, one after the other."""
    elbo, small, standard_error = judges(problem)
    optimum, budgets = problem.optimum[family].elbo, tuple(p.budgets)
    watches: dict[str, Watch] = {}

    def watch() -> Watch:
        return Watch(budgets, lambda loc, scale: optimum - small(loc, scale))

    for method, (families, run) in CONTESTANTS.items():
        if family not in families or method not in p.methods:
            continue
        mine = watches[method] = watch()
        mine.go()
        try:
            run(problem, family, seed, mine)
            mine.pause()
        except (ArithmeticError, RuntimeError, ValueError) as raised:
            print(f"{problem.name}, {family}, {method}: {str(raised).splitlines()[0]}", flush=True)
            mine.fail()
        mine.end()

    def error(given: Gaussian | None) -> float:
        if given is None:
            return math.inf
        found = optimum - elbo(*given)
        return found if found == found else math.inf

    race = [b for b in budgets if b <= p.race][-1:] or [budgets[-1]]
    for method in RACERS:
        if method not in p.methods:
            continue
        begin, runs = RACERS[method](problem, family, seed), {}
        for rate in p.rates:
            mine = watches[f"{method} {rate:g}"] = watch()
            mine.until = race[0] * 1.0001
            mine.go()
            runs[rate] = begin(rate)
            mine.pause()
            mine.compile_seconds = runs[rate].compile_seconds
            advance(runs[rate], mine)
        at_race = {rate: error(watches[f"{method} {rate:g}"].held.get(race[0])) for rate in runs}
        best = sorted(at_race, key=lambda rate: at_race[rate])[:2]
        for rate, run in runs.items():
            mine = watches[f"{method} {rate:g}"]
            chosen = rate in best or rate == FIXED_RATE
            if chosen and not mine.settled and at_race[rate] < math.inf:
                mine.until = budgets[-1] * 1.0001
                advance(run, mine)
            mine.end()

    seen: dict[int, float] = {}
    rows = []
    finals: list[tuple[float, Gaussian]] = []
    for method, mine in watches.items():
        errors = []
        for budget in budgets:
            given = mine.held[budget]
            if id(given) not in seen:
                seen[id(given)] = error(given)
            errors.append(seen[id(given)])
        rows.append({"problem": problem.name, "dim": problem.dim, "family": family, "seed": seed})
        rows[-1] |= {"method": method, "errors": errors, "seconds": mine.seconds}
        rows[-1]["compile_seconds"] = mine.compile_seconds
        last = mine.held[budgets[-1]]
        if last is not None:
            finals.append((errors[-1], last))
    spread = standard_error(*min(finals, key=lambda pair: abs(pair[0]))[1]) if finals else None
    return [row | {"standard_error": spread} for row in rows]


def main(arguments: list[str] | None = None) -> None:
    """Runs what is missing, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--problems", nargs="+", default=names(), metavar="NAME")
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    every = (*CONTESTANTS, *RACERS)
    parser.add_argument("--methods", nargs="+", default=every, choices=every)
    parser.add_argument("--rates", nargs="+", default=RATES, type=float, help="for Adam")
    parser.add_argument("--budgets", nargs="+", default=BUDGETS, type=float, metavar="SECONDS")
    parser.add_argument("--race", default=1.0, type=float, help="budget for all rates of Adam")
    parser.add_argument("--seeds", default=3, type=int, help="how many, from 0 on")
    parser.add_argument("--json", type=Path, help="keep the runs in this file, or go on from it")
    parser.add_argument("--report", action="store_true", help="only print the tables of the file")
    p = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    if p.json is not None and p.json.exists():
        rows = json.loads(p.json.read_text())["rows"]
    if not p.report:
        prepare()
        p.methods = present(tuple(p.methods))
        done = {(row["problem"], row["family"], row["seed"]) for row in rows}
        problems, warm = list(load_present(p.problems)), set[str]()
        runs = ((s, f, x) for s in range(p.seeds) for f in p.families for x in problems)
        for seed, family, problem in runs:
            if (problem.name, family, seed) in done or family not in problem.optimum:
                continue
            if family not in warm:
                short = argparse.Namespace(**(vars(p) | {"budgets": [0.02], "race": 0.02}))
                compare(problem, family, seed, short)
                warm.add(family)
            before = time.perf_counter()
            new = compare(problem, family, seed, p)
            rows += new
            took = time.perf_counter() - before
            shown = ", ".join(f"{r['method']} {r['errors'][-1]:.3g}" for r in new)
            print(f"{problem.name}, {family}, seed {seed} ({took:.0f} s): {shown}", flush=True)
            if p.json is not None:
                record = circumstances() | {"budgets": list(p.budgets), "rows": rows}
                p.json.write_text(json.dumps(record, indent=1))
    print(report(rows, tuple(p.budgets)))


if __name__ == "__main__":
    main()
