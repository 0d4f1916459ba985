"""What the parts share: a line of output with its target, the clock, a run that is looked at.

Seconds are those of the process (``time.process_time``), which other processes lengthen only by way of
shared caches and memory; with one thread they are what a wall clock would show on a free core.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any

import pyro
from pyro.infer import SVI
from torch import Tensor

import pyro_ngvi as ngvi

__all__ = ["Point", "Row", "curve", "reached", "seconds", "sites_svi", "spread"]

#: runs of each method, in turn
ROUNDS, QUICK_ROUNDS = 5, 1

#: one step of a method, and a look at where it is
Begin = Callable[[], tuple[Callable[[], object], Callable[[], float]]]


@dataclass(frozen=True)
class Row:
    """One line: what was measured, its target ("-" if there is none) and whether it is met."""

    what: str
    target: str
    measured: str
    met: bool | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        verdict = {True: " / met", False: " / NOT MET", None: ""}[self.met]
        return f"{self.what}: target {self.target} / measured {self.measured}{verdict}"


@dataclass(frozen=True)
class Point:
    """Steps, seconds and ELBO in nats so far."""

    steps: int
    seconds: float
    elbo: float


def curve(begin: Begin, looks: Iterable[int], enough: float = inf, cap: float = inf) -> list[Point]:
    """A run, looked at after these numbers of steps, until its ELBO is ``enough`` or ``cap`` seconds.

    The clock sees ``begin`` (the making of model, guide and optimizer) and the steps, not the looks.
    """
    gc.collect()  # the garbage of one method is not the next one's cost
    start = time.process_time()
    step, look = begin()
    spent, done, points = time.process_time() - start, 0, list[Point]()
    for count in looks:
        start = time.process_time()
        for _ in range(count - done):
            step()
        spent, done = spent + time.process_time() - start, count
        points.append(Point(done, spent, look()))
        if points[-1].elbo >= enough or spent > cap:
            break
    return points


def reached(points: Sequence[Point], target: float) -> Point:
    """The first point with that ELBO; one with infinite steps and seconds if there is none."""
    missed: Any = Point(0, inf, points[-1].elbo)
    return next((p for p in points if p.elbo >= target), missed)


def spread(values: Sequence[float], form: str = "#.3g") -> str:
    """Median (smallest-largest)."""
    middle, low, high = (format(v, form) for v in (median(values), min(values), max(values)))
    return f"{middle} ({low}-{high})"


def seconds(points: Sequence[Point]) -> str:
    """The seconds of several runs in words, and that they missed where they did."""
    values = [p.seconds for p in points]
    return "not reached" if median(values) == inf else f"{spread(values)} s"


def sites_svi(model: Callable[..., Any], lr: float = 1.0) -> tuple[Any, SVI]:
    """An ``AutoSites`` of the model and its SVI with ``CVI`` and ``SitesELBO``, default settings."""
    pyro.clear_param_store()
    guide = ngvi.AutoSites(model)
    return guide, SVI(model, guide, ngvi.CVI(guide, lr), ngvi.SitesELBO())


def moments(guide: Any) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the flat latent vector."""
    posterior = guide.get_posterior()
    return posterior.mean, posterior.covariance_matrix
