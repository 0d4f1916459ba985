"""PyTorch's Inductor on a recorded graph: in a process of its own, then from its cache on disk.

In a thread Inductor would hold the interpreter for half a minute, and put PyTorch's random state back
in the end.  So another process compiles, and leaves the result in Inductor's cache
(``TORCHINDUCTOR_CACHE_DIR``), from which this one has it in a second or two; so has a later run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, fx
from torch.distributions import Distribution

#: what the other process runs
PROGRAM = (
    "import sys; from pyro_ngvi.compiled.lowered import compile_file; compile_file(sys.argv[1])"
)


class Lowering:
    """Inductor's work on ``graph``, begun in another process; ``reason``: why there is no code."""

    def __init__(self, graph: fx.GraphModule, examples: Sequence[Tensor]) -> None:
        self.reason = ""
        self._graph = graph
        self._examples = [x.detach() for x in examples]
        self._process: subprocess.Popen[bytes] | None = None
        folder = tempfile.mkdtemp(prefix="pyro_ngvi-")
        finalize(self, shutil.rmtree, folder, ignore_errors=True)
        path, self._errors = Path(folder, "graph.pt"), Path(folder, "errors.txt")
        try:
            torch.save((graph, self._examples), path)
            with self._errors.open("w") as errors:
                arguments = [sys.executable, "-c", PROGRAM, str(path)]
                here = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
                self._process = subprocess.Popen(arguments, stdout=errors, stderr=errors, env=here)
            finalize(self, _end, self._process)
        except Exception as error:  # no interpreter to start, a graph that cannot be stored
            self.reason = f"Inductor cannot be started: {type(error).__name__}, {str(error)[:100]}"

    def is_ready(self, wait: bool = False) -> bool:
        """Whether the other process has ended; ``wait`` for it."""
        if self._process is not None and wait:
            self._process.wait()
        return self._process is None or self._process.poll() is not None

    def take(self) -> Callable[..., Any] | None:
        """The compiled function, once :meth:`is_ready`; ``None``: ``reason`` says why."""
        if self._process is None:
            return None
        if self._process.returncode:
            last = (self._errors.read_text().strip().splitlines() or ["no message"])[-1]
            self.reason = f"Inductor failed: {last[:120]}"
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = lowered(self._graph, self._examples)
        strides = [x.stride() for x in self._examples]
        return lambda *tensors: run(*map(_with_strides, tensors, strides))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _with_strides(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """``x``, in the layout for which code was made."""
    if x.stride() == stride:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def lowered(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """Inductor's function for ``graph``; at once where its cache has it."""
    validates = Distribution._validate_args
    try:
        import torch._inductor as inductor  # a second

        given: Any = examples
        with torch.no_grad():
            run: Any = inductor.compile(graph, given, options={"fallback_random": True})
        return run
    finally:
        # compiling switches the validation of distributions off, for the whole process
        Distribution.set_default_validate_args(validates)


def compile_file(path: str) -> None:
    """What the other process does."""
    import torch._dynamo  # without it a graph cannot be read

    graph, examples = torch.load(path, weights_only=False)
    lowered(graph, examples)(*examples)
