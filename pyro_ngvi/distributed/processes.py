"""What is asked of ``torch.distributed``; one process without it is a world of its own."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def connect(backend: str | None = None, timeout: float = 600.0) -> None:
    """Join the processes that ``torchrun`` started; without it nothing happens.

    As ``torch.distributed.init_process_group``, but that after a restart (``torchrun --max-restarts``)
    no process takes the addresses of those that are gone, which stand in the same store.

    Args:
        backend: "gloo" or "nccl"; by default the latter where there is a GPU, which is then that of
            this rank on its machine.
        timeout: seconds that a collective waits for a rank that is late.

    Example:
        >>> import pyro_ngvi as ngvi
        >>> ngvi.distributed.connect()  # alone here
    """
    env = os.environ
    if "WORLD_SIZE" not in env or dist.is_initialized():
        return
    gpu = torch.cuda.is_available() if backend is None else backend == "nccl"
    if gpu:
        torch.cuda.set_device(int(env["LOCAL_RANK"]))
    r, R, wait = int(env["RANK"]), int(env["WORLD_SIZE"]), timedelta(seconds=timeout)
    # torchrun's own store outlives a restart
    kept = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        env["MASTER_ADDR"], int(env["MASTER_PORT"]), R, not kept and r == 0, wait
    )
    store = dist.PrefixStore(  # pyright: ignore[reportPrivateImportUsage]
        f"start {env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store
    )
    named = backend or ("nccl" if gpu else "gloo")
    dist.init_process_group(named, store=store, rank=r, world_size=R, timeout=wait)
    atexit.register(dist.destroy_process_group)  # or threads of gloo may outlive the interpreter


def is_connected() -> bool:
    """Whether processes know of each other."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """The number of this process, 0 if it is alone."""
    return dist.get_rank() if is_connected() else 0


def world_size() -> int:
    """R, the number of processes."""
    return dist.get_world_size() if is_connected() else 1


def is_alone() -> bool:
    """Whether there is one process only."""
    return world_size() == 1


def check_connected() -> None:
    """Refuse processes of ``torchrun`` that are not connected: each would fit its shard alone."""
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if asked > 1 and not is_connected():
        raise RuntimeError(
            f"torchrun started {asked} processes that are not connected yet. Call "
            f"pyro_ngvi.distributed.connect() first."
        )


@contextmanager
def in_touch(doing: str) -> Iterator[None]:
    """Around a collective: what it raises where another rank is gone is said in a sentence."""
    try:
        yield
    except RuntimeError as error:  # of gloo and NCCL alike
        raise RuntimeError(
            f"Rank {dist.get_rank()} of {dist.get_world_size()} lost touch while {doing}: most often "
            f"another rank has died (its own output says why) or is late. Restart all from the last "
            f"checkpoint, as torchrun --max-restarts does."
        ) from error


def mean_over_ranks(x: Tensor) -> Tensor:
    """The mean of ``x`` over several ranks, the same bits on all; ``x`` is used up."""
    x /= world_size()
    return _reduced(x, "summing the statistics of a step")


def _reduced(x: Tensor, doing: str, largest: bool = False) -> Tensor:
    """The sum, or the ``largest``, of ``x`` over ranks, entry by entry; ``x`` is used up."""
    found = x.cuda() if dist.get_backend() == "nccl" else x  # which sums on GPUs alone
    with in_touch(doing):
        dist.all_reduce(found, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return found.to(x)


def is_anywhere(flag: bool) -> bool:
    """Whether ``flag`` is true on a rank."""
    if is_alone():
        return flag
    return bool(_reduced(torch.tensor(int(flag)), "asking whether to go on", largest=True))


@dataclass(frozen=True)
class Ranks:
    """Sums over the processes that hold parts of the data, where these are ``spread``."""

    spread: bool = False

    def sum(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """The sums of each of ``xs``, the same bits on all ranks, and constants there."""
        if not self.spread:
            return xs
        flat = torch.cat([x.detach().reshape(-1) for x in xs])
        parts = _reduced(flat, "summing what data say").split([x.numel() for x in xs])
        return tuple(part.reshape(x.shape) for part, x in zip(parts, xs, strict=True))

    def all(self, flag: Tensor) -> Tensor:
        """Whether the 0-dim ``flag`` holds on all ranks."""
        return self.sum((~flag).double())[0] == 0 if self.spread else flag

    def agree(self, flag: bool) -> bool:
        """The same of what the host knows."""
        return not is_anywhere(not flag) if self.spread else flag


ALONE = Ranks()


def extremes(x: Tensor, doing: str) -> tuple[Tensor, Tensor]:
    """The least and the largest of integers ``x`` over several ranks, entry by entry."""
    # ~x = -1 - x turns the order around
    turned, most = _reduced(torch.stack([~x, x]), doing, largest=True)
    return ~turned, most


def from_all(x: Any) -> list[Any]:
    """An object of each rank."""
    if is_alone():
        return [x]
    found: list[Any] = [None] * world_size()
    with in_touch("comparing models"):
        dist.all_gather_object(found, x)
    return found


def take_from_first(tensors: list[Tensor]) -> None:
    """Copy those of rank 0 into ``tensors``."""
    if not is_alone():
        with in_touch("copying parameters"), torch.no_grad():
            for x in tensors:
                dist.broadcast(x, 0)


def share_random_state() -> None:
    """Set the random state of torch, and of the GPU in use, to that of rank 0."""
    if is_alone():
        return
    own = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        own.append(torch.cuda.get_rng_state())
    states = from_all(own)[0]
    torch.set_rng_state(states[0])
    if torch.cuda.is_initialized() and len(states) > 1:
        torch.cuda.set_rng_state(states[1])
