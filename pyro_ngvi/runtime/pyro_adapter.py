"""Private names of Pyro's guides, distributions, transforms and optimizers, in one place.

``tests/contract/test_pyro_adapter.py`` holds what they, ``store`` and ``density`` take for granted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import pyro
import torch
from pyro.distributions import MaskedDistribution
from pyro.infer.autoguide import AutoContinuous, AutoGuide
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.nn import PyroModule
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Transform

from .density import layers_of

# --- parameters -----------------------------------------------------------------------------------


def constraint_of(name: str) -> Any:
    """The constraint of a parameter in Pyro's store; ``None``: it is not there, or has none."""
    # get_state() is public, and takes the unconstrained tensors from the parameters
    return pyro.get_param_store()._constraints.get(name)


def with_draws_held(module: Any) -> Any:
    """A module whose ``PyroSample`` attributes are drawn, here, and keep their values, as a copy; the
    same where it has none.  Outside of a call of the module each read of one would draw anew."""
    parts = module.modules() if isinstance(module, PyroModule) else ()
    if not any(part._pyro_samples for part in parts if isinstance(part, PyroModule)):
        return module
    with module._pyro_context:
        return _held(module)


def _held(module: Any) -> Any:
    held = copy(module)
    parts = {name: part if part is None else _held(part) for name, part in module._modules.items()}
    vars(held)["_modules"] = parts
    if isinstance(module, PyroModule):
        vars(held).update({name: getattr(module, name) for name in module._pyro_samples})
        vars(held)["_pyro_samples"] = OrderedDict()
    return held


# --- models of guides ---------------------------------------------------------------------------


def is_marked(site: Any) -> bool:
    """Whether a message is a latent site with ``infer={"enumerate": "parallel"}``, to be summed out."""
    if site["type"] != "sample" or site["is_observed"]:
        return False
    infer = site["infer"] or {}
    return infer.get("enumerate") == "parallel" and infer.get("num_samples") is None


class HidesMarked(Messenger):
    """Draws marked sites from the model, out of sight of what is around: a guide has none of them."""

    def _pyro_sample(self, msg: Any) -> None:
        if is_marked(msg):
            msg["stop"] = True


def has_model(guide: AutoGuide) -> bool:
    """Whether ``guide`` can run its model: Pyro leaves the model out of copies."""
    return guide._model is not None


def give_model(guide: AutoGuide, model: Callable[..., Any]) -> None:
    """Let ``guide``, a copy that came without one, run this model."""
    guide._model = (model,)


@contextmanager
def kept_whole(guide: AutoGuide) -> Iterator[None]:
    """Put model and master back, which ``AutoGuide.__getstate__`` takes from the original too."""
    model, master = guide._model, guide.master
    try:
        yield
    finally:
        guide._model, guide.master = model, master


@contextmanager
def model_under(guide: AutoGuide, handler: Messenger) -> Iterator[None]:
    """Run the model of ``guide`` under ``handler``, inside of those that its guide puts around."""
    with kept_whole(guide):
        guide._model = (handler(guide.model),)
        yield


def _inside(model: Any, handler: type[Messenger]) -> Any:
    """What ``model`` runs under a handler of that type, ``None`` where it is under none."""
    outer, *rest = getattr(getattr(model, "func", None), "args", None) or (None,)
    return rest[0] if isinstance(outer, handler) else None


def first_arguments(guide: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of the call that set a guide up, positional and by keyword."""
    node = guide.prototype_trace.nodes["_INPUT"]
    return node["args"], node["kwargs"]


def model_as_given(guide: AutoContinuous) -> Callable[..., Any]:
    """The model of a guide without the handlers that start its sites and hide enumerated ones."""
    model: Any = guide.model
    for handler in (InitMessenger, HidesMarked):
        inner = _inside(model, handler)
        model = model if inner is None else inner
    return model


def unblocked(model: Callable[..., Any]) -> Callable[..., Any]:
    """``model`` without the ``poutine.block`` around it, so that a handler sees all its sites."""
    inner = _inside(model, BlockMessenger)
    return model if inner is None else unblocked(inner)


def draws_one_vector(guide: Any, base: type[AutoContinuous] = AutoContinuous) -> bool:
    """Whether a guide samples one flat vector, in Pyro's own way or that of the class ``base``."""
    return (
        isinstance(guide, AutoContinuous)
        and type(guide).forward in (AutoContinuous.forward, base.forward)
        and type(guide).sample_latent in (AutoContinuous.sample_latent, base.sample_latent)
    )


def masks_of(site: Any) -> list[tuple[Any, int]]:
    """The masks on a sample site, by ``poutine.mask`` and ``.mask``: a bool or a tensor, and how many
    dimensions of the value it leaves out on the right."""
    fn = site["fn"]
    masks = [] if site["mask"] is None else [(site["mask"], fn.event_dim)]
    layers = [layer for layer in layers_of(fn) if isinstance(layer, MaskedDistribution)]
    return [*masks, *((layer._mask, layer.event_dim) for layer in layers)]


def unmasked(site: Any, of_event: Callable[..., Tensor] = torch.any) -> bool | Tensor:
    """Which data of a sample site its masks leave, in a shape that broadcasts to that of its terms.

    An event that is masked in part is left, or with ``of_event=torch.all`` it is not.
    """
    left: bool | Tensor = True
    for mask, left_out in masks_of(site):
        inside = site["fn"].event_shape[: site["fn"].event_dim - left_out]
        if inside and isinstance(mask, Tensor):
            mask = mask.expand(torch.broadcast_shapes(mask.shape, inside))
            mask = of_event(mask.flatten(-len(inside)), -1)
        left = left & mask
    return left


def particle_plate(site: Any) -> CondIndepStackFrame | None:
    """The plate that an ELBO puts around model and guide to vectorise its particles, if it is the
    only plate of ``site``."""
    frames = site["cond_indep_stack"]
    vectorised = len(frames) == 1 and frames[0].name == "num_particles_vectorized"
    return frames[0] if vectorised else None


def with_inner(transform: Transform) -> list[Transform]:
    """A transform and all those that it holds: parts, the one that it is the inverse of, and so on."""
    found = {id(transform): transform}
    todo = [transform]
    while todo:
        for held in vars(todo.pop()).values():
            for t in held if isinstance(held, list | tuple) else (held,):
                if isinstance(t, Transform) and id(t) not in found:
                    found[id(t)] = t
                    todo.append(t)
    return list(found.values())


def forget_cached(transform: Any) -> None:
    """Make a transform forget its last argument and what it computed from it.

    As tensors of a graph they cannot be copied or pickled, and outlive a function under ``torch.func``.
    """
    for t in with_inner(transform):
        for name in vars(t):
            if name.startswith("_cached"):
                setattr(t, name, (None, None) if name == "_cached_x_y" else None)
