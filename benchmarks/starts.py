"""Where guides over more than 200 latent variables begin, and how far steps come from there.

Run from the root of the repository: ``python -m benchmarks.starts --help``.  -ELBO in nats after so
many steps of ``NGVB``, 8 particles, from a point (``init=None``) and as the guide begins by itself,
which takes the seconds in brackets; one seed, on one thread.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor

import pyro_ngvi as ngvi

Scene = tuple[Callable[..., None], tuple[Any, ...]]
MARKS = (0, 10, 30, 100, 400)


def matrix_factorisation() -> Scene:
    """8,000 of 200 x 200 entries of a product, 6 factors: a saddle where the factors are 0."""
    a, b = torch.randn(200, 6), torch.randn(200, 6)
    i, j = torch.randint(200, (8000,)), torch.randint(200, (8000,))

    def model(y: Tensor) -> None:
        s = pyro.sample("s", dist.HalfNormal(1.0))
        u: Any = pyro.sample("u", dist.Normal(torch.zeros(200, 6), 1.0).to_event(2))
        v: Any = pyro.sample("v", dist.Normal(torch.zeros(200, 6), 1.0).to_event(2))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal((u[i] * v[j]).sum(-1), s), obs=y)

    return model, ((a[i] * b[j]).sum(-1) + 0.1 * torch.randn(8000),)


def volatility() -> Scene:
    """400 returns whose log variance is an AR(1) process, non-centred."""
    T = 400
    lag = (torch.arange(T)[:, None] - torch.arange(T)).clamp_min(0)
    lower = torch.tril(torch.ones(T, T))

    def path(phi: Any, e: Tensor) -> Tensor:
        return ((torch.as_tensor(phi) ** torch.arange(T))[lag] * lower) @ e

    def model(y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 2.0))
        phi = pyro.sample("phi", dist.Uniform(-1.0, 1.0))
        s = pyro.sample("s", dist.HalfNormal(1.0))
        e = pyro.sample("e", dist.Normal(torch.zeros(T), 1.0).to_event(1))
        with pyro.plate("data", T):
            pyro.sample("y", dist.Normal(0.0, (0.5 * (m + s * path(phi, e))).exp()), obs=y)

    return model, ((0.5 * path(0.95, 0.3 * torch.randn(T))).exp() * torch.randn(T),)


def intercepts() -> Scene:
    """Four Poisson counts in each of 500 groups, centred."""
    a, group = 1.0 + 0.7 * torch.randn(500), torch.arange(500).repeat_interleave(4)

    def model(y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 3.0))
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with pyro.plate("groups", 500):
            a: Any = pyro.sample("a", dist.Normal(m, s))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(a[group].exp()), obs=y)

    return model, (torch.poisson(a[group].exp()),)


def horseshoe() -> Scene:
    """200 rows of 150 columns, 3 of which matter, each with a half-Cauchy scale."""
    X = torch.randn(200, 150)

    def model(y: Tensor) -> None:
        t = pyro.sample("t", dist.HalfCauchy(1.0))
        s = pyro.sample("s", dist.HalfNormal(2.0))
        scale: Any = pyro.sample("scale", dist.HalfCauchy(torch.ones(150)).to_event(1))
        w = pyro.sample("w", dist.Normal(torch.zeros(150), t * scale).to_event(1))
        with pyro.plate("data", 200):
            pyro.sample("y", dist.Normal(X @ w, s), obs=y)

    return model, (X[:, :3].sum(-1) * 2.0 + torch.randn(200),)


def network() -> Scene:
    """300 points of a sine, two hidden layers of 20."""
    x, h = torch.linspace(-2.0, 2.0, 300)[:, None], 20

    def model(y: Tensor) -> None:
        def normal(name: str, *shape: int, sd: float = 1.0) -> Tensor:
            return pyro.sample(name, dist.Normal(torch.zeros(shape), sd).to_event(len(shape)))

        first = (x @ normal("w1", 1, h) + normal("b1", h)).tanh()
        second = (first @ normal("w2", h, h, sd=h**-0.5) + normal("b2", h)).tanh()
        mean = second @ normal("w3", h, sd=h**-0.5)
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with pyro.plate("data", 300):
            pyro.sample("y", dist.Normal(mean, s), obs=y)

    return model, ((2.0 * x[:, 0]).sin() + 0.1 * torch.randn(300),)


SCENES = {f.__name__: f for f in (matrix_factorisation, volatility, intercepts, horseshoe, network)}
GUIDES: dict[str, Any] = {"full_rank": ngvi.AutoFullRankNormal, "factor": ngvi.AutoFactorNormal}


def run(scene: Callable[[], Scene], guide: Any, **how: Any) -> tuple[list[str], float]:
    """-ELBO at ``MARKS``, and the seconds of the first call."""
    torch.manual_seed(0)
    model, args = scene()
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    q = guide(model, **how)
    begun = time.process_time()
    q(*args)
    taken = time.process_time() - begun
    svi = SVI(model, q, ngvi.NGVB(q), ngvi.BatchedELBO(8))
    found, loss = [], ngvi.BatchedELBO(64)
    for step in range(MARKS[-1] + 1):
        if step in MARKS:
            with torch.no_grad():
                found.append(f"{sum(loss.loss(model, q, *args) for _ in range(4)) / 4:,.1f}")
        svi.step(*args)
    return found, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--guides", nargs="+", choices=GUIDES, default=list(GUIDES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"steps: {MARKS}")
    for name in given.scenes:
        for kind in given.guides:
            if name == "matrix_factorisation" and kind == "full_rank":
                continue  # 2,401 latent variables
            for how in ({"init": None}, {}):
                found, taken = run(SCENES[name], GUIDES[kind], **how)
                words = f"by itself ({taken:.1f} s)" if not how else "from a point"
                print(f"{name} {kind} {words}: {' '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
