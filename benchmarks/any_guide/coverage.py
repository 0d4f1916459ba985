"""How often the stated Monte-Carlo errors of AIFVB's average cover the optimum: replications of a run.

The model is a logistic regression drawn once.  Its exact ELBO at a Gaussian guide takes an integral for
each row, over its linear predictor, by quadrature, so that the optimum that a run approaches is known
to many digits.  Errors are of the locations and of the log sds of the latent variables, the latter from
the covariance of the parameters, to first order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal
from torch import Tensor
from torch.nn.functional import softplus

import pyro_ngvi as ngvi
from pyro_ngvi.linalg.cubature import gauss_hermite

from ..stepping import heading, line

__all__ = ["KINDS", "Coverage", "run", "table"]

#: and by how many sds a 90 % interval reaches from its middle
ROWS, D, PARTICLES, STEPS, SDS = 80, 5, 8, 1_000, 1.6448536
KINDS: dict[str, Callable[[Any], Any]] = {
    "AutoNormal": AutoNormal,
    "AutoDiagonalNormal": AutoDiagonalNormal,
    "AutoMultivariateNormal": AutoMultivariateNormal,
}


@dataclass(frozen=True)
class Coverage:
    """Errors of single runs (runs, D), and those stated, of locations and of log sds."""

    guide: str
    steps: int
    errors: dict[str, list[list[float]]]
    stated: dict[str, list[list[float]]]


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    X = torch.cat([torch.ones(ROWS, 1), torch.randn(ROWS, D - 1, generator=g)], 1).double()
    X[:, 2] += 0.7 * X[:, 1]
    weights = torch.tensor([0.3, 1.0, -1.0, 0.5, 0.0], dtype=torch.double)
    return X, torch.bernoulli(torch.sigmoid(X @ weights), generator=g)


def model(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), 3.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def loss_at(loc: Tensor, root: Tensor) -> Tensor:
    """The exact -ELBO at N(loc, root root'), up to a constant."""
    X, y = data()
    nodes, weights = gauss_hermite(40, dtype=torch.double)
    logits = (X @ loc)[:, None] + torch.linalg.vector_norm(X @ root, dim=1)[:, None] * nodes
    expected = (y[:, None] * logits - softplus(logits)) @ weights
    prior = 0.5 * (loc.square().sum() + root.square().sum()) / 9.0
    return prior - expected.sum() - root.diagonal().abs().log().sum()


def optimum(full: bool) -> Tensor:
    """Locations and log sds (2 D,) of the best Gaussian, of any covariance or a diagonal one."""
    loc = torch.zeros(D, dtype=torch.double, requires_grad=True)
    factor = (0.3 * torch.eye(D, dtype=torch.double)).requires_grad_()

    def root() -> Tensor:
        return factor.tril() if full else factor.diagonal().diag()

    how: Any = {"max_iter": 2000, "tolerance_grad": 1e-11, "tolerance_change": 1e-16}
    search = torch.optim.LBFGS([loc, factor], line_search_fn="strong_wolfe", **how)

    def closure() -> Any:
        search.zero_grad()
        loss = loss_at(loc, root())
        loss.backward()
        return loss

    search.step(closure)
    assert loc.grad is not None and float(loc.grad.abs().max()) < 1e-6
    sds = torch.linalg.vector_norm(root(), dim=1)
    return torch.cat([loc, sds.log()]).detach()


def figures(guide: Any) -> Tensor:
    """Locations and log sds of a guide."""
    if isinstance(guide, AutoNormal):
        return torch.cat([guide.locs.w, guide.scales.w.log()]).detach()
    q = guide.get_posterior()
    return torch.cat([q.mean, 0.5 * q.variance.log()]).detach()


def one(kind: str, seed: int, steps: int) -> tuple[Tensor, Tensor]:
    """The figures of an average, and the errors stated of them."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    args = data()
    guide = KINDS[kind](model)
    optim = ngvi.AIFVB(guide)
    svi = SVI(model, guide, optim, ngvi.BatchedELBO(PARTICLES))
    for _ in range(steps):
        svi.step(*args)
    covariance = optim.asymptotic_covariance(svi, *args)
    held = {name: p for name, p in guide.named_parameters() if p.requires_grad}
    of = {name: next(p for n, p in held.items() if _same(n, name)) for name in covariance.average}
    with optim.use_average(), torch.no_grad():
        columns, width = [], 1e-5
        for p in of.values():
            flat = p.view(-1)
            for i in range(len(flat)):
                flat[i] += width
                more = figures(guide)
                flat[i] -= 2.0 * width
                columns.append((more - figures(guide)) / (2.0 * width))
                flat[i] += width
        J = torch.stack(columns, 1)
        return figures(guide), (J @ covariance.matrix @ J.mT).diagonal().clamp_min(0.0).sqrt()


def _same(of_module: str, of_store: str) -> bool:
    return of_store.endswith(of_module.removesuffix("_unconstrained"))


def run(runs: int, kinds: Iterable[str] = KINDS, steps: int = STEPS) -> list[Coverage]:
    """So many replications of each guide, in float64."""
    torch.set_default_dtype(torch.double)
    found = []
    for kind in kinds:
        best = optimum(full=kind == "AutoMultivariateNormal")
        each = [one(kind, seed, steps) for seed in range(runs)]
        errors, stated = (torch.stack(x) for x in zip(*each, strict=True))
        split: Any = {"locations": slice(D), "log sds": slice(D, None)}
        parts = [{n: x[:, at].tolist() for n, at in split.items()} for x in (errors - best, stated)]
        found.append(Coverage(kind, steps, *parts))
    torch.set_default_dtype(torch.float32)
    return found


def table(results: Iterable[Coverage]) -> str:
    """Share of 90 % intervals with the optimum in them, its standard error by run, and the ratios of
    the sd of errors over runs to the mean of those stated."""
    columns = "runs", "steps", "covered", "sd of errors / stated, of each"
    lines = [heading("", "", *columns)]
    for result in results:
        for what in result.errors:
            errors, stated = (torch.tensor(x[what]) for x in (result.errors, result.stated))
            covered = (errors.abs() < SDS * stated).double().mean(1)
            share, error = float(covered.mean()), float(covered.std()) / len(covered) ** 0.5
            each = ", ".join(f"{float(x):.2f}" for x in errors.std(0) / stated.mean(0))
            cells = (
                f"{len(covered)}",
                f"{result.steps:,}",
                f"{100 * share:.1f} ± {100 * error:.1f} %",
            )
            lines.append(line(result.guide, what, *cells, each))
    return "\n".join(lines)
