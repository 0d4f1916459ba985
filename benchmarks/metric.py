"""AutoMetricNormal (MGVI): a log-Gaussian Cox field, and logistic regressions.

Run from the root of the repository: ``python -m benchmarks.metric --help``.  The field is a stationary
Gaussian process on a torus, made of white noise by FFT, and the counts are Poisson with rate exp(1 +
field).  Its truth is a long run of Pyro's NUTS (32 x 32), or is not known (256 x 256).  Sds of logistic
regressions are compared with those of a full-rank Gaussian.
"""

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, SVI
from torch import Tensor

import pyro_ngvi as ngvi

from .problems import load


class Field:
    """Counts on n x n cells: f = F^-1 (amplitude F xi), y ~ Poisson(exp(1 + f)), sd of f about 1."""

    def __init__(self, n: int, seed: int = 0) -> None:
        self.n = n
        k = torch.fft.fftfreq(n) * n
        amplitude = (1.0 + (k[:, None].square() + k.square()) / 16.0).pow(-1.5)
        self.amplitude = amplitude / amplitude.square().mean().sqrt()
        generator = torch.Generator().manual_seed(seed)
        self.truth = self.of(torch.randn(n * n, generator=generator))
        self.y = torch.poisson((1.0 + self.truth).exp(), generator=generator)

    def of(self, xi: Tensor) -> Tensor:
        """The field (..., n, n) of white noise (..., n * n)."""
        noise = torch.fft.fft2(xi.reshape(*xi.shape[:-1], self.n, self.n))
        return torch.fft.ifft2(self.amplitude * noise).real

    def model(self) -> None:
        xi = pyro.sample("xi", dist.Normal(torch.zeros(self.n * self.n), 1.0).to_event(1))
        pyro.sample("y", dist.Poisson((1.0 + self.of(xi)).exp()).to_event(2), obs=self.y)

    def moments(self, guide: Any, draws: int) -> tuple[Tensor, Tensor]:
        """Mean and sd of the field by draws of a guide, twenty at a time."""
        q = guide.get_posterior()
        with torch.no_grad():
            f = torch.cat([self.of(q.rsample((20,))) for _ in range(draws // 20)])
        return f.mean(0), f.std(0)


def peak() -> float:
    """MiB that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fit(
    model: Any,
    guide: Any,
    particles: int,
    steps: int,
    *args: Any,
    rule: Any = ngvi.NGVB,
    loss: Any = None,
) -> tuple[float, float, float, float]:
    """Seconds of the first step, of all and of the last, and the loss of the last."""
    svi: Any = SVI(model, guide, rule(guide), loss or ngvi.BatchedELBO(particles))
    clock, loss = [time.time()], 0.0
    for _ in range(steps):
        loss = svi.step(*args)
        clock.append(time.time())
    last = clock[-1] - clock[-2]
    return clock[1] - clock[0], clock[-1] - clock[0], last, loss


def line(name: str, *cells: Any) -> None:
    shown = [f"{c:,.3g}" if isinstance(c, float) else str(c) for c in cells]
    print(" | ".join(["", name, *shown, ""]).strip(), flush=True)


def errors(
    found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]
) -> tuple[float, float, float]:
    """Root mean square error of means in sds of the truth; mean and rms of log ratios of sds."""
    mean = ((found[0] - truth[0]) / truth[1]).square().mean().sqrt()
    ratio = (found[1] / truth[1]).log()
    return float(mean), float(ratio.mean()), float(ratio.square().mean().sqrt())


#: guides for the small field, numbers of steps, and an optimizer and a loss of their own
GAUSSIANS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "metric": (ngvi.AutoMetricNormal, 30, {}),
    "sites": (ngvi.AutoSites, 15, {"rule": ngvi.CVI, "loss": ngvi.SitesELBO()}),
    "full rank": (ngvi.AutoFullRankNormal, 1000, {}),
    "mean field": (ngvi.AutoMeanFieldNormal, 1000, {}),
}


def small_field(path: Path | None, samples: int, export: Path | None) -> None:
    """32 x 32 against NUTS, with the best Gaussian of all (full rank) beside it."""
    field = Field(32)
    if path is not None and path.exists():
        mean, sd = (torch.tensor(x) for x in json.loads(path.read_text()))
    else:
        start = time.time()
        chain = MCMC(NUTS(field.model), samples, warmup_steps=samples // 3, disable_progbar=True)
        chain.run()
        f = field.of(chain.get_samples()["xi"])
        mean, sd = f.mean(0), f.std(0)
        halves = torch.stack([part.std(0) for part in f.chunk(2)])
        line("NUTS", time.time() - start, float((halves[0] / halves[1]).log().std() / 2.0))
        if path is not None:
            path.write_text(json.dumps([mean.tolist(), sd.tolist()]))
    if export is not None:
        arrays = {"mean": mean, "sd": sd, "amplitude": field.amplitude, "y": field.y}
        np.savez(export, **{name: x.numpy() for name, x in arrays.items()})
    line("32 x 32", "seconds", "loss", "mean rmse, sd", "log sd: bias", "log sd: rms", "MiB")
    for name, (make, steps, how) in GAUSSIANS.items():
        pyro.set_rng_seed(0)
        guide = make(field.model)
        _, seconds, _, loss = fit(field.model, guide, 8, steps, **how)
        found = field.moments(guide, 4000)
        line(name, seconds, f"{loss:.1f}", *errors(found, (mean, sd)), peak())


def large_field(n: int, steps: int, draws: int, dtype: torch.dtype) -> None:
    """n x n: seconds and memory, and how the truth lies within q."""
    torch.set_default_dtype(dtype)
    field = Field(n)
    guide = ngvi.AutoMetricNormal(field.model)
    pyro.set_rng_seed(0)
    first, seconds, last, loss = fit(field.model, guide, 4, steps)
    line(f"{n} x {n}", "first step, s", f"{steps} steps, s", "a step, s", "MiB", "loss")
    line(str(dtype), first, seconds, last, peak(), f"{loss:.1f}")
    if not draws:
        return
    log_det, error = guide.log_det()
    start = time.time()
    mean, sd = field.moments(guide, draws)
    seconds = (time.time() - start) / draws
    line("log det M, error, seconds a draw", float(log_det), float(error), seconds)
    inside = ((field.truth - mean).abs() < 1.645 * sd).double().mean()
    line("truth within 90 % intervals, MiB", float(inside), peak())


def wdbc(steps: int) -> None:
    """Sds and means against the full-rank Gaussian, d = 31."""
    problem = load("wdbc")
    moments = {}
    for name, make in {"metric": ngvi.AutoMetricNormal, "full": ngvi.AutoFullRankNormal}.items():
        pyro.set_rng_seed(0)
        guide = make(problem.model)
        _, seconds, _, _ = fit(problem.model, guide, 16, steps, *problem.args)
        with torch.no_grad():
            w = guide.get_posterior().rsample((40_000,))
        moments[name] = w.mean(0), w.std(0)
        elbo = ngvi.khat(problem.model, guide, *problem.args, num_samples=4000, seed=0).elbo
        line(f"wdbc, {name}", seconds, elbo)
    mean, sd = moments["metric"][0] - moments["full"][0], moments["metric"][1] / moments["full"][1]
    line("largest error of a mean, sds", float((mean / moments["full"][1]).abs().max()))
    line("sds over those of full rank", float(sd.min()), float(sd.max()))


def wide(d: int, N: int, steps: int) -> None:
    """Logistic regression of N data on d features, N(0, 4 / d) weights."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(N, d, generator=generator)
    w = 2.0 / d**0.5 * torch.randn(d, generator=generator)
    y = torch.bernoulli((X @ w).sigmoid(), generator=generator)

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(d), 2.0 / d**0.5).to_event(1))
        pyro.sample("y", dist.Bernoulli(logits=X @ w).to_event(1), obs=y)

    guide = ngvi.AutoMetricNormal(model)
    first, seconds, last, loss = fit(model, guide, 8, steps)
    line(f"{N} x {d:,}", first, seconds, last, loss, peak())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ("small_field", "large_field", "wdbc", "wide")
    parser.add_argument("parts", nargs="*", choices=[[], *parts], default=[])
    parser.add_argument("--samples", type=int, default=3000, help="of NUTS, after a third as many")
    parser.add_argument("--truth", type=Path, help="where moments by NUTS are, or are kept")
    parser.add_argument("--export", type=Path, help="where to put the small field for NIFTy")
    parser.add_argument("--size", type=int, default=256, help="side of the large field")
    parser.add_argument("--single", action="store_true", help="the large field in float32")
    parser.add_argument("--draws", type=int, default=40, help="of the large field at the end")
    parser.add_argument("--features", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args(arguments)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    chosen = args.parts or parts
    if "small_field" in chosen:
        small_field(args.truth, args.samples, args.export)
    if "wdbc" in chosen:
        wdbc(100)
    if "wide" in chosen:
        line("logistic", "first step, s", "all steps, s", "a step, s", "loss", "MiB")
        for d in args.features:
            wide(d, 500, args.steps)
    if "large_field" in chosen:
        dtype = torch.float32 if args.single else torch.float64
        large_field(args.size, args.steps, args.draws, dtype)


if __name__ == "__main__":
    main()
