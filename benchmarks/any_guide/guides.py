"""Posteriors, and guides for them that are not ours.

**mixture**: phase retrieval.  Only squares of projections are seen,

    y_i = (x_i' w)^2 + noise,   w ~ N(0, I_5),   i = 1, ..., 15,

so w and -w are equally likely and the posterior has two modes.  The guide is a function with
``pyro.param``s that draws w from Pyro's ``MixtureOfDiagNormals`` with two components.  The density is a
polynomial, so the ELBO and its gradients have variances.

**wdbc**, **breast**, **australian**, **german**: logistic regressions, with Pyro's
``AutoMultivariateNormal`` ("full"), ``AutoLowRankMultivariateNormal`` of rank 3 ("low rank") and
``AutoDiagonalNormal`` ("diagonal") as they come, started at the median of prior draws: with a flat
prior of the intercept that is tens of thousands of nats away.  **low_rank** is the German one from
zero.

**eight_schools**: the non-centred model with ``AutoNormal``; **structured**, with ``AutoStructured``.

**iaf**: a funnel in ten dimensions with ``AutoIAFNormal``, a flow of which nobody knows products with
the Fisher matrix.

The ELBO is evaluated by quadrature for the regressions, else by 20,000 draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoStructured,
    init_to_feasible,
)
from torch import Tensor

from pyro_ngvi.optim import remember_arguments

from ..problems import load

__all__ = [
    "CELLS",
    "Problem",
    "by_draws",
    "eight_schools",
    "funnel",
    "german_credit",
    "phase_retrieval",
    "regression",
    "structured",
]

OBSERVATIONS, DIM, NOISE = 15, 5, 1.0
EVALUATION_DRAWS, CHUNK = 20_000, 2_000


@dataclass(frozen=True)
class Problem:
    """A model, its arguments, and how to make a guide (at its start, for a seed)."""

    name: str
    model: Callable[..., Any]
    args: tuple[Any, ...]
    make_guide: Callable[[], Any]
    evaluate: Callable[[Problem, Any], tuple[float, float]]
    """ELBO of the guide as it is, and the standard error of that number."""


def phase_retrieval() -> Problem:
    """The bimodal posterior, with simulated data."""
    noise = torch.Generator().manual_seed(1)
    X = torch.randn(OBSERVATIONS, DIM, generator=noise)
    truth = torch.randn(DIM, generator=noise)
    y = (X @ truth).square() + NOISE * torch.randn(OBSERVATIONS, generator=noise)
    return Problem("mixture", _squares, (X, y), _mixture, by_draws)


def _squares(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(DIM), 1.0).to_event(1))
    pyro.sample("y", dist.Normal((w @ X.mT).square(), NOISE).to_event(1), obs=y)


def _mixture() -> Callable[..., Any]:
    """Two components that start around points drawn at random."""

    def guide(X: Tensor, y: Tensor) -> None:
        locs = pyro.param("locs", lambda: 0.5 * torch.randn(2, DIM))
        scales = pyro.param("scales", 0.3 * torch.ones(2, DIM), constraint=constraints.positive)
        logits = pyro.param("logits", torch.zeros(2))
        pyro.sample("w", dist.MixtureOfDiagNormals(locs, scales, logits))

    return remember_arguments(guide)


def german_credit() -> Problem:
    """Logistic regression; needs PYRO_NGVI_DATA."""
    problem = load("german_credit")

    def make() -> Any:
        return AutoLowRankMultivariateNormal(
            problem.model, init_loc_fn=init_to_feasible, init_scale=0.1
        )

    return Problem("low_rank", problem.model, problem.args, make, _by_quadrature(problem))


#: logistic regressions and Pyro's guides for them, by the name of the comparison
CELLS: dict[str, tuple[str, str]] = {
    "wdbc_full": ("wdbc", "full"),
    "wdbc_low_rank": ("wdbc", "low rank"),
    "breast_full": ("breast_cancer_presplit", "full"),
    "breast_low_rank": ("breast_cancer_presplit", "low rank"),
    "australian_full": ("australian_presplit", "full"),
    "wdbc_diagonal": ("wdbc", "diagonal"),
    "german_low_rank": ("german_credit", "low rank"),
}
FAMILIES: dict[str, Callable[[Any], Any]] = {
    "full": AutoMultivariateNormal,
    "low rank": lambda model: AutoLowRankMultivariateNormal(model, rank=3),
    "diagonal": AutoDiagonalNormal,
}


def regression(cell: str) -> Problem:
    """One of :data:`CELLS`; all but wdbc need PYRO_NGVI_DATA."""
    name, family = CELLS[cell]
    problem = load(name)

    def make() -> Any:
        return FAMILIES[family](problem.model)

    return Problem(cell, problem.model, problem.args, make, _by_quadrature(problem))


def _by_quadrature(problem: Any) -> Callable[[Problem, Any], tuple[float, float]]:
    @torch.no_grad()
    def evaluate(_: Problem, guide: Any) -> tuple[float, float]:
        q = guide.get_posterior()
        if isinstance(guide, AutoDiagonalNormal):
            factor = q.stddev.diag()
        else:
            factor = torch.linalg.cholesky(q.covariance_matrix)
        return problem.exact_elbo(q.mean, factor), 0.0

    return evaluate


def eight_schools() -> Problem:
    """Non-centred, from the zoo."""
    problem = load("eight_schools_noncentered")
    return Problem(
        "eight_schools", problem.model, problem.args, lambda: AutoNormal(problem.model), by_draws
    )


def structured() -> Problem:
    """The same with ``AutoStructured``, which computes its sites from noise and parameters."""
    problem = eight_schools()
    return replace(problem, name="structured", make_guide=lambda: AutoStructured(problem.model))


def _funnel() -> None:
    v = pyro.sample("v", dist.Normal(0.0, 3.0))
    scale = (0.5 * v).exp().unsqueeze(-1)
    pyro.sample("x", dist.Normal(torch.zeros(9), scale).to_event(1))


def funnel() -> Problem:
    """Neal's funnel in ten dimensions."""
    return Problem("iaf", _funnel, (), lambda: AutoIAFNormal(_funnel), by_draws)


@torch.no_grad()
def by_draws(
    problem: Problem, guide: Any, seed: int = 5, draws: int = EVALUATION_DRAWS
) -> tuple[float, float]:
    """The mean of log p - log q over draws from the guide, the same noise at every call."""
    values = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(draws // CHUNK):
            with pyro.plate("draws", CHUNK, dim=-2):
                q = poutine.trace(guide).get_trace(*problem.args)
                p = poutine.trace(poutine.replay(problem.model, trace=q)).get_trace(*problem.args)
            values.append(_per_draw(p) - _per_draw(q))
    weights = torch.cat(values)
    return float(weights.mean()), float(weights.std()) / len(weights) ** 0.5


def _per_draw(trace: Any) -> Tensor:
    trace.compute_log_prob()
    sites = [s for s in trace.nodes.values() if s["type"] == "sample" and s["name"] != "draws"]
    parts = [s["log_prob"].expand(CHUNK, *s["log_prob"].shape[1:]) for s in sites]
    return torch.stack([part.reshape(CHUNK, -1).sum(1) for part in parts if part.dim()]).sum(0)
