"""What `ngvi.compile` makes of a step: eager, replayed, by Inductor, in a run; and Adam beside it.

Run from the root of the repository: ``python -m benchmarks.compiled --help``.  One core, and the
processor's time but where a tier is waited for; on a GPU the time on the wall, and CUDA graphs.
See ``benchmarks/README.md`` for what is measured.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pyro
import torch
from pyro.infer import SVI, JitTrace_ELBO, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal
from pyro.optim import PyroOptim
from torch import nn

import pyro_ngvi as ngvi
from pyro_ngvi.nn import bayesianize
from pyro_ngvi.optim import IVON, SPRING, VOGN

from . import jax_methods, methods
from .contestants import present
from .problems import load
from .stepping import circumstances, heading, line
from .time_to_target import prepare

PARTICLES = 8


@dataclass(frozen=True)
class Case:
    """An SVI, made anew by each call, the arguments of its steps, and Pyro's against it."""

    make: Callable[[], SVI]
    args: tuple[Any, ...]
    adam: Callable[[], SVI]
    jit: Callable[[], SVI] | None = None
    numpyro: Callable[[], methods.Run] | None = None


def _adam() -> Any:
    return PyroOptim(torch.optim.Adam, {"lr": 1e-3})


def _on(
    problem: str, ours: Any, theirs: Any, rule: Any, loss: Callable[[], Any], device: str
) -> Case:
    p = load(problem)
    here = p.to(device, torch.float64)

    def make() -> SVI:
        guide = ours(here.model)
        return SVI(here.model, guide, rule(guide), loss())

    def adam(kind: Any = Trace_ELBO) -> SVI:
        trace = kind(PARTICLES, vectorize_particles=True, max_plate_nesting=1)
        return SVI(here.model, theirs(here.model), _adam(), trace)

    family = "mean_field" if theirs is AutoDiagonalNormal else "full_rank"
    begin = jax_methods.numpyro_factory() if present(("NumPyro",)) else None
    how = p, family, 0, PARTICLES, "feasible", 1e-3
    numpyro = None if begin is None else lambda: begin(*how)
    return Case(make, here.args, adam, lambda: adam(JitTrace_ELBO), numpyro)


def _network(rule: Any, loss: Callable[[], Any], device: str) -> Case:
    layers = (784, 400, 400, 10)
    x, y = torch.randn(128, layers[0], dtype=torch.float32), torch.randint(0, layers[-1], (128,))
    x, y = x.to(device), y.to(device)

    def model() -> Any:
        parts: list[nn.Module] = []
        for inputs, outputs in pairwise(layers):
            parts += [nn.Linear(inputs, outputs, dtype=torch.float32), nn.ReLU()]
        return bayesianize(nn.Sequential(*parts[:-1]), "categorical", num_data=60_000).to(device)

    def make(optim: Any = rule, elbo: Any = loss) -> SVI:
        net = model()
        start: Any = {"init_loc_fn": net.init_to_module, "init_scale": 0.01}
        guide = ngvi.AutoMeanFieldNormal(net, **start)
        return SVI(net, guide, optim(guide), elbo())

    return Case(make, (x, y), lambda: make(lambda guide: _adam(), lambda: ngvi.BatchedELBO(1)))


def batched(curvature: str | None = None, particles: int = PARTICLES) -> Callable[[], Any]:
    return lambda: ngvi.BatchedELBO(particles, curvature=curvature)


FULL = (ngvi.AutoFullRankNormal, AutoMultivariateNormal, ngvi.NGVB, batched())
MEAN = (ngvi.AutoMeanFieldNormal, AutoDiagonalNormal, ngvi.NGVB, batched())

CASES: dict[str, Callable[[str], Case]] = {
    "NGVB, full rank, wdbc": partial(_on, "wdbc", *FULL),
    "NGVB, mean field, wdbc": partial(_on, "wdbc", *MEAN),
    "NGVB, full rank, German credit": partial(_on, "german_credit", *FULL),
    "NGVB, full rank, varying intercepts": partial(_on, "varying_intercepts", *FULL),
    "NGVB, full rank, eight schools": partial(_on, "eight_schools_noncentered", *FULL),
    "SPRING, coupling flow, eight schools": partial(
        _on,
        "eight_schools_noncentered",
        ngvi.AutoCouplingFlow,
        AutoMultivariateNormal,
        SPRING,
        batched("scores"),
    ),
    "VOGN, 784-400-400-10, batch 128": partial(_network, VOGN, batched("gauss_newton", 1)),
    "IVON, 784-400-400-10, batch 128": partial(_network, IVON, batched(None, 1)),
}


#: in the order of the table
WAYS = {
    "eager": "eager",
    "replay": "replay",
    "inductor": "Inductor",
    "run": "run",
    "graph": "CUDA graph",
    "graph_run": "run of it",
    "fast_graph_run": "run of Inductor's",
    "adam": "Pyro, Adam",
    "jit": "JitTrace_ELBO",
    "numpyro": "NumPyro, Adam",
}
ON_GPU = ("graph", "graph_run", "fast_graph_run")


@dataclass(frozen=True)
class Row:
    """Milliseconds a step by way, medians over the rounds; seconds until a tier is there."""

    case: str
    ms: dict[str, float]
    seconds_to_replay: float
    seconds_to_inductor: float | None
    reason: str

    def cells(self, ways: list[str]) -> str:
        """A line of the table."""

        def cell(x: float | None) -> str:
            return "" if x is None else f"{x:.3g}"

        ours = (w for w in ("fast_graph_run", "graph_run", "run", "replay") if w in self.ms)
        seconds = (self.seconds_to_replay, self.seconds_to_inductor)
        ratio = f"{self.ms['eager'] / self.ms[next(ours)]:.1f}"
        return line(self.case, *(cell(self.ms.get(w)) for w in ways), ratio, *map(cell, seconds))


def measure(name: str, rounds: int, inductor: bool, device: str) -> Row:
    """All ways of a step in turn, in each of ``rounds`` rounds."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    case, on_gpu = CASES[name](device), device == "cuda"
    args = case.args
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    clock = time.perf_counter if on_gpu else time.process_time
    eager, adam = case.make(), case.adam()
    jit = None if case.jit is None else case.jit()

    def first(svi: Any, tier: str) -> float:
        start = time.perf_counter()
        for _ in range(8):
            svi.step(*args)
            if svi.tier == tier:
                break
        return time.perf_counter() - start

    def steps(svi: Any) -> Callable[[int], object]:
        return lambda count: [svi.step(*args) for _ in range(count)]

    def run(svi: Any) -> Callable[[int], object]:
        return lambda count: svi.run(count, *args)

    replay = ngvi.compile(case.make(), inductor=False, cuda_graph=False)
    ours, to_replay, to_inductor = [replay], first(replay, "replay"), None
    ways: dict[str, tuple[Callable[[int], object], int]] = {}
    ways = {"eager": (steps(eager), 10), "replay": (steps(replay), 20), "adam": (steps(adam), 10)}
    if inductor:
        ours.append(fast := ngvi.compile(case.make(), wait=True, cuda_graph=False))
        to_inductor = first(fast, "inductor")
        ways |= {"inductor": (steps(fast), 50), "run": (run(fast), 100)}
    if on_gpu:
        ours.append(graph := ngvi.compile(case.make(), inductor=False))
        ways |= {"graph": (steps(graph), 50), "graph_run": (run(graph), 200)}
    if on_gpu and inductor:
        ours.append(both := ngvi.compile(case.make(), wait=True))
        ways["fast_graph_run"] = run(both), 200
    if jit is not None:
        ways["jit"] = steps(jit), 10
    if case.numpyro is not None:
        ways["numpyro"] = case.numpyro().advance, 200
    for svi in ours:
        svi.run(70, *args)  # past the uses that are compared
    reason = "; ".join(sorted({svi.reason for svi in ours} - {""}))
    times: dict[str, list[float]] = {way: [] for way in ways}
    for k in range(rounds + 1):
        for way, (go, count) in ways.items():
            wait()
            start = clock()
            go(count)
            wait()
            if k > 0:
                times[way].append(1e3 * (clock() - start) / count)
    found = {way: median(values) for way, values in times.items()}
    return Row(name, found, to_replay, to_inductor, reason)


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark, prints the table and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", default=11, type=int)
    parser.add_argument("--replay", action="store_true", help="without Inductor")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path, help="write all results to this file")
    p = parser.parse_args(arguments)
    prepare()
    ways = [way for way in WAYS if p.device == "cuda" or way not in ON_GPU]
    columns = (WAYS[way] for way in ways)
    print(heading("ms a step", *columns, "eager / best", "s to replay", "s to Inductor"))
    rows = []
    for name in p.only:
        row = measure(name, p.rounds, not p.replay, p.device)
        rows.append(row)
        print(row.cells(ways), *([f"({row.reason})"] if row.reason else []), flush=True)
    if p.json is not None:
        p.json.write_text(
            json.dumps(circumstances() | {"rows": [asdict(r) for r in rows]}, indent=1)
        )


if __name__ == "__main__":
    main()
