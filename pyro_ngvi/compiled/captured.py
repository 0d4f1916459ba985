"""A recorded step as a CUDA graph: the driver starts all its kernels at one call.

A CUDA graph reads and writes at fixed addresses.  So parameters, the optimizer's state and the data are
copied to places of its own before a step, and the results from there after it.  In a run one call makes
``CHUNK`` steps.  Random numbers are drawn by the graph, and are those of an eager step: PyTorch gives
it the state of the generator at each call and moves that on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ..linalg.host import forbid_waiting, random_states, same_states, set_random_states
from ..runtime.density import identity, is_same
from .graph import CannotCompile, Graph, differ, first_line
from .step import StepFunction

#: steps at one call within a run
CHUNK = 20


class _Captured(NamedTuple):
    """A CUDA graph of some steps, the places of the results of the last, and of the losses of all."""

    graph: torch.cuda.CUDAGraph
    results: list[Tensor]
    losses: Tensor


class CapturedGraph:
    """``run``, ``graph.pure`` or Inductor's code of it, on one GPU; ``CannotCompile`` where it waits.

    Data are copied to places of its ``own``, or read where they are, and then it fits no others.
    """

    def __init__(
        self,
        graph: Graph,
        run: Callable[..., Sequence[Tensor]],
        function: StepFunction,
        inputs: Sequence[Tensor],
        own: bool,
    ) -> None:
        self._graph, self._run, self._function, self._own = graph, run, function, own
        self._kept, self._chunk = len(function.inputs()), CHUNK
        data = inputs[self._kept :]
        _require_gpu(graph, inputs[: self._kept], data)
        self._identities = [identity(x) for x in data]
        self._inputs = [x.detach().clone() for x in inputs[: self._kept]]
        self._data = [x.detach().clone() if own else x.detach() for x in data]
        # numbers of the program stay where they are: the graph has them, if they are on the CPU
        self._extra = [x if c else x.detach().clone() for x, c in _extras(graph)]
        self._stream = torch.cuda.Stream(self._inputs[0].device)
        self._of: dict[int, _Captured] = {}
        self.is_cut_off = False  # from PyTorch's generator
        _LIVING.add(self)
        self._captured(1)

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Whether it can step on these data, and with the tensors of modules that there are now."""
        if self.is_cut_off:
            return False
        for own, (x, constant) in zip(self._extra, _extras(self._graph), strict=True):
            if not constant and (own.shape, own.dtype) != (x.shape, x.dtype):
                return False
        data = inputs[self._kept :]
        return self._own or (
            all(map(is_same, self._identities, data))
            # x.data = y leaves x the same
            and all(
                (x.data_ptr(), x.stride()) == (y.data_ptr(), y.stride())
                for x, y in zip(self._data, data, strict=True)
            )
        )

    def several(self, inputs: Sequence[Tensor], count: int) -> tuple[list[Tensor], list[Tensor]]:
        """The results of the last of ``count`` steps, and the losses of all; or ``CannotCompile``."""
        self._put(inputs)
        losses: list[Tensor] = []
        while True:
            left = count - len(losses)
            done = self._many() if left >= self._chunk > 1 else self._captured(1)
            done.graph.replay()
            losses += done.losses.clone().unbind()
            if left <= len(done.losses):
                return _copies(done.results), losses

    def _many(self) -> _Captured:
        """The graph of many steps, or of one, where that of many is refused."""
        try:
            return self._captured(self._chunk)
        except CannotCompile:
            if self.is_cut_off:
                raise
            self._chunk = 1
            return self._captured(1)

    def _put(self, inputs: Sequence[Tensor]) -> None:
        """Copy what is not the graph's own to its places."""
        data, extras = inputs[self._kept :], _extras(self._graph)
        to, values = [*self._inputs], [*inputs[: self._kept]]
        for own, (x, constant) in zip(self._extra, extras, strict=True):
            if not constant:
                to.append(own)
                values.append(x)
        if self._own:  # whoever wrote to them, by whatever means
            to, values = [*to, *self._data], [*values, *data]
        _copy(to, values)

    def _captured(self, steps: int) -> _Captured:
        """The graph of so many steps, which gives what they give one by one."""
        if steps in self._of:
            return self._of[steps]
        held, random = _copies(self._inputs), random_states()
        try:
            expected = self._expected(steps)
            after = random_states()
            set_random_states(random)
            _copy(self._inputs, held)
            done = self._capture(steps)
            done.graph.replay()
            apart = differ([*done.results, done.losses], expected)
            if apart or not same_states(after, random_states()):
                raise CannotCompile("its CUDA graph gives other numbers")
        finally:
            set_random_states(random)
            _copy(self._inputs, held)
        self._of[steps] = done
        return done

    def _expected(self, steps: int) -> list[Tensor]:
        """What the graph has to give; what waits for the GPU, and would break a capture, is refused."""
        try:
            with self._beside(), forbid_waiting():
                results, losses = self._steps(steps)
                return [x.clone() for x in (*results, losses)]
        except RuntimeError as error:
            raise CannotCompile(f"it is no CUDA graph: {first_line(error)}") from error

    def _capture(self, steps: int) -> _Captured:
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        how: Any = {"stream": self._stream, "pool": pool, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.graph(graph, **how):
                results, losses = self._steps(steps)
        except RuntimeError as error:
            _end_capture(self._stream.device_index, pool)
            raise CannotCompile(f"it is no CUDA graph: {first_line(error)}") from error
        return _Captured(graph, results, losses)

    @torch.no_grad()
    def _steps(self, steps: int) -> tuple[list[Tensor], Tensor]:
        function, losses, results = self._function, list[Tensor](), list[Tensor]()
        stepped, leaves = len(function.stepped), len(function.leaves)
        places = [*self._inputs[:stepped], *self._inputs[leaves:]]
        given = [*self._inputs, *self._data, *self._extra]
        storages = {x.untyped_storage().data_ptr() for x in given}
        for _ in range(steps):
            # a result that is an argument, or a part of it, would change with that
            results = [
                x.clone() if x.untyped_storage().data_ptr() in storages else x
                for x in self._run(*given, *self._graph.noise())
            ]
            _copy(places, [*results[:stepped], *function.state_of(results)])
            losses.append(function.loss_of(results))
        return results, torch.stack(losses)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On the stream of the capture, after what was begun, and before what follows."""
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            here.wait_stream(self._stream)


#: those that a capture that fails cuts off from the generator
_LIVING: WeakSet[CapturedGraph] = WeakSet()


def _end_capture(device: int, pool: Any) -> None:
    """After a capture that failed PyTorch's generator and allocator go on as if it had not ended."""
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
    for graph in _LIVING:
        graph.is_cut_off = True
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        with suppress(AttributeError, RuntimeError):
            getattr(torch._C, name)(device, pool)


def _extras(graph: Graph) -> list[tuple[Tensor, bool]]:
    """Tensors of modules as they are now, and numbers of the program, and whether it is the latter."""
    held = (attributes[name] for attributes, name in graph.extra)
    return list(zip(held, graph.constants, strict=True))


def _require_gpu(graph: Graph, inputs: Sequence[Tensor], data: Sequence[Tensor]) -> None:
    """Refuse tensors elsewhere: their values at the capture would stay for good."""
    random = random_states()
    parts = {
        "the guide or the optimizer": inputs,
        "an argument of svi.step": data,
        "a module": [x for x, constant in _extras(graph) if not constant],
        "a random number": graph.noise(),
    }
    set_random_states(random)
    for name, tensors in parts.items():
        if not on_gpu(tensors, inputs[0].device):
            raise CannotCompile(
                f"a CUDA graph needs all on one GPU, and {name} has a tensor elsewhere"
            )


def on_gpu(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether all of them are on this one, and it is a GPU."""
    return device.type == "cuda" and all(x.device == device for x in tensors)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    found = [torch.empty_like(x) for x in tensors]
    _copy(found, tensors)
    return found


@torch.no_grad()
def _copy(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy with one kernel for all tensors of a dtype."""
    for dtype in dict.fromkeys(x.dtype for x in to):
        pairs = [(x, y) for x, y in zip(to, values, strict=True) if x.dtype == dtype]
        many: Any = torch
        many._foreach_copy_([x for x, _ in pairs], [y for _, y in pairs])
