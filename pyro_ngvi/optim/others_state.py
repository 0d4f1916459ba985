"""The state of an optimizer passed as ``others=``, kept by the guide's paths instead of Pyro's names.

A ``PyroOptim`` keeps its states by the names of the parameters in the parameter store.  They begin with
the name of the guide, which another run of the same program may give another one: a second guide of a
process gets a number.  So states are saved under "." and the path within the guide, and get their names
back at the first step, when all parameters stand in the store.

PyTorch's optimizers save their own tensors, write into them at the next step, and take those that they
load as their own.  So a state is copied on its way out and on its way in.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from torch import nn

__all__ = ["ADAM", "OthersState", "own_others"]


class DefaultAdam(PyroOptim):
    """What ``others`` is where nobody says so: Adam with a learning rate of 0.01."""

    rate = 0.01

    def __init__(self) -> None:
        super().__init__(torch.optim.Adam, {"lr": self.rate})

    def __repr__(self) -> str:
        return f"pyro.optim.Adam({{'lr': {self.rate}}})"


#: the default of ``others=``; each optimizer makes one of its own
ADAM = DefaultAdam()


def own_others(others: PyroOptim | None) -> PyroOptim | None:
    """``others``, and for the default an Adam that nobody else has."""
    return DefaultAdam() if others is ADAM else others


class OthersState:
    """Saves and restores the state of ``others``, the optimizer of ``guide``'s other parameters."""

    def __init__(self, guide: Any) -> None:
        self.guide = guide
        self._waiting: dict[str, Any] | None = None

    def save(self, others: PyroOptim | None) -> dict[str, Any] | None:
        """The states by path; those of the model's own parameters by name."""
        if others is None or self._waiting is not None:
            return deepcopy(self._waiting)
        paths, state = self._paths(), deepcopy(others.get_state())
        return {paths.get(str(name), str(name)): s for name, s in state.items()}

    def load(self, others: PyroOptim | None, state: dict[str, Any] | None) -> None:
        """Take what :meth:`save` returned; it is put to use by :meth:`restore`."""
        self._waiting = None
        if not state:
            return
        if others is None:
            raise ValueError("The state has a part for `others`: pass others= to the optimizer.")
        # a PyroOptim reads a state only for parameters that it has not seen
        others.optim_objs.clear()
        others.grad_clip.clear()
        self._waiting = deepcopy(state)

    def restore(self, others: PyroOptim) -> None:
        """At a step, when the parameters have their names.

        Raises:
            ValueError: for parameters that the guide does not have.
        """
        if self._waiting is None:
            return
        names = {path: name for name, path in self._paths().items()}
        unknown = [path for path in self._waiting if path.startswith(".") and path not in names]
        if unknown:
            raise ValueError(
                f"The saved state of others= has parameters that this {type(self.guide).__name__} does "
                f"not have: {', '.join(unknown)}. It comes from another guide."
            )
        others.set_state({names.get(path, path): s for path, s in self._waiting.items()})
        self._waiting = None

    def _paths(self) -> dict[str, str]:
        if not isinstance(self.guide, nn.Module):
            return {}
        store, named = pyro.get_param_store(), self.guide.named_parameters()
        found = {store.param_name(p): f".{path}" for path, p in named}
        return {name: path for name, path in found.items() if name is not None}
