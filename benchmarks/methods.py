"""The methods that `time_to_target` compares, each as a run that can be advanced and looked at.

In float64. All but ``ngvb``, whose guide searches for its own start in the first step, begin at the
same point with standard deviation 0.1. ``start`` names the point: ``"feasible"`` is zero in the
unconstrained space, ``"median"`` (the default of Pyro's guides) the median of 15 draws from every
site's prior.
"""

from typing import Any, Protocol

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    init_to_feasible,
    init_to_median,
)
from pyro.optim import PyroOptim
from torch import Tensor

from .problems import Problem

INIT_SCALE = 0.1
STARTS = {"feasible": init_to_feasible, "median": init_to_median}


class Run(Protocol):
    """One optimisation under way."""

    compile_seconds: float

    @property
    def stride(self) -> int:
        """How many steps to take between two looks."""
        ...

    def advance(self, steps: int) -> None:
        """Takes that many steps; returns when they are done."""
        ...

    def gaussian(self) -> tuple[Tensor, Tensor]:
        """The current Gaussian in the unconstrained space: loc (d,), scale_tril (d, d)."""
        ...


class SVIRun:
    """Pyro's own loop around a guide and an optimizer."""

    compile_seconds = 0.0
    stride = 1

    def __init__(self, problem: Problem, guide: Any, optim: Any, particles: int) -> None:
        self.args, self.guide = problem.args, guide
        loss = Trace_ELBO(num_particles=particles, vectorize_particles=True)
        self.svi = SVI(problem.model, guide, optim, loss=loss)

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            self.svi.step(*self.args)

    def gaussian(self) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            posterior = self.guide.get_posterior()
            if hasattr(posterior, "scale_tril"):
                return posterior.mean, posterior.scale_tril
            if hasattr(posterior, "covariance_matrix"):
                return posterior.mean, torch.linalg.cholesky(posterior.covariance_matrix)
            return posterior.mean, torch.diag(posterior.stddev)


def ngvb(problem: Problem, family: str, seed: int, particles: int, start: str) -> Run:
    """Our guide and `NGVB` with default settings; ``start`` is not heeded."""
    return _ngvb(problem, family, seed, particles)


def ngvb_point(problem: Problem, family: str, seed: int, particles: int, start: str) -> Run:
    """As :func:`ngvb`, from the point at which the others begin."""
    return _ngvb(problem, family, seed, particles, init_loc_fn=STARTS[start])


def _ngvb(problem: Problem, family: str, seed: int, particles: int, **how: Any) -> Run:
    import pyro_ngvi

    _fresh(seed)
    guides = {
        "full_rank": pyro_ngvi.AutoFullRankNormal,
        "mean_field": pyro_ngvi.AutoMeanFieldNormal,
    }
    guide = guides[family](problem.model, **how)
    return SVIRun(problem, guide, pyro_ngvi.NGVB(guide), particles)


def pyro_adam(
    problem: Problem, family: str, seed: int, particles: int, start: str, rate: float
) -> Run:
    """Pyro's guide of the same family with Adam."""
    _fresh(seed)
    guides = {"full_rank": AutoMultivariateNormal, "mean_field": AutoDiagonalNormal}
    guide = guides[family](problem.model, init_loc_fn=STARTS[start], init_scale=INIT_SCALE)
    return SVIRun(problem, guide, PyroOptim(torch.optim.Adam, {"lr": rate}), particles)


def _fresh(seed: int) -> None:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
