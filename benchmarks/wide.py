"""Regressions of many coefficients: what ``fit`` takes, and what it took, a Gaussian over all of them.

Run from the root of the repository: ``python -m benchmarks.wide --help``.  One run each, on one thread:
CPU seconds of ``fit`` as it is and of a Gaussian over all coefficients, with the ELBO of 1,000 draws or
more, its standard error, and k-hat.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import pyro_ngvi as ngvi

#: by name, the likelihood of a predictor, and data of one
LIKELIHOODS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "logistic": (lambda f: dist.Bernoulli(logits=f), lambda f: torch.bernoulli(f.sigmoid())),
    "poisson": (lambda f: dist.Poisson(f.exp()), lambda f: torch.poisson(f.exp())),
    "student": (lambda f: dist.StudentT(4.0, f, 0.3), lambda f: f + 0.3 * torch.randn_like(f)),
    "laplace": (lambda f: dist.Laplace(f, 0.3), lambda f: f + 0.3 * torch.randn_like(f)),
}


def regression(likelihood: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], None]:
    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[1]), 1.0).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", likelihood(X @ w), obs=y)

    return model


def run(kind: str, d: int, n: int, seed: int, max_time: float) -> None:
    torch.manual_seed(seed)
    X, w = 0.3 * torch.randn(n, d), torch.randn(d)
    likelihood, draw = LIKELIHOODS[kind]
    y = draw(X @ w * (0.5 / max(1.0, (d / 300) ** 0.5)))
    normal = "AutoFullRankNormal" if d <= 1000 else "AutoFactorNormal"
    for guide in (None, normal):
        pyro.clear_param_store()
        how: Any = {"guide": guide, "seed": seed, "progress": False, "max_time": max_time}
        start = time.process_time()
        fit = ngvi.fit(regression(likelihood), X, y, **how)
        seconds, name = time.process_time() - start, type(fit.guide).__name__
        elbo, error = fit.elbo
        print(
            f"| {kind} | {d:,} | {n:,} | `{name}` | {seconds:.2g} | {fit.why_stopped}, {fit.steps} | "
            f"{elbo:.2f} +- {error:.2f} | {fit.khat.khat:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--likelihoods", nargs="+", choices=LIKELIHOODS, default=[*LIKELIHOODS])
    parser.add_argument("--sizes", nargs="+", default=["120x600", "300x1000", "2000x500"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-time", type=float, default=60.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| likelihood | coefficients | data | guide | CPU s | ended, steps | ELBO, nats | k-hat |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for size in args.sizes:
        d, n = map(int, size.split("x"))
        for kind in args.likelihoods:
            run(kind, d, n, args.seed, args.max_time)


if __name__ == "__main__":
    main()
