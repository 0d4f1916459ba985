"""What an optimizer saves, restores and takes back: states of rules, and of ``others=``.

A ``PyroOptim`` keeps its states by the names of the parameters in the parameter store, which begin with
the name of the guide; a second guide of a process gets a number.  So states are saved under "." and the
path within the guide, and get their names back at the first step.  PyTorch's optimizers write into the
tensors that they save and load, so a state is copied on its way out and on its way in.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..families.base import Tensors
from ..linalg.host import host_bool
from .rule import State

#: entries that states of version 0.1, or of earlier checkouts, lack
LATER = ("reach", "growth", "path_share", "trend")


def flat(state: State, prefix: str = "") -> Tensors:
    """The tensors of a nested state by their paths, with dots."""
    found: Tensors = {}
    for name, v in state.items():
        found |= flat(v, f"{prefix}{name}.") if isinstance(v, dict) else {prefix + name: v}
    return found


def fitted(path: str, fresh: State, saved: Tensors) -> State:
    """A copy of a ``saved`` state, by paths, in the form of a ``fresh`` one."""
    wanted = flat(fresh)
    # before version 0.2 a rule had one gain for all blocks, and no reach
    saved = {k: wanted[k] for k in LATER if k in wanted} | saved
    old = {k for k, v in saved.items() if v.dim() == 0 and k in wanted and wanted[k].dim() == 1}
    saved = saved | {k: saved[k].expand_as(wanted[k]) for k in old}
    wrong = [k for k in wanted if k not in saved or saved[k].shape != wanted[k].shape]
    wrong += [k for k in saved if k not in wanted]
    if wrong:
        raise ValueError(
            f"The saved optimizer state does not fit the guide {path!r} (entries "
            f"{', '.join(wrong)}): it comes from another model, rank or setting of the optimizer."
        )
    # a copy, since a rule may write into the state that it is given
    copies = [saved[k].to(v, copy=True) for k, v in wanted.items()]
    return tree_unflatten(copies, tree_flatten(fresh)[1])


def moved(value: Tensor, like: Tensor) -> Tensor:
    """An entry of a state, for a guide that was moved to the device and precision of ``like``."""
    if value.is_floating_point():
        return value.to(like)
    # whole numbers that count something are read by the host, and stay there
    return value if value.dim() == 0 and value.dtype == torch.long else value.to(like.device)


def refuse_wrappers(*args: Any, **kwargs: Any) -> None:
    """What a ``PyroOptim`` of ours makes of single parameters: nothing."""
    raise RuntimeError(
        "An optimizer of pyro_ngvi steps a whole guide; Pyro's HorovodOptimizer and learning-rate "
        "schedulers want one for each tensor. Give it to SVI itself; for falling rates there is "
        "NGVB(guide, schedule=lambda k: 0.5 / (1 + k))."
    )


class DefaultAdam(PyroOptim):
    """What ``others`` is where nobody says so: Adam with a learning rate of 0.01."""

    rate = 0.01

    def __init__(self) -> None:
        super().__init__(torch.optim.Adam, {"lr": self.rate})

    def __repr__(self) -> str:
        return f"pyro.optim.Adam({{'lr': {self.rate}}})"


#: the default of ``others=``; each optimizer makes one of its own
ADAM = DefaultAdam()


class OthersState:
    """Saves and restores the state of ``others``, the optimizer of ``guide``'s other parameters."""

    def __init__(self, guide: Any) -> None:
        self.guide = guide
        self._waiting: dict[str, Any] | None = None
        self._bad_steps = 0

    def save(self, others: PyroOptim | None) -> dict[str, Any] | None:
        """The states by path; those of the model's own parameters by name."""
        if others is None or self._waiting is not None:
            return deepcopy(self._waiting)
        paths, state = self._paths(), deepcopy(others.get_state())
        return {paths.get(str(name), str(name)): s for name, s in state.items()}

    def load(self, others: PyroOptim | None, state: dict[str, Any] | None) -> None:
        """Take what :meth:`save` returned; the next step puts it to use."""
        self._waiting = None
        if not state:
            return
        if others is None:
            raise ValueError("The state has a part for `others`: pass others= to the optimizer.")
        # a PyroOptim reads a state only for parameters that it has not seen
        others.optim_objs.clear()
        others.grad_clip.clear()
        self._waiting = deepcopy(state)

    def step(self, others: PyroOptim, params: list[Tensor], name: str) -> None:
        """A step of ``others``, without gradients that are not finite: Adam would keep them."""
        bad = []
        for p in params:
            if p.grad is not None:
                finite = torch.isfinite(p.grad).all()
                p.grad = torch.where(finite, p.grad, 0.0)
                if host_bool(finite) is False:
                    bad.append(str(pyro.get_param_store().param_name(p)))
        self._bad_steps += bool(bad)
        if bad and is_power_of_two(self._bad_steps):
            warnings.warn(
                f"{name}: the gradient of {', '.join(bad[:3])} is not finite; it counted as zero "
                f"({self._bad_steps} steps so far). Look for NaN in the model there.",
                RuntimeWarning,
                stacklevel=6,
            )
        self.restore(others)
        others(params)

    def restore(self, others: PyroOptim) -> None:
        """Put a loaded state to use, once the parameters have their names."""
        waiting = self._waiting
        if waiting is None:
            return
        names = {path: name for name, path in self._paths().items()}
        unknown = [path for path in waiting if path.startswith(".") and path not in names]
        if unknown:
            raise ValueError(
                f"The saved state of others= has parameters that this {type(self.guide).__name__} does "
                f"not have: {', '.join(unknown)}. It comes from another guide."
            )
        others.set_state({names.get(path, path): s for path, s in waiting.items()})
        self._waiting = None

    def _paths(self) -> dict[str, str]:
        """Paths within the guide, by names in the store."""
        if not isinstance(self.guide, nn.Module):
            return {}
        store, named = pyro.get_param_store(), self.guide.named_parameters()
        found = {store.param_name(p): f".{path}" for path, p in named}
        return {name: path for name, path in found.items() if name is not None}


def entries_of(optim: Any) -> list[tuple[Any, dict[Any, Any]]]:
    """The dicts that a step of an optimizer of PyTorch writes into, and copies of what they hold."""
    optim = getattr(optim, "optimizer", optim)  # that of a scheduler
    copies = {
        p: {k: v.clone() if isinstance(v, Tensor) else v for k, v in own.items()}
        for p, own in optim.state.items()
    }
    return [(optim.state, copies), *((group, dict(group)) for group in optim.param_groups)]


@contextmanager
def whole_step(optim: Any, params: list[Tensor]) -> Iterator[None]:
    """Around a step of ``optim``: undo it where it raises, and use the gradients up in any case."""
    leaves = {id(p): p for p in params}
    values: list[tuple[Tensor, Tensor]] = []
    entries: list[tuple[Any, dict[Any, Any]]] = []
    try:
        leaves |= {id(p): p for p in optim.natural_params()}
        values = [(p, p.detach().clone()) for p in leaves.values()]
        for holder in (*optim.holders(), optim._others_state, optim.others):
            own = {} if holder is None else vars(holder)
            dicts = [own, *(v for v in own.values() if isinstance(v, dict))]
            entries += [(held, dict(held)) for held in dicts]
        for inner in () if optim.others is None else optim.others.optim_objs.values():
            entries += entries_of(inner)
        yield
    except BaseException:
        with torch.no_grad():
            for p, before in values:
                p.copy_(before)
        for held, before in entries:
            held.clear()
            held.update(before)
        for _, block in optim._blocks():
            block.curvature = None  # what a loss left belongs to this step
        raise
    finally:
        for p in leaves.values():
            p.grad = None


def is_power_of_two(count: int) -> bool:
    """When to repeat a warning: the 1st, 2nd, 4th, 8th, ... time."""
    return not count & (count - 1)
