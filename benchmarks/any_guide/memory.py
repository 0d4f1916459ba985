"""The limited-memory estimate at D = 1,000,000 in float32: time beside the guide alone, and memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import init_to_feasible

import pyro_ngvi
from pyro_ngvi.fisher import LowRank

from ..stepping import Spread, Step, heading, line

__all__ = ["Result", "run", "table"]

WINDOWS = (8, 32, 100)
PARTICLES = (1, 8)
FACTORS = 8
#: steps of a block: at least two merges for the widest window
STEPS = 100


@dataclass(frozen=True)
class Result:
    """Seconds; the estimate's over the guide's; MiB of ``window`` vectors and of all at the peak."""

    guide: str
    particles: int
    window: int
    estimate: Spread
    alone: Spread
    ratio: Spread
    whole: Spread | None
    held: float
    peak: float | None


def _guide(kind: str, D: int) -> Any:
    """A guide with D parameters in float32."""
    if kind == "mean_field":
        d = D // 2
    else:
        d = D // (FACTORS + 2)

    def model() -> None:
        pyro.sample("z", dist.Normal(torch.zeros(d), 1.0).to_event(1))

    if kind == "mean_field":
        guide: Any = pyro_ngvi.AutoMeanFieldNormal(model, init_loc_fn=init_to_feasible)
    else:
        guide = pyro_ngvi.AutoFactorNormal(model, FACTORS, init_loc_fn=init_to_feasible)
    guide()
    return guide


def _alone(guide: Any, particles: int) -> Step:
    """Draws from the guide, z.square().sum(), and its gradient."""
    family, params = guide.family, guide.natural_params()
    noise_dim = family.noise_dim(params)

    def step() -> None:
        z = family.rsample(params, torch.randn(particles, noise_dim))
        torch.autograd.grad(z.square().sum(), list(params.values()))

    return step


def _whole(guide: Any, particles: int, window: int) -> Step:
    """A step of IFVB through SVI."""
    optim = pyro_ngvi.IFVB(guide, fisher=LowRank(window, growth=1.0))
    svi = SVI(guide.model, guide, optim, Trace_ELBO(particles, vectorize_particles=True))
    return svi.step


def _estimate(window: int, D: int) -> Step:
    """One score taken in, and one product with the inverse."""
    estimate, scores, turn = LowRank(window, growth=1.0), torch.randn(8, 1, D), [0]
    state = [estimate.init(torch.ones(D), 100.0)]
    g = torch.randn(D)

    def step() -> None:
        turn[0] += 1
        state[0] = estimate.update(state[0], scores[turn[0] % len(scores)])
        estimate.product(state[0], g)

    return step


def _seconds(step: Step, count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - start) / count


def run(D: int, rounds: int, whole_windows: tuple[int, ...] = (8, 32)) -> list[Result]:
    """Blocks of all kinds of steps in turn; the whole step only for ``whole_windows``."""
    torch.set_default_dtype(torch.float32)
    try:
        return _run(D, rounds, whole_windows)
    finally:
        torch.set_default_dtype(torch.float64)


def _run(D: int, rounds: int, whole_windows: tuple[int, ...]) -> list[Result]:
    kinds = [(kind, particles) for kind in ("mean_field", "factor") for particles in PARTICLES]
    peaks = {window: peak_memory(window, D) for window in WINDOWS}
    steps: dict[Any, tuple[Callable[[], Any], int]] = {
        window: (_estimate(window, D), STEPS) for window in WINDOWS
    }
    for kind, particles in kinds:
        steps[kind, particles] = _alone(_guide(kind, D), particles), 10
        for window in whole_windows:
            # one whole cycle of merges
            count = max(16, window // 2)
            steps[kind, particles, window] = (_whole(_guide(kind, D), particles, window), count)
    for step, count in steps.values():
        _seconds(step, min(count, 32))  # past the first, more frequent merges
    seconds = {key: list[float]() for key in steps}
    for _ in range(rounds):
        for key, (step, count) in steps.items():
            seconds[key].append(_seconds(step, count))
    results = []
    for kind, particles in kinds:
        alone = seconds[kind, particles]
        for window in WINDOWS:
            ratios = [a / b for a, b in zip(seconds[window], alone, strict=True)]
            whole = seconds.get((kind, particles, window))
            results.append(
                Result(
                    kind,
                    particles,
                    window,
                    Spread.of(seconds[window]),
                    Spread.of(alone),
                    Spread.of(ratios),
                    None if whole is None else Spread.of(whole),
                    4 * window * D / 2**20,
                    peaks[window],
                )
            )
    return results


def peak_memory(window: int, D: int) -> float | None:
    """MiB that state, updates, merges and products need at their peak, in a process of their own."""
    if sys.platform != "linux":  # elsewhere the units differ
        return None
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_memory, (window, D))


def _peak_memory(window: int, D: int) -> float:
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    estimate = LowRank(window, growth=1.0)
    state = estimate.init(torch.ones(D), 100.0)
    for _ in range(STEPS + 10):
        state = estimate.update(state, torch.randn(1, D))
        estimate.product(state, state["diagonal"])
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10


def table(results: list[Result], D: int) -> str:
    """Milliseconds, ratios with quartiles, and MiB."""
    names = {"mean_field": "mean-field", "factor": f"factor, rank {FACTORS}"}
    columns = ("guide", "particles", "K", "estimate, ms", "guide alone, ms", "ratio")
    columns += ("whole step, ms", "its ratio", "K vectors, MiB", "peak, MiB")
    lines = [f"### D = {D:,}, float32\n", heading(*columns)]
    for r in results:
        ratio = f"{r.ratio.median:.2f} ({r.ratio.low:.2f}-{r.ratio.high:.2f})"
        cells = [f"{1e3 * r.estimate.median:.1f}", f"{1e3 * r.alone.median:.1f}", ratio]
        if r.whole is None:
            cells += ["", ""]
        else:
            cells += [f"{1e3 * r.whole.median:.1f}", f"{r.whole.median / r.alone.median:.2f}"]
        cells += [f"{r.held:.0f}", "?" if r.peak is None else f"{r.peak:.0f}"]
        lines.append(line(names[r.guide], r.particles, r.window, *cells))
    return "\n".join(lines)
