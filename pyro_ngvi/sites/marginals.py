"""What a user gets of corrected marginals: tables of densities, draws, and a word when to doubt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..guides.marginals import levels_like
from ..linalg.host import apart
from .algebra import Snapshot
from .corrections import ORDERS, Component, Draws, component_of
from .densities import REACH, Densities, mixture
from .joint import predictors_of
from .structure import ModelStructure

#: a correction of the evidence to second order above which both are in doubt, in nats; and a density
#: at the end of a table, as a share of the largest, above which the table is too short
TIED, CUT = 0.5, 1e-3
#: a slope of what the sites leave over, in nats a standard deviation, that is none at convergence
STEEP = 0.05


def shapes_of(plan: ModelStructure, names: Sequence[str] | None) -> dict[str, torch.Size]:
    """Shapes of the sites ``names``, by default all latent ones; refuses what has no marginals."""
    wide = [g for g in plan.groups if g.width not in ORDERS]
    if wide:
        raise NotImplementedError(
            f"AutoSites.marginals: a datum of {wide[0].name!r} depends on {wide[0].width} linear "
            f"combinations of latent variables, and corrections integrate {max(ORDERS)} at most. Use "
            f"guide.predict."
        )
    every = dict(plan.shapes)
    for name, (group, columns) in predictors_of(plan).items():
        width = columns.stop - columns.start
        every[name] = torch.Size((*group.batch, width)) if width > 1 else group.batch
    for name in names or ():
        if name not in every:
            raise ValueError(
                f"AutoSites.marginals: {name!r} is neither a latent site nor a predictor that data "
                f"see, which are {', '.join(map(repr, every))}. Name a predictor in the model: "
                f"f = pyro.deterministic({name!r}, ...)."
            )
    return {name: every[name] for name in (plan.shapes if names is None else names)}


@dataclass(frozen=True)
class SiteMarginals:
    """Marginal posteriors of single numbers, as tables of their densities: ``guide.marginals()``.

    Attributes:
        log_evidence: log p(y) in nats, of :mod:`pyro_ngvi.sites.corrections`.
        samples: draws (S, *shape) by name, with the correlations of the Gaussian and these marginals.
        doubts: what speaks against these figures, in sentences; empty where nothing was found.

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y):
        ...     w = pyro.sample("w", dist.Normal(0.0, 3.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Poisson(w.exp()), obs=y)
        >>> fit = ngvi.fit(model, torch.tensor([3.0, 4.0, 2.0]), guide="AutoSites", progress=False)
        >>> found = fit.guide.marginals()
        >>> round(found.log_evidence, 2), found.quantiles([0.05, 0.95])["w"].round(decimals=1)
        (-7.03, tensor([0.4..., 1.6...]))
        >>> x, p = found.density("w")
        >>> x.shape, round(float(torch.trapezoid(p, x)), 3)
        (torch.Size([801]), 1.0)
    """

    log_evidence: float
    samples: Draws = field(repr=False)
    doubts: tuple[str, ...]
    _tables: dict[str, Densities] = field(repr=False)
    _shapes: dict[str, torch.Size] = field(repr=False)

    def _each(self, figure: Callable[[Densities], Tensor]) -> Draws:
        """A figure (..., D) of every table, by name in the shape of its site."""
        flat = {name: figure(table) for name, table in self._tables.items()}
        return {n: x.reshape(x.shape[:-1] + self._shapes[n]) for n, x in flat.items()}

    @property
    def mean(self) -> Draws:
        """Posterior means (*shape) by name."""
        return self._each(lambda table: table.mean)

    @property
    def sd(self) -> Draws:
        """Posterior standard deviations (*shape) by name."""
        return self._each(lambda table: table.sd)

    @property
    def distance(self) -> Draws:
        """By name (*shape), the total variation, in [0, 1], of marginal and Gaussian of its moments."""
        return self._each(lambda table: table.from_gaussian)

    def quantiles(self, levels: Any) -> Draws:
        """Quantiles (Q, *shape) by name at levels (Q,) in (0, 1)."""

        def rows(table: Densities) -> Tensor:
            at = levels_like(levels, table.x)
            return table.quantiles(at.reshape(-1)).reshape(*at.shape, -1)

        return self._each(rows)

    def density(self, name: str) -> tuple[Tensor, Tensor]:
        """Points x (P, *shape) and the density there, (P, *shape), of a site; refused for others."""
        if name not in self._tables:
            raise ValueError(f"{name!r} is none of {', '.join(map(repr, self._tables))}.")
        return self._each(lambda table: table.x)[name], self._each(lambda table: table.p)[name]

    def __str__(self) -> str:
        size = sum(table.x.shape[1] for table in self._tables.values())
        furthest = {n: float(x.max()) for n, x in self.distance.items()}
        name = max(furthest, key=lambda n: furthest[n])
        first = (
            f"Marginals of {size} numbers, log evidence {self.log_evidence:.2f} nats. The furthest "
            f"from a Gaussian is one of {name!r}: a total variation of {furthest[name]:.3f}."
        )
        return " ".join([first, *self.doubts])


def combined(
    components: Sequence[Component], weights: Tensor
) -> tuple[dict[str, Densities], tuple[str, ...]]:
    """Mixtures of marginals by name, and doubts."""
    tables, short = {}, 0.0
    for name in components[0].parts:
        parts = [c.parts[name] for c in components]
        tables[name] = mixture(parts, weights)
        edges = torch.stack([p.at_edge for p in parts])
        short = max(short, float((weights.to(edges) @ edges).max()))
    doubts = []
    second = float(sum(w * c.evidence.second for w, c in zip(weights, components, strict=True)))
    if second > TIED:
        doubts.append(
            f"In doubt: pairs of data, or outliers, change the log evidence by {second:.1f} nats to "
            f"second order, so terms beyond it may matter too."
        )
    slope = max(c.evidence.slope for c in components)
    if not slope < STEEP:
        doubts.append(
            f"In doubt: the sites have not converged (a slope of {slope:.2g} nats a standard deviation "
            f"is left). Take more steps of CVI, or of a smaller lr."
        )
    if short > CUT:
        doubts.append(
            f"In doubt: some densities are still {short:.1g} of their largest value {REACH:g} standard "
            f"deviations out, where they are cut."
        )
    return tables, tuple(doubts)


@torch.no_grad()
def marginals_of(
    at: Snapshot, names: Sequence[str] | None, num_samples: int, seed: int
) -> SiteMarginals:
    """The corrected marginals of a snapshot."""
    shapes = shapes_of(at.call.plan, names)
    generator = torch.Generator().manual_seed(apart(seed))
    found = component_of(at, list(shapes), num_samples, generator)
    tables, doubts = combined([found], torch.ones(1))
    samples = {n: x.reshape(-1, *shapes[n]) for n, x in found.draws.items()}
    return SiteMarginals(found.evidence.log_p, samples, doubts, tables, shapes)
