"""The command line of the folders that run papers again: parts by name, a line a result, JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

__all__ = ["run_parts"]


def run_parts(
    package: str, parts: Mapping[str, str], description: str, arguments: list[str] | None = None
) -> None:
    """Runs the parts, prints a line for each result, and saves them.

    ``parts`` gives for each module of ``package`` what it repeats; a module has
    ``run(quick, seeds, data)``, an iterator of rows; one whose runs are timed takes ``seconds`` too.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--data", nargs="+", help="data sets of one part (--only), by default all")
    parser.add_argument("--quick", action="store_true", help="one seed or split, fewer steps")
    parser.add_argument("--seeds", type=int, default=1, help="seeds, or splits, of each run")
    parser.add_argument("--seconds", type=float, help="budget of each run, in timed parts (--only)")
    parser.add_argument("--out", type=Path, help="folder for a JSON file by part")
    p = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options = {} if p.seconds is None else {"seconds": p.seconds}
    for name in p.only:
        print(f"### {parts[name]}", flush=True)
        run = importlib.import_module(f".{name}", package).run
        start, rows = time.perf_counter(), []
        for row in run(p.quick, p.seeds, p.data, **options):
            print(row, flush=True)
            rows.append(asdict(row))
            if p.out is not None:  # after each row: long runs may be cut off
                p.out.mkdir(parents=True, exist_ok=True)
                (p.out / f"{name}.json").write_text(json.dumps(rows, indent=1))
        print(f"({name}: {time.perf_counter() - start:.0f} s)\n", flush=True)
