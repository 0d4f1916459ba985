"""Guides in Pyro's parameter store: their names, and parameters that were restored or frozen.

Pyro keys them by the guide's class name or its place in an ``AutoGuideList``, so that a second guide
silently takes over those of the first.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import pyro
import torch
from pyro.nn import PyroModule
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import constraints

# a store's file then loads with weights_only=True: our parameters have no other constraint
torch.serialization.add_safe_globals([type(constraints.real)])

#: what Pyro calls the running means of ``TraceGraph_ELBO`` in the store
BASELINES = "__baseline"
#: names that guides of this process have, or had
_claimed: set[str] = set()
#: the tensors that guides of this process have put into the store, or taken over, by name
_registered: WeakValueDictionary[str, Any] = WeakValueDictionary()


def claim_name(wanted: str) -> str:
    """A name that no guide of this process has had: ``wanted``, or ``wanted_2``, ``wanted_3`` ..."""
    name, n = wanted, 2
    while name in _claimed:
        name, n = f"{wanted}_{n}", n + 1
    _claimed.add(name)
    return name


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


def follow_store(guide: Any, modules: Mapping[str, nn.Module]) -> bool:
    """Give the ``modules`` of a guide, by prefix of their names in the store, the parameters that the
    store holds; whether some were restored.

    It replaces the module's own tensor, which an outer scope of the store may still hold.
    """
    store, replaced = pyro.get_param_store(), False
    for prefix, module in modules.items():
        own: Any = module._parameters
        for key, p in own.items():
            name = prefix + key
            if p is None or name not in store:
                continue
            value: Any = store[name]
            # what never was in the store stands here for a call of torch.func.functional_call, say
            if value is not p and _registered.get(name) is p:
                check_names(guide, in_use=True)
                _check_shape(name, p, value)
                alike = (value.dtype, value.device) == (p.dtype, p.device)
                if not isinstance(value, nn.Parameter) or not alike:
                    value = nn.Parameter(value.detach().to(p, copy=True))
                    del store[name]
                    store[name] = value
                own[key], replaced = value, True
            if value is own[key]:
                _registered[name] = value
    size, before = len(store), guide.__dict__.get("_store_size")
    if before not in (None, size):  # another guide's parameters were made, or loaded
        check_names(guide, in_use=True)
    guide.__dict__["_store_size"] = size
    return replaced


def _check_shape(name: str, own: nn.Parameter, value: Tensor) -> None:
    if value.shape != own.shape:
        raise ValueError(
            f"Pyro's parameter store holds {name!r} with the shape {tuple(value.shape)}, and the "
            f"module's parameter has the shape {tuple(own.shape)}. It is from another model: call "
            f"pyro.clear_param_store() first, or load the store of this one."
        )


def check_names(guide: Any, in_use: bool) -> None:
    """Refuse a store that was restored from elsewhere and holds several fits that ``guide`` could be,
    unless the user gave it its name; warn where the store holds one of its class by another name.

    Names are counted in a process: of ``AutoX`` and ``AutoX_2``, from a notebook cell that was run
    twice, nothing says which one is meant.  The store of a guide ``in_use`` may be back at a state of
    this process, whose names are right.
    """
    own, kind, stem = module_name(guide), type(guide).__name__, guide.counted_from
    found: dict[str, bool] = {}  # names of fits, and whether they were restored
    pattern = re.compile(rf"({re.escape(stem or kind)}(?:_\d+)*)\.")
    held = {id(p) for p in guide.parameters()}
    for name, value in pyro.get_param_store().named_parameters():
        match = pattern.match(name)
        # a subclass may have read parameters of its own before
        if match and not (match[1] == own and id(value) in held):
            found[match[1]] = found.get(match[1], True) and _registered.get(name) is not value
    restored = found.pop(own, False)
    if in_use:
        found = {name: new for name, new in found.items() if name not in _claimed}
    if restored and found and stem is not None:
        names = sorted([own, *found], key=_count)
        raise ValueError(
            f"{kind}: Pyro's parameter store was loaded and holds several fits: "
            f"{listed(names, 3)}. Name the one that you mean, the last by name={names[-1]!r}, or "
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
    return [int(n) for n in re.findall(r"_(\d+)", name)]


def listed(names: list[str], most: int) -> str:
    """The first of them, and that there are more, in a message."""
    return ", ".join(map(repr, names[:most])) + ", ..." * (len(names) > most)


class ModuleParams(Messenger):
    """Around the first run of a model: the store's values go into its modules, frozen ones stay so.

    Where a ``PyroModule`` reads its ``nn.Parameter`` x, Pyro uses that even where its store was loaded
    with another one by that name, and makes it require gradients.  Here the store's value counts, as
    for ``pyro.param``, with a warning.  Too late for a parameter that was read before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._frozen: set[int] = set()
        self._replaced: list[str] = []

    def __exit__(self, *exception: Any) -> Any:
        if self._replaced and exception[0] is None:
            warnings.warn(
                f"Pyro's parameter store held other values than the modules of the model, and these "
                f"have taken them: {listed(self._replaced, 5)}. If they are not from a store that you "
                f"loaded, call pyro.clear_param_store() before a new fit, and make the model anew.",
                stacklevel=2,
            )
        self._replaced.clear()
        return super().__exit__(*exception)

    def _pyro_param(self, msg: Any) -> None:
        own = _own(msg)
        if own is not None and not own.requires_grad:
            self._frozen.add(id(own))

    def _pyro_post_param(self, msg: Any) -> None:
        own, name, value = _own(msg), msg["name"], msg["value"]
        if own is None:
            return
        if _is_shadowed(own, msg):
            store = pyro.get_param_store()
            _check_shape(name, own, value)
            if not (own.is_meta or torch.equal(own, value.to(own))):
                self._replaced.append(name)
            with torch.no_grad():
                own.copy_(value)
            del store[name]
            store[name] = own
            msg["value"] = store[name]
        if id(own) in self._frozen:
            own.requires_grad_(False)


def _own(msg: Any) -> nn.Parameter | None:
    """The parameter of a module that a message registers, if it is one."""
    first = next(iter(msg["args"][1:]), None)
    how = msg["kwargs"]
    # under a constraint the store holds another tensor in any case; in a plate it may give some rows
    plain = how.get("constraint") is constraints.real and how.get("event_dim") is None
    return first if plain and isinstance(first, nn.Parameter) else None


def _is_shadowed(own: nn.Parameter, msg: Any) -> bool:
    """Whether Pyro's store holds another tensor by the name of a module's parameter, which it uses."""
    # a handler such as poutine.substitute may have given another value, for this run alone
    name, value, store = msg["name"], msg["value"], pyro.get_param_store()
    return value is not own and name in store and store[name] is value


class RefuseShadowed(Messenger):
    """Around a run of a guide: refuse modules whose parameters Pyro's store does not hold.

    A second module of the same names goes on with its own, and SVI would step those of the first.
    """

    def _pyro_post_param(self, msg: Any) -> None:
        own = _own(msg)
        if own is not None and _is_shadowed(own, msg):
            raise ValueError(
                f"Pyro's store holds another module's {msg['name']!r}: steps would move that one. Call "
                f"pyro.clear_param_store() before the first step of a second guide, or make it of a "
                f"subclass."
            )


def leaf_of(value: Any) -> Tensor:
    """The unconstrained parameter behind a param site, or the parameter itself, as of local ones."""
    return value.unconstrained() if hasattr(value, "unconstrained") else value


def held(name: str, own: Tensor, constraint: Any) -> Tensor:
    """``own``, the unconstrained parameter that Pyro's store holds by this name from here on.  Another
    module's by this name stays what it was."""
    store: Any = pyro.get_param_store()
    if name in store and leaf_of(store[name]) is not own:
        del store[name]
    store.set_state({"params": {name: own}, "constraints": {name: constraint}})
    return own


def traced_params(seen: Any) -> list[Any]:
    """The unconstrained parameters that a ``poutine.trace(param_only=True)`` has met."""
    sites = seen.trace.nodes.values()
    return [leaf_of(site["value"]) for site in sites if site["type"] == "param"]


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
