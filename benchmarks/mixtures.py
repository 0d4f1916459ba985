"""Posteriors with several modes or bent ones: mixtures beside one Gaussian and normalizing flows.

Run from the root of the repository: ``python -m benchmarks.mixtures --help``.

For each target and guide: the modes that 20,000 fresh draws of q show (a mode counts from a fifth of
the share that it would have if all were equal; a goal of the robot from 1/1,000), the ELBO by these
draws with its standard error, and of mixtures the components with a weight above 1/1,000 at the end.
The log evidence of the moons and of the Gaussians is 0, the largest ELBO that there is.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormalizingFlow
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi

from .modes import exchangeable_mixture
from .problems import load
from .time_to_target import prepare

DRAWS = 20_000


@dataclass(frozen=True)
class Target:
    """A model, the mode (S,) near each of S draws (S, d), or -1, and how many modes there are."""

    model: Callable[..., Any]
    mode_of: Callable[[Tensor], Tensor]
    modes: int
    components: int
    args: tuple[Any, ...] = ()
    least: float = 0.2


def of_density(log_p: Callable[[Tensor], Tensor], d: int, width: float | Tensor) -> Any:
    """A model with that log density over R^d, and a prior to draw starts from."""

    def model() -> None:
        prior: Any = dist.Normal(torch.zeros(d), width).to_event(1)
        x = pyro.sample("x", prior)
        pyro.factor("target", log_p(x) - prior.log_prob(x))

    return model


def two_moons() -> Target:
    """Two bent modes that face each other (Rezende & Mohamed 2015, figure 3, density 1)."""

    def log_p(z: Tensor) -> Tensor:
        ring = ((z.norm(dim=-1) - 2.0) / 0.4).square()
        sides = torch.stack([z[..., 0] - 2.0, z[..., 0] + 2.0], -1).div(0.6).square()
        return (-0.5 * sides).logsumexp(-1) - 0.5 * ring - log_evidence

    log_evidence, grid = 0.0, torch.linspace(-6.0, 6.0, 1201)
    log_evidence = float(log_p(torch.cartesian_prod(grid, grid)).logsumexp(0)) + 2 * math.log(0.01)

    return Target(of_density(log_p, 2, 3.0), lambda z: (z[:, 0] > 0).long(), 2, 10)


def of_gaussians(centers: Tensor, tril: Tensor, K: int, width: float) -> Target:
    parts: Any = dist.MultivariateNormal(centers, scale_tril=tril)
    weights = dist.Categorical(torch.full((len(centers),), 1.0 / len(centers)))
    mixture = dist.MixtureSameFamily(weights, parts)
    model = of_density(mixture.log_prob, centers.shape[1], width)

    def mode_of(z: Tensor) -> Tensor:
        return parts.log_prob(z.unsqueeze(1)).argmax(-1)

    return Target(model, mode_of, len(centers), K)


def ring_of_eight() -> Target:
    """Eight round Gaussians, ten sds from their neighbours."""
    angle = torch.arange(8) * (math.pi / 4)
    centers = 4.0 * torch.stack([angle.cos(), angle.sin()], -1)
    return of_gaussians(centers, (0.3 * torch.eye(2)).expand(8, 2, 2), 12, 5.0)


def gaussians(d: int) -> Target:
    """Five Gaussians with means in [-10, 10]^d and random covariances."""
    g = torch.Generator().manual_seed(d)
    centers = 20.0 * torch.rand(5, d, generator=g) - 10.0
    A = torch.randn(5, d, d, generator=g) / d**0.5
    tril = torch.linalg.cholesky(A @ A.mT + 0.2 * torch.eye(d))
    return of_gaussians(centers, tril, 8, 8.0)


def planar_robot() -> Target:
    """Ten joints with links of length 1 that reach for one of four goals (Arenz et al. 2018).

    The angles have sds of 1, of the first joint, and 0.2; the end lies within 0.01 of a goal.
    """
    goals = 7.0 * torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    width = torch.tensor([1.0, *[0.2] * 9])

    def end(z: Tensor) -> Tensor:
        angle = z.cumsum(-1)
        return torch.stack([angle.cos().sum(-1), angle.sin().sum(-1)], -1)

    def log_p(z: Tensor) -> Tensor:
        away = (end(z).unsqueeze(-2) - goals).square().sum(-1)
        reached = -0.5 * away / 1e-4 - math.log(2.0 * math.pi * 1e-4)
        return reached.amax(-1) + dist.Normal(0.0, width).log_prob(z).sum(-1)

    def mode_of(z: Tensor) -> Tensor:
        distance, goal = torch.cdist(end(z), goals).min(-1)
        return goal.masked_fill(distance > 0.1, -1)

    return Target(of_density(log_p, 10, width), mode_of, 4, 20, least=0.004)


def labels() -> Target:
    """A mixture of three normals with unknown means, sds and weights: 3! modes of one height."""
    model, args = exchangeable_mixture(0)
    orders = torch.tensor(list(permutations(range(3))))

    def mode_of(z: Tensor) -> Tensor:
        return (z[:, :3].argsort(-1).unsqueeze(1) == orders).all(-1).long().argmax(-1)

    return Target(model, mode_of, 6, 8, args)


def german_credit() -> Target:
    """Logistic regression: one mode, close to Gaussian."""
    problem = load("german_credit")
    return Target(problem.model, lambda z: torch.zeros(len(z)).long(), 1, 4, problem.args)


TARGETS: dict[str, Callable[[], Target]] = {
    "two moons": two_moons,
    "ring of eight": ring_of_eight,
    "Gaussians, d = 2": partial(gaussians, 2),
    "Gaussians, d = 10": partial(gaussians, 10),
    "Gaussians, d = 50": partial(gaussians, 50),
    "planar robot": planar_robot,
    "three labels": labels,
    "German credit": german_credit,
}


def mixture(covariance: str, target: Target, steps: int) -> tuple[Any, Any, int]:
    guide = ngvi.AutoMixtureNormal(target.model, target.components, covariance)
    return guide, SVI(target.model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8)), steps


def gaussian(target: Target, steps: int) -> tuple[Any, Any, int]:
    guide = ngvi.AutoFullRankNormal(target.model)
    return guide, SVI(target.model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8)), steps


def coupling_flow(target: Target, steps: int) -> tuple[Any, Any, int]:
    """Splines from a wide start, as their documentation advises for several modes."""
    guide = ngvi.AutoCouplingFlow(target.model, kind="spline", init=None, init_scale=1.0)
    loss = ngvi.BatchedELBO(128, curvature="scores")
    return guide, SVI(target.model, guide, ngvi.optim.SPRING(guide), loss), steps


def pyros_flow(target: Target, steps: int) -> tuple[Any, Any, int]:
    """Four masked autoregressive layers and Adam, of twice as many steps."""
    layers = partial(dist.transforms.iterated, 4, dist.transforms.affine_autoregressive)
    guide = AutoNormalizingFlow(target.model, layers)
    loss = ngvi.BatchedELBO(32)
    return guide, SVI(target.model, guide, Adam({"lr": 5e-3}), loss), 2 * steps


GUIDES: dict[str, Callable[[Target, int], tuple[Any, Any, int]]] = {
    "mixture": partial(mixture, "full"),
    "diagonal mixture": partial(mixture, "diagonal"),
    "one Gaussian": gaussian,
    "coupling flow, SPRING": coupling_flow,
    "Pyro's flow, Adam": pyros_flow,
}


@torch.no_grad()
def judged(target: Target, guide: Any) -> tuple[str, str, str]:
    """Modes, ELBO, components."""
    q = guide.get_posterior()
    z = q.sample((DRAWS,))
    density = ngvi.diagnostics.ModelDensity(target.model, target.args)
    log_p = torch.cat([density(part) for part in z.split(500)])
    ratio = log_p - q.log_prob(z)
    near = target.mode_of(z)
    shares = near[near >= 0].bincount(minlength=target.modes) / DRAWS
    found = int((shares > target.least / target.modes).sum())
    alive = "-"
    if isinstance(guide, ngvi.AutoMixtureNormal):
        alive = f"{int((guide.weights > 1e-3).sum())} of {len(guide.weights)}"
    elbo = f"{ratio.mean():.3f} ({ratio.std() / DRAWS**0.5:.3f})"
    return f"{found} of {target.modes}", elbo, alive


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark and prints a line for each target, guide and seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--guides", nargs="+", default=list(GUIDES), choices=list(GUIDES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    p = parser.parse_args(arguments)
    prepare()
    print(
        "| target | guide | seed | modes | ELBO (standard error) | components | start, s | all, s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in p.targets:
        for kind in p.guides:
            for seed in range(p.seeds):
                target = TARGETS[name]()
                pyro.clear_param_store()
                pyro.set_rng_seed(seed)
                before = time.perf_counter()
                guide, svi, steps = GUIDES[kind](target, p.steps)
                svi.step(*target.args)
                start = time.perf_counter() - before
                for _ in range(steps - 1):
                    svi.step(*target.args)
                whole = time.perf_counter() - before
                modes, elbo, alive = judged(target, guide)
                print(
                    f"| {name} | {kind} | {seed} | {modes} | {elbo} | {alive} | {start:.1f} | "
                    f"{whole:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
