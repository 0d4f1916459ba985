"""How the number of steps of NGVB grows with the number of latent variables.

Run from the root of the repository: ``python -m benchmarks.dimension --help``.  The posterior is a
product of Gaussians (prior sd 10, a datum of sd 0.2 each), so KL(q || posterior) is known; printed are
the steps until it is below 0.01 d + 0.5 nats, of q as the guide holds it, from a point (`init=None`).
"""

import argparse
from statistics import median
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor

import pyro_ngvi as ngvi

from .time_to_target import prepare

PRIOR, NOISE = 10.0, 0.2
#: the largest d of each guide
LARGEST = {"mean_field": 100_000, "full_rank": 1_000, "factor": 10_000}


def model(y: Tensor) -> None:
    z: Any = pyro.sample("z", dist.Normal(torch.zeros_like(y), PRIOR).to_event(1))
    pyro.sample("y", dist.Normal(z, NOISE).to_event(1), obs=y)


def make_guide(kind: str) -> Any:
    if kind == "factor":
        return ngvi.AutoFactorNormal(model, rank=9, init=None)
    kinds = {"mean_field": ngvi.AutoMeanFieldNormal, "full_rank": ngvi.AutoFullRankNormal}
    return kinds[kind](model, init=None)  # the steps are the subject


@torch.no_grad()
def divergence(guide: Any, y: Tensor) -> float:
    """KL of q from the posterior, in nats."""
    precision = PRIOR**-2 + NOISE**-2
    shift = guide.get_posterior().mean - y * NOISE**-2 / precision
    params = guide.natural_params()
    variance = guide.family.stddev(params).square()
    log_det = guide.family.log_det(params)
    d = len(y)
    square = precision * (variance + shift.square()).sum() - d
    return float(0.5 * square - log_det) - 0.5 * d * torch.tensor(precision).log().item()


def steps_to_target(kind: str, d: int, spread: float, particles: int, seed: int, cap: int) -> int:
    """Steps, looked at after every one; more than ``cap``: not reached."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    y = spread * torch.randn(d)
    guide = make_guide(kind)
    guide(y)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(particles))
    for step in range(1, cap + 1):
        svi.step(y)
        if divergence(guide, y) < 0.01 * d + 0.5:
            return step
    return cap + 1


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark and prints one line for each guide and d."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--guides", nargs="+", default=list(LARGEST), choices=list(LARGEST))
    sizes = (10, 100, 1_000, 10_000, 100_000)
    parser.add_argument("--dimensions", nargs="+", type=int, default=sizes)
    parser.add_argument(
        "--spread", type=float, default=3.0, help="sd of the data; the prior has 10"
    )
    parser.add_argument("--particles", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cap", type=int, default=400, help="steps at most")
    p = parser.parse_args(arguments)
    prepare()
    for kind in p.guides:
        for d in p.dimensions:
            if d > LARGEST[kind]:
                continue
            how = (kind, d, p.spread, p.particles)
            found = [steps_to_target(*how, seed, p.cap) for seed in range(p.seeds)]
            shown = [str(k) if k <= p.cap else f"> {p.cap}" for k in sorted(found)]
            middle = median(found)
            print(f"{kind:11} d = {d:6d}: {middle:g} ({shown[0]} to {shown[-1]})", flush=True)


if __name__ == "__main__":
    main()
