r"""A proposal for the globals v of a hierarchy, or all latent variables of a model, by slices.

A Gaussian q(v) falls off faster than the posterior of a log scale, so r(v) has marginals from slices
of p(v | y) through it (:mod:`.slices`); and again, through mean and covariance of the weighted draws,
until weights have a third moment, k-hat <= 1/3, or are all but equal.  Of all r that of the smallest
k-hat is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoContinuous
from torch import Tensor

from ..guides import init_to_center
from ..hierarchy.collapsed import Collapsed, ExactUnits
from ..hierarchy.marginal import MOST, ORDERS, point_count
from ..hierarchy.whole import Whole
from ..runtime.density import LatentLayout
from ..runtime.model_density import NaNWhereSingular, batched_trace
from .defence import SEVERAL, SHARE, Moments, Place, defended
from .draws import guide_draws
from .khat import EVEN, KHat, khat_from_log_weights
from .slices import copula
from .weights import MIN_DRAWS

#: draws behind the choice of r and, for each global, behind q's covariance, rounds, and where they end
DRAWS, EACH, ROUNDS, LIGHT = 1000, 50, 3, 1.0 / 3.0
#: draws at which twice the points are tried, the most for a unit, and the nats by which they may change
#: log p(y | v), by latent variables of a unit: they cost 2, 4 or 8 times as much
TRIED, MOST_POINTS, FINE = 250, 1024, {1: 1e-3, 2: 5e-3, 3: 1e-2}


def refined(model: Collapsed | Whole, draws: int = DRAWS) -> ExactUnits:
    """:func:`proposal` with as many points as its own draws need, at most 1024 for a unit."""
    exact, layout = proposal(model, draws), model.layout
    while (
        isinstance(model, Collapsed)
        and (units := model.units).width in ORDERS
        and not units.is_block
    ):
        count = 2 * model.point_count
        if count > MOST or point_count(units, count)[1] > MOST_POINTS:
            break
        finer = Collapsed(model.guide, *model.given, count)
        theta, log_r = _drawn(exact, layout, TRIED)
        few, more = log_density(model, layout, theta), log_density(finer, layout, theta)
        change = torch.softmax(more - log_r, 0) * (more - few).abs()
        if float(change.nan_to_num(torch.inf).sum()) <= FINE[units.width]:
            break
        model, exact = finer, proposal(finer, draws)
    return exact


def proposal(
    model: Collapsed | Whole,
    draws: int = DRAWS,
    wide: Moments | None = None,
    others: Sequence[Place] = (),
) -> ExactUnits:
    """With that r(v) of the smallest k-hat among a few; its long tails are of the ``wide`` mean and
    covariance, where given, that of other modes too, and it has a share at those of ``others`` that
    are not within its own Gaussian."""
    layout, tried = model.layout, []
    theta, log_q = _drawn(ExactUnits(model), layout, max(draws, EACH * layout.dim))
    theta = theta[log_q.isfinite()]
    mean, covariance = theta.mean(0), theta.mT.cov().reshape(2 * theta.shape[1:])
    if bool((theta == theta[0]).all(0).any()):  # a guide that is a point in some of them
        return ExactUnits(model)
    if others:
        precise = torch.linalg.inv(covariance)
        off = [place.mean - mean for place in others]
        others = [q for q, x in zip(others, off, strict=True) if x @ precise @ x > layout.dim]
    for _ in range(ROUNDS):
        guide = ExactUnits(model, _Sliced(model, layout, mean, covariance, wide, others))
        theta, weights = weighted_globals(guide, layout, draws)
        d = layout.dim
        tried.append((weights.khat, guide))
        few = weights.ess < MIN_DRAWS + d * (d + 1) / 2
        if is_light(weights) or few or wide is not None or others:  # slices are of one mode
            break
        w = torch.from_numpy(weights.psis_log_weights).to(theta).exp()
        mean = w @ theta
        rest = w.sqrt().unsqueeze(-1) * (theta - mean)
        covariance = rest.mT @ rest
    return min(tried, key=itemgetter(0))[1]


def _drawn(guide: ExactUnits, layout: LatentLayout, draws: int) -> tuple[Tensor, Tensor]:
    """Draws (S, d) of the globals, unconstrained, and their log density as constrained ones, infinite
    where a number is rounded to the end of its support."""
    values, (log_r, _) = guide_draws(partial(guide.globals), draws)
    theta = layout.pack(values)
    lost = log_r.isnan() | ~theta.isfinite().all(1)
    return theta.where(~lost[:, None], 0.0), log_r.where(~lost, torch.inf)


def weighted_globals(guide: ExactUnits, layout: LatentLayout, draws: int) -> tuple[Tensor, KHat]:
    """Draws (S, d) of the globals, unconstrained, and their weights p(v, y) / r(v)."""
    theta, log_r = _drawn(guide, layout, draws)
    log_w = log_density(guide.collapsed, layout, theta) - log_r
    return theta, khat_from_log_weights(log_w.numpy(force=True))


@torch.no_grad()
def log_density(model: Collapsed | Whole, layout: LatentLayout, theta: Tensor) -> Tensor:
    """log p(v, y) of constrained v at unconstrained points (S, d), (S,), in float64."""
    # far out parameters leave their support, and covariances are singular
    with pyro.validation_enabled(False), NaNWhereSingular():
        trace = batched_trace(model, layout.unpack(theta), chunk_size=max(1, int(model.room)))
    return trace.log_joint().double().nan_to_num(-torch.inf)


def is_light(weights: KHat) -> bool:
    """Whether weights have a third moment, or are all but equal."""
    return weights.khat <= LIGHT or weights.ess > EVEN * len(weights.log_weights)


class _Sliced(AutoContinuous):
    """The globals by slices of their density through a Gaussian, :func:`.slices.copula`, defended."""

    def __init__(
        self,
        model: Collapsed | Whole,
        layout: LatentLayout,
        mean: Tensor,
        covariance: Tensor,
        wide: Moments | None = None,
        others: Sequence[Place] = (),
    ) -> None:
        super().__init__(model, init_loc_fn=init_to_center)

        def log_p(theta: Tensor) -> Tensor:
            _, log_det = layout.unpack_with_log_det(theta)
            return log_density(model, layout, theta) + log_det

        q, own = copula(log_p, mean, covariance), (mean, covariance)
        share = SHARE if wide is None else SEVERAL
        self._posterior = defended(q, wide or own, share, others)
        with torch.no_grad():
            self()

    def get_posterior(self, *args: Any, **kwargs: Any) -> Any:
        return self._posterior
