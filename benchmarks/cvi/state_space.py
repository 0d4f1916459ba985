"""A Poisson series with a Matern-3/2 log rate: seconds a sweep and memory as the series gets longer.

    s(t) ~ Matern-3/2, length-scale 0.2, variance 1,  y_t ~ Poisson(exp(1 + s(t))),  1,000 times a unit.

Each length in a process of its own, for its peak memory; what is resident before the model is made is
taken off.  The local-level model of ``conjugate`` runs here too, by filtering, against the same closed
form.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_ngvi.distributions import local_level, matern_state_space

from .common import Row, sites_svi, spread
from .conjugate import TARGET

LENGTHS, QUICK_LENGTHS = (1_000, 10_000, 100_000), (1_000, 10_000)
SWEEPS = 12
#: a series ten times as long may take that many times as long
LINEAR = 12.0


def model(times: Tensor, y: Tensor) -> None:
    prior = matern_state_space(times, torch.tensor(0.2), torch.tensor(1.0), nu=1.5)
    s = pyro.sample("s", prior)
    with pyro.plate("times", len(y)):
        pyro.sample("y", dist.Poisson(torch.exp(1.0 + s[..., 0])), obs=y)


def measure(length: int) -> dict[str, Any]:
    """Losses, seconds of every sweep and peak memory in bytes of one series."""
    import resource
    import time

    pyro.set_rng_seed(0)
    times = torch.linspace(0.0, length / 1_000, length)
    y = torch.poisson(torch.exp(1.0 + torch.sin(6.0 * times)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    _, svi = sites_svi(model)
    losses, seconds = [float(svi.step(times, y))], [time.process_time() - start]  # type: ignore[arg-type]
    for _ in range(SWEEPS - 1):
        start = time.process_time()
        losses.append(float(svi.step(times, y)))  # type: ignore[arg-type]
        seconds.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"losses": losses, "seconds": seconds, "memory": 1024 * (peak - before)}


def local_level_error() -> float:
    """Largest error of mean, variance and evidence after one sweep over 60 times."""
    T = 60
    y = torch.randn(T).cumsum(0)

    def series(y: Tensor) -> None:
        s = pyro.sample("s", local_level(T, initial_scale=3.0, step_scale=0.7))
        with pyro.plate("times", T):
            pyro.sample("y", dist.Normal(s[..., 0], 0.5), obs=y)

    guide, svi = sites_svi(series)
    svi.step(y)
    loss: Any = svi.evaluate_loss(y)
    times = np.arange(T)
    K = 9.0 + 0.49 * np.minimum(times[:, None], times)
    S = K + 0.25 * np.eye(T)
    mean, variance = K @ np.linalg.solve(S, y.numpy()), np.diag(K - K @ np.linalg.solve(S, K))
    square = y.numpy() @ np.linalg.solve(S, y.numpy())
    evidence = -0.5 * (T * np.log(2 * np.pi) + np.linalg.slogdet(S)[1] + square)
    q = guide.get_posterior()
    errors = np.abs(q.mean[:, 0].numpy() - mean), np.abs(q.variance[:, 0].numpy() - variance)
    return max(float(errors[0].max()), float(errors[1].max()), abs(float(loss) + evidence))


def run(quick: bool, seeds: int, data: Sequence[str] | None) -> Iterator[Row]:
    error = local_level_error()
    yield Row("local level, largest error", f"{TARGET:g}", f"{error:.1e}", error < TARGET)
    found = []
    for length in QUICK_LENGTHS if quick else LENGTHS:
        code = f"from benchmarks.cvi.state_space import worker; worker({length})"
        how: Any = {"capture_output": True, "text": True, "check": True}
        done = subprocess.run([sys.executable, "-c", code], **how)
        r = json.loads(done.stdout.splitlines()[-1])
        found.append(r)
        left = r["losses"][-2] - r["losses"][-1]
        settled = sum(loss - r["losses"][-1] > 1e-3 for loss in r["losses"])
        measured = (
            f"{spread(r['seconds'][1:])} s a sweep, {r['seconds'][0]:#.3g} s the first, "
            f"{r['memory'] / 2**20:.0f} MiB, within 1e-3 nat after {settled} sweeps "
            f"(the last gained {left:.0e})"
        )
        yield Row(f"{length:,} counts", "-", measured, None, r)
    for a, b in pairwise(found):
        ratio = np.median(b["seconds"][1:]) / np.median(a["seconds"][1:])
        memory = b["memory"] / max(a["memory"], 1)
        measured = f"{ratio:.1f} times the seconds, {memory:.1f} times the memory"
        yield Row("ten times as long", f"at most {LINEAR:g} times", measured, bool(ratio <= LINEAR))


def worker(length: int) -> None:
    """One length, as a line of JSON."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    print(json.dumps(measure(length)))
