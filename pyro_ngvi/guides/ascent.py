"""Natural-gradient steps from a start, as a search takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..families.base import Tensors
from ..linalg.host import apart, own_random_state
from ..optim.ngvb import make_rule
from .deadline import is_late

#: draws of a step, and behind the ELBOs that are compared
DRAWS, COMPARED = 8, 256


def steps_of(
    density: Callable[[Tensor], Tensor], family: Any, params: Tensors, steps: int
) -> Iterator[tuple[Tensors, Tensor]]:
    """Each iterate of NGVB, and the ELBO of the one before by the draws of its step (DRAWS,)."""
    rule = make_rule(family, averaging=False)
    state = rule.init(params)
    for _ in range(steps):
        if is_late():
            return
        leaves = {name: v.detach().requires_grad_() for name, v in params.items()}
        with torch.enable_grad():
            z = family.centred_draw(leaves, torch.Size((DRAWS,)))
            log_p, log_q = density(z), family.log_prob(params, z)
            loss, share = (log_q - log_p).mean(), state.get("path_share")
            if share is not None:  # of log q; the rest by the entropy, which is free of noise
                loss = loss - (1.0 - share) * (log_q.mean() + family.entropy(leaves))
            found = torch.autograd.grad(loss, [*leaves.values()])
        params, state, _ = rule.update(params, dict(zip(leaves, found, strict=True)), state)
        yield params, (log_p - log_q).detach()


def ascended(
    density: Callable[[Tensor], Tensor], family: Any, params: Tensors, steps: int
) -> Tensors:
    """What so many steps of NGVB make of ``params``, of a seed of its own, if the ELBO is no lower."""

    def elbo(q: Tensors) -> Tensor:
        z = family.draw(q, torch.Size((COMPARED,)))
        return (density(z) - family.log_prob(q, z)).mean()

    with own_random_state(apart(0)), torch.no_grad():
        before, now = elbo(params), params
        for moved, _ in steps_of(density, family, params, steps):
            now = moved
        after = elbo(now)
    better = torch.isfinite(after) & ~(after < before)
    return {name: torch.where(better, v, params[name]) for name, v in now.items()}
