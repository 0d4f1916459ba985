"""IFVB and AIFVB on guides of any kind: ELBO at equal time, steps beside NGVB, frames, memory.

Run from the root of the repository: ``python -m benchmarks.any_guide --help``.
See ``benchmarks/README.md`` for what is measured and how.
"""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ..problems import DataNotFound
from ..stepping import circumstances, heading
from ..time_to_target import prepare
from . import coverage, frames, generic, guides, memory, steps
from .kinds import KINDS

GUIDES: dict[str, Callable[[], guides.Problem]] = {
    "mixture": guides.phase_retrieval,
    "low_rank": guides.german_credit,
    "eight_schools": guides.eight_schools,
    "structured": guides.structured,
    "iaf": guides.funnel,
    **{cell: partial(guides.regression, cell) for cell in guides.CELLS},
    **KINDS,
}
PARTS = (*GUIDES, "by_steps", "steps", "frames", "memory", "coverage")


def equal_time(name: str, seeds: int, budget: float) -> list[Any]:
    """Runs one comparison of ELBOs and prints its table."""
    try:
        problem = GUIDES[name]()
    except DataNotFound as error:
        print(f"{name} is left out. {error}")
        return []
    runs = generic.compare(problem, seeds, budget)
    print(generic.table(runs, budget), flush=True)
    return runs


def by_steps(seeds: int) -> list[Any]:
    """Prints -ELBO by steps for all regressions."""
    steps = " / ".join(map(str, generic.STEPS))
    print(heading("", f"IFVB after {steps} steps", "Adam, its best rate at each"), flush=True)
    rows = []
    for cell in guides.CELLS:
        try:
            rows.append(generic.by_steps(guides.regression(cell), seeds))
        except DataNotFound as error:
            print(f"{cell} is left out. {error}")
            continue
        print(rows[-1], flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Runs the parts, prints their tables and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--seeds", type=int, help="default 10; 5 for steps and frames; at least 2")
    parser.add_argument("--budget", default=4.0, type=float, help="seconds of a run at equal time")
    parser.add_argument("--quick", action="store_true", help="2 seeds, 1 s, D = 20,000")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    p = parser.parse_args(arguments)
    prepare()
    seeds, budget = (2, 1.0) if p.quick else (p.seeds or 10, p.budget)
    found: dict[str, list[Any]] = {}
    for name in p.only:
        if name in GUIDES:
            found[name] = equal_time(name, seeds, budget)
        elif name == "by_steps":
            by_steps(seeds)
        elif name == "steps":
            found[name] = steps.run(2 if p.quick else p.seeds or 5, 5 if p.quick else 21)
            print(steps.table(found[name]), flush=True)
        elif name == "frames":
            found[name] = frames.run(2 if p.quick else p.seeds or 5, p.quick)
            print(frames.table(found[name]), flush=True)
        elif name == "coverage":
            found[name] = coverage.run(10 if p.quick else 200)
            print(coverage.table(found[name]), flush=True)
        else:
            D = 20_000 if p.quick else 1_000_000
            found[name] = memory.run(D, rounds=2 if p.quick else 3)
            print(memory.table(found[name], D), flush=True)
    if p.json is not None:
        record = circumstances() | {
            "machine": f"{os.cpu_count()} cores, one thread used",
            "budget": budget,
        }
        record |= {name: [asdict(result) for result in results] for name, results in found.items()}
        p.json.parent.mkdir(parents=True, exist_ok=True)
        p.json.write_text(json.dumps(record, indent=1))
        print(f"All results are in {p.json}.")


if __name__ == "__main__":
    main()
