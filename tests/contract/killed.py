"""A fit on one of several ranks that kill themselves, for ``test_distributed.py``: run by ``torchrun``.

torchrun --nproc-per-node=2 --max-restarts=9 -m tests.contract.killed FOLDER loop|fit [STEP:RANK ...]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pyro
import torch
import torch.distributed

import pyro_ngvi as ngvi
from tests.contract.ranks import data, ours, regression

STEPS, EVERY = 40, 4


def main(folder: Path, how: str, kills: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    ngvi.distributed.connect("gloo", timeout=60)
    rank, path = torch.distributed.get_rank(), folder / "run.ngvi"
    mine = ngvi.distributed.shard(*data())
    pyro.set_rng_seed(rank)

    def kill(step: int) -> None:
        mark = folder / f"killed {step}:{rank}"
        if f"{step}:{rank}" in kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def in_a_loop() -> None:
        svi, done = ngvi.distributed.wrap(ours("AutoFullRankNormal", ngvi.IFVB)(), ["data"]), 0
        if path.exists():
            done = ngvi.load(path, svi, *mine)["steps"]
        for step in range(done, STEPS):
            kill(step)
            svi.step(*mine)
            if (step + 1) % EVERY == 0 and rank == 0:
                ngvi.save(path, svi, extra={"steps": step + 1})

    def in_one_call() -> None:
        options: Any = {
            "callbacks": [lambda fit: kill(fit.steps)],
            "checkpoint": path,
            "every": 0.0,
        }
        options["progress"] = False
        if path.exists():
            fit = ngvi.load(path, regression)
            fit.resume(*mine, max_steps=max(1, STEPS - fit.steps), **options)
        else:
            how = {"plates": ["data"]}
            ngvi.fit(regression, *mine, tol=0.0, max_steps=STEPS, distributed=how, **options)

    in_a_loop() if how == "loop" else in_one_call()
    if rank == 0:
        params = pyro.get_param_store().named_parameters()
        torch.save({name: p.detach() for name, p in params}, folder / "result")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
