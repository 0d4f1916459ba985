"""Watching the calls of a guide: their arguments, which drawing it again needs, and steady draws; and
modules of its model, which follow Pyro's store from the first call on."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import nn

from ..distributions.steady import SteadyDraws
from ..runtime.pyro_adapter import has_model, model_under
from ..runtime.store import ModuleParams, OwnName


def remember_arguments(guide: Callable[..., Any]) -> Callable[..., Any]:
    """A guide function with the arguments of its last call in ``last_call``: a pair, or ``None``.

    Optimizers that call a guide on their own (:class:`~pyro_ngvi.IFVB`) need them.  Guides that are
    modules are watched without it.  Give the wrapped function to the optimizer *and* to SVI.

    Example:
        >>> @remember_arguments
        ... def guide(x, y):
        ...     ...
        >>> guide(1, y=2)
        >>> guide.last_call
        ((1,), {'y': 2})
    """

    @functools.wraps(guide)
    def remembering(*args: Any, **kwargs: Any) -> Any:
        remembering.last_call = (args, kwargs)  # type: ignore[attr-defined]
        steadies = remembering.steadies and torch.is_grad_enabled()  # type: ignore[attr-defined]
        with SteadyDraws() if steadies else nullcontext():
            return guide(*args, **kwargs)

    remembering.last_call = None  # type: ignore[attr-defined]
    remembering.steadies = False  # type: ignore[attr-defined]
    return remembering


class Watch:
    """Hooks of a module that hold the arguments of its last call and make its draws steady."""

    def __init__(self) -> None:
        self.last_call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.steadies = False
        self._open: list[Any] = []

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.last_call = (args, kwargs)
        for part in module.modules():
            foreign = isinstance(part, AutoGuide) and not isinstance(part, OwnName)
            if foreign and part.prototype_trace is None and has_model(part):
                self._enter(model_under(part, ModuleParams()))
        if self.steadies and torch.is_grad_enabled():
            self._enter(SteadyDraws())

    def _enter(self, context: Any) -> None:
        context.__enter__()
        self._open.append(context)

    def after(self, *_: Any) -> None:
        while self._open:
            # as after an exception: an interrupted call may have left it behind
            self._open.pop().__exit__(RuntimeError, None, None)

    def __reduce__(self) -> Any:
        return (Watch, ())


def watch(guide: Callable[..., Any], steadies: bool) -> Any:
    """What holds ``last_call`` of a guide, whose draws are steady from now on if ``steadies``."""
    if isinstance(guide, nn.Module):
        hooks: Any = getattr(guide, "ngvi_watch", None)  # of an optimizer before this one
        if hooks is None:
            hooks = Watch()
            setattr(guide, "ngvi_watch", hooks)  # noqa: B010
            guide.register_forward_pre_hook(hooks.before, with_kwargs=True)
            guide.register_forward_hook(hooks.after, always_call=True)
        hooks.steadies = steadies
        return hooks
    if not hasattr(guide, "last_call") and takes_arguments(guide):
        raise ValueError(
            f"The guide {guide_name(guide)} takes arguments, and scores are drawn by calling it "
            f"again. Wrap it: guide = pyro_ngvi.optim.remember_arguments(guide), and give the "
            f"result to the optimizer and to SVI."
        )
    if hasattr(guide, "steadies"):
        guide.steadies = steadies  # type: ignore[attr-defined]
    return guide


def draws_steadily(guide: Any) -> bool:
    """Whether draws of a module are to be steady now; asked by who draws without calling it."""
    hooks = getattr(guide, "ngvi_watch", None)
    return hooks is not None and hooks.steadies and torch.is_grad_enabled()


def guide_name(guide: Any) -> str:
    return repr(getattr(guide, "__name__", type(guide).__name__))


def takes_arguments(guide: Callable[..., Any]) -> bool:
    # optional ones too: without them the scores would be those of another q than SVI's
    return bool(inspect.signature(guide).parameters)
