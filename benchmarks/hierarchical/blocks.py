"""A Gaussian block given hyperparameters: `fit` as it comes, put right, one Gaussian; against NUTS."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from torch import Tensor

import pyro_ngvi as ngvi

from .block_models import BlockCase, block_cases, coordinates
from .block_reference import WHERE

DRAWS = 2000
#: an error above so many sds, or a ratio of sds further from one, is loud where the verdict trusts
#: the intervals
OFF, RATIO = 0.3, 0.3


@dataclass(frozen=True)
class Errors:
    """The worst error of a mean, in sds of NUTS, and the lowest and highest ratio of sds to NUTS's."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f}, {self.low:.2f} to {self.high:.2f}"

    @property
    def loud(self) -> bool:
        return self.mean > OFF or self.low < 1.0 - RATIO or self.high > 1.0 + RATIO


@dataclass(frozen=True)
class Row:
    """Seconds are the processor's, for the fit and 2,000 draws; NUTS's for all its draws."""

    case: str
    method: str
    seed: int
    steps: int
    seconds: float
    decision: str
    log_hyper: Errors
    hyper: Errors
    effects: Errors
    nuts_seconds: float

    def __str__(self) -> str:
        every = self.log_hyper, self.hyper, self.effects
        loud = self.decision == "intervals" and any(x.loud for x in every)
        return (
            f"| {self.case} | {self.method} | {self.seed} | {self.steps} | {self.seconds:.1f} | "
            f"{self.decision} | {self.log_hyper} | {self.hyper} | {self.effects} | "
            f"{self.nuts_seconds:.0f} |" + " TRUSTED, BUT FAR FROM NUTS" * loud
        )


def run(quick: bool, seeds: int, data: Sequence[str] | None) -> Iterator[Row]:
    for case in block_cases():
        if data and case.name not in data:
            continue
        for seed in range(1 if quick else seeds):
            yield from contest(case, seed)


def contest(case: BlockCase, seed: int) -> Iterator[Row]:
    fit, seconds = fitted(case, seed)
    units: Any = getattr(fit.guide, "units", None)
    if not isinstance(fit.guide, ngvi.AutoHierarchical) or units.plate is not None:
        raise RuntimeError(f"{case.name}: fit chose {type(fit.guide).__name__}, {units}.")
    yield judge(case, "block", seed, fit, seconds)
    yield judge(case, "corrected", seed, fit, seconds, corrected=True)
    fit, seconds = fitted(case, seed, guide="AutoFullRankNormal")
    yield judge(case, "one Gaussian", seed, fit, seconds)


def fitted(case: BlockCase, seed: int, **how: Any) -> tuple[Any, float]:
    pyro.clear_param_store()
    start = time.process_time()
    fit = ngvi.fit(case.model, *case.args, seed=seed, progress=False, **how)
    return fit, time.process_time() - start


def judge(
    case: BlockCase, method: str, seed: int, fit: Any, seconds: float, corrected: bool = False
) -> Row:
    start = time.process_time()
    data = fit.to_arviz(
        num_samples=DRAWS,
        seed=seed,
        corrected=corrected,
        posterior_predictive=False,
        log_likelihood=False,
    )
    seconds += time.process_time() - start
    posterior = data["posterior"]
    draws = {n: torch.from_numpy(posterior[n].values[0]) for n in (*case.hyper, *case.effects)}
    reference = json.loads(WHERE.read_text())[case.name]
    found = coordinates(draws, case)
    return Row(
        case.name,
        method,
        seed,
        fit.steps,
        seconds,
        data.attrs["decision"] if corrected else fit.verdict.decision,
        errors(found["log_hyper"], reference["log_hyper"]),
        errors(found["hyper"], reference["hyper"]),
        errors(found["effects"], reference["effects"]),
        reference["seconds"],
    )


def errors(x: Tensor, reference: Any) -> Errors:
    mean, sd = (torch.tensor(reference[n], dtype=x.dtype) for n in ("mean", "sd"))
    off, ratio = ((x.mean(0) - mean) / sd).abs(), x.std(0) / sd
    return Errors(float(off.max()), float(ratio.min()), float(ratio.max()))
