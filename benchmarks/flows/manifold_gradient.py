r"""First-order methods on the rotations of an orthogonal flow: what IFVB is compared with.

With Proj_W(G) = W skew(W'G), the tangent part of G at an orthogonal W, and g the Euclidean gradient:

    ManifoldGradient    m <- 0.6 Proj(m) + 0.4 g min(1, c / |g|),   W <- cholesky-qr(W - b Proj(m))
    ProjectedAdam       W <- polar(Adam(W, g))
    AdamOnTangents      a <- Adam's step for tril(W'g - g'W),       W <- retract(W, a)

The projection of m from one W to the next is its transport.  In the frame of the family Proj(G) has the
coordinates pull(G) / 2; those of shifts are pull(g), for an orthogonal W.

Sources: Godichon-Baggioni, Nguyen & Tran (2024, JASA), example 3; Tran, Nguyen & Nguyen (2021,
Statistics and Computing 31:71) for the first with Riemannian gradients; Kingma & Ba (2015).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from pyro.optim import PyroOptim

from pyro_ngvi.families.base import Tensors
from pyro_ngvi.families.orthogonal_flow import is_rotation
from pyro_ngvi.families.vectors import pack
from pyro_ngvi.optim.host import NaturalGradientOptim
from pyro_ngvi.optim.rule import Rule, State, Step

__all__ = ["AdamOnTangents", "ManifoldGradient", "ProjectedAdam"]


@dataclass(frozen=True)
class GradientRule(Rule):
    """The first method above.

    ``normal=False`` clips and averages Proj(g) in place of g.
    """

    learns_fisher: ClassVar[bool] = True

    family: Any
    rate: float
    clip: float
    momentum: float
    flat: int
    normal: bool

    def start(self, params: Tensors) -> State:
        return {"m": {name: torch.zeros_like(v) for name, v in params.items()}}

    def _tangent(self, params: Tensors, G: Tensors) -> Tensors:
        pulled = self.family.pull(params, G)
        return {name: 0.5 * v if is_rotation(name) else v for name, v in pulled.items()}

    def _project(self, params: Tensors, G: Tensors) -> Tensors:
        return self.family.push(params, self._tangent(params, G))

    def step(self, params: Tensors, grads: Tensors, state: State) -> Step:
        g = grads if self.normal else self._project(params, grads)
        shrink = (self.clip / torch.linalg.vector_norm(pack(g))).clamp_max(1.0)
        past = self._project(params, state["m"])
        share = (1.0 - self.momentum) * shrink
        m = {name: self.momentum * past[name] + share * g[name] for name in past}
        tangent, count = self._tangent(params, m), state["count"] + 1.0
        step = self.rate * (self.flat / count).clamp_max(1.0)
        new = self.family.retract(params, tangent, -step)
        length = step * torch.linalg.vector_norm(pack(m))
        return Step(new, length, step, {"m": m})


@dataclass(frozen=True)
class TangentAdamRule(Rule):
    """Adam on the packed gradient of the local frame."""

    learns_fisher: ClassVar[bool] = True

    family: Any
    rate: float
    decays: tuple[float, float] = (0.9, 0.999)

    def start(self, params: Tensors) -> State:
        zero = torch.zeros_like(self.family.pack(params))
        return {"first": zero, "second": zero.clone()}

    def step(self, params: Tensors, grads: Tensors, state: State) -> Step:
        g, count = self.family.pack(self.family.pull(params, grads)), state["count"] + 1.0
        one, two = self.decays
        first = torch.lerp(state["first"], g, 1.0 - one)
        second = torch.lerp(state["second"], g.square(), 1.0 - two)
        scale = (second / (1.0 - two**count)).sqrt() + 1e-8
        move = self.rate * first / (1.0 - one**count) / scale
        new = self.family.retract(params, self.family.unpack(move, params), -1.0)
        length = torch.linalg.vector_norm(move)
        return Step(new, length, torch.ones_like(length), {"first": first, "second": second})


class ManifoldGradient(NaturalGradientOptim):
    """The Euclidean gradient, clipped, with momentum; steps fall as 1/k after ``flat`` of them."""

    def __init__(
        self, guide: Any, step: float, clip: float, momentum: float, flat: int, normal: bool = True
    ) -> None:
        arguments: dict[str, Any] = {"rate": step, "clip": clip, "momentum": momentum}
        self._make = partial(GradientRule, flat=flat, normal=normal, **arguments)
        super().__init__(guide)

    def make_rule(self, family: Any) -> GradientRule:
        return self._make(family)


class AdamOnTangents(NaturalGradientOptim):
    """Adam in the local frame of the flow."""

    def __init__(self, guide: Any, rate: float) -> None:
        self._rate = rate
        super().__init__(guide)

    def make_rule(self, family: Any) -> TangentAdamRule:
        return TangentAdamRule(family, self._rate)


class ProjectedAdam(PyroOptim):
    """Adam on the stored matrices, each then replaced by the nearest orthogonal one."""

    def __init__(self, guide: Any, rate: float) -> None:
        super().__init__(torch.optim.Adam, {"lr": rate})
        self._guide = guide

    @torch.no_grad()
    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__call__(params, *args, **kwargs)
        for name, p in self._guide.natural_params().items():
            if is_rotation(name):
                U, _, V = torch.linalg.svd(p)
                p.copy_(U @ V)
