"""Natural-gradient steps from a start, as a search takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..families.base import Tensors
from ..linalg.host import apart, own_random_state
from ..optim.ngvb import make_rule
from .deadline import is_late

#: draws of a step, and behind the ELBOs that are compared
DRAWS, COMPARED = 8, 256


def ascended(
    density: Callable[[Tensor], Tensor], family: Any, params: Tensors, steps: int
) -> Tensors:
    """What so many steps of NGVB make of ``params``, of a seed of its own, if the ELBO is no lower."""
    rule = make_rule(family, averaging=False)

    def loss(q: Tensors, fixed: Tensors, n: int) -> Tensor:
        z = family.draw(q, torch.Size((n,)))
        return (family.log_prob(fixed, z) - density(z)).mean()

    with own_random_state(apart(0)), torch.no_grad():
        before, now, state = loss(params, params, COMPARED), params, rule.init(params)
        for _ in range(steps):
            if is_late():
                break
            leaves = {name: v.detach().requires_grad_() for name, v in now.items()}
            with torch.enable_grad():
                found = torch.autograd.grad(loss(leaves, now, DRAWS), [*leaves.values()])
            now, state, _ = rule.update(now, dict(zip(leaves, found, strict=True)), state)
        after = loss(now, now, COMPARED)
    better = torch.isfinite(after) & ~(after > before)
    return {name: torch.where(better, v, params[name]) for name, v in now.items()}
