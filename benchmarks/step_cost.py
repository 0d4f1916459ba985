"""What a step of `NGVB` costs beside one of Adam on Pyro's guide, and of `BatchedELBO`; on a CPU.

Run from the root of the repository: ``python -m benchmarks.step_cost --help``.
See ``benchmarks/README.md`` for what is measured and how.
"""

import argparse
import json
import logging
import os
import sys
import warnings
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from pyro.infer import ELBO, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import PyroOptim
from torch import nn

from pyro_ngvi import AutoMeanFieldNormal, BatchedELBO
from pyro_ngvi.nn import bayesianize
from pyro_ngvi.optim import IVON, VOGN

from .problems import load
from .stepping import (
    FAMILIES,
    Setting,
    Step,
    Timing,
    circumstances,
    compare,
    gaussian_args,
    heading,
    independent_gaussians,
    line,
)

RANK = {"small": 5, "large": 10}
PARTICLES = 8


@dataclass(frozen=True)
class Result:
    """Two kinds of steps compared; ``memory`` is their peaks in MiB, where measured."""

    group: str
    name: str
    particles: int
    timing: Timing
    target: float | None
    memory: tuple[float | None, ...] = ()

    def __str__(self) -> str:
        memory = " / ".join("?" if m is None else f"{m:.0f}" for m in self.memory)
        target = "" if self.target is None else f"{self.target:g}"
        return line(self.group, self.name, self.particles, *self.timing.cells(), target, memory)


def report(result: Result) -> Result:
    print(result, flush=True)
    return result


def same_family(rounds: int) -> list[Result]:
    """(a) NGVB on our guide against Adam on Pyro's, logistic regression, d = 31, N = 569."""
    problem = load("wdbc")
    results = []
    for family in FAMILIES:
        for particles in (1, PARTICLES):
            setting = Setting(problem.model, problem.args, family, particles, RANK["small"])
            timing = compare(setting.ngvb(), setting.adam(), rounds)
            name = f"factor, rank {RANK['small']}" if family == "factor" else family
            results.append(report(Result("a", f"{name}, d = 31", particles, timing, 1.2)))
    return results


def batched(rounds: int) -> list[Result]:
    """(b) BatchedELBO against Trace_ELBO with vectorised particles, same guide and optimizer."""
    problem = load("wdbc")
    results = []
    for family in ("mean_field", "full_rank"):
        setting = Setting(problem.model, problem.args, family, PARTICLES)
        makers = {"NGVB": setting.ngvb, "Adam on Pyro's guide": setting.adam}
        for optim, make in makers.items():
            timing = compare(make(BatchedELBO(num_particles=PARTICLES)), make(), rounds)
            name = f"BatchedELBO / Trace_ELBO, {family}, {optim}"
            results.append(report(Result("b", name, PARTICLES, timing, 1.5)))
    return results


def large_factor(rounds: int, d: int) -> list[Result]:
    """(c) The factor guide of rank 10 on many latent variables, float32."""
    results = []
    for particles in (1, 4):
        args = gaussian_args(d, torch.float32)
        setting = Setting(independent_gaussians, args, "factor", particles, RANK["large"])
        timing = compare(setting.ngvb(), setting.adam(), rounds)
        memory = (peak_memory(setting, "ngvb"), peak_memory(setting, "adam"))
        name = f"factor, rank {RANK['large']}, d = {d:,}, float32"
        results.append(report(Result("c", name, particles, timing, 3.0, memory)))
    return results


def large_full_rank(rounds: int, dimensions: tuple[int, ...]) -> list[Result]:
    """(d) The full-rank guide, whose step grows with d^3 where Adam's grows with d^2."""
    results = []
    for d in dimensions:
        for particles in (1, PARTICLES):
            args = gaussian_args(d, torch.float64)
            setting = Setting(independent_gaussians, args, "full_rank", particles)
            timing = compare(setting.ngvb(), setting.adam(), rounds)
            results.append(report(Result("d", f"full_rank, d = {d:,}", particles, timing, None)))
    return results


def network(rounds: int) -> list[Result]:
    """(e) VOGN and IVON against Bayes by backprop on a 784-400-400-10 network, batch 128, float32.

    Bayes by backprop is Adam on a mean-field Gaussian: ours under `BatchedELBO`, the fastest that there
    is here, and Pyro's `AutoNormal` under `Trace_ELBO`.
    """
    results = []
    for particles in (1, 4):
        steps = _network_steps(particles)
        for name, other in (("VOGN", "ours"), ("VOGN", "Pyro's"), ("IVON", "ours")):
            timing = compare(steps[name], steps[other], rounds)
            target = 1.6 if name == "VOGN" else None
            label = f"{name} / Adam on {other} mean-field guide, network"
            results.append(report(Result("e", label, particles, timing, target)))
    return results


def _network_steps(particles: int) -> dict[str, Step]:
    layers = (784, 400, 400, 10)
    x = torch.randn(128, layers[0], dtype=torch.float32)
    y = torch.randint(0, layers[-1], (128,))
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(layers):
        parts += [nn.Linear(inputs, outputs, dtype=torch.float32), nn.ReLU()]
    model = bayesianize(nn.Sequential(*parts[:-1]), "categorical", num_data=60_000)
    start: Any = {"init_loc_fn": model.init_to_module, "init_scale": 0.01}

    def step(guide: Any, optim: Any, loss: ELBO) -> Step:
        svi = SVI(model, guide, optim, loss)
        return lambda: svi.step(x, y)

    ours = [AutoMeanFieldNormal(model, **start) for _ in range(3)]
    curved = BatchedELBO(particles, curvature="gauss_newton")
    return {
        "VOGN": step(ours[0], VOGN(ours[0]), curved),
        "IVON": step(ours[1], IVON(ours[1]), BatchedELBO(particles)),
        "ours": step(ours[2], PyroOptim(torch.optim.Adam, {"lr": 1e-3}), BatchedELBO(particles)),
        "Pyro's": step(
            AutoNormal(model, **start),
            PyroOptim(torch.optim.Adam, {"lr": 1e-3}),
            Trace_ELBO(particles),
        ),
    }


def peak_memory(setting: Setting, method: str) -> float | None:
    """MiB that five steps need at their peak, in a process of their own; Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_memory, (setting, method))


def _peak_memory(setting: Setting, method: str) -> float:
    quiet_and_single()
    step: Step = getattr(setting, method)()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _status("VmRSS")
    for _ in range(5):
        step()
    return (_status("VmHWM") - before) / 2**10


def _status(key: str) -> int:
    """An entry of this process's memory accounts in KiB: VmRSS now, VmHWM at its peak."""
    entries = Path("/proc/self/status").read_text().splitlines()
    return next(int(entry.split()[1]) for entry in entries if entry.startswith(key))


def quiet_and_single() -> None:
    """One thread, and no word from Pyro below a warning."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("pyro").setLevel(logging.WARNING)


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark, prints the table and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=tuple("abcde"), choices=tuple("abcde"))
    parser.add_argument("--rounds", default=21, type=int, help="at least 2")
    parser.add_argument("--quick", action="store_true", help="5 rounds of small sizes")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    p = parser.parse_args(arguments)
    quiet_and_single()
    rounds, d, dimensions = p.rounds, 100_000, (300, 1000)
    if p.quick:
        rounds, d, dimensions = 5, 10_000, (100,)
    print(heading("", "step", "particles", "ms", "against, ms", "ratio", "target", "MiB"))
    results = same_family(rounds) if "a" in p.only else []
    results += batched(rounds) if "b" in p.only else []
    results += large_factor(rounds, d) if "c" in p.only else []
    results += large_full_rank(rounds, dimensions) if "d" in p.only else []
    results += network(rounds) if "e" in p.only else []
    if p.json is not None:
        record = circumstances() | {
            "machine": f"{os.cpu_count()} cores, one thread used",
            "rounds": rounds,
            "results": [asdict(result) for result in results],
        }
        p.json.write_text(json.dumps(record, indent=1))
        print(f"All results are in {p.json}.")


if __name__ == "__main__":
    main()
