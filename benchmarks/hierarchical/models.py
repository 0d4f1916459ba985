"""The hierarchical models, by name, with their data.

Eight schools are Rubin's (1981), baseball Efron and Morris's (1975), from their papers; the others are
drawn here.  Priors are proper and wide; effects are written centred.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

Model = Callable[..., None]


@dataclass(frozen=True)
class Case:
    """A model with its data; the site of its units' effects is "u"."""

    name: str
    model: Model
    args: tuple[Tensor, ...]


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensor(*x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def schools(y: Tensor, sd: Tensor) -> None:
    """Effects of coaching: normal data of known sd."""
    m: Any = pyro.sample("m", dist.Normal(zeros(), 5.0))
    s: Any = pyro.sample("s", dist.HalfCauchy(zeros() + 5.0))
    with pyro.plate("units", len(y)):
        u: Any = pyro.sample("u", dist.Normal(m, s))
        pyro.sample("y", dist.Normal(u, sd), obs=y)


def baseball(hits: Tensor, at_bats: Tensor) -> None:
    """Batting averages: log odds of players."""
    m: Any = pyro.sample("m", dist.Normal(zeros(), 2.0))
    s: Any = pyro.sample("s", dist.HalfNormal(zeros() + 1.0))
    with pyro.plate("units", len(hits)):
        u: Any = pyro.sample("u", dist.Normal(m, s))
        pyro.sample("y", dist.Binomial(at_bats, logits=u), obs=hits)


def slopes(x: Tensor, y: Tensor, seen: Tensor, index: Any = None, size: int | None = None) -> None:
    """Logistic regressions of groups: an intercept and a slope each, in minibatches where asked for."""
    m: Any = pyro.sample("m", dist.Normal(zeros(2), 3.0).to_event(1))
    s: Any = pyro.sample("s", dist.HalfNormal(zeros(2) + 2.0).to_event(1))
    with pyro.plate("units", len(x), subsample_size=size, subsample=index) as i:
        u: Any = pyro.sample("u", dist.Normal(m, s).to_event(1))
        logits = u[..., :1] + u[..., 1:] * x[i]
        each: Any = dist.Bernoulli(logits=logits).mask(seen[i])
        pyro.sample("y", each.to_event(1), obs=y[i])


def counts(x: Tensor, y: Tensor) -> None:
    """Poisson counts with more spread than Poisson: an effect for every datum beside a regression."""
    b: Any = pyro.sample("b", dist.Normal(zeros(x.shape[1]), 2.0).to_event(1))
    s: Any = pyro.sample("s", dist.HalfNormal(zeros() + 2.0))
    with pyro.plate("units", len(y)):
        u: Any = pyro.sample("u", dist.Normal(zeros(), s))
        pyro.sample("y", dist.Poisson((x @ b + u).exp()), obs=y)


def intercepts(x: Tensor, y: Tensor) -> None:
    """A regression with an intercept for each group, beside shared slopes and an unknown noise."""
    b: Any = pyro.sample("b", dist.Normal(zeros(x.shape[-1]), 5.0).to_event(1))
    m: Any = pyro.sample("m", dist.Normal(zeros(), 5.0))
    s: Any = pyro.sample("s", dist.HalfNormal(zeros() + 2.0))
    noise: Any = pyro.sample("noise", dist.HalfNormal(zeros() + 2.0))
    with pyro.plate("units", len(y)):
        u: Any = pyro.sample("u", dist.Normal(m, s))
        pyro.sample("y", dist.Normal(x @ b + u[..., None], noise).to_event(1), obs=y)


def items(y: Tensor) -> None:
    """Item response, two-parameter logistic: persons are units, items global."""
    a: Any = pyro.sample("a", dist.LogNormal(zeros(y.shape[1]), 0.5).to_event(1))
    b: Any = pyro.sample("b", dist.Normal(zeros(y.shape[1]), 2.0).to_event(1))
    with pyro.plate("units", len(y)):
        u: Any = pyro.sample("u", dist.Normal(zeros(), 1.0))
        logits = a * (u[..., None] - b)
        pyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=y)


def slopes_data(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """1 to 30 data a group; intercepts N(-0.5, 0.8^2), slopes N(0.8, 0.5^2)."""
    g = random(seed)
    u = tensor(-0.5, 0.8) + tensor(0.8, 0.5) * torch.randn(n, 2, generator=g, dtype=torch.float64)
    x = torch.randn(n, 30, generator=g, dtype=torch.float64)
    y = torch.bernoulli(torch.sigmoid(u[:, :1] + u[:, 1:] * x), generator=g)
    count = torch.randint(1, 31, (n, 1), generator=g)
    return x, y, torch.arange(30) < count


def cases() -> list[Case]:
    g = random(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    effects = tensor(28, 8, -3, 7, -1, 1, 18, 12)
    sds = tensor(15, 10, 16, 11, 9, 11, 10, 18)
    hits = tensor(18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7)
    x = normal(300, 2)
    rate = (1.0 + x @ tensor(0.5, -0.3) + 0.7 * normal(300)).exp()
    counted = torch.poisson(rate, generator=g)
    design = normal(60, 5, 2)
    answer = 1.0 + design @ tensor(1.0, -0.5) + 0.8 * normal(60, 1) + 0.6 * normal(60, 5)
    logits = (0.3 * normal(15)).exp() * (normal(300, 1) - normal(15))
    return [
        Case("schools", schools, (effects, sds)),
        Case("baseball", baseball, (hits, torch.full_like(hits, 45.0))),
        Case("slopes", slopes, slopes_data(200)),
        Case("counts", counts, (torch.cat([torch.ones_like(x[:, :1]), x], 1), counted)),
        Case("intercepts", intercepts, (design, answer)),
        Case("items", items, (torch.bernoulli(torch.sigmoid(logits), generator=g),)),
    ]
