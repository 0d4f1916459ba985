"""Does `fit(..., guide="auto")` find what the best guide tried by hand finds, and in what time?

Run from the root of the repository: ``python -m benchmarks.auto_guide --help``.  For each problem of
the zoo a fit that chooses, and one of each guide in the list, all with default settings and a limit
of seconds.  The best by hand is that of the highest ELBO; "as good": at most 0.1 nat below it, or the
same decision of the verdict.
"""

import argparse
import time
import warnings
from statistics import median
from typing import Any

import pyro

import pyro_ngvi as ngvi

from .problems import Problem, load_present, names
from .time_to_target import prepare

GUIDES = ["AutoMeanFieldNormal", "AutoFullRankNormal", "AutoHierarchical", "AutoCouplingFlow"]
NEAR = 0.1


def run(problem: Problem, guide: str, seed: int, limit: float) -> dict[str, Any] | None:
    """A fit with its verdict; nothing where the guide refuses the model."""
    pyro.clear_param_store()
    start = time.perf_counter()
    how: dict[str, Any] = {"guide": guide, "seed": seed, "progress": False, "max_time": limit}
    try:
        fit = ngvi.fit(problem.model, *problem.args, **how)
        k, decision = fit.khat, fit.verdict.decision
    except ValueError:
        return None
    seconds = time.perf_counter() - start
    name = type(fit.guide).__name__
    figures = {"elbo": k.elbo, "error": k.elbo_error, "seconds": seconds}
    return figures | {"guide": name, "decision": decision}


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for every problem and seed, and what all of them say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--problems", nargs="+", default=names(), metavar="NAME")
    parser.add_argument("--seeds", default=1, type=int)
    parser.add_argument("--limit", default=60.0, type=float, help="seconds of a fit")
    p = parser.parse_args(arguments)
    prepare()
    warnings.simplefilter("ignore")
    good, usable, ratios = [], [], []
    print("problem | seed | chosen | ELBO | decision | s | best by hand | ELBO | decision | s")
    print("---|---|---|---|---|---|---|---|---|---")
    for problem in load_present(p.problems):
        for seed in range(p.seeds):
            auto = run(problem, "auto", seed, p.limit)
            assert auto is not None
            hand = [r for g in GUIDES if (r := run(problem, g, seed, p.limit)) is not None]
            best = max(hand, key=lambda r: r["elbo"])
            same = auto["decision"] == best["decision"]
            good.append(same or auto["elbo"] >= best["elbo"] - NEAR)
            usable.append(auto["decision"] == "intervals")
            ratios.append(auto["seconds"] / best["seconds"])
            cells = [
                f"{r['guide']} | {r['elbo']:.2f} +- {r['error']:.2f} | {r['decision']} | "
                f"{r['seconds']:.1f}"
                for r in (auto, best)
            ]
            mark = "" if good[-1] else " (WORSE)"
            print(f"{problem.name} | {seed} | {' | '.join(cells)}{mark}", flush=True)
    print(
        f"\n{len(good)} fits: as good as the best by hand in {sum(good)}; intervals to be taken as "
        f"they are in {sum(usable)}; {median(ratios):.2f} times the best guide's time (median), "
        f"{max(ratios):.1f} at most"
    )


if __name__ == "__main__":
    main()
