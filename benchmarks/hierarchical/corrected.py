"""Draws of AutoHierarchical as they are and put right, against NUTS, and a grid where it can be had."""

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
from pyro_ngvi.diagnostics import ModelDensity
from pyro_ngvi.hierarchy import collapse

from .fits import fit
from .models import Case, cases
from .reference import WHERE, coordinates

STEPS, DRAWS = 100, 2000
#: a grid of two globals: points along each, sds of NUTS that m spans, and where log s goes
POINTS, WIDTH, LOG_SCALES = 241, 10.0, (-16.0, 8.0)


@dataclass(frozen=True)
class Row:
    """Errors in sds of the reference (means) and as ratios to them (sds): globals, then effects.

    Seconds are those of the processor, for the fit and the draws.
    """

    case: str
    reference: str
    method: str
    seconds: float
    nuts_seconds: float
    khat: float
    worth: float
    mean_error: float
    sd_ratios: tuple[float, float]
    unit_error: float
    unit_sd_ratios: tuple[float, float]

    def __str__(self) -> str:
        return (
            f"{self.case:10} {self.method:9} {self.seconds:6.1f} s (NUTS {self.nuts_seconds:.0f}), "
            f"k-hat {self.khat:5.2f}, worth {self.worth:3.0%}; {self.reference}: globals off "
            f"{self.mean_error:.2f}, sds {self.sd_ratios[0]:.2f}-{self.sd_ratios[1]:.2f}; effects off "
            f"{self.unit_error:.2f}, sds {self.unit_sd_ratios[0]:.2f}-{self.unit_sd_ratios[1]:.2f}"
        )


def on_grid(case: Case, guide: Any, mean: Tensor, sd: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sd of m and log s by the trapezoidal rule, the effects integrated out."""
    density = ModelDensity(collapse(guide, *case.args), chunk_size=1000)
    m = torch.linspace(-WIDTH, WIDTH, POINTS, dtype=mean.dtype) * sd[0] + mean[0]
    at = torch.cartesian_prod(m, torch.linspace(*LOG_SCALES, POINTS, dtype=mean.dtype))
    with torch.no_grad():
        w = torch.softmax(density(at), 0)
    mean = w @ at
    return mean, (w @ (at - mean).square()).sqrt()


def run(quick: bool, seeds: int, data: Sequence[str] | None) -> Iterator[Row]:
    for case in cases():
        if data and case.name not in data:
            continue
        for seed in range(1 if quick else seeds):
            yield from both(case, seed)


def both(case: Case, seed: int) -> Iterator[Row]:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide: Any = ngvi.AutoHierarchical(case.model)
    start = time.process_time()
    fit(case, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(16), lambda n, _: n >= STEPS)
    seconds = time.process_time() - start
    found = json.loads(WHERE.read_text())[case.name]
    mean, sd, unit_mean, unit_sd = (
        torch.tensor(found[n], dtype=torch.float64) for n in ("mean", "sd", "unit_mean", "unit_sd")
    )
    reference = "NUTS"
    if guide.units.globals == ("m", "s") and len(mean) == 2:
        reference = "grid"
        mean, sd = on_grid(case, guide, mean, sd)
    for corrected in (False, True):
        start = time.process_time()
        data = ngvi.to_arviz(
            case.model,
            guide,
            *case.args,
            num_samples=DRAWS,
            seed=seed,
            corrected=corrected,
            posterior_predictive=False,
            log_likelihood=False,
        )
        spent = time.process_time() - start
        draws = {n: torch.from_numpy(x.values) for n, x in data["posterior"].data_vars.items()}
        v, u = coordinates(draws)[0], draws["u"].reshape(DRAWS, -1)
        ratios, unit_ratios = v.std(0) / sd, u.std(0) / unit_sd
        yield Row(
            case.name,
            reference,
            "corrected" if corrected else "as it is",
            seconds + spent,
            found["seconds"],
            data.attrs["khat"],
            data.attrs["ess"] / data.attrs["khat_samples"],
            float(((v.mean(0) - mean) / sd).abs().max()),
            (float(ratios.min()), float(ratios.max())),
            float(((u.mean(0) - unit_mean) / unit_sd).abs().max()),
            (float(unit_ratios.min()), float(unit_ratios.max())),
        )
