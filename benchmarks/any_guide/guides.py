"""Two posteriors, and guides for them whose Fisher matrix nobody has in closed form.

**mixture**: phase retrieval.  Only squares of projections are seen,

    y_i = (x_i' w)^2 + noise,   w ~ N(0, I_5),   i = 1, ..., 15,

so w and -w are equally likely and the posterior has two modes.  The guide is a function with
``pyro.param``s that draws w from Pyro's ``MixtureOfDiagNormals`` with two components.  The density is a
polynomial, so the ELBO and its gradients have variances.

**low_rank**: Pyro's ``AutoLowRankMultivariateNormal`` on logistic regression with German credit data.

The ELBO is evaluated by quadrature for the second, by 20,000 draws for the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer.autoguide import AutoLowRankMultivariateNormal, init_to_feasible
from torch import Tensor

from pyro_ngvi.optim import remember_arguments

from ..problems import load

__all__ = ["Problem", "german_credit", "phase_retrieval"]

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
    return Problem("mixture", _squares, (X, y), _mixture, _by_draws)


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

    @torch.no_grad()
    def by_quadrature(_: Problem, guide: Any) -> tuple[float, float]:
        q = guide.get_posterior()
        assert problem.exact_elbo is not None
        return problem.exact_elbo(q.mean, torch.linalg.cholesky(q.covariance_matrix)), 0.0

    return Problem("low_rank", problem.model, problem.args, make, by_quadrature)


@torch.no_grad()
def _by_draws(problem: Problem, guide: Any, seed: int = 5) -> tuple[float, float]:
    """The mean of log p - log q over draws from the guide, the same noise at every call."""
    values = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(EVALUATION_DRAWS // CHUNK):
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
