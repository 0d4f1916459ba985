"""Results of the papers on the Bayesian learning rule again: paper / this package, line by line.

Run from the root of the repository: ``python -m benchmarks.blr_papers --help``.  The data sets are
read from the directory in ``PYRO_NGVI_DATA``; "digits" comes with scikit-learn.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

#: module of this package -> what it repeats
PARTS = {
    "fig1": "Khan & Nielsen (2018), figure 1(b): test log loss in bits by epoch",
    "slang": "Mishkin et al. (2018), table 1: logistic regression, nats",
    "digits": "A small convolutional network on scikit-learn's digits (no published numbers)",
    "uci": "Khan et al. (2018) and Mishkin et al. (2018): UCI regression, RMSE and log-likelihood",
}


def main(arguments: list[str] | None = None) -> None:
    """Runs the parts, prints a line for each result, and saves them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--data", nargs="+", help="data sets of one part (--only), by default all")
    parser.add_argument("--quick", action="store_true", help="one seed or split, fewer steps")
    parser.add_argument("--seeds", type=int, default=1, help="seeds, or splits, of each run")
    parser.add_argument("--out", type=Path, help="folder for a JSON file by part")
    p = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in p.only:
        print(f"### {PARTS[name]}", flush=True)
        run = importlib.import_module(f".{name}", __package__).run
        start, rows = time.perf_counter(), []
        for row in run(p.quick, p.seeds, p.data):
            print(row, flush=True)
            rows.append(asdict(row))
            if p.out is not None:  # after each row: long runs may be cut off
                p.out.mkdir(parents=True, exist_ok=True)
                (p.out / f"{name}.json").write_text(json.dumps(rows, indent=1))
        print(f"({name}: {time.perf_counter() - start:.0f} s)\n", flush=True)


if __name__ == "__main__":
    main()
