"""Gaussian processes with binary data and with counts: CVI beside GPyTorch's NGD, and GPflow's.

    f ~ N(0, K),   K = v exp(-|x - x'|^2 / (2 l^2)) + 1e-6 I,
    y_n ~ Bernoulli(logits f_n) or Poisson(exp f_n),

l and v fixed, float64, 32 Gauss-Hermite points in both.  Both Gaussians get their ELBO from one
function, :func:`exact_elbo`, with 128 points, which no clock sees.  Our clock sees the making of K and
its factor, the finding of the structure and the sweeps; GPyTorch's the making of the model and the
steps, in which K is made and factorised anew (in training mode it keeps nothing from step to step).

With rate 1 GPyTorch makes our steps, but for the first and for those that our secant shortens.  Its
rates are 1, 0.5 and 0.1; the last is that of its tutorial, and is run once.  The target is against its
best rate.  GPflow's natural gradients with gamma 1 are there where GPflow is installed, eager and
compiled; the clock sees the compilation, which takes more than a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import median
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from ..problems.logistic import standardise
from ..problems.problem import DataNotFound, data_file
from .common import (
    QUICK_ROUNDS,
    Begin,
    Point,
    Row,
    curve,
    moments,
    reached,
    seconds,
    sites_svi,
    spread,
)
from .gpflow_natgrad import NaturalGradientVGP, have_gpflow
from .gpytorch_ngd import UNWHITENED_JITTER, Process, have_gpytorch

JITTER, POINTS = 1e-6, 32
NEAR, SWEEPS, SHARE = 1e-3, 20, 1 / 5
RATES, TUTORIAL_RATE = (1.0, 0.5), 0.1
ROUNDS = 3


def bernoulli(f: Tensor) -> Any:
    return dist.Bernoulli(logits=f)


def poisson(f: Tensor) -> Any:
    return dist.Poisson(f.exp())


@dataclass(frozen=True)
class Case:
    """Inputs (N, D), data (N,), the likelihood, length-scale and variance."""

    X: Tensor
    y: Tensor
    given: Callable[[Tensor], Any]
    length: float
    variance: float

    def covariance(self, jitter: float = JITTER) -> Tensor:
        distance = torch.cdist(self.X, self.X, compute_mode="donot_use_mm_for_euclid_dist")
        K = self.variance * torch.exp(-0.5 * (distance / self.length) ** 2)
        return K + jitter * torch.eye(len(K))


def classification(name: str) -> Case:
    """Standardised inputs without constant columns, l = sqrt(D), v = 2."""
    with np.load(data_file(f"libsvm/{name}.npz")) as data:
        X, y = data["X"].astype(np.float64), data["y"].astype(np.float64)
    X = standardise(X[:, X.std(0) > 0])
    return Case(torch.as_tensor(X), torch.as_tensor(y), bernoulli, sqrt(X.shape[1]), 2.0)


def counts() -> Case:
    """500 inputs on [0, 10], l = 1, v = 1, counts of rate exp(f), f a draw from the prior."""
    generator = torch.Generator().manual_seed(0)
    X = torch.linspace(0.0, 10.0, 500).unsqueeze(-1)
    empty = Case(X, torch.zeros(500), poisson, 1.0, 1.0)
    root = torch.linalg.cholesky(empty.covariance())
    f = root @ torch.randn(500, generator=generator)
    return Case(X, torch.poisson(f.exp(), generator), poisson, 1.0, 1.0)


CASES: dict[str, Callable[[], Case]] = {
    "ionosphere": lambda: classification("ionosphere"),
    "australian": lambda: classification("australian_scale"),
    "counts": counts,
}


def exact_elbo(case: Case, root: Tensor, mean: Tensor, covariance: Tensor) -> float:
    """The ELBO of N(mean, covariance) over f, in nats; ``root`` is the prior's Cholesky factor."""
    white = torch.linalg.solve_triangular(root, covariance, upper=False)
    white = torch.linalg.solve_triangular(root, white.mT, upper=False)
    centre = torch.linalg.solve_triangular(root, mean.unsqueeze(-1), upper=False)
    kl = white.trace() + centre.square().sum() - len(mean) - torch.linalg.slogdet(white)[1]
    x, w = np.polynomial.hermite_e.hermegauss(128)
    f = mean + covariance.diagonal().sqrt() * torch.as_tensor(x).unsqueeze(-1)
    terms = torch.as_tensor(w / w.sum()) @ case.given(f).log_prob(case.y)
    return float(terms.sum() - 0.5 * kl)


def cvi(case: Case) -> Begin:
    def begin() -> Any:
        root = torch.linalg.cholesky(case.covariance())

        def model(y: Tensor) -> None:
            zero = torch.zeros(len(root))
            f = pyro.sample("f", dist.MultivariateNormal(zero, scale_tril=root))
            with pyro.plate("data", len(root)):
                pyro.sample("y", case.given(f), obs=y)

        guide, svi = sites_svi(model)
        return lambda: svi.step(case.y), lambda: exact_elbo(case, root, *moments(guide))

    return begin


def ngd(case: Case, rate: float, whiten: bool = True) -> Begin:
    root = torch.linalg.cholesky(case.covariance(JITTER if whiten else UNWHITENED_JITTER))

    def begin() -> Any:
        options = case.length, case.variance, JITTER, POINTS, rate, whiten
        process = Process(case.X, case.y, case.given, *options)
        return process.step, lambda: exact_elbo(case, root, *process.posterior(root))

    return begin


def gpflow(case: Case, compiled: bool) -> Begin:
    root = torch.linalg.cholesky(case.covariance())
    likelihood = "poisson" if case.given is poisson else "bernoulli"

    def begin() -> Any:
        options = likelihood, case.length, case.variance, JITTER, POINTS, compiled
        process = NaturalGradientVGP(case.X, case.y, *options)
        return process.step, lambda: exact_elbo(case, root, *process.posterior(root))

    return begin


def run(quick: bool, seeds: int, data: Sequence[str] | None) -> Iterator[Row]:
    if not have_gpytorch():
        print("GPyTorch is not installed (pip install gpytorch): this part is left out.")
        return
    rounds = QUICK_ROUNDS if quick else max(seeds, ROUNDS)
    for name in data or CASES:
        try:
            case = CASES[name]()
        except DataNotFound as error:
            print(f"{name} is left out. {error}")
            continue
        yield from compare(f"{name}, N = {len(case.y)}", case, rounds, quick)


def milliseconds_later(points: Sequence[Point]) -> str:
    """Of a step that is not the first."""
    return f"{1e3 * (points[-1].seconds - points[0].seconds) / (len(points) - 1):.0f} ms"


def compare(name: str, case: Case, rounds: int, quick: bool) -> Iterator[Row]:
    ours = curve(cvi(case), range(1, SWEEPS + 1))
    theirs = curve(ngd(case, 1.0), range(1, 31))
    unwhitened = curve(ngd(case, 1.0, whiten=False), range(1, 31))
    best, goal, other = ours[-1].elbo, theirs[-1].elbo - NEAR, unwhitened[-1].elbo - NEAR
    sweeps = next(p.steps for p in ours if p.elbo >= best - NEAR)
    difference = best - theirs[-1].elbo
    measured = f"{best:.5f} nats, {difference:+.1e} beside GPyTorch's, after {sweeps} sweeps"
    met = abs(difference) <= NEAR and sweeps <= SWEEPS
    yield Row(f"{name}, ELBO", f"GPyTorch's to {NEAR:g} nat in {SWEEPS} sweeps", measured, met)

    starts: dict[str, tuple[Begin, float, int]] = {"CVI": (cvi(case), best - NEAR, SWEEPS)}
    starts |= {f"NGD {rate:g}": (ngd(case, rate), goal, 60) for rate in RATES}
    starts["NGD 1, unwhitened"] = (ngd(case, 1.0, whiten=False), other, 60)
    each = {"later ones": ours, "NGD's steps": theirs, "its unwhitened ones": unwhitened}
    if have_gpflow():
        each["GPflow's compiled ones"] = curve(gpflow(case, True), range(1, SWEEPS + 1))
        for label, compiled in {"GPflow": False, "GPflow, compiled": True}.items():
            starts[label] = (gpflow(case, compiled), best - NEAR, 60)
    times: dict[str, list[Point]] = {label: [] for label in starts}
    firsts: list[Point] = []
    for _ in range(rounds):
        for label, (begin, enough, most) in starts.items():
            points = curve(begin, range(1, most + 1), enough)
            if label == "CVI":
                firsts.append(points[0])
            times[label].append(reached(points, enough))
    if not quick:
        label = f"NGD {TUTORIAL_RATE:g}"
        points = curve(ngd(case, TUTORIAL_RATE), range(1, 201), goal)
        times[label] = [reached(points, goal)]
    detail = {"times": times, "elbo": {"CVI": ours, "NGD": theirs}}
    mine = median(p.seconds for p in times["CVI"])
    measured = f"{times['CVI'][0].steps} sweeps, {seconds(times['CVI'])}"
    yield Row(f"{name}, CVI", "-", measured, None, detail)
    words = [f"{what} {milliseconds_later(points)}" for what, points in each.items()]
    first = median(p.seconds for p in firsts)
    yield Row(f"{name}, a step", "-", f"first sweep {1e3 * first:.0f} ms, {', '.join(words)}")
    same = [label for label in times if label.startswith("NGD") and "unwhitened" not in label]
    fastest = min(same, key=lambda label: median(p.seconds for p in times[label]))
    for label in times:
        if label == "CVI":
            continue
        found = times[label]
        theirs_median = median(p.seconds for p in found)
        if theirs_median == inf:
            yield Row(f"{name}, {label}", "-", "not reached")
            continue
        share = mine / theirs_median
        pairs = [a.seconds / b.seconds for a, b in zip(times["CVI"], found, strict=False)]
        measured = (
            f"{found[0].steps} steps, {seconds(found)}; CVI takes {spread(pairs)} of its time"
        )
        judged = label == fastest
        target = f"{SHARE:g} of its time" if judged else "-"
        yield Row(f"{name}, {label}", target, measured, share <= SHARE if judged else None)
