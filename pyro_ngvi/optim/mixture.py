r"""Natural-gradient steps of a mixture: each component by itself, the weights, and lost components.

In the Fisher metric of :mod:`pyro_ngvi.families.mixture` components and weights are apart, and the
weights cancel: each component takes the step of :mod:`.natural_gradient` on its own bound, with a gain,
trust region and memory of its own, all K in one batched call.  So do the weights.

**Lost components.**  A component is idle where its weight has come to the least there is, or where it
is the twin of another, KL(k || j) + KL(j || k) < 0.1 nat by the draws of this step; then j gets the
weight.  Of the points that components drew, so far, those stay in memory where

    r(z) = log p(z) - log q(z)

is largest under the present q.  An idle component moves to the best of them, if there r exceeds the
ELBO by a nat: with the scales of the component that is responsible for the point, and the weight at
which its density at z meets that of p,

    log pi_k = log p(z) - ELBO - log N(z; z, Sigma),

at most log 1/K (after Arenz et al. 2023, arXiv:2209.11533, who add and delete).  It has to have waited
for 100 steps, and for as many more with every move so far.  Then averages begin anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..families.base import Tensors
from ..families.mixture import LEAST, by_component, each
from ..linalg.host import host_bool
from .natural_gradient import NaturalGradientRule
from .rule import Averaging, Rule, State, Step, choose

#: points in memory, steps that an idle component waits, nats between twins, nats that a move is for
POINTS, WAIT, TWINS, WORTH = 64, 100.0, 0.1, 1.0


@dataclass(frozen=True)
class MixtureRule(Rule):
    """The mathematics, as pure functions of tensors; ``component`` and ``weights`` step the parts."""

    family: Any
    component: NaturalGradientRule
    weights: NaturalGradientRule
    averaging: Averaging | None = None

    def refuses(self, family: Any) -> str | None:
        return self.component.refuses(family)

    def start(self, params: Tensors) -> State:
        loc = params["loc"]
        return {
            "components": self._fresh(params),
            "weights": self._fresh_weights(params),
            "path_share": loc.new_ones(len(loc)),
            "points": loc.new_zeros(POINTS, loc.shape[-1]),
            "log_p": loc.new_full((POINTS,), -torch.inf),
            "moves": loc.new_zeros(()),
        }

    def _fresh(self, params: Tensors) -> State:
        count = torch.zeros_like(params["logits"])
        return each(self.component.start, self.family.own(params)) | {"count": count}

    def _fresh_weights(self, params: Tensors) -> State:
        own = {"logits": params["logits"]}
        return self.weights.start(own) | {"count": params["logits"].new_zeros(())}

    def step(self, params: Tensors, grads: Tensors, state: State, curvature: Any = None) -> Step:
        pi = self.family.probs(params)
        bound = by_component(1.0 / pi, self.family.own(grads))  # gradients of each one's own
        parts = each(self._part, self.family.own(params), bound, state["components"])
        logits, gradient = ({"logits": t["logits"]} for t in (params, grads))
        weights = _as_dict(self.weights.step(logits, gradient, state["weights"]), state["weights"])
        length = ((pi * parts["length"].square()).sum() + weights["length"].square()).sqrt()
        own_radius = weights["radius"] if len(pi) > 1 else 0.0 * length  # one has nothing to weigh
        radius = ((pi * parts["radius"].square()).sum() + own_radius.square()).sqrt()
        new: Any = {"params": weights["params"] | parts["params"]}
        new["state"] = {"components": parts["state"], "weights": weights["state"]}
        keep = None
        if curvature and len(pi) > 1:
            new, keep = self._moved(params, new, state, curvature)
        share = new["state"]["components"].get("path_share", state["path_share"])
        return Step(
            new["params"],
            length,
            (pi * parts["gain"]).sum(),
            new["state"] | {"path_share": share},
            radius,
            parts["damped"].any() | weights["damped"],
            parts["finite"].all() & weights["finite"],
            None if self.averaging is None else keep,
            if_refused={"components": parts["refused"], "weights": weights["refused"]},
        )

    def _part(self, params: Tensors, grads: Tensors, state: State) -> dict[str, Any]:
        return _as_dict(self.component.step(params, grads, state), state)

    def _moved(
        self, params: Tensors, new: dict[str, Any], state: State, drawn: Tensors
    ) -> tuple[dict[str, Any], Tensor]:
        """``new`` with an idle component moved to where it is missed, and whether none was."""
        K, residuals = len(params["logits"]), drawn["residuals"]
        log_pi = params["logits"].log_softmax(-1)
        points = torch.cat([state["points"], drawn["draws"]])
        log_n = self.family.component_log_prob(params, points)
        joint = log_pi.unsqueeze(-1) + log_n
        log_q = joint.logsumexp(0)
        log_p = torch.cat([state["log_p"], log_q[POINTS:] - residuals])
        log_p = log_p.nan_to_num(-torch.inf, -torch.inf, -torch.inf)
        ratio = log_p - log_q
        largest, kept = ratio.topk(POINTS)
        points, log_p = points[kept], log_p[kept]
        memory: State = {"points": points, "log_p": log_p, "moves": state["moves"]}

        seen = (
            log_n[:, POINTS:].reshape(K, K, -1).mean(-1)
        )  # of each component, at draws of another
        divergence = seen.diagonal() - seen
        twins = (divergence + divergence.mT < TWINS).triu(1)  # of the second, named first
        components = new["state"]["components"]
        waited = components["count"] > WAIT * (1.0 + state["moves"])
        idle = waited & ((log_pi <= LEAST + 1e-3) | twins.any(0))
        elbo = -(log_pi.exp() * residuals.reshape(K, -1).mean(-1)).sum()
        worth = idle.any() & (largest[0] > elbo + WORTH) & largest[0].isfinite() & elbo.isfinite()
        if host_bool(worth) is False:
            return new | {"state": new["state"] | memory}, ~worth

        old: Tensors = new["params"]
        first = first_of(idle)
        here = first & worth

        def put(value: Tensor, at_k: Tensor) -> Tensor:
            return torch.where(here.reshape(-1, *[1] * (value.dim() - 1)), at_k, value)

        owner = first_of(joint.index_select(1, kept[:1])[:, 0].masked_fill(first, -torch.inf))
        own = {name: torch.tensordot(owner.to(v), v, 1) for name, v in self.family.own(old).items()}
        placed = {name: put(old[name], v) for name, v in (own | {"loc": points[0]}).items()}
        height = self.family.component.log_prob(own, own["loc"])
        weight = (log_p[0] - elbo - height).clamp(LEAST, -math.log(K))
        pi = old["logits"].softmax(-1)
        twin = (twins & first).any(
            1
        )  # those of which it is the twin: the first inherits its weight
        pi = pi + (first_of(twin) & twin) * (pi * first).sum()
        others = pi.masked_fill(here, 0.0)
        others = (1.0 - weight.exp()) * others / others.sum()
        logits = put(others.log(), weight).clamp_min(LEAST)
        placed = {"logits": torch.where(worth, logits, old["logits"])} | placed
        clean: State = {"components": tree_map(put, components, self._fresh(placed))}
        clean["weights"] = choose(~worth, new["state"]["weights"], self._fresh_weights(placed))
        memory["moves"] = state["moves"] + worth
        return {"params": placed, "state": clean | memory}, ~worth


def first_of(x: Tensor) -> Tensor:
    """Where the first of the largest entries of x (K,) is, (K,)."""
    return torch.arange(len(x), device=x.device) == x.to(torch.get_default_dtype()).argmax()


def _as_dict(step: Step, state: State) -> dict[str, Any]:
    """A step as a nested dict of tensors, with the state after it and the one if it is refused."""
    names = ("params", "length", "gain", "radius", "damped", "finite")
    count = {"count": state["count"] + 1.0}
    whole: dict[str, Any] = {name: getattr(step, name) for name in names}
    whole["state"] = state | step.state | count
    whole["refused"] = state | step.if_refused
    return whole
