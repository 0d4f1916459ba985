"""Where a guide starts: the log joint as one function, and the searches on it."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to

from ..families.base import Family, Tensors
from ..linalg.host import own_random_state
from ..runtime.model_density import ModelDensity
from ..runtime.pyro_adapter import is_marked, model_as_given, unblocked
from .ascent import ascended
from .centers import init_to_center
from .deadline import ending_by
from .found import Found
from .laplace import FEW, LARGEST
from .narrow import by_mean_field, narrow

#: steps of the Gaussian start
STEPS = 200
#: largest d for which a guide takes Hessians unasked
UNASKED = 200
#: seconds that a search unasked may take
PATIENCE = 20.0


def _sites(guide: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Minibatches, and latent sites of other guides, of a run with these at the centres of priors."""

    def center(site: Any) -> Tensor:
        return site["fn"].sample() if site["fn"].support.is_discrete else init_to_center(site)

    whole = unblocked(model_as_given(guide))
    with torch.no_grad(), own_random_state(0):
        trace: Any = poutine.trace(InitMessenger(center)(whole)).get_trace(*args, **kwargs)
    own, sites = guide.prototype_trace.nodes, trace.iter_stochastic_nodes()
    return {name: s for name, s in sites if name not in own and not is_marked(s)}


def _one_function(sites: dict[str, Any], part: bool) -> bool:
    """Whether no latent site of another guide is among :func:`_sites`, and no minibatch but a part."""
    return all(
        site_is_subsample(s) and (part or len(s["value"]) >= s["fn"].size) for s in sites.values()
    )


class _Alone(Messenger):
    """A minibatch by itself: no site of a plate is scaled to all data."""

    def _pyro_sample(self, msg: Any) -> None:
        for frame in msg["cond_indep_stack"]:
            if frame.full_size:
                msg["scale"] = msg["scale"] * (frame.size / frame.full_size)


def _model_alone(guide: Any, sites: dict[str, Any]) -> Callable[..., Any]:
    """The model with the latent sites of other guides, among :func:`_sites`, at one value."""
    model = model_as_given(guide)
    fixed = {name: s["value"] for name, s in sites.items() if not site_is_subsample(s)}
    return poutine.condition(unblocked(model), data=fixed) if fixed else model


def _density_alone(model: Any, start: Tensor, args: Any, kwargs: Any) -> ModelDensity:
    """The log joint on one minibatch: a search needs a function that does not change."""
    indices = ModelDensity(model, tuple(args), kwargs).trace(start.unsqueeze(0)).indices
    return ModelDensity(model, tuple(args), kwargs, indices=indices)


def find_mode(guide: Any, start: Tensor, args: Any, kwargs: Any) -> Tensor:
    """Mode of the log joint over the unconstrained vector; ``start`` (d,) if none is better."""
    model = _model_alone(guide, _sites(guide, args, kwargs))
    return mode_of(_density_alone(model, start, args, kwargs), start)


def mode_of(
    density: Callable[[Tensor], Tensor], start: Tensor, history: int = 100, steps: int = 50
) -> Tensor:
    """The mode near ``start`` (d,), or ``start``, by L-BFGS that keeps ``history`` past steps."""
    theta = start.detach().clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [theta], max_iter=steps, history_size=history, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        loss = -density(theta.unsqueeze(0)).sum()
        theta.grad = torch.autograd.grad(loss, theta)[0]
        return loss

    with torch.enable_grad():
        before = closure().detach()
        optimizer.step(closure)
        after = closure().detach()
    better = torch.isfinite(after) & (after < before) & torch.isfinite(theta.detach()).all()
    return torch.where(better, theta.detach(), start)


def start_points(
    names: Iterable[str], model: Any, start: Tensor, args: Any, kwargs: Any
) -> Iterator[Tensor]:
    """``start`` (d,), then by turns a draw of the prior, if it can draw, and one around ``start``."""
    yield start
    for seed in count(1):
        with own_random_state(seed):
            point = start + 4.0 * torch.rand_like(start) - 2.0
            if seed % 2:
                with suppress(NotImplementedError, RuntimeError, ValueError), torch.no_grad():
                    drawn: Any = poutine.trace(model).get_trace(*args, **kwargs)
                    parts = [drawn.nodes[name] for name in names]
                    parts = [biject_to(s["fn"].support).inv(s["value"]).flatten() for s in parts]
                    prior = torch.cat(parts).to(start)
                    point = torch.where(prior.isfinite().all(), prior, point)
        yield point


def find_laplace(guide: Any, start: Tensor, given: Tensors, args: Any, kwargs: Any) -> Found | None:
    """What to replace ``given`` by (:mod:`.laplace`), for the log joint over the unconstrained vector.

    Unasked, ``None`` unless the log joint is one function of few latent variables (no minibatch, no
    latent sites of others) that runs away from its start under ``vmap``, with no state to be loaded.
    Above ``UNASKED`` latent variables a guide with more scales begins as a mean field (:mod:`.narrow`).
    Of a guide that begins with a part of the data, for these alone: their posterior is as wide as it is
    off, and its modes may be theirs.
    """
    kind, d, asked = type(guide).__name__, len(start), guide.init == "laplace"
    if asked and d > LARGEST:
        raise ValueError(
            f'{kind}: init="laplace" takes Hessians of {d} x {d} numbers, and {LARGEST} is the most. '
            f'Leave init out, or pass init="map".'
        )
    by_hessians = asked or ("laplace" in guide.starts and d <= UNASKED)
    begins_narrow = guide.begins_narrow and (d > FEW or not by_hessians) and UNASKED > 0
    part = guide.begins_with_part
    none = not (by_hessians or begins_narrow) or start.is_meta or guide._waiting_state is not None
    if not asked and (none or (part and d > UNASKED)):  # of many variables a part tells little
        return None
    try:
        sites = _sites(guide, args, kwargs)
        if not asked and not _one_function(sites, part):
            return None
        model = _model_alone(guide, sites)
        model = _Alone()(model) if part else model
        points = start_points(guide._unconstrained_shapes, model, start, args, kwargs)
        with own_random_state():  # a prototype draws
            density = _density_alone(model, start, args, kwargs)
            with ending_by(math.inf if asked else time.monotonic() + PATIENCE):
                if by_hessians:
                    how = {"instead": narrow} if begins_narrow else {}
                    found = guide.search(density, guide.family, given, points, **how)
                else:
                    found = by_mean_field(density, guide.family, given)
            found = replace(found, apart=()) if part else found
    except Exception:
        if asked:
            raise
        return None  # whatever it is, the first step meets it where the user asked for it
    if asked and found.params is None:
        warnings.warn(
            f'{kind}: init="laplace" found no Gaussian with a larger ELBO than the one that it was to '
            f"replace, and starts there. Pass init_loc_fn= for another point.",
            UserWarning,
            stacklevel=2,
        )
    return found


def find_gaussian(guide: Any, family: Family, params: Tensors, args: Any, kwargs: Any) -> Tensors:
    """The Gaussian of ``family`` that 200 steps of NGVB reach from ``params``; see :func:`ascended`."""
    model = _model_alone(guide, _sites(guide, args, kwargs))
    return ascended(ModelDensity(model, tuple(args), kwargs), family, params, STEPS)
