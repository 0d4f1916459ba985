"""A fit on one of several ranks that kill themselves, for ``test_distributed.py``: run by ``torchrun``.

torchrun --nproc-per-node=2 --max-restarts=9 -m tests.contract.killed FOLDER [STEP:RANK ...]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pyro
import torch
import torch.distributed

import pyro_ngvi as ngvi
from tests.contract.ranks import data, ours

STEPS, EVERY = 20, 4


def main(folder: Path, kills: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    ngvi.distributed.connect("gloo", timeout=60)
    rank, path = torch.distributed.get_rank(), folder / "run.ngvi"
    mine = ngvi.distributed.shard(*data())
    pyro.set_rng_seed(rank)
    svi, done = ngvi.distributed.wrap(ours("AutoFullRankNormal", ngvi.IFVB)()), 0
    if path.exists():
        done = ngvi.load(path, svi, *mine)["steps"]
    for step in range(done, STEPS):
        mark = folder / f"killed {step}:{rank}"
        if f"{step}:{rank}" in kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        svi.step(*mine)
        if (step + 1) % EVERY == 0 and rank == 0:
            ngvi.save(path, svi, extra={"steps": step + 1})
    if rank == 0:
        params = pyro.get_param_store().named_parameters()
        torch.save({name: p.detach() for name, p in params}, folder / "result")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
