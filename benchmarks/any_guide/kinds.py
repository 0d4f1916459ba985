"""Further kinds of guides: of parts, by hand, with a network, with latent variables of minibatches.

**laplace**: an ``AutoMultivariateNormal`` that starts at what ``AutoLaplaceApproximation`` finds, on
wdbc.  **list**: an ``AutoGuideList`` of a full-rank part for the coefficients and a mean-field one for
the groups, on varying intercepts.  **easy**: an ``EasyGuide`` whose one group of sites is a Gaussian
with a factor by ``pyro.param``, on wdbc.

**amortised**: x_i = tanh(B z_i) + noise with B known, z_i of two numbers for each of 200 rows; a
network of 214 parameters reads x_i and gives mean and sds of z_i.

**locals**: y_i = z_i + noise, z_i ~ N(0, s), for 200 rows of which a step sees 20; ``AutoNormal`` holds
a mean and an sd for each z_i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.contrib.easyguide import EasyGuide
from pyro.distributions import constraints
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.nn import PyroParam
from pyro.optim import PyroOptim
from torch import Tensor, nn

from pyro_ngvi.optim import remember_arguments

from ..problems import load
from .guides import Problem, by_draws, regression

__all__ = ["KINDS"]

ROWS, SEEN, LATENT, WIDTH, HIDDEN = 200, 20, 2, 10, 14
START = 0.1
#: 1,000 data and 200 rows of latent variables are dear to draw
few_draws = partial(by_draws, draws=4_000)


def laplace() -> Problem:
    """Newton's Gaussian at a mode that Adam finds."""
    problem = regression("wdbc_full")

    pyro.clear_param_store()
    point = AutoLaplaceApproximation(problem.model)
    svi = SVI(problem.model, point, PyroOptim(torch.optim.Adam, {"lr": 0.1}), Trace_ELBO())
    for _ in range(500):
        svi.step(*problem.args)
    q = point.laplace_approximation(*problem.args).get_posterior()

    def make() -> Any:
        guide: Any = AutoMultivariateNormal(problem.model)
        guide(*problem.args)  # it has parameters: the one that the other returned has none
        scale = q.scale_tril.diagonal()
        guide.loc = PyroParam(q.mean.clone())
        guide.scale = PyroParam(scale.clone(), constraints.softplus_positive)
        unit = q.scale_tril / scale[:, None]
        guide.scale_tril = PyroParam(unit, constraints.unit_lower_cholesky)
        return guide

    return replace(problem, name="laplace", make_guide=make)


def guide_list() -> Problem:
    """Two of Pyro's guides side by side."""
    problem = load("varying_intercepts")

    def make() -> Any:
        guide, model = AutoGuideList(problem.model), problem.model
        guide.append(AutoMultivariateNormal(poutine.block(model, hide=["a", "y"])))
        guide.append(AutoNormal(poutine.block(model, expose=["a"])))
        return guide

    return Problem("list", problem.model, problem.args, make, few_draws)


class Easy(EasyGuide):
    """All sites in one group."""

    def guide(self, *args: Any) -> None:
        group = self.group()
        d = int(group.event_shape[0])
        loc = pyro.param("loc", lambda: torch.zeros(d))
        factor = pyro.param("factor", START * torch.eye(d), constraint=constraints.lower_cholesky)
        group.sample("all", dist.MultivariateNormal(loc, scale_tril=factor))


def easy() -> Problem:
    """``EasyGuide``."""
    problem: Any = load("wdbc")

    def evaluate(_: Problem, guide: Any) -> tuple[float, float]:
        return problem.exact_elbo(pyro.param("loc"), pyro.param("factor")), 0.0

    return Problem("easy", problem.model, problem.args, lambda: Easy(problem.model), evaluate)


def _curved(x: Tensor, B: Tensor) -> None:
    with pyro.plate("rows", len(x)):
        z = pyro.sample("z", dist.Normal(x.new_zeros(LATENT), 1.0).to_event(1))
        pyro.sample("x", dist.Normal((z @ B).tanh(), 0.1).to_event(1), obs=x)


def amortised() -> Problem:
    """A network that reads a row."""
    noise = torch.Generator().manual_seed(1)
    B = torch.randn(LATENT, WIDTH, generator=noise)
    z = torch.randn(ROWS, LATENT, generator=noise)
    x = (z @ B).tanh() + 0.1 * torch.randn(ROWS, WIDTH, generator=noise)

    def make() -> Callable[..., Any]:
        net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2 * LATENT))

        def guide(x: Tensor, B: Tensor) -> None:
            pyro.module("net", net)
            loc, log_scale = net(x).chunk(2, -1)
            with pyro.plate("rows", len(x)):
                pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))

        return remember_arguments(guide)

    return Problem("amortised", _curved, (x, B), make, few_draws)


def _locals(y: Tensor, size: int | None) -> None:
    scale = pyro.sample("scale", dist.LogNormal(y.new_zeros(()), 0.5))
    with pyro.plate("rows", len(y), subsample_size=size) as i:
        z = pyro.sample("z", dist.Normal(0.0, scale))
        pyro.sample("y", dist.Normal(z, 0.5), obs=y[i])


def local_latents() -> Problem:
    """Trained on minibatches, judged on all rows."""
    y = 1.5 * torch.randn(ROWS, generator=torch.Generator().manual_seed(1))

    def plates(y: Tensor, size: int | None) -> Any:
        return pyro.plate("rows", len(y), subsample_size=size, dim=-1)

    def evaluate(problem: Problem, guide: Any) -> tuple[float, float]:
        return few_draws(replace(problem, args=(y, None)), guide)

    make = partial(AutoNormal, _locals, create_plates=plates)
    return Problem("locals", _locals, (y, SEEN), make, evaluate)


KINDS: dict[str, Callable[[], Problem]] = {
    "laplace": laplace,
    "list": guide_list,
    "easy": easy,
    "amortised": amortised,
    "locals": local_latents,
}
