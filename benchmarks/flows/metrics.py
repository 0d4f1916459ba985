"""How near a guide is to a target: its ELBO, k-hat, and the distance of its draws to exact ones.

    ELBO = E_q[log p(y, z) - log q(z)] <= log Z,
    SW_1 = mean over directions u of W_1(<u, a>, <u, b>),

with W_1 between two samples of one size the mean distance of their sorted values.

Source of the last: Bonneel, Rabin, Peyre & Pfister (2015), "Sliced and Radon Wasserstein barycenters of
measures".  A guide that leaves out a mode may have a small gap (log 2 for one of two) and a good k-hat:
only the distance to reference draws sees it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_ngvi.diagnostics.khat import khat_from_log_weights

from .targets import Target

__all__ = ["Evaluation", "evaluate", "floor", "guide_draws", "sliced_wasserstein"]

DRAWS, CHUNK = 10_000, 2_000
DIRECTIONS = 200


@dataclass(frozen=True)
class Evaluation:
    """A guide as it is: ELBO and its standard error in nats, k-hat, sliced Wasserstein-1 distance.

    A guide with a NaN in it has ELBO -inf, and the rest infinite.
    """

    elbo: float
    error: float
    khat: float
    distance: float


FAILED = Evaluation(-math.inf, math.inf, math.inf, math.inf)


def evaluate(target: Target, guide: Any, seed: int = 5) -> Evaluation:
    """From ``DRAWS`` draws of the guide, the same noise at every call."""
    try:
        theta, log_joint, log_q = guide_draws(target, guide, DRAWS, seed)
    except ValueError as error:  # Pyro's validation, once a parameter is NaN
        print(f"A guide of {target.name} has no ELBO. {str(error).splitlines()[0]}", flush=True)
        return FAILED
    weights = log_joint - log_q
    if not bool(torch.isfinite(weights).all()):
        return FAILED
    reference = target.draws(DRAWS, 1)
    distance = sliced_wasserstein(theta[: len(reference)], reference)
    error = float(weights.std()) / math.sqrt(DRAWS)
    return Evaluation(
        float(weights.mean()),
        error,
        khat_from_log_weights((log_joint - log_q).double().cpu().numpy()).khat,
        distance,
    )


@torch.no_grad()
def guide_draws(target: Target, guide: Any, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """n draws, unconstrained (n, d), with log p(y, z) and log q(z) there, (n,), in nats.

    Both densities are of the sites as the model writes them.  ``n`` is a multiple of ``CHUNK``, or
    less.  Leaves the global random state as it was.
    """
    chunk, parts = min(n, CHUNK), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(n // chunk):
            with pyro.plate("draws", chunk, dim=-2):  # left of every plate of the targets
                q = poutine.trace(guide).get_trace(*target.args)
                p = poutine.trace(poutine.replay(target.model, trace=q)).get_trace(*target.args)
            parts.append((_latent(target, p), _per_draw(p, chunk), _per_draw(q, chunk)))
    theta, log_joint, log_q = (torch.cat(part) for part in zip(*parts, strict=True))
    return theta, log_joint, log_q


def _latent(target: Target, trace: Any) -> Tensor:
    """The latent sites as one unconstrained vector a draw."""
    values = {}
    for name in target.log_joint.shapes:
        site = trace.nodes[name]
        outside = all(frame.name == "draws" for frame in site["cond_indep_stack"])
        # outside of the model's plates a site has the batch shape (n, 1)
        values[name] = site["value"].squeeze(1) if outside else site["value"]
    return target.log_joint.unconstrain(values)


def _per_draw(trace: Any, n: int) -> Tensor:
    """Log densities of all sites, one sum a draw."""
    trace.compute_log_prob()
    total = torch.zeros(n)
    for site in trace.nodes.values():
        if (
            site["type"] != "sample" or not site["log_prob"].dim()
        ):  # no dimension: a plate's numbers
            continue
        if site["name"] != "draws":
            log_prob = site["log_prob"]
            total = total + log_prob.expand(n, *log_prob.shape[1:]).reshape(n, -1).sum(1)
    return total


def sliced_wasserstein(draws: Tensor, reference: Tensor, directions: int = DIRECTIONS) -> float:
    """Sliced Wasserstein-1 distance of two samples (n, d), in sds of the reference.

    Both are divided by the standard deviations of ``reference``, coordinate by coordinate; the
    directions are random unit vectors, the same at every call.

    :raises ValueError: when the samples differ in shape.

    A shift by delta moves each projection by <u, delta>, whose mean length over unit vectors u of the
    plane is 2/pi (from 200 of them to about 2.5 %):

    >>> noise = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
    >>> reference = (noise - noise.mean(0)) / noise.std(0)
    >>> shift = torch.tensor([3.0, 4.0])
    >>> abs(sliced_wasserstein(reference + shift, reference) / 5 - 2 / math.pi) < 0.05
    True
    >>> sliced_wasserstein(reference.flip(0), reference)
    0.0
    """
    if draws.shape != reference.shape:
        raise ValueError(
            f"The samples have shapes {tuple(draws.shape)} and {tuple(reference.shape)}; take as "
            f"many of one as of the other."
        )
    generator = torch.Generator().manual_seed(11)
    u = torch.randn(directions, reference.shape[1], generator=generator, dtype=torch.float64)
    u = (u / torch.linalg.vector_norm(u, dim=1, keepdim=True)).to(reference)
    scale = reference.std(0)
    a, b = (((x / scale) @ u.mT).sort(0).values for x in (draws, reference))
    return float((a - b).abs().mean())


def floor(target: Target) -> float:
    """The distance between two independent sets of exact draws: nothing measured here is below.

    NaN where the draws are stored, and two sets would not be independent.
    """
    if target.stored is not None:
        return math.nan
    return sliced_wasserstein(target.draws(DRAWS, 2), target.draws(DRAWS, 1))
