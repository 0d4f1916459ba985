"""The methods that `time_to_target` compares, each as a run that can be advanced and looked at.

In float64. All but ``ngvb``, whose guide searches for its own start in the first step, begin at the
same point with standard deviation 0.1. ``start`` names the point: ``"feasible"`` is zero in the
unconstrained space, ``"median"`` (the default of Pyro's guides) the median of 15 draws from every
site's prior.
"""

# NumPyro is optional.
# pyright: reportMissingImports=false

import time
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import numpy as np
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

from .problems import LogJoint, Problem, load

INIT_SCALE = 0.1
STARTS = {"feasible": init_to_feasible, "median": init_to_median}


class Run(Protocol):
    """One optimisation under way."""

    compile_seconds: float

    def advance(self, steps: int) -> None:
        """Takes that many steps; returns when they are done."""
        ...

    def gaussian(self) -> tuple[Tensor, Tensor]:
        """The current Gaussian in the unconstrained space: loc (d,), scale_tril (d, d)."""
        ...


class SVIRun:
    """Pyro's own loop around a guide and an optimizer."""

    compile_seconds = 0.0

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


class NumPyroProgram:
    """A jitted loop of NumPyro's SVI updates, compiled once and shared by all seeds."""

    def __init__(
        self, problem: Problem, family: str, particles: int, start: str, rate: float
    ) -> None:
        import jax
        import numpyro
        from numpyro import infer
        from numpyro.infer import SVI, Trace_ELBO, autoguide

        from .numpyro_models import arguments, translate

        jax.config.update("jax_enable_x64", True)
        guides = {
            "full_rank": autoguide.AutoMultivariateNormal,
            "mean_field": autoguide.AutoDiagonalNormal,
        }
        model = translate(problem)
        starts = {"feasible": infer.init_to_feasible, "median": infer.init_to_median}
        guide = guides[family](model, init_loc_fn=starts[start], init_scale=INIT_SCALE)
        adam = numpyro.optim.Adam(rate)
        self.svi = SVI(model, guide, adam, loss=Trace_ELBO(num_particles=particles))
        self.args, self.key = arguments(problem), jax.random.PRNGKey

        @jax.jit
        def advance(state: Any, steps: Any) -> Any:
            return jax.lax.fori_loop(
                0, steps, lambda _, s: self.svi.update(s, *self.args)[0], state
            )

        before = time.perf_counter()
        self.advance = lambda state, steps: jax.block_until_ready(advance(state, steps))
        state = self.advance(self.svi.init(self.key(0), *self.args), 0)
        self.compile_seconds = time.perf_counter() - before
        self.order = _flat_order(problem, guide, self.svi.get_params(state))


def _flat_order(problem: Problem, guide: Any, params: dict[str, Any]) -> Tensor:
    """Where each entry of Pyro's flat latent vector lies in NumPyro's.

    NumPyro does not document the order of the sites: its guide is asked where 0.00, 0.01, ... go.
    """
    probe = {**params, "auto_loc": np.arange(problem.dim) / 100}
    values = {k: torch.as_tensor(np.array(v)) for k, v in guide.median(probe).items()}
    return (100 * LogJoint(problem).unconstrain(values)).round().long()


class NumPyroRun:
    """One seed of a compiled NumPyro program."""

    def __init__(self, program: NumPyroProgram, seed: int) -> None:
        self.program = program
        self.compile_seconds = program.compile_seconds
        self.state = program.svi.init(program.key(seed), *program.args)

    def advance(self, steps: int) -> None:
        self.state = self.program.advance(self.state, steps)

    def gaussian(self) -> tuple[Tensor, Tensor]:
        params = self.program.svi.get_params(self.state)
        loc = torch.as_tensor(np.array(params["auto_loc"]))
        if "auto_scale" in params:
            scale = torch.diag(torch.as_tensor(np.array(params["auto_scale"])))
        else:
            scale = torch.as_tensor(np.array(params["auto_scale_tril"]))
        order = self.program.order
        covariance = (scale @ scale.T)[order][:, order]
        return loc[order], torch.linalg.cholesky(covariance)


def numpyro_factory() -> Callable[..., Run]:
    """NumPyro's guide of the same family with Adam, jitted.

    Raises
    ------
    ImportError
        If NumPyro is not installed.
    """
    import numpyro  # noqa: F401

    @cache
    def program(name: str, *options: Any) -> NumPyroProgram:
        return NumPyroProgram(load(name), *options)

    def begin(
        problem: Problem, family: str, seed: int, particles: int, start: str, rate: float
    ) -> Run:
        return NumPyroRun(program(problem.name, family, particles, start, rate), seed)

    return begin
