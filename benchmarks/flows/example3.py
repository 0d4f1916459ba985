r"""Example 3 of the paper on IFVB: a small network on German credit under the printed orthogonal flow.

    theta = W_1 sigmoid(W_0 eps + b_0) + mu,   W_0 = W_1 = I, b_0 = mu = 0 at the start.

Settings of the paper: minibatches of 100 rows (the script draws them with replacement, Pyro's plate
without), 100 draws a step, gradients clipped at 10, m <- 0.6 m + 0.4 g, steps 0.01, after 5,000 of
them 0.01 x 5,000 / k.  The authors' scripts have errors in their gradients; here all methods have the
same path gradients of ``BatchedELBO``, which are exact.

Methods, on the printed flow if not said otherwise:

* **Euclidean**: gradient clipped, momentum, projection on the tangents, Cholesky-QR.  At the paper's
  step and at three more.
* **VB on manifold** (Tran, Nguyen & Nguyen 2021): the Riemannian gradient of the metric of R^(d x d) is
  that projected gradient, so this is the same algorithm but for two details: the clip sees the gradient
  without its normal part, and no normal part enters the momentum.
* **IFVB, paper**: window of the last 100 psi, one score a step, the steps above.  In the local frame of
  the flow, so that scores are tangent; there a rotation is 1/sqrt(2) as long as in R^(d x d).
* **IFVB, ambient**: that with scores and window in R^(d x d), as in the script, and projected steps.
* **IFVB**, **AIFVB**: this package's defaults, with the same 100 draws and minibatches.
* **Adam**: the same gradients; each W is replaced by the nearest orthogonal matrix after each step.
  **Adam, tangent**: Adam on the left-trivialised gradient, so that no matrix leaves the manifold.
* **SPRING**: 128 draws, all 800 rows.
* The last four have other guides, all 800 rows, and 16 draws (SPRING 128).  What the printed flow pays
  beside them for its box: :mod:`.german_credit`.

Source: Godichon-Baggioni, Nguyen & Tran (2024, JASA), example 3.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import init_to_value

import pyro_ngvi
from pyro_ngvi.optim.schedules import Custom

from ..baselines import PaperWindow
from ..stepping import heading, line
from .german_credit import DIM, Credit, evaluate, least_kl
from .manifold_gradient import AdamOnTangents, ManifoldGradient, ProjectedAdam
from .orthogonal_forms import AmbientForm, AutoOrthogonalForm

__all__ = ["METHODS", "Run", "Table", "run"]

BATCH, DRAWS = 100, 100
STEP, CLIP, MOMENTUM, FLAT = 0.01, 10.0, 0.6, 5_000
SPRING_DRAWS, GAUSSIAN_DRAWS = 128, 16
#: shares of the budget after which the bound is evaluated, and draws behind it there and at the end
MARKS = (0.025, 0.05, *(k / 10 for k in range(1, 11)))
MARK_DRAWS, END_DRAWS = 1_000, 10_000
SECONDS, QUICK_SECONDS = 60.0, 15.0


Contestant = tuple[Any, SVI]
Maker = Callable[[], Contestant]


class AutoAmbientForm(AutoOrthogonalForm):
    """What is learnt of F stays in R^(d x d)."""

    kind = AmbientForm


def _printed(
    make: Callable[[Any], Any], batch: int | None = BATCH, loss: Any = None, kind: Any = None
) -> Contestant:
    """The printed flow from the printed start, whose mean is 1/2."""
    kind = kind or AutoOrthogonalForm
    model = Credit(batch)
    start = init_to_value(values={"theta": torch.full((DIM,), 0.5)})
    guide = kind(model, form="paper", retraction="cholesky-qr", init_loc_fn=start)
    guide()
    return guide, SVI(model, guide, make(guide), loss or pyro_ngvi.BatchedELBO(DRAWS))


def _contrast(
    make_guide: Callable[..., Any], make: Callable[[Any], Any], loss: Any = None
) -> Contestant:
    """Another guide, all rows; units that start alike would stay alike in the mean."""
    model = Credit()
    start = init_to_value(values={"theta": 0.5 * torch.randn(DIM)})
    guide = make_guide(model, init_loc_fn=start)
    guide()
    return guide, SVI(model, guide, make(guide), loss or pyro_ngvi.BatchedELBO(GAUSSIAN_DRAWS))


def _paper_ifvb(guide: Any) -> Any:
    return pyro_ngvi.IFVB(
        guide,
        schedule=Custom(lambda k: STEP * (1.0 - MOMENTUM) * (FLAT / (k + 1.0)).clamp_max(1.0)),
        fisher=PaperWindow(100),
        trust_radius=None,
        clip_norm=CLIP,
        momentum=MOMENTUM,
        averaging=False,
    )


def _scores() -> Any:
    return pyro_ngvi.BatchedELBO(SPRING_DRAWS, curvature="scores")


def _methods() -> dict[str, Maker]:
    gradient = partial(ManifoldGradient, clip=CLIP, momentum=MOMENTUM, flat=FLAT)
    deep = partial(pyro_ngvi.AutoOrthogonalFlow, layers=2)
    made: dict[str, Maker] = {
        f"Euclidean, step {step:g}": partial(_printed, partial(gradient, step=step))
        for step in (STEP, 0.003, 0.03, 0.1)
    }
    made |= {
        "VB on manifold, step 0.01": partial(_printed, partial(gradient, step=STEP, normal=False)),
        "IFVB, paper": partial(_printed, _paper_ifvb),
        "IFVB, ambient": partial(_printed, _paper_ifvb, kind=AutoAmbientForm),
        "IFVB": partial(_printed, pyro_ngvi.IFVB),
        "AIFVB": partial(_printed, pyro_ngvi.AIFVB),
    }
    made |= {
        f"{name} {rate:g}": partial(_printed, partial(adam, rate=rate))
        for name, adam in (("Adam", ProjectedAdam), ("Adam, tangent", AdamOnTangents))
        for rate in (0.001, 0.003, 0.01, 0.03)
    }
    return made | {
        "SPRING": lambda: _printed(pyro_ngvi.optim.SPRING, None, _scores()),
        "full rank, NGVB": lambda: _contrast(pyro_ngvi.AutoFullRankNormal, pyro_ngvi.NGVB),
        "2 layers, SPRING": lambda: _contrast(deep, pyro_ngvi.optim.SPRING, _scores()),
        "2 layers, IFVB": lambda: _contrast(deep, pyro_ngvi.IFVB),
        "mean field, NGVB": lambda: _contrast(pyro_ngvi.AutoMeanFieldNormal, pyro_ngvi.NGVB),
    }


METHODS = _methods()


@dataclass(frozen=True)
class Point:
    """Where a run is: the bound is on all training rows, in nats."""

    seconds: float
    steps: int
    bound: float


@dataclass(frozen=True)
class Run:
    """One optimisation; the fit E_q[log p(y | theta)] and KL(q || prior) at its end, and on test rows
    the accuracy and the mean negative log density of the mixture over q."""

    method: str
    seed: int
    curve: tuple[Point, ...]
    error: float
    fit: float
    kl: float
    accuracy: float
    nll: float

    @property
    def end(self) -> float:
        return self.curve[-1].bound

    @property
    def best(self) -> Point:
        return max(self.curve, key=lambda point: point.bound)

    def seconds_to(self, level: float) -> float:
        """Seconds until the curve is above ``level``, linear between marks; infinite if it never is."""
        before = self.curve[0]
        for point in self.curve:
            if point.bound >= level:
                rise = point.bound - before.bound
                share = (level - before.bound) / rise if rise > 0 else 1.0
                return before.seconds + share * (point.seconds - before.seconds)
            before = point
        return math.inf

    def bound_at(self, steps: int) -> float:
        """The bound after so many steps, linear between marks; NaN if they were not taken."""
        at = [point.steps for point in self.curve]
        return float(np.interp(steps, at, [p.bound for p in self.curve], right=math.nan))


def _bound(guide: Any) -> float:
    fit, cost, _ = evaluate(guide, MARK_DRAWS)
    return float((fit - cost).mean())


def train(name: str, make: Maker, seed: int, budget: float) -> Run:
    """One method for one seed; after a NaN the run stays as it is, with a bound of -inf."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide, svi = make()
    seconds, steps, curve = 0.0, 0, [Point(0.0, 0, _bound(guide))]
    for mark in MARKS:
        while seconds < mark * budget:
            begin = time.thread_time()
            try:
                svi.step()
            except ValueError as error:
                print(f"{name} stopped. {str(error).splitlines()[0]}", flush=True)
                seconds = math.inf
            seconds += time.thread_time() - begin
            steps += 1
        bound = _bound(guide)
        curve.append(Point(seconds, steps, bound if math.isfinite(bound) else -math.inf))
    fit, cost, test = evaluate(guide, END_DRAWS)
    y = Credit().y_test
    p = torch.sigmoid(test).mean(0)
    nll = -torch.where(y == 1, p, 1 - p).log().mean()
    accuracy = ((p > 0.5) == (y == 1)).double().mean()
    error = (fit - cost).std() / math.sqrt(END_DRAWS)
    numbers = (float(v) for v in (error, fit.mean(), cost.mean(), accuracy, nll))
    return Run(name, seed, tuple(curve), *numbers)


@dataclass(frozen=True)
class Table:
    """All runs; printed are medians over seeds, and the range of the last bound."""

    budget: float
    start: float
    least_kl: float
    runs: list[Run]

    def of(self, method: str) -> list[Run]:
        return [run for run in self.runs if run.method == method]

    def methods(self) -> list[str]:
        return list(dict.fromkeys(run.method for run in self.runs))

    @property
    def target(self) -> tuple[str, float, float]:
        """The Adam with the highest median bound at the end, or, without any, the best method.

        Name, bound, seconds to it.
        """
        adam = [name for name in self.methods() if name.startswith("Adam")] or self.methods()
        best = max(adam, key=lambda name: median(run.end for run in self.of(name)))
        level = median(run.end for run in self.of(best))
        return best, level, median(run.seconds_to(level) for run in self.of(best))

    def __str__(self) -> str:
        name, level, seconds = self.target
        seeds = len({run.seed for run in self.runs})
        title = (
            f"{seeds} seeds, {self.budget:g} s each.  Bound at the printed start {self.start:.1f}; KL "
            f"of the printed flow at least {self.least_kl:.1f} nats.\n"
            f"Adam's bound: that of {name}, {level:.1f} after {seconds:.1f} s."
        )
        columns = ("at 300 steps", "end (range)", "best, at s", "s to Adam's", "fit", "KL")
        lines = [title, "", heading("", *columns, "test accuracy, NLL", "steps", "seeds")]
        for name in self.methods():
            lines.append(line(name, *self._cells(self.of(name), level)))
        return "\n".join(lines) + "\n"

    @staticmethod
    def _cells(runs: list[Run], level: float) -> list[str]:
        def middle(of: Callable[[Run], float]) -> float:
            return median(map(of, runs))

        ends = [run.end for run in runs]
        to, early = middle(lambda r: r.seconds_to(level)), middle(lambda r: r.bound_at(300))
        return [
            f"{early:.1f}" if math.isfinite(early) else "-",
            f"{median(ends):.1f} ({min(ends):.1f} to {max(ends):.1f})",
            f"{middle(lambda r: r.best.bound):.1f}, {middle(lambda r: r.best.seconds):.1f}",
            f"{to:.1f}" if math.isfinite(to) else "never",
            f"{middle(lambda run: run.fit):.1f}",
            f"{middle(lambda run: run.kl):.1f}",
            f"{middle(lambda r: r.accuracy):.3f}, {middle(lambda r: r.nll):.3f}",
            f"{middle(lambda run: run.curve[-1].steps):.0f}",
            str(len(runs)),
        ]


def compare(seeds: int, budget: float, methods: dict[str, Maker]) -> Table:
    """All methods, one after the other for each seed."""
    fit, cost, _ = evaluate(_printed(pyro_ngvi.IFVB)[0], END_DRAWS)
    start = float((fit - cost).mean())
    for make in methods.values():  # what a process does only once is no method's cost
        pyro.clear_param_store()
        _, svi = make()
        for _ in range(3):
            svi.step()
    runs = [
        train(name, make, seed, budget) for seed in range(seeds) for name, make in methods.items()
    ]
    return Table(budget, start, least_kl(), runs)


def run(
    quick: bool, seeds: int, data: Sequence[str] | None, seconds: float | None = None
) -> Iterator[Table]:
    """One table; ``seconds`` a run, by default 60 (quick: 15).  ``data`` may name a few methods."""
    torch.set_default_dtype(torch.float64)
    methods = {name: METHODS[name] for name in data} if data else METHODS
    yield compare(seeds, seconds or (QUICK_SECONDS if quick else SECONDS), methods)
