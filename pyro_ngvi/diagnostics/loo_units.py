"""Leaving out whole units of a hierarchical model: integrated, Pareto-smoothed importance sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .khat import khat_from_log_weights

#: the k-hat above which Vehtari et al. do not trust a density
TRUSTED = 0.7


@dataclass(frozen=True)
class UnitLOO:
    """Expected log predictive density of the data of new units, by leave-one-out, in nats.

    Attributes:
        elpd: sum over the units.
        se: standard error of ``elpd`` as a sum of independent terms.
        pointwise: log p(y_i | y_-i) (B,).
        khat: Pareto k-hat of each unit's weights (B,); above 0.7 its density is not to be trusted.
    """

    elpd: float
    se: float
    pointwise: Tensor = field(repr=False)
    khat: Tensor = field(repr=False)

    def __str__(self) -> str:
        bad = int((self.khat > TRUSTED).sum())
        word = f"; k-hat above {TRUSTED} in {bad}" if bad else ""
        return (
            f"elpd_loo {self.elpd:.2f} nats, standard error {self.se:.2f} "
            f"(of {len(self.pointwise)} units{word})"
        )


def loo_units(
    guide: Any, *args: Any, num_draws: int = 1000, points: int = 32, **kwargs: Any
) -> UnitLOO:
    """How well the other units predict all data of a unit, for each, without refitting.

    Each unit's latent variables are integrated out (:mod:`pyro_ngvi.hierarchy.marginal`), since leaving
    out data of a unit whose effect they alone inform fails with weights on that effect.  The globals
    are reweighted by 1 / p(y_i | v), their tail smoothed (Vehtari et al. 2024); q of the globals
    stands for their posterior.

    Args:
        guide: a trained :class:`~pyro_ngvi.AutoHierarchical`.
        args: those of the model, with the data of the units that are left out in turn.
        num_draws: draws of the globals.
        points: draws of a unit's latent variables at each of them.
        kwargs: keyword arguments of the model.

    Raises:
        ValueError: where data of units lie outside their plate, or for fewer than 25 draws.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> import pyro_ngvi as ngvi
        >>> from pyro_ngvi.diagnostics import loo_units
        >>> def model(y):
        ...     m = pyro.sample("m", dist.Normal(0.0, 5.0))
        ...     s = pyro.sample("s", dist.HalfNormal(5.0))
        ...     with pyro.plate("schools", len(y)):
        ...         u = pyro.sample("u", dist.Normal(m, s))
        ...         pyro.sample("y", dist.Normal(u, 2.0), obs=y)
        >>> y = torch.tensor([3.0, 5.0, 1.0, -2.0])
        >>> guide = ngvi.AutoHierarchical(model)
        >>> svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(16))
        >>> losses = [svi.step(y) for _ in range(30)]
        >>> found = loo_units(guide, y)
        >>> found.pointwise.shape
        torch.Size([4])
    """
    log_l = guide.log_marginals(*args, num_draws=num_draws, points=points, **kwargs)
    terms, shapes = [], []
    for x in log_l.double().cpu().numpy().T:
        found = khat_from_log_weights(-x)
        terms.append(float(np.logaddexp.reduce(found.psis_log_weights + x)))
        shapes.append(found.khat)
    pointwise, khat = (torch.tensor(x, dtype=torch.float64) for x in (terms, shapes))
    se = float((len(terms) * pointwise.var(correction=0)).sqrt())
    return UnitLOO(float(pointwise.sum()), se, pointwise, khat)
