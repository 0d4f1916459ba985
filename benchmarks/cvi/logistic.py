"""Logistic regressions: CVI to 1e-3 nat of the optimum, NGVB and Adam to 0.1 nat.

Every run has the ELBO of its Gaussian from quadrature with 128 points, of
:mod:`benchmarks.problems.optimum`, which is not this package's own.  NGVB: ``AutoFullRankNormal``, 8
particles, default settings, from zero; Adam: Pyro's ``AutoMultivariateNormal`` with 8 particles, the
better of two rates, one seed.  CVI begins at the prior.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from .. import methods
from ..problems.logistic import OPTIMA, load
from ..problems.problem import DataNotFound, Problem
from ..time_to_target import checkpoints
from .common import (
    QUICK_ROUNDS,
    ROUNDS,
    Begin,
    Point,
    Row,
    curve,
    reached,
    seconds,
    sites_svi,
    spread,
)

PROBLEMS = ("wdbc", "australian_presplit", "breast_cancer_presplit")
NEAR, FAR = 1e-3, 0.1
SWEEPS = 15
RATES = (0.01, 0.03)
ADAM_SECONDS = 10.0


def cvi(problem: Problem) -> Begin:
    def begin() -> Any:
        guide, svi = sites_svi(problem.model)
        elbo: Any = problem.exact_elbo

        def look() -> float:
            posterior = guide.get_posterior()
            return elbo(posterior.mean, posterior.scale_tril)

        return lambda: svi.step(*problem.args), look

    return begin


def sampled(problem: Problem, seed: int, rate: float | None) -> Begin:
    """NGVB, or Adam at a rate."""

    def begin() -> Any:
        options: Any = (problem, "full_rank", seed, 8, "feasible")
        if rate is None:
            run: methods.Run = methods.ngvb(*options)
        else:
            run = methods.pyro_adam(*options, rate=rate)
        elbo: Any = problem.exact_elbo
        return lambda: run.advance(1), lambda: elbo(*run.gaussian())

    return begin


def run(quick: bool, seeds: int, data: Sequence[str] | None) -> Iterator[Row]:
    rounds = QUICK_ROUNDS if quick else max(seeds, ROUNDS)
    for name in data or PROBLEMS:
        try:
            problem = load(name)
        except DataNotFound as error:
            print(f"{name} is left out. {error}")
            continue
        yield from compare(name, problem, rounds, () if quick else RATES)


def compare(name: str, problem: Problem, rounds: int, rates: Sequence[float]) -> Iterator[Row]:
    optimum = OPTIMA[name][0]
    curve(cvi(problem), (2,))  # what a process does only once is no method's cost
    curve(sampled(problem, 0, None), (3,))
    ours: list[Point] = []
    ngvb: list[Point] = []
    for seed in range(rounds):
        points = curve(cvi(problem), range(1, 41), optimum - NEAR)
        ours.append(reached(points, optimum - NEAR))
        points = curve(sampled(problem, seed, None), checkpoints(20_000), optimum - FAR, 30.0)
        ngvb.append(reached(points, optimum - FAR))
    adam: dict[float, Point] = {}
    for rate in rates:
        curve(sampled(problem, 0, rate), (3,))
        points = curve(sampled(problem, 0, rate), checkpoints(50_000), optimum - FAR, ADAM_SECONDS)
        adam[rate] = reached(points, optimum - FAR)
    detail = {"cvi": ours, "ngvb": ngvb, "adam": adam}
    sweeps = max(p.steps if p.seconds < float("inf") else 999 for p in ours)
    measured = f"{sweeps} sweeps, {seconds(ours)}"
    yield Row(f"{name}, to {NEAR:g} nat", f"{SWEEPS} sweeps", measured, sweeps <= SWEEPS, detail)
    ratios = [b.seconds / a.seconds for a, b in zip(ours, ngvb, strict=True)]
    steps = median(p.steps for p in ngvb)
    measured = f"{steps:.0f} steps, {seconds(ngvb)}, {spread(ratios)} times CVI's to {NEAR:g}"
    yield Row(f"{name}, NGVB to {FAR:g} nat", "-", measured)
    end = curve(cvi(problem), (40,))[-1].elbo - optimum
    yield Row(f"{name}, ELBO after 40 sweeps less the optimum", "-", f"{end:.1e} nat")
    if not adam:
        return
    best = min(adam, key=lambda rate: adam[rate].seconds)
    if adam[best].seconds == float("inf"):
        measured = f"not within {ADAM_SECONDS:g} s at rates {', '.join(f'{r:g}' for r in rates)}"
    else:
        ratio = adam[best].seconds / median(p.seconds for p in ours)
        found = adam[best]
        measured = (
            f"rate {best:g}, {found.steps} steps, {found.seconds:.3g} s, {ratio:.3g} times CVI's"
        )
    yield Row(f"{name}, Adam to {FAR:g} nat", "-", measured)
