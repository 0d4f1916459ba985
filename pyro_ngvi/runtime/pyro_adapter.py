"""The one place that touches private names of Pyro.  ``tests/contract/test_pyro_adapter.py`` holds it.

Pyro keys the parameters of a guide by the guide's class name, or by its place in an
``AutoGuideList``, so that a second guide silently takes over the parameters of the first (or fails
on their shape).  There is no public way to name an ``AutoGuide``; ``PyroModule`` keeps the name in
``_pyro_name`` and sets that of a part in ``_pyro_set_supermodule``.
"""

from __future__ import annotations

import itertools
import re
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyro
import torch
from pyro.distributions import Independent, MaskedDistribution
from pyro.infer.autoguide import AutoContinuous, AutoGuide
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.nn import PyroModule
from pyro.ops import special
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import Transform, constraints


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


# a store's file then loads with weights_only=True: our parameters have no other constraint
torch.serialization.add_safe_globals([type(constraints.real)])

#: the tensors that guides of this process have in the store, by name
_registered: dict[str, weakref.ref[Tensor]] = {}


def follow_store(guide: Any, modules: Mapping[str, nn.Module]) -> bool:
    """Give the modules of a guide the parameters that the store holds, where some were restored.

    Another tensor replaces the module's own and is not copied into it, which an outer scope of the
    store may still hold.

    Args:
        guide: a guide with an ``OwnName``.
        modules: by the prefix of the names of their own parameters in the store.

    Returns:
        Whether a parameter was replaced.

    Raises:
        ValueError: where the store holds a parameter of another shape, or several fits that the guide
            could be.
    """
    replaced = False
    for prefix, module in modules.items():
        own: Any = module._parameters
        for name, p in own.items():
            if p is not None:
                own[name] = _as_stored(guide, prefix + name, p)
                replaced = replaced or own[name] is not p
    size, before = len(pyro.get_param_store()), guide.__dict__.get("_store_size")
    if before not in (None, size):  # another guide's parameters were made, or loaded
        check_names(guide, in_use=True)
    guide.__dict__["_store_size"] = size
    return replaced


def _as_stored(guide: Any, name: str, own: nn.Parameter) -> nn.Parameter:
    """The parameter that the store holds by this name: ``own``, or another where one was restored."""
    store = pyro.get_param_store()
    if name not in store:
        return own
    value: Any = store[name]
    if value is own:
        if not _is_registered(name, own):
            _registered[name] = weakref.ref(own)
        return own
    # what never was in the store stands here for a call of torch.func.functional_call, say
    if not _is_registered(name, own):
        return own
    check_names(guide, in_use=True)
    _check_shape(name, own, value)
    if not isinstance(value, nn.Parameter) or (value.dtype, value.device) != (
        own.dtype,
        own.device,
    ):
        value = nn.Parameter(value.detach().to(own, copy=True))
        del store[name]
        store[name] = value
    _registered[name] = weakref.ref(value)
    return value


def _is_registered(name: str, value: Any) -> bool:
    """Whether a guide of this process has put this very tensor into the store, or taken it over."""
    kept = _registered.get(name)
    return kept is not None and kept() is value


def check_names(guide: Any, in_use: bool) -> None:
    """Refuse a store that was restored from elsewhere and holds several fits that ``guide`` could be.

    Names are counted in a process.  A notebook cell that was run twice leaves ``AutoX`` and
    ``AutoX_2``, the first guide of a new process is called ``AutoX``, and nothing says that the user
    means the first run.  A warning says where the store holds a fit of this class by another name.

    Args:
        guide: a guide with an ``OwnName``.
        in_use: whether it has parameters.  Then the store may be back at a state of this process,
            whose names are right.

    Raises:
        ValueError: with the names, unless the user gave ``guide`` its name.
    """
    own, kind, stem = module_name(guide), type(guide).__name__, guide.counted_from
    found: dict[str, bool] = {}  # names of fits, and whether they were restored
    pattern = re.compile(rf"({re.escape(stem or kind)}(?:_\d+)*)\.")
    held = {id(p) for p in guide.parameters()}
    for name, value in pyro.get_param_store().named_parameters():
        match = pattern.match(name)
        # a subclass may have read parameters of its own before
        if match and not (match[1] == own and id(value) in held):
            found[match[1]] = found.get(match[1], True) and not _is_registered(name, value)
    restored = found.pop(own, False)
    if in_use:
        found = {name: new for name, new in found.items() if not is_claimed(name)}
    if restored and found and stem is not None:
        latest = max([own, *found], key=_count)
        raise ValueError(
            f"{kind}: Pyro's parameter store was loaded and holds several fits: "
            f"{_listed([own, *found])}. Name the one that you mean, the last by name={latest!r}, or "
            f"begin anew after pyro.clear_param_store()."
        )
    strange = sorted((name for name, new in found.items() if new), key=_count)
    if strange and not restored:
        warnings.warn(
            f"Pyro's parameter store holds parameters of {strange[-1]!r}, which no guide of this "
            f"process has made, and this {kind} is called {own!r}: it does not take them. To take "
            f"them over, make it with name={strange[-1]!r}.",
            stacklevel=2,
        )


def _count(name: str) -> list[int]:
    """A key that sorts names in the order in which they were counted."""
    numbers = re.search(r"(?:_\d+)*$", name)
    assert numbers is not None
    return [int(n) for n in numbers[0].split("_")[1:]]


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names, key=_count)
    return ", ".join(map(repr, ordered[:3])) + ", ..." * (len(ordered) > 3)


def _check_shape(name: str, own: nn.Parameter, value: Tensor) -> None:
    if value.shape != own.shape:
        raise ValueError(
            f"Pyro's parameter store holds {name!r} with the shape {tuple(value.shape)}, and the "
            f"module's parameter has the shape {tuple(own.shape)}. It is from another model: call "
            f"pyro.clear_param_store() first, or load the store that belongs to this one."
        )


class ModuleParams(Messenger):
    """Around the first run of a model: the store's values go into modules, frozen ones stay so.

    Raises:
        ValueError: where the store holds a parameter of another shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self._frozen: set[int] = set()
        self._replaced: list[str] = []

    def __exit__(self, *exception: Any) -> Any:
        if self._replaced and exception[0] is None:
            names = ", ".join(map(repr, self._replaced[:5])) + ", ..." * (len(self._replaced) > 5)
            warnings.warn(
                f"Pyro's parameter store held other values than the modules of the model, and these "
                f"have taken them: {names}. If they are not from a store that you loaded, call "
                f"pyro.clear_param_store() before a new fit, and make the model anew.",
                stacklevel=2,
            )
        self._replaced.clear()
        return super().__exit__(*exception)

    def _pyro_param(self, msg: Any) -> None:
        own = _own(msg)
        if own is not None and not own.requires_grad:
            self._frozen.add(id(own))

    def _pyro_post_param(self, msg: Any) -> None:
        own, value = _own(msg), msg["value"]
        if own is None:
            return
        store = pyro.get_param_store()
        # a handler such as poutine.substitute may have given another value, for this run alone
        if value is not own and msg["name"] in store and store[msg["name"]] is value:
            self._take(msg["name"], own, value)
            msg["value"] = store[msg["name"]]
        if id(own) in self._frozen:
            own.requires_grad_(False)

    def _take(self, name: str, own: nn.Parameter, value: Tensor) -> None:
        _check_shape(name, own, value)
        if not (
            own.is_meta or torch.equal(own, value.to(own))
        ):  # before the first step one may wait
            self._replaced.append(name)
        with torch.no_grad():
            own.copy_(value)
        store = pyro.get_param_store()
        del store[name]
        store[name] = own


def _own(msg: Any) -> nn.Parameter | None:
    """The parameter of a module that a message registers, if it is one."""
    first = next(iter(msg["args"][1:]), None)
    how = msg["kwargs"]
    # under a constraint the store holds another tensor in any case; in a plate it may give some rows
    plain = how.get("constraint") is constraints.real and how.get("event_dim") is None
    return first if plain and isinstance(first, nn.Parameter) else None


@contextmanager
def whole_gradients() -> Iterator[None]:
    """Around a loss and its backward pass: ``.grad`` of what Pyro's store holds gets all, or nothing.

    Gradients that were there before, of a loop that accumulates them, stay and are added to.
    """
    store = pyro.get_param_store()
    before: dict[Tensor, Tensor | None] = {p: p.grad for _, p in store.named_parameters()}
    try:
        for p in before:
            p.grad = None
        yield
        for p, g in before.items():
            if g is not None:
                p.grad = g if p.grad is None else g + p.grad
    except BaseException:
        for _, p in store.named_parameters():
            p.grad = before.get(p)
        raise
