"""Every model of this folder: how far from NUTS after how many steps and seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal

import pyro_ngvi as ngvi

from .models import Case, cases
from .reference import WHERE, coordinates

DRAWS, EVALUATIONS = 2000, 200
#: baselines may take so many times the seconds of our steps
PATIENCE = 10.0
RATES = (0.003, 0.01, 0.03)


@dataclass(frozen=True)
class Row:
    """Errors in sds of NUTS (means) and as ratios to them (sds): globals, then effects.

    Of globals it is the worst, of effects the median and the worst.
    """

    case: str
    method: str
    seed: int
    steps: int
    seconds: float
    elbo: float
    mean_error: float
    sd_ratios: tuple[float, float]
    unit_errors: tuple[float, float]
    unit_sd_ratios: tuple[float, float]
    nuts_seconds: float

    def __str__(self) -> str:
        return (
            f"{self.case:10} {self.method:22} seed {self.seed}: {self.steps:5} steps "
            f"{self.seconds:6.2f} s  ELBO {self.elbo:9.2f}  globals: off {self.mean_error:.2f}, sds "
            f"{self.sd_ratios[0]:.2f}-{self.sd_ratios[1]:.2f}; effects: off {self.unit_errors[0]:.2f} "
            f"(worst {self.unit_errors[1]:.2f}), sds {self.unit_sd_ratios[0]:.2f}-"
            f"{self.unit_sd_ratios[1]:.2f}; NUTS {self.nuts_seconds:.0f} s"
        )


def fit(
    case: Case, guide: Any, optimizer: Any, loss: Any, enough: Callable[[int, float], bool]
) -> Any:
    """Steps until ``enough(steps, seconds)``; both are given back."""
    svi, steps, seconds = SVI(case.model, guide, optimizer, loss), 0, 0.0
    while not enough(steps, seconds):
        start = time.perf_counter()
        svi.step(*case.args)
        seconds += time.perf_counter() - start
        steps += 1
    return steps, seconds


def elbo(case: Case, guide: Any) -> float:
    loss = ngvi.BatchedELBO(16)
    with torch.no_grad():
        every = [loss.loss(case.model, guide, *case.args) for _ in range(EVALUATIONS)]
    return -sum(every) / len(every)


def judge(case: Case, method: str, seed: int, guide: Any, spent: tuple[int, float]) -> Row:
    reference = json.loads(WHERE.read_text())[case.name]
    guide.eval()
    with torch.no_grad(), poutine.block():
        draws = [guide(*case.args) for _ in range(DRAWS)]
        found = {n: torch.stack([x[n] for x in draws])[None] for n in draws[0]}
        value = elbo(case, guide)
    guide.train()
    v, u = coordinates(found)[0], found["u"].reshape(DRAWS, -1)
    mean, sd, unit_mean, unit_sd = (
        torch.tensor(reference[n]) for n in ("mean", "sd", "unit_mean", "unit_sd")
    )
    ratios, unit_ratios = v.std(0) / sd, u.std(0) / unit_sd
    off = ((u.mean(0) - unit_mean) / unit_sd).abs()
    return Row(
        case.name,
        method,
        seed,
        *spent,
        value,
        float(((v.mean(0) - mean) / sd).abs().max()),
        (float(ratios.min()), float(ratios.max())),
        (float(off.median()), float(off.max())),
        (float(unit_ratios.min()), float(unit_ratios.max())),
        reference["seconds"],
    )


def run(quick: bool, seeds: int, data: Sequence[str] | None) -> Iterator[Row]:
    for case in cases():
        if data and case.name not in data:
            continue
        for seed in range(1 if quick else seeds):
            yield from contest(case, seed)


def contest(case: Case, seed: int) -> Iterator[Row]:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide: Any = ngvi.AutoHierarchical(case.model)
    optimizer, loss = ngvi.NGVB(guide), ngvi.BatchedELBO(16)
    spent, seconds = (0, 0.0), 0.0
    for steps in (12, 36, 100):
        more = fit(case, guide, optimizer, loss, lambda n, _: n >= steps - spent[0])  # noqa: B023
        spent = (spent[0] + more[0], spent[1] + more[1])
        seconds = spent[1] if steps == 36 else seconds
        yield judge(case, "AutoHierarchical", seed, guide, spent)
    budget = PATIENCE * seconds
    guide = ngvi.AutoFullRankNormal(case.model)
    spent = fit(case, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8), lambda _, s: s >= budget)
    yield judge(case, "AutoFullRankNormal", seed, guide, spent)
    best: Row | None = None
    for rate in RATES:
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        guide = AutoNormal(case.model)
        adam = pyro.optim.Adam({"lr": rate})  # pyright: ignore[reportAttributeAccessIssue]
        spent = fit(case, guide, adam, ngvi.BatchedELBO(8), lambda _, s: s >= budget)
        row = judge(case, f"AutoNormal, Adam {rate:g}", seed, guide, spent)
        best = row if best is None or row.elbo > best.elbo else best
    assert best is not None
    yield best
