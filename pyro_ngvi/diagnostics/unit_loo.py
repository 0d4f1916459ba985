"""Leaving out each unit of a hierarchy in turn, and how far the globals move without it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from pyro import poutine
from torch import Tensor

from ..families.vectors import split
from ..hierarchy.collapsed import Collapsed, ExactUnits
from ..optim.rule import require
from ..runtime.density import LatentLayout
from .correction import can_weigh
from .draws import random_state
from .khat import PARETO, KHat
from .loo import without
from .proposal import is_light, refined, weighted_globals
from .weights import smoothed


@dataclass(frozen=True)
class UnitLOO:
    """Expected log predictive density of the data of new units, by leave-one-out, in nats.

    Attributes:
        elpd: sum_i log p(y_i | y_-i) over the units.
        se: its standard error, sqrt(B Var_i), for independent terms.
        pointwise: log p(y_i | y_-i) (B,); NaN of a unit without data.
        khat: Pareto k-hat of each unit's weights (B,); above 0.7 its figures are not to be trusted.
        absent: how many units have no data, but for missing or masked ones.
        influence: by site of the globals (B, ...), its posterior mean less that without the unit, in
            posterior standard deviations; 0 of a unit without data.

    Example:
        >>> terms, khat, moves = torch.tensor([[-3.0, -4.0], [0.1, 0.9], [0.2, -0.5]])
        >>> found = UnitLOO(-7.0, 0.7, terms, khat, influence={"m": moves})
        >>> print(found, found.most())
        elpd_loo -7.00 nats, standard error 0.70 (of 2 units; k-hat above 0.7 in 1; unit 1 moves m most,
        by 0.50 sd) tensor([1, 0])
    """

    elpd: float
    se: float
    pointwise: Tensor = field(repr=False)
    khat: Tensor = field(repr=False)
    absent: int = 0
    influence: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def most(self, count: int = 10) -> Tensor:
        """Numbers (count,) of the units that move a global furthest, the first one first."""
        require(count >= 0, "count", "not be negative", count)
        parts = [x.reshape(len(x), -1) for x in self.influence.values()]
        parts += [self.pointwise.new_zeros(len(self.pointwise), 1)]
        largest = torch.cat(parts, 1).abs().nan_to_num(torch.inf).amax(1)
        return largest.argsort(descending=True, stable=True)[:count]

    def __str__(self) -> str:
        bad = int((self.khat > PARETO).sum())
        word = f"; k-hat above {PARETO} in {bad}" if bad else ""
        gone = f"; {self.absent} without data" if self.absent else ""
        first = ""
        for i in self.most(1).tolist() if self.influence else []:
            far = {n: float(x[i].abs().amax()) for n, x in self.influence.items() if x[i].numel()}
            name = max(far, key=lambda n: math.inf if math.isnan(far[n]) else far[n])
            first = f"; unit {i} moves {name} most, by {far[name]:.2f} sd"
        return (
            f"elpd_loo {self.elpd:.2f} nats, standard error {self.se:.2f} "
            f"(of {len(self.pointwise) - self.absent} units{gone}{word}{first})"
        )


def loo_units(
    guide: Any,
    *args: Any,
    num_draws: int = 1000,
    points: int | None = None,
    seed: int | None = None,
    **kwargs: Any,
) -> UnitLOO:
    r"""How well the other units predict all data of a unit, and how far it moves the globals, for each,
    without refitting.

    Each unit's latent variables are integrated out (:func:`pyro_ngvi.collapse`), L_i(v) = p(y_i | v),
    and draws v_s of r(v) weighted, the tail smoothed (Vehtari et al. 2024):

    .. math:: w_{is} \propto \frac{p(v_s) \prod_{j \ne i} L_j(v_s)}{r(v_s)}, \quad
        \log p(y_i | y_{-i}) \approx \log \sum_s w_{is} L_i(v_s).

    r is q of the globals or, unless its weights have a third moment and all k-hats are small, that of
    :func:`~pyro_ngvi.diagnostics.corrected`.

    Args:
        guide: a trained :class:`~pyro_ngvi.AutoHierarchical`.
        args: those of the model, and ``kwargs``, with the data of the units left out in turn.
        num_draws: draws of the globals.
        points: of the quadrature over a unit's latent variables, as for :func:`pyro_ngvi.collapse`.
        seed: makes the result repeatable and leaves the global random state as it was.

    Raises:
        ValueError: where a datum outside the plate of units is of several, for minibatches of units,
            or for fewer than 25 draws.

    Warns:
        RuntimeWarning: as :func:`pyro_ngvi.collapse`, and where no r(v) is near the posterior: q of the
            globals then stands for it.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y):
        ...     m = pyro.sample("m", dist.Normal(0.0, 5.0))
        ...     s = pyro.sample("s", dist.HalfNormal(5.0))
        ...     with pyro.plate("schools", len(y)):
        ...         u = pyro.sample("u", dist.Normal(m, s))
        ...         pyro.sample("y", dist.Normal(u, 2.0), obs=y)
        >>> y = torch.tensor([3.0, 5.0, 1.0, -2.0])
        >>> fit = ngvi.fit(model, y, guide="AutoHierarchical", max_steps=30, progress=False, seed=0)
        >>> found = ngvi.diagnostics.loo_units(fit.guide, y, seed=0)
        >>> found.pointwise.shape, found.influence["m"].shape
        (torch.Size([4]), torch.Size([4]))
        >>> int(found.most(1))  # -2 is furthest from the others
        3
    """
    if guide.units.is_block:
        raise ValueError(
            f"loo_units leaves out one unit after the other, and all is one block here: {guide.units}. "
            f"Take pyro_ngvi.diagnostics.loo, which leaves out data."
        )
    with random_state(seed), torch.no_grad(), poutine.block():
        model = Collapsed(guide, args, kwargs, points)
        model.warn()
        layout = model.layout
        found, weights = _found(model, ExactUnits(model), layout, num_draws)
        if not is_light(weights) or (found.khat > PARETO).any():
            better, weights = _found(model, refined(model), layout, num_draws)
            if can_weigh(weights):
                return better
            words = (
                f"loo_units: no draws are near the posterior of the globals (k-hat {weights.khat:.2f}, "
                f"{weights.ess:.0f} of {num_draws}), and q stands for it. Check by NUTS on "
                f"ngvi.collapse(guide, ...)."
            )
            warnings.warn(words, RuntimeWarning, stacklevel=2)
    return found


def _found(
    model: Collapsed, proposal: ExactUnits, layout: LatentLayout, num_draws: int
) -> tuple[UnitLOO, KHat]:
    """By draws of the globals, and their weights; all the same where these are of no use."""
    theta, weights = weighted_globals(proposal, layout, num_draws)
    log_ratio = weights.log_weights if can_weigh(weights) else np.zeros(num_draws)
    values = layout.unpack(theta)
    log_l, absent = (x.cpu() for x in model.by_unit(values))
    flat = [v.double().cpu().reshape(num_draws, -1) for v in values.values()]
    every = torch.cat(flat, 1).numpy()
    figures, moves = map(torch.from_numpy, _left_out(log_l.double().numpy(), log_ratio, every))
    pointwise, khat = torch.where(absent, torch.nan, figures)
    moves = torch.where(absent[:, None], 0.0, moves)
    influence = split(moves, {name: v.shape[1:] for name, v in values.items()})
    terms = pointwise[~absent]
    se = float((len(terms) * terms.var(correction=0)).sqrt())
    result = UnitLOO(float(terms.sum()), se, pointwise, khat, int(absent.sum()), influence)
    return result, weights


def _left_out(
    log_l: np.ndarray, log_ratio: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """log p(y_i | y_-i) and k-hats (2, B), and what each unit adds to the mean of v (S, D), in its sds
    (B, D): from log L_i(v_s) (S, B) and the log weights (S,) of draws v."""
    w = np.exp(smoothed(log_ratio))
    mean = w @ v
    sd = np.sqrt(w @ (v - mean) ** 2)
    sd[sd == 0.0] = 1.0  # of a guide that is a point there, whose draws do not move
    figures, moves = np.empty((2, log_l.shape[1])), np.full((log_l.shape[1], v.shape[1]), np.nan)
    for i, of_unit in enumerate(log_l.T):
        figures[0, i], figures[1, i], left = without(of_unit, log_ratio)
        if left.ess > 0.0:  # 0 where a draw rules the unit out
            moves[i] = (mean - np.exp(left.psis_log_weights) @ v) / sd
    return figures, moves
