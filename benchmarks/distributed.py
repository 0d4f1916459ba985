"""Steps on several processes: time against ranks, bytes sent, and where that stops paying.

Run from the root of the repository: ``python -m benchmarks.distributed --help``.  One thread a rank.
See ``benchmarks/README.md`` for what is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.distributed
from pyro.infer import SVI
from pyro.infer.autoguide import init_to_value

import pyro_ngvi as ngvi

from .step_cost import quiet_and_single
from .stepping import circumstances, heading, line

#: rows and latent variables of logistic regressions, and the guide
CASES = {
    "full rank, d = 50": (400_000, 50, "AutoFullRankNormal"),
    "full rank, d = 500": (60_000, 500, "AutoFullRankNormal"),
    "mean field, d = 100,000": (500, 100_000, "AutoMeanFieldNormal"),
}
#: seconds to send a message, and bytes a second, of links for the last table
LINKS = {"10 Gbit Ethernet": (5e-5, 1.2e9), "InfiniBand": (5e-6, 2.5e10)}


def model(X: torch.Tensor, y: torch.Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def sent(d: int, guide: str) -> int:
    """Bytes of the buffer of a step in float32: gradients and the loss."""
    return 4 * (1 + d + (d * d if guide == "AutoFullRankNormal" else d))


def predicted(compute: float, ranks: int, size: int, latency: float, bandwidth: float) -> float:
    """Seconds of a step: its work over the ranks, and a ring of 2 (R - 1) messages of size / R."""
    return compute / ranks + 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


def work(case: str, rank: int, ranks: int, store: str, steps: int) -> dict[str, float]:
    """Milliseconds of a step on this rank, and of a sum over ranks of a number and of the buffer."""
    n, d, kind = CASES[case]
    if ranks > 1:
        how: Any = {"rank": rank, "world_size": ranks, "timeout": timedelta(seconds=300)}
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", **how)
    g = torch.Generator().manual_seed(0)
    X = torch.randn(n, d, generator=g) / d**0.5
    y = torch.bernoulli(torch.sigmoid(X.sum(-1)), generator=g)
    X, y = ngvi.distributed.shard(X, y)
    # the start is not the subject
    start = init_to_value(values={"w": torch.zeros(d)})
    guide = getattr(ngvi, kind)(model, init_loc_fn=start)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    svi = ngvi.distributed.wrap(svi, ["data"], check_every=10**9)

    def timed(go: Any, count: int) -> float:
        go()
        start = time.perf_counter()
        for _ in range(count):
            go()
        return 1e3 * (time.perf_counter() - start) / count

    for _ in range(3):
        svi.step(X, y)
    found = {"step": timed(lambda: svi.step(X, y), steps)}
    if ranks > 1:
        buffer = torch.zeros(sent(d, kind) // 4)
        found["number"] = timed(lambda: torch.distributed.all_reduce(buffer[:1]), 20)
        found["buffer"] = timed(lambda: torch.distributed.all_reduce(buffer), 20)
        torch.distributed.destroy_process_group()
    return found


def measure(case: str, ranks: int, steps: int) -> dict[str, float]:
    """The slowest of the ranks, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.distributed", "--work", case, str(steps)]
        given = [folder + "/store", folder + "/out"]
        running = [subprocess.Popen([*command, str(r), str(ranks), *given]) for r in range(ranks)]
        if any([p.wait() for p in running]):
            raise RuntimeError(f"a rank of {ranks} failed at {case}")
        parts = [json.loads(Path(f"{given[1]}{r}").read_text()) for r in range(ranks)]
    return {name: max(part[name] for part in parts) for name in parts[0]}


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark, prints the tables and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--work", nargs=6, help=argparse.SUPPRESS)
    p = parser.parse_args(arguments)
    quiet_and_single()
    if p.work:
        case, steps, rank, ranks, store, out = p.work
        found = work(case, int(rank), int(ranks), store, int(steps))
        Path(out + rank).write_text(json.dumps(found))
        return
    print(heading("", "ranks", "ms a step", "times faster", "MB sent", "ms to sum", "predicted ms"))
    rows: list[dict[str, Any]] = []
    for case in p.only:
        _, d, guide = CASES[case]
        size = sent(d, guide)
        runs = [{r: measure(case, r, p.steps) for r in p.ranks} for _ in range(p.rounds)]
        for r in p.ranks:
            found = {k: median(run[r][k] for run in runs) for k in runs[0][r]}
            alone = median(run[p.ranks[0]]["step"] for run in runs)
            row = {"case": case, "ranks": r, "bytes": size, **found}
            row["faster"] = median(run[p.ranks[0]]["step"] / run[r]["step"] for run in runs)
            cells = [f"{found['step']:.1f}", f"{row['faster']:.2f}", f"{size / 1e6:.2f}"]
            if r > 1:
                latency = found["number"] / (2e3 * (r - 1))
                rest = max(found["buffer"] - found["number"], 1e-6) / 1e3
                bandwidth = 2 * (r - 1) / r * size / rest
                row["predicted"] = 1e3 * predicted(alone / 1e3, r, size, latency, bandwidth)
                cells += [f"{found['buffer']:.2f}", f"{row['predicted']:.1f}"]
            rows.append(row)
            print(line(case, str(r), *cells, *[""] * (5 - len(cells))), flush=True)
    print("\nTimes faster than one rank, predicted, for a step of 1 s on one rank:\n")
    counts = [2, 8, 32, 128, 1024]
    print(heading("", *[f"{r} ranks" for r in counts]))
    full, mean = "AutoFullRankNormal", "AutoMeanFieldNormal"
    for name, link in LINKS.items():
        for d, guide in ((1_000, full), (10**4, full), (10**6, mean)):
            size = sent(d, guide)
            faster = [f"{1 / predicted(1.0, r, size, *link):.1f}" for r in counts]
            print(line(f"{name}, {guide}, d = {d:,}", *faster))
    if p.json is not None:
        p.json.write_text(json.dumps(circumstances() | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
