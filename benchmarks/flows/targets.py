r"""Models with known answers on which a Gaussian guide fails: curved, funnel-shaped, multimodal.

| name | density | log Z |
|---|---|---|
| banana | x ~ N(0, 10), y given x ~ N(0.03 (x^2 - 100), 1) | 0 |
| funnel10, funnel50 | v ~ N(0, 3), x_i given v ~ N(0, exp(v/2)), d = 10 and 50 | 0 |
| moons | N(\|z\|; 2, 0.4) (N(z_1; 2, 0.6) + N(z_1; -2, 0.6)), N without its constants | quadrature |
| ring | 8 equal normals of sd 0.5 on a circle of radius 4 | quadrature: 0 |
| eight_schools_* | Rubin's data, centered and non-centered | quadrature over tau |
| low_dim_gauss_mix, gp_regr, arK | posteriordb | not known |

N(m, s) has sd s.  log Z is the logarithm of the integral of the model's joint density over the latents,
in nats, so that ELBO <= log Z.

Sources: Haario, Saksman & Tamminen (1999) for the twist 0.03 of a N(0, 10) x N(0, 1); Neal (2003),
"Slice sampling", section 8; Rezende & Mohamed (2015), table 1, density 1 for the moons;
Magnusson et al., posteriordb, whose draws are those of NUTS.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from ..problems import LogJoint, Problem
from ..problems import load as load_problem

__all__ = ["NAMES", "Target", "load", "quadrature_log_z"]

BANANA_SD, BANANA_TWIST = 10.0, 0.03
FUNNEL_SD = 3.0
MOONS_RADIUS, MOONS_WIDTH, MOONS_SD = 2.0, 0.4, 0.6
RING_RADIUS, RING_SD, RING_MODES = 4.0, 0.5, 8
SIMULATED = ("banana", "funnel10", "funnel50", "moons", "ring")
POSTERIORS = (
    "eight_schools_centered",
    "eight_schools_noncentered",
    "low_dim_gauss_mix",
    "gp_regr",
    "arK",
)
NAMES = SIMULATED + POSTERIORS


@dataclass(frozen=True)
class Target:
    """A model with its answers.

    Attributes
    ----------
    model, args
        ``model(*args)`` is right under ``vectorize_particles=True`` and under :func:`torch.func.vmap`
        over conditioned latents.
    dim
        d, the length of the unconstrained latent vector.
    log_z
        Logarithm of the integral of the joint density, in nats; ``None`` where it is not known.
    draws
        ``(n, seed) -> (n, d)``: reference draws in the unconstrained space, in the order of
        :class:`LogJoint` and of Pyro's autoguides.  Stored draws are at most as many as there are,
        and those of two seeds overlap.
    stored
        Number of the stored draws; ``None`` where they are drawn afresh, exactly.
    """

    name: str
    model: Callable[..., Any]
    args: tuple[Any, ...]
    dim: int
    log_z: float | None
    draws: Callable[[int, int], Tensor]
    stored: int | None = None

    @cached_property
    def log_joint(self) -> LogJoint:
        """The unnormalised log density in the unconstrained space, (S, d) -> (S,), in nats."""
        return LogJoint(Problem(self.name, self.model, self.args, self.dim))


@cache
def load(name: str) -> Target:
    """The target of that name; float64.

    Raises
    ------
    DataNotFound
        If it needs a data file that is not there.
    KeyError
        If there is no target of that name.
    """
    match name:
        case "banana":
            return Target(name, banana, (_zeros(2),), 2, 0.0, banana_draws)
        case "funnel10" | "funnel50":
            d = int(name.removeprefix("funnel"))
            return Target(name, funnel, (_zeros(d - 1),), d, 0.0, partial(funnel_draws, d))
        case "moons":
            log_z = quadrature_log_z(moons_log_density, half_width=8.0)
            return Target(name, moons, (_zeros(2),), 2, log_z, moons_draws)
        case "ring":
            log_z = quadrature_log_z(ring_log_density, half_width=12.0)
            return Target(name, ring, (_zeros(2),), 2, log_z, ring_draws)
    if name in POSTERIORS:
        return _posterior(name)
    raise KeyError(f"There is no target called {name!r}; there are {', '.join(NAMES)}.")


def _zeros(n: int) -> Tensor:
    """What a model without data is called with: its dtype and device are the model's."""
    return torch.zeros(n, dtype=torch.float64)


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def banana(origin: Tensor) -> None:
    """x ~ Normal(0, 10), y ~ Normal(0.03 (x^2 - 100), 1); ``origin`` is zero, (2,)."""
    x = pyro.sample("x", dist.Normal(origin[0], BANANA_SD))
    pyro.sample("y", dist.Normal(BANANA_TWIST * (x.square() - BANANA_SD**2), 1.0))


def banana_draws(n: int, seed: int) -> Tensor:
    noise = _noise(seed, n, 2)
    x = BANANA_SD * noise[:, 0]
    y = BANANA_TWIST * (x.square() - BANANA_SD**2) + noise[:, 1]
    return torch.stack([x, y], 1)


def funnel(origin: Tensor) -> None:
    """v ~ Normal(0, 3), x_i ~ Normal(0, exp(v/2)); ``origin`` is zero, (d - 1,)."""
    v = pyro.sample("v", dist.Normal(origin.new_zeros(()), FUNNEL_SD))
    pyro.sample("x", dist.Normal(origin, (v / 2).exp().unsqueeze(-1)).to_event(1))


def funnel_draws(d: int, n: int, seed: int) -> Tensor:
    noise = _noise(seed, n, d)
    v = FUNNEL_SD * noise[:, :1]
    return torch.cat([v, (v / 2).exp() * noise[:, 1:]], 1)


def _with_density(log_density: Callable[[Tensor], Tensor], origin: Tensor) -> None:
    """z (2,) with that unnormalised density, in nats, in place of a prior."""
    flat = dist.Normal(origin, 1.0).to_event(1).mask(False)  # density 1, and Pyro can start from it
    z = pyro.sample("z", flat)
    pyro.factor("density", log_density(z))


def moons_log_density(z: Tensor) -> Tensor:
    """Two crescents that face each other, (..., 2) -> (...)."""
    radius = torch.linalg.vector_norm(z, dim=-1)
    x = z[..., 0]
    sides = torch.stack([x - MOONS_RADIUS, x + MOONS_RADIUS], -1) / MOONS_SD
    crescents = torch.logsumexp(-0.5 * sides.square(), -1)
    return crescents - 0.5 * ((radius - MOONS_RADIUS) / MOONS_WIDTH).square()


def moons(origin: Tensor) -> None:
    """z with the density of :func:`moons_log_density`; ``origin`` is zero, (2,)."""
    _with_density(moons_log_density, origin)


def moons_draws(n: int, seed: int) -> Tensor:
    """Exact, by rejection in polar coordinates, where the radius r has a factor r more.

    Proposals have a uniform angle and r ~ Normal(2, 0.5), which bounds r exp(-((r - 2)/0.4)^2 / 2) over
    the proposal's density; the crescents add up to at most 1 + exp(-(2/0.6)^2 / 2).
    """
    random, wide = torch.Generator().manual_seed(seed), 1.25 * MOONS_WIDTH
    excess = MOONS_WIDTH**-2 - wide**-2
    # r exp(-excess (r - R)^2 / 2) is largest where 1 / r = excess (r - R)
    top = MOONS_RADIUS / 2 + math.sqrt(MOONS_RADIUS**2 / 4 + 1 / excess)
    log_bound = math.log(top) - 0.5 * excess * (top - MOONS_RADIUS) ** 2
    log_bound += math.log1p(math.exp(-0.5 * (MOONS_RADIUS / MOONS_SD) ** 2))
    kept = torch.empty(0, 2, dtype=torch.float64)
    while len(kept) < n:
        u = torch.rand(8 * n, 2, dtype=torch.float64, generator=random)
        step = torch.randn(8 * n, dtype=torch.float64, generator=random) * wide
        r, angle = MOONS_RADIUS + step, 2 * math.pi * u[:, 0]
        z = torch.stack([r * angle.cos(), r * angle.sin()], 1)
        log_ratio = r.log() + moons_log_density(z) + 0.5 * (step / wide).square()
        kept = torch.cat([kept, z[u[:, 1].log() < log_ratio - log_bound]])  # r < 0 gives a NaN: out
    return kept[:n]


def _ring_centers(like: Tensor) -> Tensor:
    angle = torch.arange(RING_MODES, dtype=like.dtype, device=like.device)
    angle = angle * (2 * math.pi / RING_MODES)
    return RING_RADIUS * torch.stack([angle.cos(), angle.sin()], 1)


def ring_log_density(z: Tensor) -> Tensor:
    """An equal mixture of normals on a circle, (..., 2) -> (...)."""
    square = (z.unsqueeze(-2) - _ring_centers(z)).square().sum(-1)
    constant = math.log(RING_MODES * 2 * math.pi * RING_SD**2)
    return torch.logsumexp(-0.5 * square / RING_SD**2, -1) - constant


def ring(origin: Tensor) -> None:
    """z with the density of :func:`ring_log_density`; ``origin`` is zero, (2,)."""
    _with_density(ring_log_density, origin)


def ring_draws(n: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    mode = torch.randint(RING_MODES, (n,), generator=random)
    noise = torch.randn(n, 2, dtype=torch.float64, generator=random)
    return _ring_centers(noise)[mode] + RING_SD * noise


def quadrature_log_z(
    log_density: Callable[[Tensor], Tensor], half_width: float, spacing: float = 0.05
) -> float:
    """log of the integral over the square [-half_width, half_width]^2, in nats.

    The trapezoidal rule, whose error falls faster than any power of the spacing for smooth densities
    that vanish at the edge.

    >>> round(quadrature_log_z(lambda z: -0.5 * z.square().sum(-1), 9.0) - math.log(2 * math.pi), 12)
    0.0
    """
    x = torch.arange(-half_width, half_width + spacing / 2, spacing, dtype=torch.float64)
    values = log_density(torch.cartesian_prod(x, x))
    return float(torch.logsumexp(values, 0)) + 2 * math.log(spacing)


def _posterior(name: str) -> Target:
    """A problem of the zoo with its stored draws, unconstrained."""
    problem = load_problem(name)
    log_z = eight_schools_log_z(*problem.args) if name.startswith("eight_schools") else None
    reference = LogJoint(problem).unconstrain(problem.reference_draws())

    def draws(n: int, seed: int) -> Tensor:
        order = torch.randperm(len(reference), generator=torch.Generator().manual_seed(seed))
        return reference[order[:n]]

    return Target(name, problem.model, problem.args, problem.dim, log_z, draws, len(reference))


def eight_schools_log_z(y: Tensor, sigma: Tensor) -> float:
    """log p(y) in nats, the same for both forms: mu and theta integrated out, tau by quadrature.

    y given tau ~ N(0, diag(sigma^2 + tau^2) + 25 11'), tau ~ Half-Cauchy(5); on a grid of log tau.
    """
    spacing = 0.01
    t = torch.arange(-30.0, 30.0, spacing, dtype=torch.float64)
    tau = t.exp()
    loc, ones = torch.zeros_like(y), torch.ones_like(y).unsqueeze(-1)
    variances = sigma.square() + tau.square().unsqueeze(-1)
    given_tau = dist.LowRankMultivariateNormal(loc, 5.0 * ones, variances)
    values = given_tau.log_prob(y) + dist.HalfCauchy(tau.new_tensor(5.0)).log_prob(tau) + t
    return float(torch.logsumexp(values, 0)) + math.log(spacing)
