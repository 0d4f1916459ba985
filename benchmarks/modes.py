"""Posteriors with several modes: how often a guide starts and ends in the best of them.

Run from the root of the repository: ``python -m benchmarks.modes --help``.

Ten models, each with data sets of its own for every seed.  The best mode is the Gaussian with the
largest ELBO to which 100 other points lead, half of them draws of the prior.  Shown are the share of
data sets on which the ELBO of the default start, of NGVB after it, and of NGVB from a point are at most
a nat below that, and what the start cost.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from itertools import islice
from statistics import median
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.families import FullRankNormal
from pyro_ngvi.guides.laplace import Search

from .time_to_target import prepare

Made = tuple[Callable[..., Any], tuple[Any, ...]]
#: of the best mode, and of each ELBO that is compared with it
STARTS, DRAWS = 100, 4000
FAMILY = FullRankNormal()


def _normals(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exchangeable_mixture(seed: int) -> Made:
    """Three normals ten sds apart, their means, sds and weights unknown: 3! modes of one height."""
    noise = _normals(seed, 60)
    y = 10.0 * (torch.arange(60) % 3 - 1) + noise

    def model(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(torch.zeros(3), 20.0).to_event(1))
        sd = pyro.sample("sd", dist.HalfNormal(3.0 * torch.ones(3)).to_event(1))
        weight = pyro.sample("weight", dist.Dirichlet(2.0 * torch.ones(3)))
        with pyro.plate("data", len(y)):
            parts = dist.Normal(mean, sd)
            pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(weight), parts), obs=y)

    return model, (y,)


def unequal_mixture(seed: int) -> Made:
    """Two normals with known weights of .7 and .3: the exchanged means are a lower mode."""
    noise = _normals(seed, 100)
    y = torch.where(torch.arange(100) < 70, -2.0, 2.0) + noise

    def model(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 5.0).to_event(1))
        weight = dist.Categorical(torch.tensor([0.7, 0.3]))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.MixtureSameFamily(weight, dist.Normal(mean, 1.0)), obs=y)

    return model, (y,)


def mixture_in_five_dimensions(seed: int) -> Made:
    """Four clusters in five dimensions: where two centres share a cluster there is a lower mode."""
    noise, centers = _normals(seed, 120, 5), 6.0 * _normals(1_000 + seed, 4, 5)
    y = centers[torch.arange(120) % 4] + noise

    def model(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(torch.zeros(4, 5), 10.0).to_event(2))
        weight = pyro.sample("weight", dist.Dirichlet(2.0 * torch.ones(4)))
        with pyro.plate("data", len(y)):
            parts = dist.Normal(mean, 1.0).to_event(1)
            pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(weight), parts), obs=y)

    return model, (y,)


def _states(seed: int, steps: int, stay: float) -> Tensor:
    """A chain of two states, (steps,)."""
    jumps = torch.rand(steps, generator=torch.Generator().manual_seed(seed)) > stay
    return jumps.cumsum(0) % 2


def _forward(log_prob: Tensor, stay: Tensor) -> Tensor:
    """Log density of a chain of two states with log densities (T, 2) of its data, summed out."""
    move = torch.stack([stay, 1.0 - stay], -1)
    transition = torch.stack([move[..., 0, :], move[..., 1, :].flip(-1)], -2).log()
    alpha = log_prob[..., 0, :] + math.log(0.5)
    for t in range(1, log_prob.shape[-2]):
        alpha = torch.logsumexp(alpha.unsqueeze(-1) + transition, -2) + log_prob[..., t, :]
    return torch.logsumexp(alpha, -1)


def hidden_markov_normal(seed: int) -> Made:
    """Two states, N(0, 1) and N(2, 3^2)."""
    states, noise = _states(seed, 100, 0.95), _normals(seed, 100)
    y = torch.where(states == 0, noise, 2.0 + 3.0 * noise)

    def model(y: Tensor) -> None:
        stay = pyro.sample("stay", dist.Beta(5.0 * torch.ones(2), 1.0).to_event(1))
        mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 5.0).to_event(1))
        sd = pyro.sample("sd", dist.HalfNormal(3.0 * torch.ones(2)).to_event(1))
        pyro.factor("y", _forward(dist.Normal(mean, sd).log_prob(y.unsqueeze(-1)), stay))

    return model, (y,)


def hidden_markov_poisson(seed: int) -> Made:
    """Two states with rates of 2 and 9."""
    rates = torch.where(_states(seed, 100, 0.93) == 0, 2.0, 9.0)
    y = torch.poisson(rates, generator=torch.Generator().manual_seed(seed))

    def model(y: Tensor) -> None:
        stay = pyro.sample("stay", dist.Beta(5.0 * torch.ones(2), 1.0).to_event(1))
        rate = pyro.sample("rate", dist.Gamma(torch.ones(2), 0.1).to_event(1))
        pyro.factor("y", _forward(dist.Poisson(rate).log_prob(y.unsqueeze(-1)), stay))

    return model, (y,)


def _oscillator(frequency: Tensor, friction: Tensor, start: Tensor) -> Tensor:
    """x'' = -frequency^2 x - friction x' from rest, by Runge and Kutta's steps of 0.1, at 25 times."""
    x, v, step, seen = start, torch.zeros_like(start), 0.1, []

    def slope(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return v, -frequency.square() * x - friction * v

    for k in range(100):
        x1, v1 = slope(x, v)
        x2, v2 = slope(x + 0.5 * step * x1, v + 0.5 * step * v1)
        x3, v3 = slope(x + 0.5 * step * x2, v + 0.5 * step * v2)
        x4, v4 = slope(x + step * x3, v + step * v3)
        x = x + step / 6.0 * (x1 + 2.0 * x2 + 2.0 * x3 + x4)
        v = v + step / 6.0 * (v1 + 2.0 * v2 + 2.0 * v3 + v4)
        seen += [x] if k % 4 == 3 else []
    return torch.stack(seen, -1)


def oscillator(seed: int) -> Made:
    """A damped oscillator, an ODE: other frequencies fit a part of the swings."""
    truth = (torch.tensor(2.0), torch.tensor(0.1), torch.tensor(2.0))
    y = _oscillator(*truth) + 0.3 * _normals(seed, 25)

    def model(y: Tensor) -> None:
        frequency = pyro.sample("frequency", dist.LogNormal(0.0, 1.0))
        friction = pyro.sample("friction", dist.LogNormal(-2.0, 1.0))
        start = pyro.sample("start", dist.Normal(0.0, 3.0))
        sd = pyro.sample("sd", dist.HalfNormal(1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(_oscillator(frequency, friction, start), sd), obs=y)

    return model, (y,)


def change_point(seed: int) -> Made:
    """A level that drops once, and a short bump before."""
    t = torch.arange(100.0)
    y = torch.where(t < 70, 1.0, -1.0) + torch.where((t > 25) & (t < 30), 1.5, 0.0)
    y = y + 0.7 * _normals(seed, 100)

    def model(y: Tensor) -> None:
        when = pyro.sample("when", dist.Uniform(0.0, 100.0))
        before = pyro.sample("before", dist.Normal(0.0, 2.0))
        after = pyro.sample("after", dist.Normal(0.0, 2.0))
        sd = pyro.sample("sd", dist.HalfNormal(1.0))
        with pyro.plate("data", len(y)):
            level = before + (after - before) * torch.sigmoid(t - when)
            pyro.sample("y", dist.Normal(level, sd), obs=y)

    return model, (y,)


def ridge(seed: int) -> Made:
    """A product of two factors: two curved ridges, of which the prior prefers one."""
    noise = _normals(seed, 2, 50)
    x = noise[0]
    y = 1.5 * x + 0.5 * noise[1]

    def model(x: Tensor, y: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.5, 1.0))
        b = pyro.sample("b", dist.Normal(0.3, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(a * b * x, 0.5), obs=y)

    return model, (x, y)


def phase_retrieval(seed: int) -> Made:
    """Squares of linear functions: w and -w, of which the prior prefers one."""
    X = _normals(seed, 40, 4)
    y = (X @ torch.tensor([1.0, -1.0, 0.5, 2.0])).square() + 0.5 * _normals(1_000 + seed, 40)

    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.2 * torch.ones(4), 2.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal((X * w.unsqueeze(-2)).sum(-1).square(), 0.5), obs=y)

    return model, (X, y)


def sine(seed: int) -> Made:
    """A sine of unknown frequency, amplitude and phase."""
    t = torch.linspace(0.0, 6.0, 60)
    y = 1.5 * torch.sin(3.3 * t + 0.4) + 0.4 * _normals(seed, 60)

    def model(y: Tensor) -> None:
        amplitude = pyro.sample("amplitude", dist.Normal(0.0, 2.0))
        frequency = pyro.sample("frequency", dist.Gamma(2.0, 0.7))
        phase = pyro.sample("phase", dist.Normal(0.0, 1.0))
        sd = pyro.sample("sd", dist.HalfNormal(1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(amplitude * torch.sin(frequency * t + phase), sd), obs=y)

    return model, (y,)


PROBLEMS: dict[str, Callable[[int], Made]] = {
    make.__name__: make
    for make in (
        exchangeable_mixture,
        unequal_mixture,
        mixture_in_five_dimensions,
        hidden_markov_normal,
        hidden_markov_poisson,
        oscillator,
        change_point,
        ridge,
        phase_retrieval,
        sine,
    )
}


@torch.no_grad()
def elbo(density: Any, params: dict[str, Tensor]) -> float:
    """Of a full-rank Gaussian, by common draws."""
    noise = _normals(7, DRAWS, len(params["loc"]))
    z = FAMILY.rsample(params, noise)
    log_p = torch.cat([density(part) for part in z.split(200)])
    return float((log_p - FAMILY.log_prob(params, z)).mean())


def points(density: Any, model: Any, args: Any, start: Tensor) -> Iterator[Tensor]:
    """Draws of the prior and points around the start (d,), by turns, of torch's own random state."""
    while True:
        drawn: Any = poutine.trace(model).get_trace(*args)
        values = {
            name: drawn.nodes[name]["value"].unsqueeze(0) for name in density.unpack(start[None])
        }
        yield density.pack(values)[0]
        yield start + 4.0 * torch.rand_like(start) - 2.0


@torch.no_grad()
def best_elbo(density: Any, from_points: Iterator[Tensor], start: Tensor) -> float:
    """The largest ELBO to which ``STARTS`` points lead."""
    search = Search(density, start)
    for point in islice(from_points, STARTS):
        search.visit(point)
    best = sorted(search.ends, key=lambda q: -q.elbo)[:3]
    return max(elbo(density, FAMILY.matched(q.loc, q.precision)) for q in best)


def trained(model: Any, args: Any, steps: int, **how: Any) -> tuple[Any, float, dict[str, Tensor]]:
    """A guide, the seconds of its start, and its parameters there; then trained."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = ngvi.AutoFullRankNormal(model, **how)
    before = time.perf_counter()
    guide(*args)
    seconds = time.perf_counter() - before
    start = {name: p.detach().clone() for name, p in guide.natural_params().items()}
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    for _ in range(steps):
        svi.step(*args)
    return guide, seconds, start


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark and prints a line for each problem."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=40, help="data sets")
    parser.add_argument("--steps", type=int, default=300)
    p = parser.parse_args(arguments)
    prepare()
    print("| problem | d | start | NGVB after it | NGVB from a point | evaluations | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in p.problems:
        rows = []
        for seed in range(p.seeds):
            model, args = PROBLEMS[name](seed)
            guide, seconds, start = trained(model, args, p.steps)
            point, _, there = trained(model, args, p.steps, init=None)
            density = ngvi.diagnostics.ModelDensity(model, args)
            torch.manual_seed(1_000 + seed)
            best = best_elbo(density, points(density, model, args, there["loc"]), there["loc"])
            ends = start, guide.natural_params(), point.natural_params()
            good = [elbo(density, params) > best - 1.0 for params in ends]
            rows.append((*good, guide.start_report.evaluations, seconds, len(start["loc"])))
        *shares, cost, seconds, d = zip(*rows, strict=True)
        shown = " | ".join(f"{sum(share)} of {p.seeds}" for share in shares)
        print(
            f"| {name} | {d[0]} | {shown} | {median(cost):.0f} | {median(seconds):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
