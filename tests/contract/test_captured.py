"""Steps as CUDA graphs, on an emulation of these on the CPU (and on a GPU in tests/gpu).

The emulation records each operation and its results, and a replay does them again: it reads and writes
at the same addresses, as a GPU does, and draws new random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import pyro_ngvi as ngvi
from pyro_ngvi.compiled import CompiledSVI, captured, checked
from pyro_ngvi.compiled.graph import CannotCompile, Graph
from tests.contract.test_compiled import CASES, SMALL, D, N, data, everything, make, same

pytestmark = pytest.mark.usefixtures("plain_start")


class Recorded:
    """Stands for a ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        with torch.no_grad():
            for f, args, kwargs, results in self.operations:
                again = f(*args, **kwargs)
                for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Record(TorchDispatchMode):
    def __init__(self, graph: Recorded) -> None:
        super().__init__()
        self.graph = graph
        self.written: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # where they are now, whatever shape they are given later
        place = partial(tree_map_only, Tensor, torch.ops.aten.alias.default)
        at = place(args)
        if func._schema.is_mutable:
            self.written += [(x, x.clone()) for x in tree_leaves(at[0])]
        results = func(*args, **(kwargs or {}))
        self.graph.operations.append((func, at, kwargs or {}, place(results)))
        return results


@contextmanager
def capture(graph: Recorded, **how: Any) -> Iterator[None]:
    random = torch.get_rng_state()
    with Record(graph) as record:
        yield
    # a GPU does nothing during a capture
    torch.set_rng_state(random)
    for x, before in reversed(record.written):
        x.data.copy_(before)


class Stream:
    device, device_index = torch.device("cpu"), 0

    def __init__(self, *args: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


@pytest.fixture(autouse=True)
def emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (captured, checked):
        monkeypatch.setattr(module, "on_gpu", lambda tensors, device: True)
    monkeypatch.setattr(captured, "CHUNK", 8)  # the emulation takes as long as the steps
    emulated = {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": nullcontext,
        "CUDAGraph": Recorded,
        "graph": capture,
        "graph_pool_handle": lambda: (0, 0),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
    }
    for name, value in emulated.items():
        monkeypatch.setattr(torch.cuda, name, value)


def compiled(*case: Any, **settings: Any) -> CompiledSVI:
    return ngvi.compile(make(*case, **settings), inductor=False)


#: a capture repeats whatever operations there are, and those of these are many: test_compiled.py has
#: their recordings by default
LONG = ("units given globals", "VON")


@pytest.mark.parametrize(
    "name", [pytest.param(k, marks=pytest.mark.slow) if k in LONG else k for k in CASES]
)
@pytest.mark.filterwarnings("ignore:NGVB leaves what is not natural")
def test_steps_are_the_eager_ones(name: str) -> None:
    model, guide, rule, loss = CASES[name]
    eager = make(model, guide, rule, loss())
    losses = [eager.step(*data()) for _ in range(21)]
    expected = everything(eager)
    svi = compiled(model, guide, rule, loss())
    found = [svi.step(*data()) for _ in range(12)]
    found += svi.run(9, *data()).tolist()  # a chunk and a step
    assert svi.tier == "cuda_graph", svi.reason
    assert found == losses and same(everything(svi), expected)


def test_other_data_come_into_places_of_their_own() -> None:
    """At first data are read where they are; then a graph is captured that has a copy."""
    batches = [data(8, seed) for seed in range(5)]
    runs: list[Any] = []
    for build in (make, compiled):
        svi: Any = build()
        losses = [svi.step(*batch) for _ in range(4) for batch in batches]
        losses += [svi.step(*batches[2]) for _ in range(3)]
        runs.append((losses, everything(svi)))
    assert svi.tier == "cuda_graph" and runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


def test_data_that_are_written_to_are_those_of_the_next_step() -> None:
    X, y = data()
    runs: list[Any] = []
    for build in (make, compiled):
        svi: Any = build(**SMALL)
        losses = []
        for k in range(12):
            losses.append(svi.step(X, y))
            if k in (3, 6):
                X.mul_(-1.0)
        runs.append(losses)
    assert svi.tier == "cuda_graph" and runs[0] == runs[1]


def test_results_of_a_step_do_not_change_with_the_next() -> None:
    svi = compiled()
    svi.run(16, *data())
    state = everything(svi)
    held = [x.clone() for x in state]
    svi.run(9, *data())
    assert same(state, held) and not same(state, everything(svi))


def test_what_waits_has_no_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch raises where one would wait, in the mode in which the operations are tried first."""
    modes: list[Any] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    steps = captured.CapturedGraph._steps

    def waiting(self: Any, count: int) -> Any:
        assert modes[-1] == "error"
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(captured.CapturedGraph, "_steps", waiting)
    svi = compiled(**SMALL)
    with pytest.warns(
        UserWarning, match="not the fastest graph of this step, since it is no CUDA graph: called a"
    ):
        losses = [svi.step(*data()) for _ in range(6)]
    assert svi.tier == "replay" and modes[-1] == 0
    monkeypatch.setattr(captured.CapturedGraph, "_steps", steps)
    eager = make(**SMALL)
    assert losses == [eager.step(*data()) for _ in range(6)]


def test_what_is_not_on_the_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_gpu(tensors: Any, device: Any) -> bool:
        return not any(x.shape == (N, D) for x in tensors)

    monkeypatch.setattr(captured, "on_gpu", on_gpu)
    svi = compiled(**SMALL)
    with pytest.warns(UserWarning, match="an argument of svi.step has a tensor elsewhere"):
        svi.run(6, *data())
    assert svi.tier == "replay"


def test_a_graph_that_gives_other_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Recorded.replay

    def wrong(self: Recorded) -> None:
        replay(self)
        for x in (x for _, _, _, results in self.operations for x in tree_leaves(results)):
            if isinstance(x, Tensor) and x.is_floating_point() and x.is_contiguous():
                x.data.mul_(1.01)

    monkeypatch.setattr(Recorded, "replay", wrong)
    eager = make(**SMALL)
    losses = [eager.step(*data()) for _ in range(6)]
    svi = compiled(**SMALL)
    with pytest.warns(UserWarning, match="its CUDA graph gives other numbers"):
        assert [svi.step(*data()) for _ in range(6)] == losses


@pytest.mark.parametrize(("fails", "tier"), [(False, "cuda_graph"), (True, "replay")])
@pytest.mark.filterwarnings("ignore:pyro_ngvi.compile")
def test_a_run_goes_on_where_there_is_no_graph_of_many_steps(
    fails: bool, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By that of one, and by none after a capture that failed, which has cut that one off."""
    one = captured.CapturedGraph._captured

    def refused(self: Any, steps: int) -> Any:
        if steps > 1:
            self.is_cut_off = fails
            raise CannotCompile("it is no CUDA graph: out of memory")
        return one(self, steps)

    monkeypatch.setattr(captured.CapturedGraph, "_captured", refused)
    eager = make()
    losses = [eager.step(*data()) for _ in range(20)]
    svi = compiled()
    assert svi.run(20, *data()).tolist() == losses and svi.tier == tier
    assert ("out of memory" in svi.reason) == fails


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("how", ["data =", "data.mul_"])
def test_data_are_read_anew_whoever_wrote_to_them(own: bool, how: str) -> None:
    """Also where no version counter sees it."""
    runs: list[Any] = []
    svi: Any = None
    for build in (make, compiled):
        X, y = data()
        svi = build(**SMALL)
        losses = [svi.step(*data(N, 7)) for _ in range(4)] if own else []
        for k in range(16):
            losses.append(svi.step(X, y))
            if k in (5, 9):
                if how == "data =":
                    X.data = -2.0 * X
                else:
                    X.data.mul_(-2.0)
        runs.append(losses)
    assert svi.tier == "cuda_graph" and runs[0] == runs[1]


def test_a_capture_that_fails_leaves_the_others_to_be_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes the state of the generator from them."""
    X, y = data()
    svi: Any = compiled(**SMALL)
    for _ in range(6):
        svi.step(X, y)
    kept = next(iter(svi._known.values())).graph._captured
    assert not kept.is_cut_off

    class Generator:
        def clone_state(self) -> str:
            return "clone"

        def graphsafe_set_state(self, state: str) -> None:
            seen.append(state)

    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "default_generators", [Generator()])
    with monkeypatch.context() as failing:

        @contextmanager
        def fails(graph: Recorded, **how: Any) -> Iterator[None]:
            yield
            raise RuntimeError("operation failed due to a previous error during capture")

        failing.setattr(torch.cuda, "graph", fails)
        with pytest.warns(UserWarning, match="it is no CUDA graph: operation failed"):
            for _ in range(6):
                svi.step(*data(5, 3))
    assert seen == ["clone"] and kept.is_cut_off
    svi.step(X, y)
    anew = next(iter(svi._known.values())).graph._captured
    assert svi.tier == "cuda_graph"
    assert not any(k.graph._captured is kept for k in svi._known.values() if k.graph) and anew


def test_a_compiled_svi_is_copied_without_its_graphs() -> None:
    svi = compiled(**SMALL)
    svi.run(6, *data())
    again = deepcopy(svi)
    assert not again._known and again.tier == "cuda_graph"


def test_what_a_program_makes_on_the_host_is_moved_once() -> None:
    """The indices of a plate, and numbers that it moves itself: else every step would wait."""
    X = torch.zeros(5, 3, device="meta")

    def program() -> list[Tensor]:
        scale = torch.as_tensor(2.0).to(X) * torch.ones(3).to(X.device)
        return [X[torch.arange(5)] * scale]

    graph = Graph(program, [X], 0, {})
    assert "_to_copy" not in graph.pure.code and "arange" not in graph.pure.code
    places = [held[name] for held, name in graph.extra if name.startswith("moved")]
    assert sorted((x.device.type, *x.shape) for x in places) == [
        ("meta",),
        ("meta", 3),
        ("meta", 5),
    ]
    assert graph.constants == [True] * len(graph.extra)


def test_what_is_written_to_after_it_was_made_is_made_anew() -> None:
    X = torch.zeros(3, device="meta")

    def program() -> list[Tensor]:
        indices = torch.arange(3)
        indices[1] = 2
        return [X[indices]]

    assert "arange" in Graph(program, [X], 0, {}).pure.code


def test_what_is_written_to_is_not_what_its_numbers_come_from() -> None:
    """The gradient of log softmax writes into what it made of rows of the data."""
    X = torch.zeros(5, 3, device="meta")

    def program() -> list[Tensor]:
        rows = X[torch.arange(5)]
        return [torch.ones_like(rows).sub_(rows), (2.0 * rows).add_(1.0)[:2].exp_()]

    assert "arange" not in Graph(program, [X], 0, {}).pure.code


def test_what_stays_on_the_host_meets_its_own_there() -> None:
    """Random numbers, arguments of the host: what they are used with is not moved from there."""
    X, host = torch.zeros(5, 3, device="meta"), torch.arange(5.0)

    def program() -> list[Tensor]:
        noise = torch.randn(3) * torch.ones(3)
        part = host[torch.arange(5)] + torch.tensor([1, 2, 3, 4, 5])
        return [X * noise.to(X.device), part]

    graph = Graph(program, [X, host], 0, {})
    assert not any(name.startswith("moved") for _, name in graph.extra)
    _, part = graph.pure(*graph.arguments([X, host]))
    assert torch.equal(part, 2.0 * host + 1.0)
