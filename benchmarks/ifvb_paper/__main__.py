"""The examples of Godichon-Baggioni, Nguyen & Tran (2024) again: paper, authors' code, this package.

Run from the root of the repository: ``python -m benchmarks.ifvb_paper --help``.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import time
from pathlib import Path

import torch

from .report import table

#: module of this package -> title of its table
PARTS = {
    "example1": "Example 1: Beta-Bernoulli (errors: distance to (58, 144) after so many steps)",
    "example2": "Example 2: Poisson regression; normal model",
    "calibration": "Calibration: eigenvalues of (estimate x Fisher), 1 is right",
    "example4": "Example 4: direct marketing",
}


def main(arguments: list[str] | None = None) -> None:
    """Runs the parts, prints their tables, and saves rows and figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--out", type=Path, help="folder for figures (PNG, JSON) and rows.json")
    p = parser.parse_args(arguments)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    found = {}
    for name in p.only:
        run = importlib.import_module(f".{name}", __package__).run
        further = {"out": p.out} if "out" in inspect.signature(run).parameters else {}
        start = time.perf_counter()
        rows = run(p.quick, **further)
        print(table(PARTS[name], rows), flush=True)
        print(f"({name}: {time.perf_counter() - start:.0f} s)\n", flush=True)
        found[name] = [list(map(str, row)) for row in rows]
    if p.out is not None:
        p.out.mkdir(parents=True, exist_ok=True)
        (p.out / "rows.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
