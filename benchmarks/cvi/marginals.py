"""Marginals with hyperparameters integrated out: total variation to long Markov chains, and time.

Four models, each with priors on its hyperparameters, non-centred:

* ``seeds``: 21 plates of seeds, a logistic regression with an effect of every plate (Crowder 1978,
  "Beta-binomial anova for proportions", Applied Statistics 27, table 3; the model of Breslow & Clayton
  1993, "Approximate inference in generalized linear mixed models", JASA 88);
* ``classification``: 25 binary data under a Gaussian process with an RBF kernel, scale and length-scale
  unknown;
* ``counts``: 80 Poisson counts of a random walk with unknown steps, as a state-space prior;
* ``regions``: counts of 49 regions on a square, effects of neighbours correlated, their scale unknown.

The last three are drawn from their models.  Compared are the Gaussian marginals of AutoSites at the
mode of the hyperparameters, those corrected there (``guide.marginals``), and ``integrate``, by the
total variation of histograms of 40 bins, mean and largest over all latent numbers.  The reference is
elliptical slice sampling of everything (Murray, Adams & MacKay 2010) around a Gaussian that was fitted
to the chains (Nishihara, Murray & Adams 2014), 500 of them; how far one half of the draws is from the
other tells how far it can be trusted.
Pyro's NUTS is timed: 500 warm-up steps and 500 draws, one chain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.distributions import local_level

from .common import Row, sites_svi

CHAINS, ROUNDS, QUICK_ROUNDS, THIN, BINS = 500, 1500, 600, 3, 40
#: the largest total variation of an integrated marginal, and our time over that of NUTS
TARGET, SHARE = 0.02, 0.1


@dataclass(frozen=True)
class Case:
    """A model with data and its hyperparameters; and for the reference the same in white noise.

    ``log_joint`` takes white e (C, D) and unconstrained u (C, p) to log p(y, u | e) (C,), ``latent`` to
    values (C, L) of the site ``name``.
    """

    model: Callable[..., Any]
    y: Tensor
    name: str
    theta: tuple[str, ...]
    size: int
    log_joint: Callable[[Tensor, Tensor], Tensor]
    latent: Callable[[Tensor, Tensor], Tensor]


def seeds() -> Case:
    n = torch.tensor(
        [39, 62, 81, 51, 39, 6, 74, 72, 51, 79, 13, 16, 30, 28, 45, 4, 12, 41, 30, 51, 7.0]
    )
    r = torch.tensor(
        [10, 23, 23, 26, 17, 5, 53, 55, 32, 46, 10, 8, 10, 8, 23, 0, 3, 22, 15, 32, 3.0]
    )
    kind = torch.tensor([0.0] * 11 + [1.0] * 10)
    extract = torch.tensor([0.0] * 5 + [1.0] * 6 + [0.0] * 5 + [1.0] * 5)
    X = torch.stack([torch.ones(21), kind, extract, kind * extract], -1)

    def model(r: Tensor) -> None:
        tau = pyro.sample("tau", dist.HalfNormal(torch.tensor(1.0)))
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 3.0).to_event(1))
        effect = pyro.sample("effect", dist.Normal(torch.zeros(21), 1.0).to_event(1))
        with pyro.plate("plates", 21):
            pyro.sample("r", dist.Binomial(n, logits=X @ w + tau * effect), obs=r)

    def log_joint(e: Tensor, u: Tensor) -> Tensor:
        f = 3.0 * e[:, :4] @ X.mT + u.exp() * e[:, 4:]
        log_p = r * f - n * torch.nn.functional.softplus(f)
        return log_p.sum(-1) + (u - 0.5 * (2.0 * u).exp()).squeeze(-1)

    return Case(model, r, "w", ("tau",), 25, log_joint, lambda e, u: 3.0 * e[:, :4])


def classification() -> Case:
    x = torch.linspace(0.0, 8.0, 25)
    square = (x.unsqueeze(-1) - x).square()

    def root(lengthscale: Tensor) -> Tensor:
        K = torch.exp(-0.5 * square / lengthscale.reshape(*lengthscale.shape, 1, 1).square())
        return torch.linalg.cholesky(K + 1e-4 * torch.eye(25))

    y = torch.bernoulli(torch.sigmoid(3.0 * root(torch.tensor(1.5)) @ torch.randn(25)))

    def model(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.HalfNormal(torch.tensor(4.0)))
        lengthscale = pyro.sample("lengthscale", dist.LogNormal(torch.tensor(0.0), 0.5))
        g = dist.MultivariateNormal(torch.zeros(25), scale_tril=scale * root(lengthscale))
        f = pyro.sample("f", g)
        with pyro.plate("data", 25):
            pyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    def latent(e: Tensor, u: Tensor) -> Tensor:
        return u[:, :1].exp() * (root(u[:, 1].exp()) @ e.unsqueeze(-1)).squeeze(-1)

    def log_joint(e: Tensor, u: Tensor) -> Tensor:
        f = latent(e, u)
        prior = u[:, 0] - 0.5 * (u[:, 0].exp() / 4.0).square() - 0.5 * (u[:, 1] / 0.5).square()
        return -torch.nn.functional.softplus((1.0 - 2.0 * y) * f).sum(-1) + prior

    return Case(model, y, "f", ("scale", "lengthscale"), 25, log_joint, latent)


def counts() -> Case:
    level = torch.cumsum(torch.cat([torch.randn(1), 0.25 * torch.randn(79)]), 0)
    y = torch.poisson(level.exp())

    def model(y: Tensor) -> None:
        step = pyro.sample("step", dist.HalfNormal(torch.tensor(0.5)))
        s = pyro.sample("s", local_level(80, initial_scale=torch.tensor(1.0), step_scale=step))
        with pyro.plate("times", 80):
            pyro.sample("y", dist.Poisson(s[..., 0].exp()), obs=y)

    def latent(e: Tensor, u: Tensor) -> Tensor:
        return torch.cumsum(torch.cat([e[:, :1], u.exp() * e[:, 1:]], -1), -1)

    def log_joint(e: Tensor, u: Tensor) -> Tensor:
        f = latent(e, u)
        return (y * f - f.exp()).sum(-1) + (u - 0.5 * (u.exp() / 0.5).square()).squeeze(-1)

    return Case(model, y, "s", ("step",), 80, log_joint, latent)


def regions() -> Case:
    place = torch.cartesian_prod(torch.arange(7.0), torch.arange(7.0))
    near = (torch.cdist(place, place) - 1.0).abs() < 1e-6
    precision = torch.diag(near.sum(-1).double()) - 0.95 * near.double()
    covariance = torch.linalg.inv(precision)
    root = torch.linalg.cholesky(covariance / covariance.diagonal().mean())
    expected = 0.3 + 2.0 * torch.rand(49)
    y = torch.poisson(expected * (0.8 * root @ torch.randn(49)).exp())

    def model(y: Tensor) -> None:
        tau = pyro.sample("tau", dist.HalfNormal(torch.tensor(1.0)))
        mu = pyro.sample("mu", dist.Normal(torch.tensor(0.0), 1.0))
        risk = pyro.sample(
            "risk", dist.MultivariateNormal(mu * torch.ones(49), scale_tril=tau * root)
        )
        with pyro.plate("region", 49):
            pyro.sample("y", dist.Poisson(expected * risk.exp()), obs=y)

    def latent(e: Tensor, u: Tensor) -> Tensor:
        return e[:, :1] + u.exp() * (e[:, 1:] @ root.mT)

    def log_joint(e: Tensor, u: Tensor) -> Tensor:
        f = latent(e, u)
        return (y * f - expected * f.exp()).sum(-1) + (u - 0.5 * (2.0 * u).exp()).squeeze(-1)

    return Case(model, y, "risk", ("tau",), 50, log_joint, latent)


CASES = {"seeds": seeds, "classification": classification, "counts": counts, "regions": regions}


def reference(case: Case, start: Tensor, scale: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Draws (S, L) of the latent site and (S, p) of u; the first half of the rounds is thrown away.

    In it the Gaussian that slices are drawn from is fitted to the chains, five times.
    """

    def log_target(x: Tensor) -> Tensor:
        e, u = x[:, : case.size], x[:, case.size :]
        return case.log_joint(e, u) - 0.5 * e.square().sum(-1)

    center = torch.cat([torch.zeros(case.size), start])
    root = torch.diag(torch.cat([torch.ones(case.size), 2.0 * scale]))
    x, kept = center + torch.randn(CHAINS, len(center)) @ root.mT, []
    for k in range(rounds):
        if 0 < k <= rounds // 2 and k % (rounds // 10) == 0:
            center, root = x.mean(0), torch.linalg.cholesky(1.2 * x.mT.cov())
        gaussian = dist.MultivariateNormal(center, scale_tril=root, validate_args=False)
        log_p = log_target(x) - gaussian.log_prob(x)
        white, floor = gaussian.sample((CHAINS,)) - center, log_p + torch.rand(CHAINS).log()
        angle = 2.0 * torch.pi * torch.rand(CHAINS)
        low, high, todo = angle - 2.0 * torch.pi, angle, torch.ones(CHAINS, dtype=torch.bool)
        first = x - center
        while todo.any():
            ends = first * angle.cos().unsqueeze(-1) + white * angle.sin().unsqueeze(-1)
            tried = center + ends
            there = log_target(tried) - gaussian.log_prob(tried)
            good = todo & (there > floor)
            x, todo = torch.where(good.unsqueeze(-1), tried, x), todo & ~good
            low = torch.where(todo & (angle < 0.0), angle, low)
            high = torch.where(todo & (angle >= 0.0), angle, high)
            angle = torch.where(todo, low + torch.rand(CHAINS) * (high - low), angle)
        if k > rounds // 2 and k % THIN == 0:
            e, u = x[:, : case.size], x[:, case.size :]
            kept.append((case.latent(e, u), u))
    latents, free = zip(*kept, strict=True)
    return torch.cat(latents), torch.cat(free)


def variations(draws: Tensor, cdf: Callable[[Tensor], Tensor]) -> Tensor:
    """Total variations (L,) between histograms of draws (S, L) and what ``cdf`` says of their bins."""
    low, high = draws.quantile(torch.tensor([0.0005, 0.9995]), 0)
    edges = low + torch.linspace(0.0, 1.0, BINS + 1).unsqueeze(-1) * (high - low)
    below = torch.stack([(draws < edge).double().mean(0) for edge in edges])
    truth, found = (torch.cat([x[:1], x.diff(dim=0), 1.0 - x[-1:]]) for x in (below, cdf(edges)))
    return 0.5 * (truth - found).abs().sum(0)


def of_draws(draws: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.stack([(draws < row).double().mean(0) for row in x])


def of_density(x: Tensor, p: Tensor) -> Callable[[Tensor], Tensor]:
    """The distribution function of densities (P, *shape) on points x."""
    x, p = x.flatten(1), p.flatten(1)
    mass = torch.cumulative_trapezoid(p, x, dim=0)
    mass = torch.cat([torch.zeros_like(mass[:1]), mass])

    def cdf(at: Tensor) -> Tensor:
        rows = (
            np.interp(a, b, c)
            for a, b, c in zip(at.mT.numpy(), x.mT.numpy(), mass.mT.numpy(), strict=True)
        )
        return torch.tensor(np.stack(list(rows))).mT

    return cdf


def measure(name: str, rounds: int) -> Iterator[Row]:
    pyro.set_rng_seed(0)
    case = CASES[name]()
    begin = time.process_time()
    found = ngvi.integrate(case.model, case.y)
    ours = time.process_time() - begin
    w, theta = found.weights, found.points
    flat = torch.stack([theta[n] for n in case.theta], -1).log()
    mean = w @ flat
    sd = (w @ (flat - mean).square()).sqrt()
    latents, free = reference(case, mean, sd, rounds)
    parts = {"half of the reference": variations(latents[::2], of_draws(latents[1::2]))}

    best = {n: theta[n][w.argmax()] for n in case.theta}
    guide, svi = sites_svi(pyro.poutine.condition(case.model, data=best))
    for _ in range(20):
        svi.step(case.y)
    m, variance = (x.flatten() for x in guide.predict()[case.name])
    parts["Gaussian at the mode"] = variations(latents, dist.Normal(m, variance.sqrt()).cdf)
    at_mode = guide.marginals()
    parts["corrected at the mode"] = variations(latents, of_density(*at_mode.density(case.name)))
    parts["integrate"] = variations(latents, of_density(*found.density(case.name)))
    tau = torch.stack([found.quantiles([0.1, 0.5, 0.9])[n] for n in case.theta], -1)
    below = torch.stack([(free < q.log()).double().mean(0) for q in tau])

    begin = time.process_time()
    chain = MCMC(NUTS(case.model), num_samples=500, warmup_steps=500, disable_progbar=True)
    chain.run(case.y)
    nuts = time.process_time() - begin
    by_nuts = variations(latents, of_draws(chain.get_samples()[case.name].flatten(1)))
    parts["NUTS, 500 draws"] = by_nuts
    figures = ", ".join(
        f"{k} {float(v.mean()):.4f} ({float(v.max()):.4f})" for k, v in parts.items()
    )
    met = float(parts["integrate"].max()) <= TARGET
    yield Row(f"{name}, total variation, mean (largest)", f"largest {TARGET:g}", figures, met)
    levels = "; ".join(", ".join(f"{x:.3f}" for x in row) for row in below.mT.tolist())
    yield Row(f"{name}, mass below the 0.1, 0.5, 0.9 quantiles of theta", "-", levels)
    timed = f"{ours:.1f} s, {len(w)} points; NUTS {nuts:.0f} s"
    yield Row(f"{name}, seconds", f"{SHARE:g} of NUTS", timed, ours <= SHARE * nuts)
    yield Row(f"{name}, in words", "-", str(found))


def run(quick: bool, seeds: int, data: Sequence[str] | None) -> Iterator[Row]:
    for name in data or CASES:
        yield from measure(name, QUICK_ROUNDS if quick else ROUNDS)
