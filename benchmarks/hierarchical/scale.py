"""Many groups in minibatches of 500: the ELBO of all against seconds, beside AutoNormal and Adam."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

import pyro_ngvi as ngvi

from .fits import RATES
from .models import slopes, slopes_data

BATCH, SIZES = 500, (20_000, 100_000)


@dataclass(frozen=True)
class Row:
    groups: int
    method: str
    seed: int
    steps: int
    seconds: float
    elbo: float
    log_s: tuple[float, float]

    def __str__(self) -> str:
        return (
            f"{self.groups:7,} groups {self.method:22} seed {self.seed}: {self.steps:6} steps "
            f"{self.seconds:7.1f} s  ELBO per 1,000 groups {1000 * self.elbo / self.groups:10.3f}  "
            f"log s {self.log_s[0]:.3f} {self.log_s[1]:.3f} (drawn with -0.223, -0.693)"
        )


def whole_elbo(guide: Any, args: Any, count: int = 8) -> float:
    loss = ngvi.BatchedELBO(4)
    with torch.no_grad():
        return -sum(loss.loss(slopes, guide, *args) for _ in range(count)) / count


def run(
    quick: bool, seeds: int, data: Sequence[str] | None, seconds: float = 60.0
) -> Iterator[Row]:
    for n in SIZES[:1] if quick else SIZES:
        args = slopes_data(n, seed=2)
        for seed in range(1 if quick else seeds):
            yield from _one(n, args, seed, "AutoHierarchical", None, seconds)
            for rate in RATES:
                yield from _one(n, args, seed, f"AutoNormal, Adam {rate:g}", rate, 5.0 * seconds)


def _plates(x: Tensor, y: Tensor, seen: Tensor, index: Any = None) -> Any:
    return pyro.plate("units", len(x), subsample=index)


def _one(
    n: int, args: Any, seed: int, method: str, rate: float | None, seconds: float
) -> Iterator[Row]:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide: Any
    optimizer: Any
    if rate is None:
        guide = ngvi.AutoHierarchical(slopes)
        optimizer = ngvi.NGVB(guide)
    else:
        guide = AutoNormal(slopes, create_plates=_plates)
        optimizer = pyro.optim.Adam({"lr": rate})  # pyright: ignore[reportAttributeAccessIssue]
    svi, spent, steps, report = SVI(slopes, guide, optimizer, ngvi.BatchedELBO(8)), 0.0, 0, 2.0
    order = torch.empty(0)
    while spent < seconds:
        start = time.perf_counter()
        at = steps * BATCH % n
        order = torch.randperm(n) if at == 0 else order
        svi.step(*args, index=order[at : at + BATCH])
        spent, steps = spent + time.perf_counter() - start, steps + 1
        if spent >= min(report, seconds):
            report *= 2.0
            with torch.no_grad():
                globals: Any = guide.globals.median() if rate is None else guide.median(*args)
            log_s = globals["s"].log().tolist()
            yield Row(n, method, seed, steps, spent, whole_elbo(guide, args), tuple(log_s))
