"""Parameters of modules as their user left them, where a model runs for the first time.

Reading ``module.x``, an ``nn.Parameter`` of a ``PyroModule``, Pyro registers x with its store, and

* uses the module's x even where the store, loaded before, holds another one by that name: the value
  that was loaded is ignored, and an optimizer trains a tensor that nobody reads;
* makes x require gradients, although the user froze it.

Under this handler the store's value goes into the module, as for ``pyro.param``, and a frozen parameter
stays frozen.  A warning names what was replaced: a store that was left from another fit looks like one
that was loaded.  A ``PyroParam`` and ``pyro.param`` need none of it.

Too late for a frozen parameter that was read before the first call of a guide of ours, by a run of
the model or by an ``AutoGuideList`` around the guide: freeze it again after that call.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import pyro
import torch
from pyro.nn import PyroModule
from pyro.poutine.messenger import Messenger
from torch import nn
from torch.distributions import constraints

from ._pyro_adapter import is_claimed, module_name

__all__ = ["ModuleParams", "follow_store", "warn_of_other_names"]


def follow_store(module: nn.Module, prefix: str) -> None:
    """Give ``module`` the parameters that the store holds by its ``prefix``, where some were restored.

    Another tensor replaces the module's own and is not copied into it, which an outer scope of the
    store may still hold.

    Raises:
        ValueError: where the store holds a parameter of another shape.
    """
    own: Any = module._parameters
    for name, p in own.items():
        if p is not None:
            own[name] = _as_stored(prefix + name, p)


def _as_stored(name: str, own: nn.Parameter) -> nn.Parameter:
    """The parameter that the store holds by this name: ``own``, or another where one was restored."""
    store = pyro.get_param_store()
    if name not in store:
        return own
    value = store[name]
    if value is own:
        own._stored_as = name  # pyright: ignore[reportAttributeAccessIssue]
        return own
    # what never was in the store stands here for a call of torch.func.functional_call, say
    if getattr(own, "_stored_as", None) != name:
        return own
    _check_shape(name, own, value)
    if not isinstance(value, nn.Parameter) or (value.dtype, value.device) != (
        own.dtype,
        own.device,
    ):
        value = nn.Parameter(value.detach().to(own, copy=True))
        del store[name]
        store[name] = value
    return value


def warn_of_other_names(guide: PyroModule) -> None:
    """Say so where the store was loaded, and its guide of this class has another name than ``guide``.

    Names are counted in a process: the guide of a notebook cell that was run twice ends in ``_2``.
    """
    own, kind = module_name(guide), type(guide).__name__
    roots = {name.split(".")[0] for name in pyro.get_param_store()}
    if own in roots:
        return
    strange = sorted(r for r in roots if re.fullmatch(rf"{kind}(_\d+)?", r) and not is_claimed(r))
    if strange:
        warnings.warn(
            f"Pyro's parameter store holds the parameters of {strange[0]!r}, which no guide of this "
            f"process is called, and this {kind} is called {own!r}: it starts anew. To take them "
            f"over, make it with name={strange[0]!r}.",
            stacklevel=2,
        )


def _check_shape(name: str, own: nn.Parameter, value: torch.Tensor) -> None:
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

    def _take(self, name: str, own: nn.Parameter, value: torch.Tensor) -> None:
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
