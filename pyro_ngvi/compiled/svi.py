"""SVI whose steps are graphs of tensor operations, held against its eager ones.

The first step with arguments of new shapes is eager, the second is recorded
(:mod:`pyro_ngvi.compiled.graph`), and the following ones run the graph, whose inputs are parameters,
the optimizer's state, the data and random numbers.  A step that asks for the value of a tensor, uses
tensors from elsewhere or changes anything but tensors stays eager.  Graph and eager step are compared
now and then (:mod:`pyro_ngvi.compiled.checked`).

PyTorch's Inductor makes code of the graph in the background (:mod:`pyro_ngvi.compiled.lowered`).  On a
GPU all kernels are started by one CUDA graph (:mod:`pyro_ngvi.compiled.captured`).
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..linalg.host import random_states, set_random_states
from ..runtime.store import traced_params
from .checked import CheckedGraph, tensors_of_modules
from .graph import CannotCompile, Place
from .state import StepState
from .step import StepFunction

#: structures of the arguments that are known at a time
MOST_GRAPHS = 8
#: steps after which the next one has to be recorded
SETTLED = 4
PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)


@dataclass
class _Known:
    """What is known of steps with arguments of one structure."""

    params: list[Tensor] | None = None
    written: list[Place] = field(default_factory=list)
    graph: CheckedGraph | None = None
    steps: int = 0
    refused: str = ""


class CompiledSVI(SVI):
    """What :func:`compile` returns, with an example: an ``SVI`` whose steps run a graph where they can.

    Attributes:
        tier: how the last step was done: "eager", "recorded", "replay", "inductor" or "cuda_graph".
        reason: why no faster tier did it, a sentence; "" where nothing is in the way.
    """

    def __init__(
        self,
        svi: SVI,
        inductor: bool,
        wait: bool,
        warn: bool,
        cuda_graph: bool,
    ) -> None:
        vars(self).update(vars(svi))
        self._inductor, self._wait, self._warn = inductor, wait, warn
        self._cuda_graph = cuda_graph
        self._known: OrderedDict[Any, _Known] = OrderedDict()
        self._told: set[str] = set()
        self.tier, self.reason = "eager", ""

    def __getstate__(self) -> dict[str, Any]:
        """Without the graphs, which are of this process."""
        return vars(self) | {"_known": OrderedDict()}

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """One step, as ``SVI.step``: the loss before it, a number in nats."""
        loss = self._step(args, kwargs)[0]
        return loss.item() if isinstance(loss, Tensor) else loss

    def run(
        self,
        num_steps: int,
        *args: Any,
        callback: Callable[[int, Tensor], Any] | None = None,
        every: int = 100,
        **kwargs: Any,
    ) -> Tensor:
        """``num_steps`` steps with the same arguments; between callbacks nothing waits for the device.

        Args:
            num_steps: how many.
            args, kwargs: those of ``step``.
            callback: called after each ``every`` steps with the number of steps n and their losses (n,)
                so far; the run ends where it returns True.

        Returns:
            The losses (num_steps,) in nats, on their device.
        """
        losses: list[Tensor] = []
        while len(losses) < num_steps:
            end = min(num_steps, (len(losses) // every + 1) * every)
            while len(losses) < end:
                loss, known, data = self._step(args, kwargs)
                losses.append(torch.as_tensor(loss))
                if known.graph is not None and not known.refused:
                    losses += known.graph.several(end - len(losses), data)
                    self.tier, self.reason = known.graph.tier, known.graph.reason
            if callback is not None and callback(len(losses), _stacked(losses)):
                break
        return _stacked(losses) if losses else torch.zeros(0)

    def _step(self, args: Any, kwargs: Any) -> tuple[Any, _Known, list[Tensor]]:
        try:
            known, data = self._find(args, kwargs)
            if known.graph is not None and not known.graph.function.fits():
                self._known.clear()
                known, data = self._find(args, kwargs)
        except CannotCompile as refused:
            return self._eager(str(refused), args, kwargs), _Known(refused=str(refused)), []
        if known.refused:
            loss = self._eager(known.refused, args, kwargs)
        elif known.params is None:
            loss = self._first(known, args, kwargs)
        elif known.graph is None:
            loss = self._record(known, data, args, kwargs)
        else:
            loss = known.graph.step(args, kwargs, data)
            known.refused = known.graph.refused
            self.tier, self.reason = known.graph.tier, known.refused or known.graph.reason
            self._tell(self.reason, self._warn or bool(known.refused))
        return loss, known, data

    def _first(self, known: _Known, args: Any, kwargs: Any) -> Any:
        """An eager step, which shows the parameters and the buffers that it writes to."""
        before = {id(x): x._version for x, _ in tensors_of_modules(self)}
        with poutine.trace(param_only=True) as seen:
            loss = self._eager("", args, kwargs)
        params = {id(p): p for p in traced_params(seen)}
        mine = params.keys() | {id(x) for x in StepState(self.optim).tensors}
        after = [(x, place) for x, place in tensors_of_modules(self) if id(x) not in mine]
        new = [name for x, (_, name) in after if id(x) not in before]
        known.steps += 1
        if not new:
            known.params = list(params.values())
            known.written = [place for x, place in after if x._version != before[id(x)]]
        elif known.steps > SETTLED:
            known.refused = f"every step makes a new tensor {new[0]!r} of a module"
        self._known[self._structure(args, kwargs)[0]] = known  # the guide has parameters now
        return loss

    def _eager(self, reason: str, args: Any, kwargs: Any) -> Any:
        self.tier, self.reason = "eager", reason
        self._tell(reason, self._warn)
        return super().step(*args, **kwargs)

    def _tell(self, reason: str, warn: bool) -> None:
        if warn and reason and reason not in self._told:
            self._told.add(reason)
            lacks = "no graph" if self.tier == "eager" else "not the fastest graph"
            warnings.warn(f"pyro_ngvi.compile: {lacks} of this step, since {reason}.", stacklevel=5)

    def _find(self, args: Any, kwargs: Any) -> tuple[_Known, list[Tensor]]:
        """What is known of arguments of this structure, and the tensors among them."""
        if am_i_wrapped():
            raise CannotCompile("effect handlers are around svi.step")
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise CannotCompile("autocast is on")
        structure, data = self._structure(args, kwargs)
        known = self._known.setdefault(structure, _Known())
        self._known.move_to_end(structure)
        if len(self._known) > MOST_GRAPHS:
            self._known.popitem(last=False)
        return known, data

    def _structure(self, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
        """What a graph holds for, and the tensors among the arguments, those bound by a ``partial``
        included, which may have other values."""
        bound = [_unbound(root)[1] for root in (self.model, self.guide)]
        (leaves, spec), (more, how) = tree_flatten((args, kwargs)), tree_flatten(bound)
        key, data = [str(spec), str(how), *self._settings()], list[Tensor]()
        for k, leaf in enumerate([*leaves, *more]):
            given = k < len(leaves)
            if isinstance(leaf, Tensor) and (given or not leaf.requires_grad):
                key.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
                data.append(leaf)
            elif isinstance(leaf, PLAIN):
                key.append((type(leaf), leaf))
            elif given:
                kind = type(leaf).__name__
                raise CannotCompile(f"an argument is of type {kind}, neither tensor nor number")
            else:  # a network, say, or a parameter
                key.append(_which(leaf))
        ids = [id(x) for x in data]
        key += [ids.index(i) for i in ids]  # one tensor in two places is one input
        return tuple(key), data

    def _settings(self) -> list[Any]:
        """What else the program may branch on."""
        found: list[Any] = [torch.get_default_dtype(), dist.is_validation_enabled()]
        found += [self.loss_and_grads, torch.is_grad_enabled()]
        found += _numbers_of(getattr(self.loss_and_grads, "__self__", None))
        for root in (self.model, self.guide):
            found += [_which(_unbound(root)[0]), *_around(root)]
            for module in root.modules() if isinstance(root, nn.Module) else ():
                held = (p for p in module._parameters.values() if p is not None)
                found += [*_numbers_of(module), *(p.requires_grad for p in held)]
        return found

    def _record(self, known: _Known, data: list[Tensor], args: Any, kwargs: Any) -> Any:
        known.steps += 1
        assert known.params is not None
        random, function = random_states(), StepFunction(self, known.params, known.written)
        try:
            with function.whole():
                graph = CheckedGraph(function, args, kwargs, data, self._cuda_graph)
        except CannotCompile as refused:
            set_random_states(random)
            for p in function.leaves:
                p.grad = None  # the eager step would add to what is there
            known.refused = str(refused) if known.steps > SETTLED else ""
            return self._eager(known.refused, args, kwargs)
        known.graph, results = graph, graph.results
        graph.results = []
        function.step_others(function.gradients_of(results))
        if self._inductor:
            graph.lower(data, self._wait)
        self.tier, self.reason = "recorded", ""
        return function.loss_of(results)


def _stacked(losses: list[Tensor]) -> Tensor:
    """One tensor on the device of most; an eager step gives a number."""
    like = max(losses, key=lambda loss: loss.device.type != "cpu")
    return torch.stack([loss.to(like) for loss in losses])


def _numbers_of(holder: Any) -> list[Any]:
    """The numbers and the like among the public attributes of an object."""
    own = getattr(holder, "__dict__", {})
    return [x for x in own.items() if isinstance(x[1], PLAIN) and not x[0].startswith("_")]


def _unbound(program: Any) -> tuple[Any, list[Any]]:
    """What a ``partial`` calls, and the arguments that it binds."""
    bound: list[Any] = []
    while isinstance(program, partial):
        bound.append((program.args, program.keywords))
        program = program.func
    return program, bound


def _which(x: Any) -> MethodType:
    """Equal for the same object alone, which it keeps: the number ``id(x)`` may become another's."""
    return x if isinstance(x, MethodType) else MethodType(id, x)


def _around(program: Any) -> list[Any]:
    """What the names stand for that a function takes from around it: numbers, or which object."""
    program = _unbound(program)[0]
    code = getattr(program, "__code__", None)
    if code is None:
        return []
    names = program.__globals__
    found = [names[name] for name in code.co_names if name in names]
    for cell in program.__closure__ or ():
        with suppress(ValueError):  # of a name that has no value yet
            found.append(cell.cell_contents)
    return [x if isinstance(x, PLAIN) else id(x) for x in found]


def compile(
    svi: SVI,
    *,
    inductor: bool = True,
    wait: bool = False,
    warn: bool = True,
    cuda_graph: bool = True,
) -> CompiledSVI:
    """An ``SVI`` that takes the same steps as ``svi`` without the Python in them.

    Args:
        svi: with a loss that runs without a look at its numbers, above all
            :class:`~pyro_ngvi.BatchedELBO`.
        inductor: let PyTorch's Inductor make code of the graph, in the background (half a minute of
            another core; it needs a C++ compiler).
        wait: wait for it, at the second step.
        warn: tell why steps stay eager, as ``reason`` does in any case.
        cuda_graph: on a GPU, start all kernels of a step, in a run of twenty, with one call.

    Raises:
        TypeError: for anything but an ``SVI``, and for one whose class has another step.

    Warns:
        UserWarning: once for each reason why steps stay eager, or without Inductor's code or a CUDA
            graph; never where numbers might be wrong and nothing is said.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> guide = ngvi.AutoFullRankNormal(model, init_loc_fn=ngvi.guides.init_to_center)
        >>> svi = pyro.infer.SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
        >>> svi = ngvi.compile(svi, inductor=False)
        >>> losses = svi.run(100, torch.tensor([1.0, 2.0, 3.0]))
        >>> svi.tier, len(losses), round(losses[-1].item(), 2)  # -log p(y)
        ('replay', 100, 6.63)
    """
    if not isinstance(svi, SVI):
        raise TypeError(
            f"compile takes an SVI, got {type(svi).__name__}. Make one first, "
            f"svi = SVI(model, guide, optim, BatchedELBO(8)), and then pyro_ngvi.compile(svi)."
        )
    if type(svi).step is not SVI.step:
        raise TypeError(
            f"compile takes the step of pyro.infer.SVI; {type(svi).__name__} has a step of its own, so "
            f"pass a plain SVI."
        )
    return CompiledSVI(svi, inductor, wait, warn, cuda_graph)
