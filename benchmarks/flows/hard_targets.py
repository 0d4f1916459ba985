"""Guides on the hard targets at equal time: gap to log Z, k-hat, distance to exact draws.

All methods but SPRING have 16 vectorised particles.  All have float64 and the same seconds of the
thread's own clock, which stands while the ELBO is evaluated.  Adam runs at three rates for each of its
guides; the table has the rate with the highest median ELBO at the end, chosen with the knowledge of the
answer.

* **AutoCouplingFlow, SPRING**: ours, default settings (4 affine layers behind a Gaussian that is fitted
  first, which the clock sees), 128 particles; "spline" and "autoregressive" are its other kinds, "from
  the start" is without the Gaussian (``init=None``), "IFVB" and "Adam" the default guide with these.
* **AutoFullRankNormal, NGVB**: ours, default settings, the averaged answer.
* **AutoIAFNormal k**: Pyro's, with k affine autoregressive transforms of default width 3 d + 1; "wide":
  four times that, at least 64.
* **spline coupling**: Pyro's ``AutoNormalizingFlow``.  Two spline couplings, which act on [-3, 3] only,
  then two affine couplings, which move and stretch, with the order of the entries reversed after each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import pyro
import torch
from pyro.distributions import transforms
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoIAFNormal, AutoNormalizingFlow
from pyro.optim import PyroOptim

import pyro_ngvi

from ..problems import DataNotFound
from ..stepping import heading, line
from .metrics import Evaluation, evaluate, floor
from .targets import NAMES, Target, load

__all__ = ["METHODS", "OURS", "Contestant", "Run", "Table", "run"]

PARTICLES = 16
RATES = (0.001, 0.003, 0.01)
#: shares of the budget after which the guide is evaluated
MARKS = (0.25, 0.5, 1.0)
SECONDS, QUICK_SECONDS = 60.0, 20.0

#: ``answer()`` is a context in which the guide it gives is the method's answer, such as an average
Answer = Callable[[], AbstractContextManager[Any]]
Contestant = tuple[Any, SVI, Answer]
Maker = Callable[[Callable[..., Any]], Contestant]


def contestant(model: Callable[..., Any], guide: Any, optim: Any) -> Contestant:
    """A guide that is its own answer, with Pyro's vectorised ELBO."""
    loss = Trace_ELBO(PARTICLES, vectorize_particles=True, max_plate_nesting=1)
    return guide, SVI(model, guide, optim, loss=loss), lambda: nullcontext(guide)


def _full_rank(model: Callable[..., Any]) -> Contestant:
    guide = pyro_ngvi.AutoFullRankNormal(model)
    return contestant(model, guide, pyro_ngvi.NGVB(guide))


def _iaf(model: Callable[..., Any], count: int) -> Any:
    return AutoIAFNormal(model, num_transforms=count)


def _wide_iaf(model: Callable[..., Any], count: int) -> Any:
    def build(d: int) -> Any:
        hidden = [max(64, 4 * (3 * d + 1))]
        make = transforms.affine_autoregressive
        return transforms.iterated(count, make, d, hidden_dims=hidden)

    return AutoNormalizingFlow(model, build)


def _spline_coupling(model: Callable[..., Any]) -> Any:
    def build(d: int) -> Any:
        parts: list[Any] = []
        for make in [transforms.spline_coupling] * 2 + [transforms.affine_coupling] * 2:
            parts += [make(d), transforms.permute(d, torch.arange(d).flip(0))]
        return transforms.ComposeTransformModule(parts)

    return AutoNormalizingFlow(model, build)


def _by_adam(make: Callable[..., Any], rate: float, model: Callable[..., Any]) -> Contestant:
    return contestant(model, make(model), PyroOptim(torch.optim.Adam, {"lr": rate}))


FLOWS: dict[str, Callable[..., Any]] = {
    "AutoCouplingFlow": pyro_ngvi.AutoCouplingFlow,
    "AutoIAFNormal 1": partial(_iaf, count=1),
    "AutoIAFNormal 2": partial(_iaf, count=2),
    "AutoIAFNormal 1 wide": partial(_wide_iaf, count=1),
    "AutoIAFNormal 2 wide": partial(_wide_iaf, count=2),
    "spline coupling": _spline_coupling,
}


def _spring(model: Callable[..., Any], **kwargs: Any) -> Contestant:
    guide = pyro_ngvi.AutoCouplingFlow(model, **kwargs)
    loss = pyro_ngvi.BatchedELBO(DRAWS, curvature="scores")
    return guide, SVI(model, guide, pyro_ngvi.optim.SPRING(guide), loss), lambda: nullcontext(guide)


def _ifvb(model: Callable[..., Any]) -> Contestant:
    guide = pyro_ngvi.AutoCouplingFlow(model)
    loss = pyro_ngvi.BatchedELBO(PARTICLES)
    return guide, SVI(model, guide, pyro_ngvi.IFVB(guide), loss), lambda: nullcontext(guide)


#: particles of SPRING
DRAWS = 128
#: the flow guides of this package; " Adam RATE" at the end of a name makes it one of a grid
OURS: dict[str, Maker] = {
    "AutoCouplingFlow, SPRING": _spring,
    "AutoCouplingFlow, IFVB": _ifvb,
    "from the start, SPRING": partial(_spring, init=None),
    "spline from the start, SPRING": partial(_spring, init=None, kind="spline"),
    "autoregressive, SPRING": partial(_spring, kind="autoregressive"),
}

METHODS: dict[str, Maker] = {"AutoFullRankNormal, NGVB": _full_rank}
METHODS |= OURS
METHODS |= {
    f"{name}, Adam {rate:g}": partial(_by_adam, make, rate)
    for name, make in FLOWS.items()
    for rate in RATES
}


@dataclass(frozen=True)
class Run:
    """One optimisation: evaluations at the marks, and the steps in all."""

    method: str
    seed: int
    found: tuple[Evaluation, ...]
    steps: int

    @property
    def end(self) -> Evaluation:
        return self.found[-1]


def _begin(target: Target, make: Maker, seed: int) -> Contestant:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    made = make(target.model)
    made[0](*target.args)  # builds the guide and draws its start
    return made


def train(target: Target, name: str, make: Maker, seed: int, budget: float) -> Run:
    """One method for one seed; where Pyro finds a NaN, the run stays as it is."""
    start = time.thread_time()
    _, svi, answer = _begin(target, make, seed)  # a guide may fit its start
    seconds, steps, found = time.thread_time() - start, 0, list[Evaluation]()
    for mark in MARKS:
        while seconds < mark * budget or not steps:
            start = time.thread_time()
            try:
                svi.step(*target.args)
            except ValueError as error:
                print(f"{name} on {target.name} stopped. {str(error).splitlines()[0]}", flush=True)
                seconds = math.inf
            seconds += time.thread_time() - start
            steps += 1
        with answer() as guide:
            found.append(evaluate(target, guide))
    return Run(name, seed, tuple(found), steps)


def _family(name: str) -> str:
    """The name without Adam's rate."""
    head, found, _ = name.rpartition(" Adam ")
    return head + " Adam" if found else name


def best_of_grid(runs: Sequence[Run]) -> list[str]:
    """For each method the name with the highest median ELBO at the end."""
    names = list(dict.fromkeys(run.method for run in runs))

    def elbo(name: str) -> float:
        return median(run.end.elbo for run in runs if run.method == name)

    families = dict.fromkeys(map(_family, names))
    return [max((n for n in names if _family(n) == family), key=elbo) for family in families]


@dataclass(frozen=True)
class Table:
    """All runs on one target; printed, the best of each grid, medians over seeds and the range."""

    target: str
    dim: int
    log_z: float | None
    floor: float
    budget: float
    runs: list[Run]

    def __str__(self) -> str:
        seeds = len({run.seed for run in self.runs})
        known = "not known" if self.log_z is None else f"{self.log_z:.4f}"
        what = "ELBO" if self.log_z is None else "gap"
        title = f"### {self.target}, d = {self.dim}, log Z {known}, {seeds} seeds\n"
        marks = [f"{what} at {mark * self.budget:g} s" for mark in MARKS]
        lines = [title, heading("", *marks, "se", "k-hat", "distance", "steps")]
        for name in best_of_grid(self.runs):
            own = [run for run in self.runs if run.method == name]
            cells = [_cell([self._nats(run.found[k]) for run in own]) for k in range(len(MARKS))]
            for field in ("error", "khat", "distance"):
                cells.append(_cell([asdict(run.end)[field] for run in own]))
            lines.append(line(name, *cells, f"{median(run.steps for run in own):.0f}"))
        if not math.isnan(self.floor):
            empty = ["-"] * (len(MARKS) + 2)
            lines.append(line("exact draws", *empty, f"{self.floor:.3f}", "-"))
        return "\n".join(lines) + "\n"

    def _nats(self, found: Evaluation) -> float:
        return found.elbo if self.log_z is None else self.log_z - found.elbo


def _cell(values: list[float]) -> str:
    extra = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return f"{median(values):.3f}{extra}"


def compare(target: Target, seeds: int, budget: float, methods: dict[str, Maker]) -> Table:
    """All methods on one target, one after the other for each seed."""
    for make in methods.values():  # what a process does only once is no method's cost
        _, svi, _ = _begin(target, make, 0)
        for _ in range(3):
            svi.step(*target.args)
    runs = [
        train(target, name, make, seed, budget)
        for seed in range(seeds)
        for name, make in methods.items()
    ]
    return Table(target.name, target.dim, target.log_z, floor(target), budget, runs)


def run(
    quick: bool, seeds: int, data: Sequence[str] | None, seconds: float | None = None
) -> Iterator[Table]:
    """A table for each target; ``seconds`` a run, by default 60 (quick: 20)."""
    torch.set_default_dtype(torch.float64)
    budget = seconds or (QUICK_SECONDS if quick else SECONDS)
    for name in data or NAMES:
        try:
            target = load(name)
        except DataNotFound as error:
            print(f"{name} is left out. {error}")
            continue
        yield compare(target, seeds, budget, METHODS)
