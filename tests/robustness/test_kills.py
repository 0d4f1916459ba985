"""Runs that are killed at random moments, also while they write, go on bit for bit in a new process."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pytest
from pyro.infer import SVI

import pyro_ngvi as ngvi
from tests.contract.test_checkpoint import CASES, Loop, X, _loader, _minibatched, _of, counted, y
from tests.contract.test_every_pair import RULES
from tests.contract.test_every_pair import model as two_sites
from tests.forked import imported_before, processes

SOME = ["NGVB, shuffled minibatches", "sites", "Pyro's guide, Adam"]


def _cvi() -> SVI:
    guide = ngvi.AutoSites(counted)
    return SVI(counted, guide, ngvi.CVI(guide, lr=0.5), ngvi.SitesELBO())


def _rule(name: str) -> Callable[[], SVI]:
    accepts, loss = RULES[name], ngvi.BatchedELBO(4)
    guide = ngvi.AutoMeanFieldNormal
    if name in ("VON", "VOGN"):
        loss = ngvi.BatchedELBO(4, curvature="gauss_newton")
    return _of(two_sites, guide, accepts, lambda: loss)


LOOPS: dict[str, Callable[[], Loop]] = {
    "NGVB, shuffled minibatches": lambda: Loop(
        _minibatched, loader=lambda: _loader("own"), stop=_stop
    ),
    "sites": lambda: Loop(_cvi, (X, y)),
    **{
        name: lambda make=make: Loop(make, (X, y))
        for name, make in CASES.items()
        if name != "sites"
    },
    **{
        name: lambda name=name: Loop(_rule(name), (X, X[:, :2].cos()))
        for name in ("VON", "VOGN", "IVON", "IFVB", "AIFVB")
    },
}


def _stop(svi: SVI) -> ngvi.StopRule:
    return ngvi.StopRule(svi, batches=_loader("shuffled"))


def run(name: str, path: Path, log: Path, steps: int) -> None:
    """Take ``steps`` in all, from where the file at ``path`` left off, with a file at every step."""
    pyro.set_rng_seed(0)
    loop = LOOPS[name]()
    done = loop.load(path) if path.exists() else 0
    with open(log, "ab", buffering=0) as file:  # a line is written at once or not at all
        for k in range(done, steps):
            (loss,) = loop.take(1)
            file.write(f"{k} {float(loss).hex()}\n".encode())
            loop.save(path, extra=k + 1)


def survive(name: str, folder: Path, kills: int, steps: int = 12) -> int:
    """How often a run was killed before it ended; its losses must be those of one that was not."""

    def lines(log: str) -> list[str]:
        path = folder / log
        return path.read_text().splitlines() if path.exists() else []

    def started(path: str, log: str) -> Any:
        process = processes.Process(target=run, args=(name, folder / path, folder / log, steps))
        process.start()
        return process

    imported_before("tests.robustness.test_kills")
    whole = started("whole", "whole.log")
    whole.join()
    killed, expected = 0, lines("whole.log")
    assert whole.exitcode == 0 and len(expected) == steps
    chosen = random.Random(name)
    while True:
        process = started("run", "run.log")
        # somewhere in a step, or before the first, whatever the machine has to do beside
        most = len(lines("run.log")) + chosen.randrange(steps // 2) if killed < kills else math.inf
        while process.exitcode is None and len(lines("run.log")) < most:
            process.join(0.002)
        process.join(chosen.uniform(0.0, 0.02))
        if process.exitcode is not None:
            assert process.exitcode == 0
            break
        process.kill()
        process.join()
        killed += 1
    assert set(lines("run.log")) == set(expected)
    return killed


@pytest.mark.parametrize("name", SOME)
def test_a_run_survives_being_killed(name: str, tmp_path: Path) -> None:
    assert survive(name, tmp_path, kills=3) >= 1


@pytest.mark.slow
def test_two_hundred_kills(tmp_path: Path) -> None:
    """Over rules and guides: every one of them in turn, until 200 runs were killed."""
    killed = turn = 0
    while killed < 200:
        for name in LOOPS:
            folder = tmp_path / f"{turn}-{name}"
            folder.mkdir()
            killed += survive(name, folder, kills=10, steps=40)
        turn += 1
