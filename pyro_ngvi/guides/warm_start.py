"""Posterior mode by L-BFGS: an optional start for the location."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..density import ModelDensity

__all__ = ["find_mode"]


def find_mode(
    model: Callable[..., Any],
    start: Tensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    max_iter: int = 50,
) -> Tensor:
    """Mode of the log joint over the unconstrained latent vector, from ``start`` (d,).

    L-BFGS with a strong-Wolfe line search, at most ``max_iter`` iterations.  If no finite point is
    better than ``start``, ``start`` comes back.  The mode depends on the parametrisation and can lie
    far from the mass of a hierarchical posterior: a start, not an answer.
    """
    density = ModelDensity(model, tuple(args), kwargs)
    # one minibatch for the whole search: the line search needs a function that does not change
    indices = density.trace(start.unsqueeze(0)).indices
    density = ModelDensity(model, tuple(args), kwargs, indices=indices)
    theta = start.detach().clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS([theta], max_iter=max_iter, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -density(theta.unsqueeze(0)).sum()
        theta.grad = torch.autograd.grad(loss, theta)[0]
        return loss

    with torch.enable_grad():
        before = closure().detach()
        optimizer.step(closure)
        after = closure().detach()
    better = torch.isfinite(after) & (after < before) & torch.isfinite(theta.detach()).all()
    return torch.where(better, theta.detach(), start)
