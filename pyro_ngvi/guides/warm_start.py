"""Optional starts: the posterior mode by L-BFGS, and a Gaussian by natural gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..families.base import Family, Tensors
from ..linalg.host import own_random_state
from ..optim.natural_gradient import make_rule
from ..runtime.model_density import ModelDensity
from ..runtime.pyro_adapter import unblocked
from .initialization import init_to_center

#: steps and draws of the Gaussian start
STEPS, DRAWS = 200, 8

__all__ = ["find_gaussian", "find_mode", "others_fixed"]


def others_fixed(
    model: Callable[..., Any], own: Collection[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """``model`` with its latent sites but ``own`` at the centres of their priors, discrete ones drawn.

    A part of an ``AutoGuideList`` does not see the sites of the others, and the model would draw them
    anew at each run: a search needs one function, and not every distribution draws under ``vmap``.
    """
    whole = unblocked(model)

    def center(site: Any) -> Tensor:
        return site["fn"].sample() if site["fn"].support.is_discrete else init_to_center(site)

    with torch.no_grad(), own_random_state(0):
        trace: Any = poutine.trace(InitMessenger(center)(whole)).get_trace(*args, **kwargs)
    sites = trace.iter_stochastic_nodes()
    fixed = {n: s["value"] for n, s in sites if n not in own and not site_is_subsample(s)}
    return poutine.condition(whole, data=fixed) if fixed else model


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


def find_gaussian(
    model: Callable[..., Any],
    family: Family,
    params: Tensors,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Tensors:
    """The Gaussian of ``family`` that a short run of natural gradients reaches from ``params``.

    200 steps of :class:`~pyro_ngvi.NGVB`, 8 draws each, from a seed of its own.  If it ends with a
    lower ELBO than it began, or none, ``params`` comes back.
    """
    density = ModelDensity(model, tuple(args), kwargs)
    rule = make_rule(family, averaging=False)

    def loss(q: Tensors, fixed: Tensors, n: int) -> Tensor:
        z = family.draw(q, torch.Size((n,)))
        return (family.log_prob(fixed, z) - density(z)).mean()

    with own_random_state(0):
        with torch.no_grad():
            before = loss(params, params, 32 * DRAWS)
        now, state = params, rule.init(params)
        for _ in range(STEPS):
            leaves = {name: v.detach().requires_grad_() for name, v in now.items()}
            with torch.enable_grad():
                value = loss(leaves, now, DRAWS)
                found = torch.autograd.grad(value, list(leaves.values()))
            grads = dict(zip(leaves, found, strict=True))
            with torch.no_grad():
                now, state, _ = rule.update(now, grads, state)
        with torch.no_grad():
            after = loss(now, now, 32 * DRAWS)
    better = torch.isfinite(after) & ~(after > before)
    return {name: torch.where(better, v, params[name]) for name, v in now.items()}
