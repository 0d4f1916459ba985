r"""Natural-gradient steps of a mixture: each component by itself, the weights, and lost components.

The weights cancel (:mod:`pyro_ngvi.families.mixture`): each component takes the step of
:mod:`.natural_gradient` on its own bound, with gain, trust region and memory of its own, all K in one
call.  So do the weights.

**Lost components.**  A component is idle where its weight is the least there is, or as the twin of
another, KL(k || j) + KL(j || k) < 0.1 nat by the draws of this step; then j gets the weight.  Of the
points drawn so far those stay in memory where r = log p - log q is largest under the present q.  An
idle one moves to the best, z, if there r exceeds the ELBO by a nat: with the scales of the component
that is responsible for it, and the weight at which the densities meet,

    log pi_k = log p(z) - ELBO - log N(z; z, Sigma), at most log 1/K

(after Arenz et al. 2023, arXiv:2209.11533).  It has waited for 100 steps, and as many more with every
move so far.  Averages then begin anew.
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
from ..linalg.host import choose, host_bool
from .natural_gradient import NaturalGradientRule
from .rule import Averaging, Rule, State, Step

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
        state = self._fresh(params) | {"path_share": torch.ones_like(loc[:, 0])}
        state |= {"points": loc.new_zeros(POINTS, loc.shape[1]), "moves": loc.new_zeros(())}
        return state | {"log_p": loc.new_full((POINTS,), -torch.inf)}

    def _fresh(self, params: Tensors) -> State:
        """The states of the parts before their first step."""
        count = torch.zeros_like(params["logits"])
        weights = self.weights.start({"logits": params["logits"]}) | {"count": count.new_zeros(())}
        own = each(self.component.start, self.family.own(params)) | {"count": count}
        return {"components": own, "weights": weights}

    def step(self, params: Tensors, grads: Tensors, state: State, curvature: Any = None) -> Step:
        pi, one = self.family.probs(params), len(params["logits"]) == 1
        bounds = by_component(1.0 / pi, self.family.own(grads))
        parts = each(_part(self.component), self.family.own(params), bounds, state["components"])
        logits = ({"logits": t["logits"]} for t in (params, grads))
        weights = _part(self.weights)(*logits, state["weights"])
        new = weights["params"] | parts["params"]
        own: State = {"components": parts["state"], "weights": weights["state"]}
        keep = None
        if curvature and not one:
            new, own, keep = self._moved(params, new, own, state, curvature)
        whole = [(pi * parts[n].square()).sum() for n in ("length", "radius")]
        if not one:  # one has nothing to weigh
            whole = [
                v + weights[n].square() for v, n in zip(whole, ("length", "radius"), strict=True)
            ]
        length, radius = (v.sqrt() for v in whole)
        return Step(
            new,
            length,
            (pi * parts["gain"]).sum(),
            own | {"path_share": own["components"].get("path_share", state["path_share"])},
            radius,
            parts["damped"].any() | weights["damped"],
            parts["finite"].all() & weights["finite"],
            None if self.averaging is None else keep,
            if_refused={"components": parts["refused"], "weights": weights["refused"]},
        )

    def _moved(
        self, params: Tensors, new: Tensors, own: State, state: State, drawn: Tensors
    ) -> tuple[Tensors, State, Tensor]:
        """Parameters and state with an idle component where it is missed; whether none has moved."""
        K, residuals = len(params["logits"]), drawn["residuals"]
        log_pi = params["logits"].log_softmax(-1)
        points = torch.cat([state["points"], drawn["draws"].flatten(0, 1)])
        log_n = self.family.component_log_prob(params, points)
        joint = log_pi.unsqueeze(-1) + log_n
        log_q = joint.logsumexp(0)
        log_p = torch.cat([state["log_p"], log_q[POINTS:] - residuals.flatten()])
        log_p = log_p.nan_to_num(-torch.inf, -torch.inf, -torch.inf)
        best, kept = (log_p - log_q).topk(POINTS)
        points, log_p = points[kept], log_p[kept]

        # of a row's density, at a column's draws
        mean = log_n[:, POINTS:].reshape(K, -1, K).mean(1)
        divergence = mean.diagonal() - mean
        twins = (divergence + divergence.mT < TWINS).triu(1)
        waited = own["components"]["count"] > WAIT * (1.0 + state["moves"])
        idle = waited & ((log_pi <= LEAST + 1e-3) | twins.any(0))
        elbo = -(log_pi.exp() * residuals.mean(0)).sum()
        moves = idle.any() & (best[0] > elbo + WORTH) & best[0].isfinite() & elbo.isfinite()
        own = own | {"points": points, "log_p": log_p, "moves": state["moves"] + moves}
        if host_bool(moves) is False:
            return new, own, ~moves

        first = first_of(idle)
        here = first & moves

        def put(value: Tensor, at: Tensor) -> Tensor:
            return torch.where(here.reshape(-1, *[1] * (value.dim() - 1)), at, value)

        owner = first_of(joint.index_select(1, kept[:1])[:, 0].masked_fill(first, -torch.inf))
        of_owner = {n: torch.tensordot(owner.to(v), v, 1) for n, v in self.family.own(new).items()}
        weight = log_p[0] - elbo - self.family.component.log_prob(of_owner, of_owner["loc"])
        weight = weight.clamp(LEAST, -math.log(K))
        pi, twin = self.family.probs(new), (twins & first).any(1)
        pi = pi + (first_of(twin) & twin) * (pi * first).sum()
        others = pi.masked_fill(here, 0.0)
        logits = put(((1.0 - weight.exp()) * others / others.sum()).log(), weight).clamp_min(LEAST)
        placed = {"logits": torch.where(moves, logits, new["logits"])}
        placed |= {n: put(new[n], v) for n, v in (of_owner | {"loc": points[0]}).items()}
        fresh = self._fresh(placed)
        own["components"] = tree_map(put, own["components"], fresh["components"])
        own["weights"] = choose(~moves, own["weights"], fresh["weights"])
        return placed, own, ~moves


def first_of(x: Tensor) -> Tensor:
    """Where the first of the largest entries of x (K,) is, (K,)."""
    return torch.arange(len(x), device=x.device) == x.to(torch.get_default_dtype()).argmax()


def _part(rule: Rule) -> Any:
    """The step of ``rule`` as a dict of tensors, with the states after it and where it is refused."""

    def step(params: Tensors, grads: Tensors, state: State) -> dict[str, Any]:
        found = vars(rule.step(params, grads, state))
        after = state | found["state"] | {"count": state["count"] + 1.0}
        kept = {n: found[n] for n in ("params", "length", "gain", "radius", "damped", "finite")}
        return kept | {"state": after, "refused": state | found["if_refused"]}

    return step
