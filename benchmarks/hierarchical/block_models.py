"""Models of one Gaussian block, with data that are drawn here: a series, a field, crossed, nested and
spatial effects.

Each is written as a reader of the how-to would; `block_reference` has them again in NumPyro.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from .models import Model, random, zeros

STEPS, POINTS, SIDE = 60, 50, 6
PERSONS, ITEMS = 30, 12
SCHOOLS, CLASSES, PUPILS = 6, 4, 5
JITTER = 1e-4


@dataclass(frozen=True)
class BlockCase:
    """A model with its data, and its sites: hyperparameters, and effects that are compared.

    Hyperparameters are positive, but for those in ``shares``, which lie in (0, 1).
    """

    name: str
    model: Model
    args: tuple[Tensor, ...]
    hyper: tuple[str, ...]
    effects: tuple[str, ...]
    shares: tuple[str, ...] = ()


def half_normal(name: str, scale: float = 2.0) -> Any:
    return pyro.sample(name, dist.HalfNormal(zeros() + scale))


def series(y: Tensor) -> None:
    """Counts of a local level, a named sum of increments."""
    s = half_normal("s", 1.0)
    start: Any = pyro.sample("start", dist.Normal(zeros(), 2.0))
    with pyro.plate("steps", len(y)):
        z: Any = pyro.sample("z", dist.Normal(zeros(), 1.0))
    level: Any = pyro.deterministic("level", start[..., None] + s[..., None] * z.cumsum(-1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(level.exp()), obs=y)


def classification(x: Tensor, y: Tensor) -> None:
    """Binary data of a Gaussian process."""
    length: Any = pyro.sample("length", dist.LogNormal(zeros(), 1.0))
    amplitude = half_normal("amplitude")
    apart = (x[:, None] - x) / length[..., None, None]
    K = amplitude[..., None, None].square() * torch.exp(-0.5 * apart.square())
    K = K + JITTER * torch.eye(len(x), dtype=x.dtype)
    f: Any = pyro.sample("f", dist.MultivariateNormal(torch.zeros_like(x), K))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def crossed(person: Tensor, item: Tensor, y: Tensor) -> None:
    """Answers of persons to items, both with a scale of their own."""
    a_scale, b_scale = half_normal("a_scale"), half_normal("b_scale")
    m: Any = pyro.sample("m", dist.Normal(zeros(), 2.0))
    with pyro.plate("persons", PERSONS):
        a: Any = pyro.sample("a", dist.Normal(zeros(), a_scale))
    with pyro.plate("items", ITEMS):
        b: Any = pyro.sample("b", dist.Normal(zeros(), b_scale))
    with pyro.plate("data", len(y)):
        logits = m[..., None] + a[..., person] + b[..., item]
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def nested(school: Tensor, group: Tensor, y: Tensor) -> None:
    """Marks of pupils in classes of schools; ``school`` is that of each class."""
    school_scale, class_scale = half_normal("school_scale"), half_normal("class_scale")
    noise = half_normal("noise")
    m: Any = pyro.sample("m", dist.Normal(zeros(), 5.0))
    with pyro.plate("schools", SCHOOLS):
        u: Any = pyro.sample("u", dist.Normal(m, school_scale))
    with pyro.plate("classes", SCHOOLS * CLASSES):
        v: Any = pyro.sample("v", dist.Normal(u[..., school], class_scale))
    with pyro.plate("pupils", len(y)):
        pyro.sample("y", dist.Normal(v[..., group], noise), obs=y)


def regions(W: Tensor, expected: Tensor, y: Tensor) -> None:
    """Counts of regions, whose relative risks lean on their neighbours' (CAR)."""
    s = half_normal("s", 1.0)
    rho: Any = pyro.sample("rho", dist.Beta(zeros() + 4.0, 2.0))
    b: Any = pyro.sample("b", dist.Normal(zeros(), 2.0))
    P = (W.sum(1).diag() - rho[..., None, None] * W) / s[..., None, None].square()
    f: Any = pyro.sample("f", dist.MultivariateNormal(zeros(len(y)), precision_matrix=P))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(expected * (b[..., None] + f).exp()), obs=y)


def neighbours(side: int) -> Tensor:
    """Which cells of a square grid share an edge, as a matrix of zeros and ones."""
    line = torch.diag(torch.ones(side - 1).double(), 1)
    line, eye = line + line.mT, torch.eye(side).double()
    return torch.kron(line, eye) + torch.kron(eye, line)


def pairs(n: int, m: int) -> tuple[Tensor, ...]:
    return torch.cartesian_prod(torch.arange(n), torch.arange(m)).unbind(1)


def block_cases() -> list[BlockCase]:
    g = random(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    counts = torch.poisson((1.0 + (0.2 * normal(STEPS)).cumsum(0)).exp(), generator=g)
    x = torch.linspace(-3.0, 3.0, POINTS, dtype=torch.float64)
    binary = torch.bernoulli(torch.sigmoid(2.0 * torch.sin(1.5 * x)), generator=g)
    person, item = pairs(PERSONS, ITEMS)
    logits = 0.5 + (1.0 * normal(PERSONS))[person] + (0.7 * normal(ITEMS))[item]
    answers = torch.bernoulli(torch.sigmoid(logits), generator=g)
    school, _ = pairs(SCHOOLS, CLASSES)
    group, _ = pairs(SCHOOLS * CLASSES, PUPILS)
    means = 1.0 + (0.8 * normal(SCHOOLS))[school] + 0.5 * normal(len(school))
    marks = means[group] + normal(len(group))
    W = neighbours(SIDE)
    root = torch.linalg.cholesky(W.sum(1).diag() - 0.9 * W)
    risk = torch.linalg.solve_triangular(root.mT, normal(SIDE**2, 1), upper=True)[:, 0]
    expected = 2.0 + 10.0 * torch.rand(SIDE**2, generator=g, dtype=torch.float64)
    ill = torch.poisson(expected * (0.1 + 0.7 * risk).exp(), generator=g)
    crossed_scales = ("a_scale", "b_scale")
    nested_scales = ("school_scale", "class_scale", "noise")
    return [
        BlockCase("series", series, (counts,), ("s",), ("start", "level")),
        BlockCase("gp", classification, (x, binary), ("length", "amplitude"), ("f",)),
        BlockCase("crossed", crossed, (person, item, answers), crossed_scales, ("m", "a", "b")),
        BlockCase("nested", nested, (school, group, marks), nested_scales, ("m", "u", "v")),
        BlockCase("car", regions, (W, expected, ill), ("s", "rho"), ("b", "f"), ("rho",)),
    ]


def by_log(name: str, x: Tensor, case: BlockCase) -> Tensor:
    """The logarithm of what is positive, the log odds of a share."""
    return x.logit() if name in case.shares else x.log()


def coordinates(draws: dict[str, Tensor], case: BlockCase) -> dict[str, Tensor]:
    """(draws, D) by "hyper", "log_hyper" and "effects", from draws (draws, ...) of sites."""
    n = len(draws[case.hyper[0]])
    parts = {
        "hyper": [draws[name] for name in case.hyper],
        "log_hyper": [by_log(name, draws[name], case) for name in case.hyper],
        "effects": [draws[name] for name in case.effects],
    }
    return {k: torch.cat([x.reshape(n, -1) for x in p], 1) for k, p in parts.items()}
