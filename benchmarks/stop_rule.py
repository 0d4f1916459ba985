"""Does "converged" mean what it says: the nats that are left when `StopRule` ends a run.

Run from the root of the repository: ``python -m benchmarks.stop_rule --help``.  `NGVB` with default
settings on the zoo, or with ``--rule adam`` Adam on Pyro's guides, its rate .05 falling by a factor of
a hundred over the run; the gap is that of the guide's ELBO to the known optimum of its family.  Beside
it: the first step from which the gap stays at or below the tolerance (of the step counts of a grid that
grows by 15 %), the steps of the run, and the share of its time that went into looking.

With ``--others`` runs go on until three more rules have spoken, at steps of the grid: the mean loss of
ten steps within 1 or .1 % of that of the ten before (Kucukelbir et al. 2017, JMLR 18(14), as Stan), and
split R-hat below 1.1 of all parameters over the last half of the steps, of 40 or more (Dhaka et al.
2020, NeurIPS, without the averages that they take then).
"""

import argparse
import time
from functools import partial
from statistics import median
from typing import Any

import arviz as az
import pyro
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal
from pyro.optim import ClippedAdam

import pyro_ngvi as ngvi

from .particles import GUIDES
from .problems import Problem, load_present, names
from .problems.problem import FAMILIES
from .time_to_target import Elbo, checkpoints, evaluator, prepare

PYROS: dict[str, Any] = {"full_rank": AutoMultivariateNormal, "mean_field": AutoDiagonalNormal}


class _Timed(ngvi.StopRule):
    """The rule, with the seconds that it takes."""

    seconds = 0.0

    def __call__(self, loss: Any, *args: Any, **kwargs: Any) -> bool:
        start = time.perf_counter()
        try:
            return super().__call__(loss, *args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start


def relative(losses: list[float], path: list[Any], share: float) -> bool:
    """Whether the mean of the last ten losses is within a share of that of the ten before."""
    if len(losses) < 20:
        return False
    last, before = sum(losses[-10:]) / 10.0, sum(losses[-20:-10]) / 10.0
    return abs(last - before) < share * abs(last)


def mixed(losses: list[float], path: list[Any]) -> bool:
    """Whether all parameters seem stationary over the last half of the steps."""
    if len(path) < 40:
        return False
    quarter = len(path) // 4
    chains = torch.stack(path[-2 * quarter :]).unflatten(0, (2, quarter)).numpy()
    found: Any = az.rhat(az.convert_to_dataset({"x": chains}), method="identity")
    return bool((found["x"].values < 1.1).all())


OTHERS: dict[str, Any] = {
    "1 %": partial(relative, share=0.01),
    "0.1 %": partial(relative, share=0.001),
    "R-hat": mixed,
}


def run(problem: Problem, family: str, seed: int, elbo: Elbo, p: Any) -> dict[str, Any]:
    """One run to the stop: its reason, steps, gap, first good step, and share of time for looking."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    if p.rule == "ngvb":
        guide: Any = GUIDES[family](problem.model)
        optim: Any = ngvi.NGVB(guide)
    else:
        guide = PYROS[family](problem.model, init_scale=0.1)
        optim = ClippedAdam({"lr": 0.05, "lrd": 0.01 ** (1.0 / p.max_steps)})
    svi = SVI(problem.model, guide, optim, ngvi.BatchedELBO(p.particles))
    stop = _Timed(svi, p.tol, max_steps=p.max_steps, newton=p.newton)
    grid, good, seconds, ours = set(checkpoints(p.max_steps)), None, 0.0, None
    path: list[Any] = []
    others: dict[str, Any] = {}

    def gap() -> float:
        with torch.no_grad():
            q = guide.get_posterior()
            full = hasattr(q, "scale_tril")
            return problem.optimum[family].elbo - elbo(
                q.mean, q.scale_tril if full else q.stddev.diag()
            )

    while True:
        start = time.perf_counter()
        ended = stop(svi.step(*problem.args), *problem.args)
        if ended and stop.reason == "stalled":
            stop.polish(*problem.args)
        seconds += time.perf_counter() - start
        left = gap() if stop.steps in grid or ended else None
        if left is not None:
            good = (good or stop.steps) if left <= p.tol else None
        if ended and ours is None:
            shares = {"looking": stop.seconds / seconds, "good": good}
            ours = {
                "reason": stop.reason,
                "steps": stop.steps,
                "gap": left,
                "others": others,
            } | shares
            stop.tol = 0.0  # no more looks
        if p.others:
            path.append(torch.cat([x.detach().reshape(-1) for x in guide.parameters()]))
            for name in OTHERS.keys() - others.keys() if stop.steps in grid else ():
                if OTHERS[name](stop.losses, path):
                    others[name] = stop.steps, left
        spoke = not p.others or len(others) == len(OTHERS) or stop.steps == p.max_steps
        if ours is not None and spoke:
            return ours | {"good": good if p.others else ours["good"]}


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for every problem and family, and what all of them say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--problems", nargs="+", default=names(), metavar="NAME")
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--rule", default="ngvb", choices=("ngvb", "adam"))
    parser.add_argument("--particles", default=8, type=int)
    parser.add_argument("--tol", default=0.05, type=float)
    parser.add_argument("--max-steps", default=1000, type=int)
    parser.add_argument("--seeds", default=3, type=int)
    parser.add_argument("--newton", action="store_true", help="looks step, as those of fit do")
    parser.add_argument("--others", action="store_true")
    p = parser.parse_args(arguments)
    prepare()
    runs: list[dict[str, Any]] = []
    for problem in load_present(p.problems):
        elbo = evaluator(problem)
        for family in (f for f in p.families if f in problem.optimum):
            found = [run(problem, family, seed, elbo, p) for seed in range(p.seeds)]
            shown = ", ".join(
                f"{r['reason']} {r['steps']} ({r['good'] or '-'}) {r['gap']:.3f}" for r in found
            )
            print(f"{problem.name:34} {family:10} {shown}", flush=True)
            runs += found
    ended = [r for r in runs if r["reason"] == "converged"]
    wrong = sum(r["gap"] > p.tol + 0.05 for r in ended)
    print(f"converged: {len(ended)} of {len(runs)}; of these above tol + 0.05 nat: {wrong}")
    if ended:
        looking = median(r["looking"] for r in ended)
        late = [r["steps"] / r["good"] for r in ended if r["good"]]
        print(f"steps / first good step: median {median(late):.2f}; looking: {looking:.0%} of time")
    for name in OTHERS if p.others else ():
        spoke = [r["others"][name] + (r["good"],) for r in runs if name in r["others"]]
        above = sum(left > p.tol + 0.05 for _, left, _ in spoke)
        late = [steps / good for steps, _, good in spoke if good]
        print(
            f"{name}: {len(spoke)} of {len(runs)} ended; above tol + 0.05 nat: {above}, the worst "
            f"{max((left for _, left, _ in spoke), default=0.0):.2f}; steps / first good step: "
            f"median {median(late) if late else float('nan'):.2f}"
        )


if __name__ == "__main__":
    main()
