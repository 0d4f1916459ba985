r"""Hierarchies put right by weights on their globals, whose number units do not raise.

Draws v_s of a proposal r(v), and of each unit u_i given v_s, exactly; then with L_i(v) = p(y_i | v)

    w_s propto p(v_s) prod_i L_i(v_s) / r(v_s)

(:mod:`pyro_ngvi.hierarchy.collapsed`).  r is q(v) where its weights have a third moment, k-hat <= 1/3,
without which the errors of averages are far from normal.  A Gaussian q falls off faster than the
posterior of a log scale, which goes as exp(-|x|) to the left under a prior that is flat at 0.  There r
has mean and Cholesky factor of the weighted draws, and noise of independent Student-t entries with 5
degrees of freedom: a multivariate t is far out in all entries where it is in one.  And again, until its
weights have a third moment (Oh & Berger 1992); of all, the one with the smallest k-hat.  Not for tens
of globals: a covariance of d of them is d (d + 1) / 2 numbers, and no more are taken from weights than
these are worth draws.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.transforms import LowerCholeskyAffine
from pyro.infer.autoguide import AutoContinuous
from torch import Tensor

from ..guides import init_to_center
from ..hierarchy.collapsed import DEGREES, Collapsed, ExactUnits, collapse
from ..runtime.density import LatentLayout
from ..runtime.model_density import batched_trace
from .draws import guide_draws
from .khat import FEWEST, KHat, khat_from_log_weights
from .weights import MIN_DRAWS

#: draws behind the choice of r, how many Student-t distributions are tried, and the k-hat that ends it
DRAWS, ROUNDS, LIGHT = 1000, 3, 1.0 / 3.0


def corrected(guide: Any, *args: Any, points: int | None = None, **kwargs: Any) -> ExactUnits:
    """The guide r(v) prod_i p(u_i | y_i, v) that ``to_arviz(..., corrected=True)`` takes draws of.

    It is a guide of the whole model, for :func:`pyro_ngvi.khat`, which then judges the globals, and the
    rest.  Its draws want weights: ``to_arviz(..., resample="psis")``.

    Args:
        guide: a trained :class:`~pyro_ngvi.AutoHierarchical`.
        args: those of its model, with all data.
        points: of the quadrature, as in :func:`pyro_ngvi.collapse`.
        kwargs: keyword arguments of the model.

    Raises:
        ValueError: as :func:`pyro_ngvi.collapse`, and for another guide.

    Source:
        Oh & Berger 1992, Adaptive importance sampling in Monte Carlo integration, J. Stat. Comput.
        Simul. 41.
    """
    model = collapse(guide, *args, points=points, **kwargs)
    layout = LatentLayout(guide.globals.prototype_trace)
    found = best = ExactUnits(model)
    least = float("inf")
    for _ in range(1 + ROUNDS):
        values, of_guide = guide_draws(partial(found.globals), DRAWS)
        with torch.no_grad():
            log_joint = batched_trace(model, values, chunk_size=model.at_once).log_joint()
        weights = khat_from_log_weights((log_joint.double() - of_guide["log"]).cpu().numpy())
        if weights.khat < least:
            best, least = found, weights.khat
        theta = layout.pack(values)
        d = theta.shape[1]
        if least <= LIGHT or not weights.ess >= max(MIN_DRAWS, d * (d + 1) / 2):
            break
        found = ExactUnits(model, _StudentT(model, theta, weights))
    return best


def decision_on(weights: KHat, model: Collapsed) -> tuple[str, str]:
    """Whether to take corrected draws, and the same in words."""
    share, draws = weights.ess / len(weights.log_weights), len(weights.log_weights)
    good = weights.reliable and share >= FEWEST and not (weights.missed or 0.0) > 0.0
    if model.too_rough:
        return "unusable", (
            f"Not usable: log p(y | v) is off by {model.error:.2g} nats or more. Pass points= to "
            f"ngvi.collapse(guide, ...), or take NUTS."
        )
    figures = f"k-hat of the globals {weights.khat:.2f} from {draws} draws, worth {weights.ess:.0f}"
    if model.missed:
        return (
            "unusable",
            f"Not usable. {model.missed_in_words}. Check against NUTS from several starts.",
        )
    if good:
        return "intervals", f"Take the corrected intervals as they are ({figures} exact ones)."
    return "unusable", (
        f"Not usable: globals cannot be corrected ({figures}). Take NUTS on ngvi.collapse(guide, ...), "
        f"whose draw_units(draws) adds the units."
    )


class _StudentT(AutoContinuous):
    """Mean and Cholesky factor of weighted draws theta (S, d), times independent Student-t noise."""

    def __init__(self, model: Collapsed, theta: Tensor, weights: KHat) -> None:
        super().__init__(model, init_loc_fn=init_to_center)
        w = torch.from_numpy(weights.psis_log_weights).to(theta).exp()
        mean = w @ theta
        rest = w.sqrt().unsqueeze(-1) * (theta - mean)
        root = torch.linalg.cholesky(rest.mT @ rest)
        t = dist.StudentT(DEGREES, torch.zeros_like(mean), 1.0).to_event(1)
        self._posterior = dist.TransformedDistribution(t, [LowerCholeskyAffine(mean, root)])
        with torch.no_grad():
            self()

    def get_posterior(self, *args: Any, **kwargs: Any) -> Any:
        return self._posterior
