"""What ``BatchedELBO(curvature=...)`` adds to a step: it records the draws and asks the estimator.

Once an estimator has set :attr:`CurvatureEstimator.taps`, the loss runs the model with taps behind its
layers (:mod:`pyro_ngvi.curvature.taps.taps`), and its backward pass leaves what the estimator reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..linalg.host import outside_autocast
from ..runtime.density import LatentLayout, Sites, sum_log_prob
from ..runtime.run import Minibatches
from .drawn import Drawn
from .kinds import ESTIMATORS, KINDS
from .record import Curvature
from .taps.taps import LayerTaps

__all__ = ["CurvatureEstimator"]


class CurvatureEstimator:
    """The curvature of one pair of model and guide, step after step, by an entry of ``ESTIMATORS``.

    Attributes:
        taps: those behind the layers of the model, once they are found.
        reasons: by latent site, why taps do not cover it.
        searched: whether there is nothing more to find.
        rest_curvature: the Hessian of -rest times 1 (d,), of a step with taps.
        rest_is_diagonal: whether the Hessian of -rest is diagonal; ``None``: not asked yet.
        looked_for_kinks: whether they were looked for.
    """

    def __init__(self, kind: str, guide: Any, layout: LatentLayout) -> None:
        self.kind, self.guide, self.layout = kind, guide, layout
        self.taps: LayerTaps | None = None
        self.reasons: dict[str, str] = {}
        self.rest_is_diagonal: bool | None = None
        self.searched = self.looked_for_kinks = False
        self.rest_curvature = torch.empty(0)
        self._forget()

    def start(self, draws: Tensor, log_det: Tensor) -> None:
        """At each step: theta (S, d) as drawn, with its graph, and the log-Jacobians (S,)."""
        self._draws, self._log_det = draws, log_det
        if self.taps is not None:
            self.taps.clear()

    def program(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """What to run in place of the model."""
        return model if self.taps is None else self.taps

    def terms(self, sites: Sites) -> Any:
        """The log probability of one particle; with taps, of the data that they see and of the rest."""
        if self.taps is None:
            return sum_log_prob(sites)
        seen = self.taps.observed
        rest = {name: site for name, site in sites.items() if name != seen}
        return sum_log_prob({seen: sites[seen]}), sum_log_prob(rest)

    def log_joint(self, terms: Any) -> Tensor:
        """The log joint (S,) from the ``terms`` of all particles."""
        if self.taps is None:
            return terms
        data, rest = terms
        self._rest = -(rest + self._log_det)
        return data + rest

    def losses(self, each: Tensor) -> None:
        """Record log q - log p (S,) of each particle."""
        self._losses = each.detach()

    @outside_autocast
    def before_backward(self) -> None:
        """The curvature of the rest, while its graph is there: H 1, for a diagonal H."""
        if self.taps is None or not self.rest_is_diagonal:
            return
        self.rest_curvature = torch.zeros_like(self._draws[0])
        how: Any = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
        if self._rest.requires_grad:
            (g,) = torch.autograd.grad(self._rest.sum(), self._draws, create_graph=True, **how)
            if g.requires_grad:
                (product,) = torch.autograd.grad(g.sum(), self._draws, **how)
                self.rest_curvature = product.mean(0).detach()

    @outside_autocast
    def after_backward(
        self, model: Callable[..., Any], minibatches: Minibatches, args: Any, kwargs: Any
    ) -> Curvature:
        """The curvature at the draws of this step."""
        draws, losses = self._draws.detach(), self._losses
        drawn = Drawn(self.guide, draws, losses, self, model, minibatches, args, kwargs)
        parts = ESTIMATORS[self.kind](drawn)
        self._forget()
        return Curvature(self.kind if self.kind in KINDS else "hessian", parts)

    def _forget(self) -> None:
        self._draws = self._log_det = self._rest = self._losses = torch.empty(0)
