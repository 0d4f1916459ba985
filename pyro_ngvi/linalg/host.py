"""Between tensors and the host: questions nobody waits for, precision, draws that leave no trace.

A branch on a tensor makes a GPU and its host wait for each other, and has no meaning for ``meta``
tensors or under ``vmap``.  Code that asks must give the same result, bit for bit, whether it gets an
answer or not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial, reduce, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

P = ParamSpec("P")
T = TypeVar("T")


_looks_away: ContextVar[bool] = ContextVar("looks_away", default=False)


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """While it lasts a variable has that value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def nothing_at_hand() -> AbstractContextManager[None]:
    """While it lasts no tensor is at hand: what is recorded then holds for other numbers too."""
    return setting(_looks_away, True)


def constant(x: Tensor) -> Tensor:
    """``x``, which no step changes; for a recording like a number that stands in the program."""
    return torch.ops.aten.lift_fresh_copy(x) if _looks_away.get() else x


def at_hand(x: Tensor) -> bool:
    """Whether the host can look at ``x`` without waiting for another device."""
    return x.device.type == "cpu" and not _looks_away.get()


def host_bool(condition: Tensor) -> bool | None:
    """The value of a 0-dim ``condition`` on a CPU; ``None`` where it would have to be waited for."""
    if not at_hand(condition):
        return None
    try:
        return bool(condition)
    except RuntimeError:  # under vmap and in tracing there is no single answer
        return None


def choose(condition: Tensor, accepted: Any, refused: Any) -> Any:
    """By tensor ``accepted`` where the 0-dim ``condition`` holds, else ``refused``; nobody waits."""
    return tree_map(lambda a, b: a if a is b else torch.where(condition, a, b), accepted, refused)


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Whether every tensor of ``b`` equals the one of that name in ``a``: a 0-dim tensor."""
    if all(at_hand(v) for v in b.values()):
        return torch.tensor(all(torch.equal(a[name], v) for name, v in b.items()))
    return reduce(torch.logical_and, ((a[name] == v).all() for name, v in b.items()))


def outside_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` with autocast, which rounds products of matrices, switched off while it runs."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return run


@contextmanager
def forbid_waiting() -> Iterator[None]:
    """Whatever makes the host wait for a GPU, as far as PyTorch knows, is a ``RuntimeError`` within."""
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():  # once it says that it does not know of all that waits
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def apart(seed: int, stream: int = 0) -> int:
    """The seed of a stream that shares no numbers with another, nor with ``torch.manual_seed(seed)``:
    data that users have drawn so must not be the noise by which their model is judged.  Stream 0 is
    that of searches and integrals, 1 of :func:`pyro_ngvi.fit`, the others of what reads a guide."""
    return int(np.random.SeedSequence([stream + 1, seed]).generate_state(1)[0])


@contextmanager
def own_random_state(seed: int | None = None) -> Iterator[None]:
    """Restores torch's random states, of a GPU where it is in use; ``seed`` sets them inside."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        if seed is not None:
            # torch.manual_seed takes half a millisecond for kinds of GPU that are not in use
            others = torch.backends.mps.is_available() or torch.xpu.is_available()
            in_use = others or torch.cuda.is_initialized()
            (torch.manual_seed if in_use else torch.default_generator.manual_seed)(seed)
        yield


def random_states() -> list[Tensor]:
    """The states of torch's generators, of a GPU where it is in use."""
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_gpu]


def set_random_states(states: list[Tensor]) -> None:
    """Put :func:`random_states` back; those of another number of GPUs are left as they are."""
    torch.set_rng_state(states[0])
    if states[1:] and len(states[1:]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states[1:])


def same_states(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two :func:`random_states` are the same."""
    return all(map(torch.equal, a, b))


def fixed_normal(*shape: int, seed: int) -> Tensor:
    """Normal numbers in float64 on the CPU, the same for the same seed; no random state is touched.

    Under ``vmap`` they are the same for all particles, and a plain tensor that the host can look at.
    """
    generator = torch.Generator().manual_seed(seed)
    how: Any = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    drawn = partial(torch.randn, shape, **how)
    return constant(outside_modes(drawn)) if _looks_away.get() else outside_vmap(drawn)


def outside_vmap(function: Callable[[], T]) -> T:
    """Call it, where no transform of ``torch.func`` holds."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    plain = functorch.peek_interpreter_stack() is None
    return function() if plain else outside_modes(function)


def outside_modes(function: Callable[[], T]) -> T:
    """Call it where no mode of torch holds (vmap, grad, inference, tracing): in a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def is_coarse(x: Tensor, sd: Tensor, dtype: torch.dtype) -> Tensor:
    """Where numbers of the dtype around ``x`` are a sixteenth of this sd apart, or more."""
    return sd < 16.0 * torch.finfo(dtype).eps * x.abs()
