"""Processes that are forked from one in which the slow imports were made, once for all of them."""

from __future__ import annotations

from multiprocessing import get_context
from typing import Any

#: what a first step imports, of vmap and of torch.optim, takes longer than many steps
FIRST_STEPS = ["torch._dynamo", "torch._decomp.decompositions_for_jvp"]

processes: Any = get_context("forkserver")


def imported_before(*modules: str) -> None:
    """To call before the first process is started: one that is there already keeps its imports."""
    processes.set_forkserver_preload([*modules, *FIRST_STEPS])
