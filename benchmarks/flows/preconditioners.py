r"""Fisher preconditioners for a flow at equal time: gap to log Z on the banana and the funnel.

The guide is ``AutoCouplingFlow(affine="diagonal", hidden=(16, 16))``, float64; seconds are those of the
thread's own clock, which stands while the ELBO is evaluated.  All but SPRING have ``BatchedELBO(16)``,
with path gradients.

* **Adam**: at two rates.
* **IFVB low_rank**: calibrated in all directions, the default of guides that are not flows.
* **IFVB window**, **AIFVB window**: the default for flows, K = 128 scores, ridge 1.
* **conjugate gradient**: (F + c I) G = g with F = J'J / S of 128 fresh scores, never formed.  J is the
  Jacobian of log q at S fixed draws.  J'w is a backward pass, and J v the derivative of <J'w, v> in
  w, a backward pass through it; the graph is built once a step.  c = mean of diag(F), by one random
  vector; 10 iterations from 0; the steps of IFVB.
* **SPRING**: its defaults with ``BatchedELBO(128, curvature="scores")``.

A run that meets a NaN stays as it is: its gap is infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from pyro.infer import SVI
from pyro.optim import PyroOptim
from torch import Tensor

import pyro_ngvi
from pyro_ngvi.families.base import Tensors
from pyro_ngvi.fisher import LowRank
from pyro_ngvi.optim.blocks import EstimatedGeometry
from pyro_ngvi.optim.host import NaturalGradientOptim
from pyro_ngvi.optim.ifvb import SLOW
from pyro_ngvi.optim.natural_gradient import NaturalGradientRule
from pyro_ngvi.optim.ngvb import make_rule
from pyro_ngvi.optim.rule import Rule, State, Step

from .hard_targets import Contestant, Maker, Table, compare
from .targets import load

__all__ = ["METHODS", "ConjugateGradient", "ConjugateGradientRule", "fisher_operator", "run"]

TARGETS = ("banana", "funnel10")
PARTICLES, SPRING_PARTICLES = 16, 128
#: scores behind each system of the conjugate gradient, and its iterations
SCORES, ITERATIONS = 128, 10
SECONDS, QUICK_SECONDS = 30.0, 10.0


def fisher_operator(
    family: Any, params: Tensors, z: Tensor
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """v -> F v for packed v (D,) of the local frame, F the mean over the draws z (S, d), and its trace.

    The trace is an estimate by one random vector.
    """
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    with torch.enable_grad():
        log_q = family.log_prob(leaves, z)
        w = torch.zeros_like(log_q, requires_grad=True)
        pulled = torch.autograd.grad(log_q, list(leaves.values()), w, create_graph=True)

    def transposed(x: Tensor) -> Tensor:
        grads = torch.autograd.grad(log_q, list(leaves.values()), x, retain_graph=True)
        grads = dict(zip(leaves, grads, strict=True))
        return family.pack(family.pull(params, grads))

    def product(v: Tensor) -> Tensor:
        velocity = family.push(params, family.unpack(v, params))
        along = [velocity[name] for name in leaves]
        (seen,) = torch.autograd.grad(pulled, w, along, retain_graph=True)
        return transposed(seen) / len(z)

    signs = torch.randint(2, (len(z),), device=z.device).to(z) * 2.0 - 1.0
    return product, transposed(signs).square().sum() / len(z)


def conjugate_gradient(product: Callable[[Tensor], Tensor], g: Tensor, iterations: int) -> Tensor:
    """x with ``product(x)`` close to g (Hestenes & Stiefel 1952), from 0."""
    x, r, p = torch.zeros_like(g), g, g
    tiny = torch.finfo(g.dtype).tiny
    square = r @ r
    for _ in range(iterations):
        q = product(p)
        step = square / (p @ q).clamp_min(tiny)
        x, r = x + step * p, r - step * q
        before, square = square, r @ r
        p = r + square / before.clamp_min(tiny) * p
    return x


@dataclass(frozen=True)
class ConjugateGradientRule(Rule):
    """The rule of IFVB without memory: a Fisher matrix of fresh scores at each step."""

    learns_fisher: ClassVar[bool] = True

    rule: NaturalGradientRule
    scores: int = SCORES
    iterations: int = ITERATIONS
    damping: float = 1.0

    @property
    def family(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rule.family

    @property
    def averaging(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rule.averaging

    def start(self, params: Tensors) -> State:
        return self.rule.start(params)

    def step(self, params: Tensors, grads: Tensors, state: State) -> Step:
        z = self.family.draw(params, torch.Size((self.scores,)))
        product, trace = fisher_operator(self.family, params, z)

        def solve(g: Tensor) -> Tensor:
            ridge = self.damping * trace / len(g)
            return conjugate_gradient(lambda v: product(v) + ridge * v, g, self.iterations)

        geometry = EstimatedGeometry(self.family, solve)
        return replace(self.rule, family=geometry).step(params, grads, state)


class ConjugateGradient(NaturalGradientOptim):
    """Natural gradients of a flow guide by conjugate gradients."""

    def make_rule(self, family: Any) -> ConjugateGradientRule:
        return ConjugateGradientRule(make_rule(family, 1.0, 1.0, SLOW, None, None))


def _contestant(make: Callable[[Any], Any], loss: Any, model: Callable[..., Any]) -> Contestant:
    guide = pyro_ngvi.AutoCouplingFlow(model, affine="diagonal", hidden=(16, 16))
    return guide, SVI(model, guide, make(guide), loss=loss), lambda: nullcontext(guide)


def _maker(make: Callable[[Any], Any]) -> Maker:
    return partial(_contestant, make, pyro_ngvi.BatchedELBO(PARTICLES))


def _adam(rate: float) -> Maker:
    return _maker(lambda guide: PyroOptim(torch.optim.Adam, {"lr": rate}))


METHODS: dict[str, Maker] = {
    # a name that ends in " Adam RATE" would be one of a grid, of which the table has the best
    "Adam, rate 0.003": _adam(0.003),
    "Adam, rate 0.01": _adam(0.01),
    "IFVB low_rank": _maker(partial(pyro_ngvi.IFVB, fisher=LowRank(32, growth=1.0))),
    "IFVB window": _maker(pyro_ngvi.IFVB),
    "AIFVB window": _maker(pyro_ngvi.AIFVB),
    "conjugate gradient": _maker(ConjugateGradient),
    "SPRING": partial(
        _contestant,
        pyro_ngvi.optim.SPRING,
        pyro_ngvi.BatchedELBO(SPRING_PARTICLES, curvature="scores"),
    ),
}


def run(
    quick: bool, seeds: int, data: Sequence[str] | None, seconds: float | None = None
) -> Iterator[Table]:
    """A table for each target; ``seconds`` a run, by default 30 (quick: 10)."""
    torch.set_default_dtype(torch.float64)
    budget = seconds or (QUICK_SECONDS if quick else SECONDS)
    for name in data or TARGETS:
        yield compare(load(name), seeds, budget, METHODS)
