"""The one place that touches private names of Pyro.  ``tests/contract/test_pyro_adapter.py`` holds it.

Pyro keys the parameters of a guide by the guide's class name, or by its place in an
``AutoGuideList``, so that a second guide silently takes over the parameters of the first (or fails
on their shape).  There is no public way to name an ``AutoGuide``; ``PyroModule`` keeps the name in
``_pyro_name`` and sets that of a part in ``_pyro_set_supermodule``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pyro.distributions import Independent, MaskedDistribution
from pyro.infer.autoguide import AutoContinuous, AutoGuide
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.nn import PyroModule
from pyro.ops import special
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Transform

from .marked import HidesMarked

__all__ = [
    "OwnName",
    "batched_safe_log",
    "claim_name",
    "forget_cached",
    "give_model",
    "has_model",
    "is_claimed",
    "kept_whole",
    "layers_of",
    "masks_of",
    "model_as_given",
    "model_under",
    "module_name",
    "particle_plate",
    "rename",
    "unblocked",
    "with_inner",
]

_counters: dict[str, itertools.count[int]] = defaultdict(itertools.count)
_claimed: set[str] = set()


def claim_name(wanted: str) -> str:
    """A name that no guide of this process has had: ``wanted``, or ``wanted_2``, ``wanted_3`` ...

    Names are not given back when a guide is deleted, since its parameters stay in the parameter
    store.  They depend on the order of construction alone; what a store restored by such a name is
    meant for, ``check_names`` in ``_module_params.py`` decides.
    """
    name = wanted
    while name in _claimed:
        name = f"{wanted}_{next(_counters[wanted]) + 2}"
    _claimed.add(name)
    return name


def is_claimed(name: str) -> bool:
    """Whether a guide of this process has, or had, this name."""
    return name in _claimed


def module_name(module: PyroModule) -> str:
    """The name under which the parameters of ``module`` stand in the parameter store."""
    return module._pyro_name


def rename(module: PyroModule, name: str) -> None:
    """Give ``module`` a name before its first parameter is registered."""
    module._pyro_name = name
    _claimed.add(name)  # or a copy would take it, and with it the parameters


class OwnName:
    """Mixed into a ``PyroModule``: a name in the parameter store that no other module has.

    As a part of another module it gets a new one, unless its user gave it a name.
    """

    #: what the name was made of by counting; ``None`` for a name that the user gave
    counted_from: str | None = None

    def take_name(self, name: str | None) -> None:
        """Take the user's ``name``, or for ``None`` one that is counted from that of the class."""
        module: Any = self
        self.counted_from = type(self).__name__ if name is None else None
        rename(module, claim_name(type(self).__name__) if name is None else name)

    def _pyro_set_supermodule(self, name: str, context: Any) -> None:
        parent: Any = super()
        module: Any = self
        if self.counted_from is None:
            name = module_name(module)
        else:
            self.counted_from, name = name, claim_name(name)
        parent._pyro_set_supermodule(name, context)


def has_model(guide: AutoGuide) -> bool:
    """Whether ``guide`` can run its model: Pyro leaves the model out of copies."""
    return guide._model is not None


def give_model(guide: AutoGuide, model: Callable[..., Any]) -> None:
    """Let ``guide``, a copy that came without one, run this model."""
    guide._model = (model,)


@contextmanager
def model_under(guide: AutoGuide, handler: Messenger) -> Iterator[None]:
    """Run the model of ``guide`` under ``handler``, inside of those that its guide puts around."""
    given = guide._model
    guide._model = (handler(guide.model),)
    try:
        yield
    finally:
        guide._model = given


def _inside(model: Any, handler: type[Messenger]) -> Any:
    """What ``model`` runs under a handler of that type, ``None`` where it is under none."""
    outer, *rest = getattr(getattr(model, "func", None), "args", None) or (None,)
    return rest[0] if isinstance(outer, handler) else None


def model_as_given(guide: AutoContinuous) -> Callable[..., Any]:
    """The model of a guide without the handlers, around ``guide.model``, that start its sites and
    hide those that are enumerated."""
    model: Any = guide.model
    for handler in (InitMessenger, HidesMarked):
        inner = _inside(model, handler)
        model = model if inner is None else inner
    return model


def unblocked(model: Callable[..., Any]) -> Callable[..., Any]:
    """``model`` without the ``poutine.block`` around it, so that a handler sees all its sites."""
    inner = _inside(model, BlockMessenger)
    return model if inner is None else unblocked(inner)


def states_to_restore(optim: Any) -> dict[str, Any]:
    """The saved states of parameters that ``optim`` has not met since ``set_state``; a live dict."""
    return optim._state_waiting_to_be_consumed


def layers_of(fn: Any) -> list[Any]:
    """A distribution, and those within its ``to_event`` and ``mask``; the innermost is the last."""
    layers = [fn]
    while isinstance(layers[-1], Independent | MaskedDistribution):
        layers.append(layers[-1].base_dist)
    return layers


def masks_of(site: Any) -> list[tuple[Any, int]]:
    """The masks on a sample site, by ``poutine.mask`` and ``.mask``: a bool or a tensor, and how many
    dimensions of the value it leaves out on the right."""
    fn = site["fn"]
    masks = [] if site["mask"] is None else [(site["mask"], fn.event_dim)]
    layers = [layer for layer in layers_of(fn) if isinstance(layer, MaskedDistribution)]
    return [*masks, *((layer._mask, layer.event_dim) for layer in layers)]


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

    Pyro's transforms keep them, as tensors that belong to a graph: they cannot be copied or pickled,
    and under ``torch.func`` outlive the function that they belong to.
    """
    for t in with_inner(transform):
        for name in vars(t):
            if name.startswith("_cached"):
                setattr(t, name, (None, None) if name == "_cached_x_y" else None)


@contextmanager
def kept_whole(guide: AutoGuide) -> Iterator[None]:
    """Around ``AutoGuide.__getstate__``, which takes model and master from the original too."""
    model, master = guide._model, guide.master
    try:
        yield
    finally:
        guide._model, guide.master = model, master


class _SafeLog:
    """Pyro's logarithm with a gradient of at most 1 / eps, of functions that ``torch.func`` knows."""

    @staticmethod
    def apply(x: Tensor) -> Tensor:
        eps, here = torch.finfo(x.dtype).eps, x.detach()
        return torch.where(here < eps, here.log() + (x - here) / eps, x.clamp(min=eps).log())


@contextmanager
def batched_safe_log() -> Iterator[None]:
    """Let ``pyro.ops.special.safe_log`` run under ``vmap``: tensor variable elimination and
    ``DiscreteHMM`` call it, and Pyro's own function has no rule for that."""
    given = special._SafeLog
    special._SafeLog = _SafeLog  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        special._SafeLog = given
