"""a9a: 32,561 data, 123 features of 0 and 1, in minibatches without replacement; prior N(0, 1).

Each datum keeps its own site, so a minibatch replaces what its data said before, and no noise stays in
q: lr is 1 throughout.  The ELBO of all data is by quadrature with 64 points, of
:mod:`benchmarks.problems.optimum`; the optimum is that of CVI with all data, checked by the fixed point
of that module.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from ..problems.logistic import with_intercept
from ..problems.optimum import BinaryRegression, gaussian_optimum
from ..problems.problem import DataNotFound, data_file
from .common import Point, Row, curve, moments, reached, seconds, sites_svi, spread

BATCHES, QUICK_BATCHES = (256, 1024, 4096), (1024,)
EPOCHS = 3
NATS_PER_THOUSAND = 0.1
FULL_SWEEPS = 20
ROUNDS, QUICK_ROUNDS = 3, 1


def regression() -> BinaryRegression:
    with np.load(data_file("libsvm/a9a.npz")) as data:
        X, y = with_intercept(data["X"].astype(np.float64)), data["y"].astype(np.float64)
    return BinaryRegression(X, y, np.ones(X.shape[1]), nodes=64)


def model(total: int, X: Tensor, y: Tensor, rows: Tensor | None = None) -> None:
    """X and y are those of the ``rows`` among ``total`` data."""
    w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", total, subsample=rows):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def elbo(problem: BinaryRegression, guide: Any) -> float:
    mean, covariance = moments(guide)
    return problem.elbo(mean.numpy(), covariance.numpy())


def epochs(problem: BinaryRegression, batch: int, seed: int) -> list[Point]:
    """Seconds and ELBO after each epoch."""
    X, y, total = torch.as_tensor(problem.X), torch.as_tensor(problem.y), len(problem.y)
    order = torch.Generator().manual_seed(seed)

    def begin() -> Any:
        guide, svi = sites_svi(partial(model, total))

        def epoch() -> None:
            for rows in torch.randperm(total, generator=order).split(batch):
                svi.step(X[rows], y[rows], rows)

        return epoch, lambda: elbo(problem, guide)

    return curve(begin, range(1, EPOCHS + 1))


def all_data(problem: BinaryRegression, enough: float) -> list[Point]:
    X, y = torch.as_tensor(problem.X), torch.as_tensor(problem.y)

    def begin() -> Any:
        guide, svi = sites_svi(partial(model, len(y)))
        return lambda: svi.step(X, y), lambda: elbo(problem, guide)

    return curve(begin, range(1, FULL_SWEEPS + 1), enough)


def run(quick: bool, seeds: int, data: Sequence[str] | None) -> Iterator[Row]:
    try:
        problem = regression()
    except DataNotFound as error:
        print(f"a9a is left out. {error}")
        return
    rounds = QUICK_ROUNDS if quick else max(seeds, ROUNDS)
    points = all_data(problem, float("inf"))
    best = max(p.elbo for p in points)
    if not quick:
        start = time.process_time()
        fixed_point = gaussian_optimum(problem, "full_rank").elbo
        spent = time.process_time() - start
        measured = f"{best:.6f} nats, {best - fixed_point:+.1e} beside it, which took {spent:.1f} s"
        met = abs(best - fixed_point) < 1e-6
        yield Row(
            "a9a, all data, 20 sweeps against a fixed point in NumPy", "1e-6 nat", measured, met
        )
    allowed = NATS_PER_THOUSAND * len(problem.y) / 1000
    batches = [int(b) for b in data] if data else QUICK_BATCHES if quick else BATCHES
    runs: dict[int, list[list[Point]]] = {batch: [] for batch in batches}
    whole: list[Point] = []
    for seed in range(rounds):
        for batch in batches:
            runs[batch].append(epochs(problem, batch, seed))
        whole.append(reached(all_data(problem, best - allowed), best - allowed))
    measured = f"{whole[0].steps} sweeps, {seconds(whole)}"
    yield Row(f"a9a, all data, to {allowed:.2f} nats", "-", measured, None, {"runs": whole})
    for batch, found in runs.items():
        ends = [best - r[-1].elbo for r in found]
        after = " / ".join(f"{median(best - r[e].elbo for r in found):.2g}" for e in range(EPOCHS))
        ratios = [r[-1].seconds / w.seconds for r, w in zip(found, whole, strict=True)]
        measured = (
            f"gap {spread(ends, '.2g')} nats, median gap by epoch {after}, "
            f"{seconds([r[-1] for r in found])}, {spread(ratios)} times that of all data above"
        )
        target = f"{allowed:.2f} nats ({NATS_PER_THOUSAND:g} per 1,000 data) after {EPOCHS} epochs"
        yield Row(
            f"a9a, batches of {batch}", target, measured, max(ends) <= allowed, {"runs": found}
        )
