"""One step of an SVI as a function of tensors to tensors, and what becomes of its results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from ..optim.host import NaturalGradientOptim
from ..optim.state import whole_step
from ..runtime.store import traced_params
from .graph import CannotCompile, Place
from .state import StepState


class StepFunction:
    """A step of ``svi`` for arguments of one structure.

    Its inputs are the parameters, the state of the optimizer and the data; its *results* the new
    parameters that a rule of ours steps, the loss, what the rule reports, the gradients of all other
    parameters, and the new state.  ``params`` are the unconstrained parameters that a step before has
    met, ``written`` the buffers of modules that it wrote to; both are ``leaves``, first of all those
    that are ``stepped``.  ``others`` are left to another optimizer.
    """

    def __init__(self, svi: Any, params: Sequence[Tensor], written: Sequence[Place]) -> None:
        self.svi, optim = svi, svi.optim
        self.natural = isinstance(optim, NaturalGradientOptim)
        own = {id(p) for p in optim.natural_params()} if self.natural else set()
        self.stepped = [p for p in params if id(p) in own] + [held[name] for held, name in written]
        self.leaves = [*self.stepped, *(p for p in params if id(p) not in own)]
        self.others: list[Tensor] = []
        self.state = StepState(optim)
        self._reports: dict[str, Any] = {}
        self._with_gradient: list[Tensor] = []
        self._params = {id(p) for p in params}
        store = pyro.get_param_store().named_parameters()
        self._stored = {name: p for name, p in store if id(p) in self._params}
        self._written = [(held, name, held[name]) for held, name in written]

    def inputs(self) -> list[Tensor]:
        """Parameters and state, as they are now."""
        return [*self.leaves, *self.state.tensors]

    def fits(self) -> bool:
        """Whether parameters, buffers and the optimizer's state have the form that was recorded."""
        if not self.state.is_untouched():
            now = StepState(self.svi.optim)
            if now.differs(self.state):
                return False
            self.state = now
        store = dict(pyro.get_param_store().named_parameters())
        same = all(store.get(name) is p for name, p in self._stored.items())
        return same and all(held.get(name) is x for held, name, x in self._written)

    def eager(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Run the program: step what the rule steps, and return the results."""
        svi, optim = self.svi, self.svi.optim
        for p in self.leaves:
            p.grad = None
        with poutine.trace(param_only=True) as seen:
            loss = svi.loss_and_grads(svi.model, svi.guide, *args, **kwargs)
        if not isinstance(loss, Tensor):
            raise CannotCompile("its loss is no tensor: take loss=pyro_ngvi.BatchedELBO(...)")
        met = {id(p): p for p in traced_params(seen)}
        if met.keys() != self._params:
            raise CannotCompile("it has other parameters than the step before")
        if self.natural:
            self.others = optim.step_blocks(list(met.values()))
            self._reports = optim.reports
        else:
            name = pyro.get_param_store().param_name
            self.others = sorted(met.values(), key=lambda p: str(name(p)))
        self._with_gradient = [p for p in self.others if p.grad is not None]
        gradients = [p.grad for p in self._with_gradient if p.grad is not None]
        reports = [v for r in self._reports.values() for v in vars(r).values()]
        self.state = StepState(optim)
        new = [p.detach() for p in self.stepped]
        return [*new, loss.detach(), *reports, *gradients, *self.state.tensors]

    def loss_of(self, results: Sequence[Tensor]) -> Tensor:
        """The loss among the results."""
        return results[len(self.stepped)]

    def state_of(self, results: Sequence[Tensor]) -> Sequence[Tensor]:
        """The new state among the results."""
        return results[len(results) - len(self.state.tensors) :]

    def reports_of(self, results: Sequence[Tensor]) -> dict[str, Any]:
        """What the rule reports of each block, among the results."""
        rest = iter(results[len(self.stepped) + 1 :])
        reports = self._reports.items()
        return {k: replace(r, **{n: next(rest) for n in vars(r)}) for k, r in reports}

    def whole(self) -> Any:
        """Around a step: undo it where it raises, if a rule of ours takes it."""
        return whole_step(self.svi.optim, self.leaves) if self.natural else nullcontext()

    def take(self, results: Sequence[Tensor]) -> None:
        """Put the results where they belong, and let the other parameters be stepped."""
        with self.whole() if self.others else nullcontext():
            try:
                self._write(results)
            except BaseException:  # Ctrl-C: once more, since nothing is undone by half
                self._write(results)
                raise
            if self.natural:
                self.svi.optim.take_reports(self.reports_of(results))
            self.step_others(self.gradients_of(results))

    @torch.no_grad()
    def _write(self, results: Sequence[Tensor]) -> None:
        for p, new in zip(self.stepped, results, strict=False):
            p.copy_(new)
        self.state.write(list(self.state_of(results)))

    def gradients_of(self, results: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradients of the other parameters among the results."""
        end = len(results) - len(self.state.tensors)
        return results[end - len(self._with_gradient) : end]

    def step_others(self, gradients: Sequence[Tensor]) -> None:
        """Let the optimizer of the other parameters step them."""
        for p, g in zip(self._with_gradient, gradients, strict=True):
            p.grad = g
        if self.natural:
            self.svi.optim.step_others(self.others)
        else:
            self.svi.optim(set(self.others))
        for p in self.others:
            p.grad = None
