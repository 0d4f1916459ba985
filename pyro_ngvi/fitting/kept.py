"""Parameters of a fit that go by name in Pyro's store, where a later fit would train them on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyro
import torch
from torch import Tensor, nn
from torch.distributions import constraints

from ..linalg.host import own_random_state
from ..runtime.pyro_adapter import constraint_of
from ..runtime.run import Minibatches, run_both
from ..runtime.store import OwnName, held, leaf_of

#: marks of the fits that kept or put back the parameter of a name last, and of those that are running
_LAST: dict[str, object] = {}
_RUNNING: list[object] = []


class Kept:
    """Copies of parameters of ``pyro.param``, of modules, and of guides that share their names."""

    def __init__(self) -> None:
        #: by name: the tensor that was trained, its value, its constraint, whether a module has it
        self.params: dict[str, tuple[Tensor, Tensor, Any, bool]] = {}
        #: of the fit, beside those of others
        self.mark = object()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around steps of the fit, which may train those of others, however they end."""
        self.params.clear()
        _LAST.clear()
        _RUNNING.append(self.mark)
        try:
            yield
        finally:
            _RUNNING.remove(self.mark)

    def keep(self, model: Any, guide: Any, args: Any, kwargs: Any) -> None:
        """Copy those that a run of guide and model meets."""
        modules = [part for part in (model, guide) if isinstance(part, nn.Module)]
        # no other has the names of one with a name of its own
        unique = {id(p) for m in modules if isinstance(m, OwnName) for p in m.parameters()}
        with own_random_state(), torch.no_grad(), pyro.validation_enabled(False):
            ran = run_both(model, guide, args, kwargs, Minibatches())
        of_modules = {id(p) for part in modules for p in part.parameters()}
        names = {name for handler in ran for name in handler.params}
        for name, p in pyro.get_param_store().named_parameters():
            if name in names and id(p) not in unique:
                constraint = constraint_of(name) or constraints.real
                self.params[name] = p, p.detach().clone(), constraint, id(p) in of_modules
                _LAST[name] = self.mark

    def put_back(self) -> None:
        """Let the store hold them, with their values; of modules, where another fit was there since."""
        store = pyro.get_param_store()
        for name, (own, value, constraint, of_module) in self.params.items():
            if _RUNNING and name in store:
                if leaf_of(store[name]) is not own or not torch.equal(own, value):
                    raise ValueError(
                        f"Another fit is running, which trains the parameter {name!r} of this one on: "
                        f"to put it back would change that. Read this fit before, or afterwards."
                    )
            p = held(name, own, constraint)
            if p is not own or not of_module or _LAST.get(name) is not self.mark:
                p.data.copy_(value)
            self.params[name] = p, value, constraint, of_module
            _LAST[name] = self.mark
