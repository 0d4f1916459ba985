"""Methods written in JAX: NumPyro's guides with Adam in one compiled loop, BlackJAX's Pathfinder.

What is traced and compiled, and NumPyro's own start of a guide, is on no clock: `compile_seconds` says
what it took.  JAX is imported late: by then `one_core` has tied the process to one core, and so XLA's
threads, whose time the processor's clock would add up.
"""

# NumPyro and BlackJAX are optional.
# pyright: reportMissingImports=false

import time
from collections.abc import Callable
from copy import copy
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .methods import INIT_SCALE, Run
from .problems import LogJoint, Problem, load


class NumPyroProgram:
    """A jitted loop of NumPyro's SVI updates, compiled once and shared by all seeds and rates."""

    def __init__(self, problem: Problem, family: str, particles: int, start: str) -> None:
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
        before = time.process_time()
        model, args = translate(problem), arguments(problem)
        starts = {"feasible": infer.init_to_feasible, "median": infer.init_to_median}
        guide = guides[family](model, init_loc_fn=starts[start], init_scale=INIT_SCALE)
        elbo = Trace_ELBO(num_particles=particles)
        self.svi = svi = SVI(model, guide, numpyro.optim.Adam(0.01), loss=elbo)

        @jax.jit
        def advance(state: Any, steps: Any, rate: Any) -> Any:
            mine = copy(svi)  # the rate is an argument, so that all rates share the program
            mine.optim = numpyro.optim.Adam(rate)
            return jax.lax.fori_loop(0, steps, lambda _, s: mine.update(s, *args)[0], state)

        self.init = cache(lambda seed: svi.init(jax.random.PRNGKey(seed), *args))
        self.advance = lambda *how: jax.block_until_ready(advance(*how))
        state = self.advance(self.init(0), 0, 0.01)
        self.compile_seconds = time.process_time() - before
        self.order = _flat_order(problem, guide, svi.get_params(state))


def _flat_order(problem: Problem, guide: Any, params: dict[str, Any]) -> Tensor:
    """Where each entry of Pyro's flat latent vector lies in NumPyro's.

    NumPyro does not document the order of the sites: its guide is asked where 0.00, 0.01, ... go.
    """
    probe = {**params, "auto_loc": np.arange(problem.dim) / 100}
    values = {k: torch.as_tensor(np.array(v)) for k, v in guide.median(probe).items()}
    return (100 * LogJoint(problem).unconstrain(values)).round().long()


def reordered(scale_tril: Tensor, order: Tensor) -> Tensor:
    """The factor of a covariance in another order; its covariance, squared, may be singular."""
    upper = torch.linalg.qr(scale_tril[order].T, mode="r").R
    return upper.T * upper.diagonal().sign()


class NumPyroRun:
    """One seed and one rate of a compiled NumPyro program."""

    def __init__(self, program: NumPyroProgram, seed: int, rate: float) -> None:
        self.program, self.rate = program, rate
        self.compile_seconds = program.compile_seconds
        self.state, self.done = program.init(seed), 0

    @property
    def stride(self) -> int:
        """A twentieth of the steps so far: a call from Python costs as much as some steps."""
        return max(20, self.done // 20)

    def advance(self, steps: int) -> None:
        self.state = self.program.advance(self.state, steps, self.rate)
        self.done += steps

    def gaussian(self) -> tuple[Tensor, Tensor]:
        params = self.program.svi.get_params(self.state)
        loc = torch.as_tensor(np.array(params["auto_loc"]))
        if "auto_scale" in params:
            scale = torch.diag(torch.as_tensor(np.array(params["auto_scale"])))
        else:
            scale = torch.as_tensor(np.array(params["auto_scale_tril"]))
        return loc[self.program.order], reordered(scale, self.program.order)


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
        return NumPyroRun(program(problem.name, family, particles, start), seed, rate)

    return begin


def blackjax_pathfinder(problem: Problem) -> Callable[[int, Tensor], tuple[Tensor, Tensor]]:
    """BlackJAX's Pathfinder, compiled: a seed and a start to the Gaussian that it samples from.

    With its defaults: at most 30 iterations of L-BFGS, ten pairs of steps, 200 draws for each ELBO.
    """
    import jax
    from blackjax.optimizers.lbfgs import lbfgs_inverse_hessian_formula_1 as covariance
    from blackjax.vi import pathfinder

    from .numpyro_models import log_joint

    jax.config.update("jax_enable_x64", True)
    density = log_joint(problem)

    def approximate(key: Any, start: Any) -> tuple[Any, Any]:
        state, _ = pathfinder.approximate(key, density, start)
        spread = covariance(state.alpha, state.beta, state.gamma)
        # The mean of its draws.  Its gradient is that of -log p, for which a Newton step has a minus.
        return state.position + spread @ state.grad_position, spread

    key = jax.random.PRNGKey
    program = jax.jit(approximate).lower(key(0), np.zeros(problem.dim)).compile()

    def find(seed: int, start: Tensor) -> tuple[Tensor, Tensor]:
        loc, spread = (torch.as_tensor(np.array(x)) for x in program(key(seed), start.numpy()))
        return loc, torch.linalg.cholesky(spread)

    return find
