"""The graph of a step, and how it is held against the step itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..linalg.host import host_bool, own_random_state, random_states, same_states, set_random_states
from ..runtime.density import identity, is_same
from .captured import CHUNK, CapturedGraph, on_gpu
from .graph import CannotCompile, Graph, Place, differ, first_line
from .lowered import Lowering
from .step import StepFunction

#: uses at which a graph is held against an eager step
CHECKED = (1, 2, 8, 64, 512, 4096, 32768)
#: after so many other data it is not done again for more
NEW_DATA = 2


class CheckedGraph:
    """A recorded step.  The constructor takes this step; its results are in ``results``.

    ``tier`` says how the last step was done, ``refused`` why no other is to be.
    """

    def __init__(
        self,
        function: StepFunction,
        args: Any,
        kwargs: Any,
        data: list[Tensor],
        cuda_graph: bool = True,
    ) -> None:
        self.function, self.uses, self.refused, self.tier = function, 0, "", "recorded"
        self._reasons = {"inductor": "", "cuda_graph": ""}
        self.lowering: Lowering | None = None  # while there is something to wait for
        self._fast: Any = None  # Inductor's function, once it was checked
        self._captured: CapturedGraph | None = None
        self._others_came = False  # other data than those of the capture
        leaves = function.leaves
        self._tries = cuda_graph and bool(leaves) and on_gpu(leaves, leaves[0].device)
        self._data, self._other_data = [identity(x) for x in data], 0
        before, random = function.state, random_states()
        inputs = [*function.inputs(), *data]
        held = [x.detach().clone() for x in function.leaves]
        recorded: list[Tensor] = []

        def step() -> list[Tensor]:
            recorded[:] = function.eager(args, kwargs)
            return recorded

        modules = {id(x): place for x, place in tensors_of_modules(function.svi)}
        self.graph = Graph(step, inputs, len(inputs) - len(data), modules)
        changed = before.differs(function.state)
        if changed is not None:
            name = type(function.svi.optim).__name__
            raise CannotCompile(f"a step changes {changed!r} of {name}, which is no tensor")
        after = random_states()
        set_random_states(random)
        try:
            with torch.no_grad():
                again = self.graph.pure(*self.graph.arguments([*held, *inputs[len(held) :]]))
        except RuntimeError as error:
            raise CannotCompile(f"its operations do not run again: {first_line(error)}") from error
        if differ(again, recorded) or not same_states(after, random_states()):
            raise CannotCompile("its operations, run again, do not give what it gave")
        self.results = recorded

    @property
    def reason(self) -> str:
        """Why Inductor's code, or a CUDA graph, was tried and is not there."""
        return "; ".join(filter(None, self._reasons.values()))

    def _lowered(self) -> Lowering | None:
        """Inductor's work, if it has ended since the last step."""
        return self.lowering if self.lowering is not None and self.lowering.is_ready() else None

    def lower(self, data: list[Tensor], wait: bool) -> None:
        """Begin with Inductor's work; ``wait`` for its end."""
        with own_random_state():
            examples = self.graph.arguments([*self.function.inputs(), *data])
        self.lowering = Lowering(self.graph.pure, examples)
        self.lowering.is_ready(wait)

    def step(self, args: Any, kwargs: Any, data: list[Tensor]) -> Tensor:
        """One step; its loss."""
        self.uses += 1
        inputs = [*self.function.inputs(), *data]
        if self.uses in CHECKED or self._are_other(data):
            results = self._compared(inputs, args, kwargs)
        else:
            results = self._run(inputs)
        self.function.take(results)
        return self.function.loss_of(results)

    def several(self, most: int, data: list[Tensor]) -> list[Tensor]:
        """Up to ``most`` further steps on the data of the last, as far as they need no comparison and
        leave nothing to other optimizers."""
        function, losses = self.function, []
        following = min(use for use in (*CHECKED, self.uses + most + 1) if use > self.uses)
        most = min(most, following - 1 - self.uses)
        if function.others or most < 1:
            return []
        stepped, results = len(function.stepped), []
        inputs = [*function.inputs(), *data]
        state = slice(len(function.leaves), len(inputs) - len(data))
        try:
            while len(losses) < most:
                fixed = None if self._lowered() else self._capture(inputs)
                if fixed is None:
                    results = self._run(inputs)
                    new = [function.loss_of(results)]
                else:
                    try:
                        results, new = fixed.several(inputs, min(most - len(losses), 5 * CHUNK))
                        self.tier = "cuda_graph"
                    except CannotCompile as refused:
                        self._give_up(refused)
                        continue
                inputs[:stepped], inputs[state] = results[:stepped], function.state_of(results)
                losses += new
                reports = function.reports_of(results).values()
                if any(host_bool(report.finite) is False for report in reports):
                    break
        finally:
            self.uses += len(losses)
            if results:
                function.take(results)
        return losses

    @torch.no_grad()
    def _run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if lowered := self._lowered():
            return self._try(lowered, self.graph.arguments(inputs))
        if fixed := self._capture(inputs):
            self.tier = "cuda_graph"
            return fixed.several(inputs, 1)[0]
        arguments = self.graph.arguments(inputs)
        self.tier = "replay" if self._fast is None else "inductor"
        return self.graph.pure(*arguments) if self._fast is None else self._fast(*arguments)

    def _capture(self, inputs: Sequence[Tensor]) -> CapturedGraph | None:
        """The CUDA graph for these inputs; where there is none, ``reason`` says why."""
        if self._tries and (self._captured is None or not self._captured.fits(inputs)):
            self._others_came = self._others_came or self._captured is not None
            run = self.graph.pure if self._fast is None else self._fast
            made = self.graph, run, self.function, inputs, self._others_came
            try:
                self._captured = CapturedGraph(*made)
            except CannotCompile as refused:
                self._give_up(refused)
        return self._captured

    def _give_up(self, refused: CannotCompile) -> None:
        """No CUDA graphs any more."""
        self._captured, self._tries = None, False
        self._reasons["cuda_graph"] = str(refused)

    def _try(self, lowering: Lowering, arguments: list[Tensor]) -> Sequence[Tensor]:
        """Both functions, the first time: Inductor's is taken from now on if it gives the same."""
        random, reason = random_states(), ""
        results, self.tier = self.graph.pure(*arguments), "replay"
        after = random_states()
        try:
            fast = lowering.take()
            set_random_states(random)
            if fast is not None and not differ(fast(*arguments), results):
                self._fast, self._captured = fast, None
            else:
                reason = lowering.reason or "Inductor's code gives other numbers than the graph"
        except Exception as error:
            reason = f"Inductor's code fails: {type(error).__name__}, {str(error)[:100]}"
        set_random_states(after)
        self._reasons["inductor"], self.lowering = reason, None
        return results

    def _compared(self, inputs: list[Tensor], args: Any, kwargs: Any) -> Sequence[Tensor]:
        """The results of an eager step if the graph gives others, which is then refused."""
        function, before = self.function, self.function.state
        leaves, tensors = function.leaves, before.tensors
        stepped, random = len(function.stepped), random_states()
        held = [p.detach().clone() for p in leaves]
        with function.whole():
            eager = function.eager(args, kwargs)
        eager[:stepped] = [x.clone() for x in eager[:stepped]]
        after, changed = random_states(), before.differs(function.state)
        if changed is None:
            with torch.no_grad():
                for p, x in zip(function.stepped, held, strict=False):
                    p.copy_(x)
            function.state.write(tensors)
            set_random_states(random)
            results = self._run(inputs)
            if not differ(results, eager) and same_states(after, random_states()):
                return results
            set_random_states(after)
        self.refused = (
            f"at use {self.uses} it gave other numbers than the program, which changes from step to "
            f"step; the steps since their last comparison may be wrong"
            if changed is None
            else f"a step changes {changed!r} of its optimizer, which is no tensor"
        )
        return eager

    def _are_other(self, data: list[Tensor]) -> bool:
        """Whether the data are not those of the last step, for the first few times."""
        if self._other_data >= NEW_DATA:
            return False
        other = not all(map(is_same, self._data, data))
        self._data = [identity(x) for x in data]
        self._other_data += other
        return other


def tensors_of_modules(svi: Any) -> Iterator[tuple[Tensor, Place]]:
    """The tensors of the modules of model and guide, and where they stand."""
    for root in (svi.model, svi.guide):
        for module in root.modules() if isinstance(root, nn.Module) else ():
            for held in (module._buffers, module._parameters):
                yield from ((x, (held, name)) for name, x in held.items() if x is not None)
