"""No tuning: on how many problems is a method within 0.1 nat of the best Gaussian, and by when?

Run from the root of the repository: ``python -m benchmarks.leaderboard --help``.  For each problem and
family (full-rank or mean-field Gaussian in the unconstrained space) one run of every method, with one
setting for all problems.  Only "Adam, best of five" has its rate chosen afterwards, for each problem
and budget, and the other four runs cost it nothing.  The error at a budget is the optimum of the
family minus the ELBO of the Gaussian that the method holds then; "none" where it holds none.

- **The clock** is the processor time of the process, one thread, and stands still while answers are
  copied and judged.  Every method runs for a moment first, so that loading code is not on it.
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

import pyro
import torch
from pyro.infer import SVI
from torch import Tensor

import pyro_ngvi as ngvi

from . import methods
from .baselines import batch_and_match, dadvi, laplace, pathfinder
from .leaderboard_report import report
from .particles import GUIDES
from .problems import LogJoint, Problem, load_present
from .problems.problem import FAMILIES
from .problems.sample_average import gaussian_elbo, maximise, standard_noise
from .stepping import circumstances
from .time_to_target import Elbo, prepare

PROBLEMS = (
    "wdbc",
    "australian_presplit",
    "german_credit",
    "a1a",
    "arK",
    "gp_regr",
    "kidscore_interaction",
    "logmesquite",
    "low_dim_gauss_mix",
    "eight_schools_noncentered",
    "eight_schools_centered",
    "varying_intercepts",
    "horseshoe",
)
BUDGETS = (0.3, 1.0, 3.0, 10.0)
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
FIXED_RATE = 0.01
DRAWS, LOOK_DRAWS = 4096, 512
SETTLED, LOOKS = 0.02, 4
Gaussian = tuple[Tensor, Tensor]


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


class Watch:
    """What a method holds at each budget.  Its clock stands still while anything here runs."""

    def __init__(self, budgets: tuple[float, ...], look: Callable[[Tensor, Tensor], float]) -> None:
        self.held: dict[float, Gaussian | None] = {}
        self.budgets, self.until = budgets, budgets[-1]
        self._look, self._last, self._good = look, None, 0
        self.seconds, self._next, self._read = 0.0, 0.0, 0.0
        self._from = time.process_time()

    def go(self) -> None:
        self._from = time.process_time()

    def pause(self) -> None:
        self.seconds += time.process_time() - self._from
        self._close(self.seconds)

    def _close(self, seconds: float) -> None:
        for budget in self.budgets:
            if budget < seconds and budget not in self.held:
                self.held[budget] = self._last

    @property
    def settled(self) -> bool:
        return self._good >= LOOKS

    def report(self, loc: Tensor, scale_tril: Tensor) -> bool:
        """Takes an answer; true where the run may end."""
        self.pause()
        try:
            finite = bool(torch.isfinite(loc).all() and torch.isfinite(scale_tril).all())
            self._last = (loc.detach().clone(), scale_tril.detach().clone()) if finite else None
            if self.seconds >= self._next:
                self._next = max(1.25 * self.seconds, 0.02)
                good = finite and self._look(loc.detach(), scale_tril.detach()) < SETTLED
                self._good = self._good + 1 if good else 0
            return not finite or self.settled or self.seconds >= self.until
        finally:
            self.go()

    def see(self, answer: Callable[[], Gaussian], final: bool = False) -> bool:
        """As :meth:`report`, of an answer that costs something to read: once in 1 % of the time."""
        self.pause()
        if self.seconds < self._read and not final:
            self.go()
            return False
        self._read = 1.01 * self.seconds
        given = answer()
        self.go()
        return self.report(*given)

    def fail(self) -> None:
        """Nothing is left of a run that raised an error."""
        self._last = None

    def end(self) -> None:
        """What is held now is held at all later budgets."""
        self._close(math.inf)


class Start:
    """What a method that knows no model of Pyro is given: the density, and the start of all."""

    def __init__(self, problem: Problem, seed: int) -> None:
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        self.log_joint = LogJoint(problem)
        self.zero = torch.zeros(problem.dim)
        self.scale = methods.INIT_SCALE * torch.eye(problem.dim)


def run_fit(problem: Problem, family: str, seed: int, watch: Watch) -> None:
    """`ngvi.fit` with the guide of the family, and no other argument that matters."""
    pyro.clear_param_store()

    def callback(fit: Any) -> bool:
        return watch.see(lambda: answer(fit.guide))

    name = GUIDES[family].__name__
    how: dict[str, Any] = {"seed": seed, "progress": False, "callbacks": [callback]}
    fit = ngvi.fit(problem.model, *problem.args, guide=name, **how)
    watch.see(lambda: answer(fit.guide), final=True)


def answer(guide: Any) -> Gaussian:
    """The Gaussian of one of our guides."""
    with torch.no_grad():
        q = guide.get_posterior()
        return q.mean, q.scale_tril if hasattr(q, "scale_tril") else q.stddev.diag()


def run_loop(problem: Problem, family: str, seed: int, watch: Watch) -> None:
    """Our guide, `NGVB` and `BatchedELBO(8)` in a loop without a stop rule."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = GUIDES[family](problem.model)
    svi = SVI(problem.model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    while True:
        svi.step(*problem.args)
        if watch.see(lambda: answer(guide)):
            return


def run_laplace(problem: Problem, family: str, seed: int, watch: Watch) -> None:
    start = Start(problem, seed)
    found = laplace(start.log_joint.single, start.zero)
    if found is not None:
        watch.report(*found)


def run_pathfinder(problem: Problem, family: str, seed: int, watch: Watch) -> None:
    start = Start(problem, seed)
    pathfinder(start.log_joint, start.zero, report=watch.report)


def run_batch_and_match(problem: Problem, family: str, seed: int, watch: Watch) -> None:
    """From N(0, I), with 32 draws an update and the falling rate of the paper."""
    start = Start(problem, seed)
    scale = torch.eye(problem.dim)
    batch_and_match(start.log_joint, start.zero, scale, report=watch.report)


def run_dadvi(problem: Problem, family: str, seed: int, watch: Watch) -> None:
    start = Start(problem, seed)
    noise = torch.randn(30, problem.dim)
    dadvi(start.log_joint, start.zero, start.scale.diagonal(), noise, report=watch.report)


def run_sample_average(problem: Problem, family: str, seed: int, watch: Watch) -> None:
    """As DADVI with L-BFGS and quasi-random draws: 512, or the power of two from 8 d on.

    L-BFGS begins again at its end, with that for its metric, until this gains less than 0.001 nat: a
    line search that has met an infinite density ends a run early.
    """
    start = Start(problem, seed)
    draws = max(512, 2 ** math.ceil(math.log2(8 * problem.dim)))
    noise = standard_noise(draws, problem.dim, seed)
    loc, scale, last, value = start.zero, start.scale, -math.inf, -1e300
    while value > last + 0.001 and watch.seconds < watch.until:
        last = value
        value, loc, scale = maximise(
            start.log_joint, family, noise, loc, scale, report=watch.report
        )
        scale = scale if family == "full_rank" else scale.diagonal().diag()


def adam(problem: Problem, family: str, seed: int, rate: float) -> methods.SVIRun:
    """Pyro's guide with Adam, under names of its own, for runs that take turns."""
    from pyro_ngvi.runtime.store import claim_name, rename

    run: Any = methods.pyro_adam(problem, family, seed, 8, "feasible", rate)
    rename(run.guide, claim_name(type(run.guide).__name__))
    return run


def advance(run: methods.SVIRun, watch: Watch) -> None:
    """Steps up to the watch's limit."""
    watch.go()
    try:
        while True:
            run.advance(1)
            if watch.see(run.gaussian):
                return
    except ValueError:  # Pyro's validation, once a parameter is NaN
        watch.fail()


CONTESTANTS: dict[str, tuple[tuple[str, ...], Callable[..., None]]] = {
    "fit": (FAMILIES, run_fit),
    "NGVB loop": (FAMILIES, run_loop),
    "Laplace": (("full_rank",), run_laplace),
    "Pathfinder": (("full_rank",), run_pathfinder),
    "batch and match": (("full_rank",), run_batch_and_match),
    "DADVI": (("mean_field",), run_dadvi),
    "sample average": (FAMILIES, run_sample_average),
}


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

    race = [b for b in budgets if b <= p.race][-1:] or [budgets[-1]]
    runs = {}
    for rate in p.rates if "Adam" in p.methods else ():
        mine = watches[f"Adam {rate:g}"] = watch()
        mine.until = race[0] * 1.0001
        mine.go()
        runs[rate] = adam(problem, family, seed, rate)
        mine.pause()
        advance(runs[rate], mine)

    def error(given: Gaussian | None) -> float:
        if given is None:
            return math.inf
        found = optimum - elbo(*given)
        return found if found == found else math.inf

    at_race = {rate: error(watches[f"Adam {rate:g}"].held.get(race[0])) for rate in runs}
    best = sorted(at_race, key=lambda rate: at_race[rate])[:2]
    for rate, run in runs.items():
        mine = watches[f"Adam {rate:g}"]
        if (rate in best or rate == FIXED_RATE) and not mine.settled and at_race[rate] < math.inf:
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
        last = mine.held[budgets[-1]]
        if last is not None:
            finals.append((errors[-1], last))
    spread = standard_error(*min(finals, key=lambda pair: abs(pair[0]))[1]) if finals else None
    return [row | {"standard_error": spread} for row in rows]


def main(arguments: list[str] | None = None) -> None:
    """Runs what is missing, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--problems", nargs="+", default=PROBLEMS, metavar="NAME")
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    every = (*CONTESTANTS, "Adam")
    parser.add_argument("--methods", nargs="+", default=every, choices=every)
    parser.add_argument("--rates", nargs="+", default=RATES, type=float, help="for Adam")
    parser.add_argument("--budgets", nargs="+", default=BUDGETS, type=float, metavar="SECONDS")
    parser.add_argument("--race", default=3.0, type=float, help="budget for all rates of Adam")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--json", type=Path, help="keep the runs in this file, or go on from it")
    parser.add_argument("--report", action="store_true", help="only print the tables of the file")
    p = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    if p.json is not None and p.json.exists():
        rows = json.loads(p.json.read_text())["rows"]
    if not p.report:
        prepare()
        done = {(row["problem"], row["family"], row["seed"]) for row in rows}
        problems, warm = list(load_present(p.problems)), set[str]()
        for family in p.families:
            for problem in problems:
                if (problem.name, family, p.seed) in done or family not in problem.optimum:
                    continue
                if family not in warm:
                    short = argparse.Namespace(**(vars(p) | {"budgets": [0.02], "race": 0.02}))
                    compare(problem, family, p.seed, short)
                    warm.add(family)
                before = time.perf_counter()
                new = compare(problem, family, p.seed, p)
                rows += new
                took = time.perf_counter() - before
                shown = ", ".join(f"{r['method']} {r['errors'][-1]:.3g}" for r in new)
                print(f"{problem.name}, {family} ({took:.0f} s): {shown}", flush=True)
                if p.json is not None:
                    record = circumstances() | {"budgets": list(p.budgets), "rows": rows}
                    p.json.write_text(json.dumps(record, indent=1))
    print(report(rows, tuple(p.budgets)))


if __name__ == "__main__":
    main()
