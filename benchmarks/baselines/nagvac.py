r"""NAGVAC: natural gradients for Sigma = b b' + diag(c^2) from an approximate Fisher matrix.

From the Euclidean gradient (g_mu, g_b, g_c) of the loss, with k = sum b^2 / c^2, s = k / (1 + k) and
P = Sigma^-1, divisions and powers of vectors entrywise:

    G_mu = Sigma g_mu                                                      exact
    G_b  = (2 s P)^-1 g_b = (1 + k) / (2 k) Sigma g_b                      approximate
    G_c  = (2 C (P o P) C)^-1 g_c,   C = diag(c)                           exact block
    m <- G at the first step, then momentum m + (1 - momentum) G,  G clipped to length clip_norm
    (mu, b, c) <- (mu, b, c) - lr min(1, tau / step) m

**What the approximation drops.**  The Fisher block of b is s P + P b b' P, its inverse Sigma / s -
b b' / (2 s^2): along b the two agree, in the d - 1 directions across it G_b is half as long as it
should be.  The cross block of b and c, 2 P_ij c_j (P b)_j, is left out.  -G still goes downhill.
:class:`~pyro_ngvi.NGVB` solves with all of F, at O(d) too.

**The sign of c.**  Steps are taken in c itself, as published, and may carry an entry through zero.
Only c^2 enters q, and the guide stores log|c|: the gradient in c is the one in log c over c, and where
c changes sign so does the entry of m, which makes the run the same as with the sign kept.  An entry
that would land nearer to zero than sqrt(machine epsilon) |c| stops there.  Where the best c_i is zero
(few dimensions), G_c grows like 1 / c_i on the way and only the clipping ends it.

With the leverages l = b^2 / (c^2 (1 + k)), P o P = C^-2 (diag(1 - 2 l) + l l') C^-2: its inverse is
Sherman & Morrison's.

Not for use beyond comparisons: it needs a learning rate, and NGVB on the same guide does not.

Source: Tran, Nguyen, Nott & Kohn (2020, JCGS 29:97), "Bayesian deep net GLM and GLMM"; the clipping is
in the authors' scripts only.  These also roll m back where a validation loss got worse: that belongs to
a training loop and is not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_ngvi.families import FactorNormal
from pyro_ngvi.families.base import Tensors, clamp_exponent
from pyro_ngvi.families.factor_base import Factors, row
from pyro_ngvi.families.vectors import pack
from pyro_ngvi.optim.host import NaturalGradientOptim
from pyro_ngvi.optim.rule import Rule, State, Step
from pyro_ngvi.optim.state import ADAM

__all__ = ["NAGVAC", "NAGVACRule", "approximate_natural_gradient"]

#: the published settings
LEARNING_RATE = 0.01
TAU = 10_000
MOMENTUM = 0.6
CLIP_NORM = 100.0


def tangent_of(params: Tensors, velocity: Tensors) -> Tensors:
    """The tangent of a velocity of ``params``: the inverse of ``FactorNormal.push``."""
    factors = Factors(params["factor"], params["log_scale"])
    return {
        "loc": row(factors.inverse_root, velocity["loc"]),
        "factor": velocity["factor"] / factors.c.unsqueeze(-1),
        "log_scale": velocity["log_scale"],
    }


def approximate_natural_gradient(params: Tensors, grads: Tensors) -> Tensors:
    """(G_mu, G_b, G_c) as "loc" (d,), "factor" (d, 1) and "scale" (d,).

    ``params`` and ``grads`` are those of ``FactorNormal(rank=1)``, in loc, factor and log_scale.
    """
    c, b = params["log_scale"].exp(), params["factor"].squeeze(-1)
    tiny, epsilon = torch.finfo(c.dtype).tiny, torch.finfo(c.dtype).eps
    ratio = (b / c).square()
    k = ratio.sum()

    def covariance_times(g: Tensor) -> Tensor:
        return torch.dot(b, g) * b + c.square() * g

    leverage = ratio / (1.0 + k)
    diagonal = 1.0 - 2.0 * leverage
    # One leverage may be 1/2.  The matrix is then as regular as ever, and this much harms it no more
    # than the cancellation that it prevents.
    diagonal = torch.where(diagonal.abs() < epsilon**0.5, epsilon**0.5, diagonal)
    first, second = grads["log_scale"] / diagonal, leverage / diagonal
    # 1 + l'second; for the largest leverage, 1 + l^2 / (1 - 2 l) = (1 - l)^2 / (1 - 2 l), because near
    # l = 1 (c small beside b) nothing would be left of the difference
    top = ratio.argmax().unsqueeze(0)
    rest = ratio.index_fill(0, top, 0.0)
    l_top, diagonal_top, second_top = (
        v.index_select(0, top).squeeze(0) for v in (leverage, diagonal, second)
    )
    near_one = ((1.0 + rest.sum()) / (1.0 + k)).square() / diagonal_top
    slack = torch.where(l_top > 0.75, near_one, 1.0 + l_top * second_top)
    share = torch.dot(leverage, first) / (slack + torch.dot(rest / (1.0 + k), second))
    g_b = grads["factor"].squeeze(-1)
    return {
        "loc": covariance_times(grads["loc"]),
        "factor": ((1.0 + k) / (2.0 * k).clamp_min(tiny) * covariance_times(g_b)).unsqueeze(-1),
        "scale": 0.5 * c * (first - share * second),
    }


@dataclass(frozen=True)
class NAGVACRule(Rule):
    """The mathematics, as pure functions of tensors."""

    family: FactorNormal
    lr: float = LEARNING_RATE
    tau: float = TAU
    momentum: float = MOMENTUM
    clip_norm: float = CLIP_NORM

    def refuses(self, family: Any) -> str | None:
        if isinstance(family, FactorNormal) and family.rank == 1:
            return None
        return (
            "it is written for one factor. Use pyro_ngvi.AutoFactorNormal(model, rank=1), or "
            "pyro_ngvi.NGVB."
        )

    def start(self, params: Tensors) -> State:
        names = {"loc": "loc", "factor": "factor", "scale": "log_scale"}
        return {"momentum": {k: torch.zeros_like(params[name]) for k, name in names.items()}}

    def step(self, params: Tensors, grads: Tensors, state: State) -> Step:
        G = approximate_natural_gradient(params, grads)
        norm = torch.linalg.vector_norm(pack(G))
        shrink = (self.clip_norm / norm).clamp_max(1.0)
        new_share = torch.where(state["count"] == 0, 1.0, 1.0 - self.momentum).to(norm)
        past = state["momentum"]
        m = {name: torch.lerp(past[name], shrink * v, new_share) for name, v in G.items()}

        lr = self.lr * (self.tau / (state["count"] + 1.0)).clamp_max(1.0)
        c = params["log_scale"].exp()
        signed = c - lr * m["scale"]
        nearest = torch.finfo(c.dtype).eps ** 0.5 * c
        new = {
            "loc": params["loc"] - lr * m["loc"],
            "factor": params["factor"] - lr * m["factor"],
            "log_scale": clamp_exponent(torch.maximum(signed.abs(), nearest).log()),
        }
        move = {"loc": m["loc"], "factor": m["factor"], "log_scale": m["scale"] / c}
        step_norm = lr * self.family.fisher_norm(params, tangent_of(params, move))

        turned = torch.where(signed < 0, -m["scale"], m["scale"])
        changed = {"momentum": m | {"scale": turned}}
        # a NaN in the gradient is one in the norm
        return Step(new, step_norm, lr, changed, damped=shrink < 1.0, finite=torch.isfinite(norm))


class NAGVAC(NaturalGradientOptim):
    """Natural-gradient Gaussian variational approximation with a factor covariance, as published.

    For ``AutoFactorNormal(model, rank=1)``, to compare with: its Fisher matrix is an approximation
    whose block of the factor b is 2 s Sigma^-1 in place of s Sigma^-1 + Sigma^-1 b b' Sigma^-1, which
    halves steps across b, and which has no block between b and c.  :class:`~pyro_ngvi.NGVB` uses the
    exact matrix and needs no learning rate.  The equations stand at the head of this file.

    Args:
        guide: an ``AutoFactorNormal`` of rank 1, or a list of guides that contains some.
        lr: learning rate on the natural gradient.
        tau: number of steps after which the learning rate falls as lr * tau / step.
        momentum: weight in [0, 1) of the past in the average of the natural gradients.
        clip_norm: largest Euclidean norm of the natural gradient in (mu, b, c).
        others: a ``PyroOptim`` for parameters that are not the guide's; see :class:`~pyro_ngvi.NGVB`.

    Raises:
        ValueError: for another guide or rank, or arguments out of range.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> import pyro_ngvi as ngvi
        >>> from benchmarks.baselines import NAGVAC
        >>> def model():
        ...     pyro.sample("x", dist.Normal(torch.tensor([3.0, -1.0]), 2.0).to_event(1))
        >>> guide = ngvi.AutoFactorNormal(model, rank=1)
        >>> optim = NAGVAC(guide, lr=0.05)
        >>> svi = SVI(model, guide, optim, Trace_ELBO(8, vectorize_particles=True))
        >>> for _ in range(300):
        ...     loss = svi.step()
        >>> bool((guide.median()["x"] - torch.tensor([3.0, -1.0])).abs().max() < 0.2)
        True
    """

    suits = "pyro_ngvi.AutoFactorNormal(model, rank=1)"

    def __init__(
        self,
        guide: Any,
        lr: float = LEARNING_RATE,
        tau: float = TAU,
        momentum: float = MOMENTUM,
        clip_norm: float = CLIP_NORM,
        others: PyroOptim | None = ADAM,
    ) -> None:
        for name, value in {"lr": lr, "tau": tau, "clip_norm": clip_norm}.items():
            if not 0.0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number, got {value!r}.")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum!r}.")
        self._arguments = (float(lr), float(tau), float(momentum), float(clip_norm))
        super().__init__(guide, others)

    def make_rule(self, family: Any) -> NAGVACRule:
        return NAGVACRule(family, *self._arguments)
