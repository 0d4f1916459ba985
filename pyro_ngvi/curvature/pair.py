"""What is known of one pair of model and guide, and what the loss's own run and backward pass give.

Once an estimator has set :attr:`Pair.taps`, the loss runs the model with taps behind its layers
(:mod:`pyro_ngvi.curvature.taps.taps`), so that its backward pass leaves what the estimator reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..linalg.autocast import outside_autocast
from ..runtime.checks import sum_log_prob
from ..runtime.layout import LatentLayout
from ..runtime.vmap import Sites
from .taps.taps import LayerTaps

__all__ = ["Pair"]


class Pair:
    """What the estimators of curvature keep between the steps of one pair of model and guide.

    Attributes:
        taps: those behind the layers of the model, once they are found.
        reasons: by latent site, why taps do not cover it.
        searched: whether there is nothing more to find.
        prior: the Hessian of -rest times 1 (d,), of a step with taps.
        diagonal_prior: whether the Hessian of -rest is diagonal; ``None``: not asked yet.
        looked_for_kinks: whether they were looked for.
    """

    def __init__(self, layout: LatentLayout) -> None:
        self.layout = layout
        self.taps: LayerTaps | None = None
        self.reasons: dict[str, str] = {}
        self.diagonal_prior: bool | None = None
        self.searched = self.looked_for_kinks = False
        self.draws = self.log_det = self.prior = self._rest = torch.empty(0)

    def start(self, draws: Tensor, log_det: Tensor) -> None:
        """At each step: theta (S, d) as drawn, with its graph, and the log-Jacobians (S,)."""
        self.draws, self.log_det = draws, log_det
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
        self._rest = -(rest + self.log_det)
        return data + rest

    @outside_autocast
    def before_backward(self) -> None:
        """The curvature of the rest, while its graph is there: H 1, for a diagonal H."""
        if self.taps is None or not self.diagonal_prior:
            return
        self.prior = torch.zeros_like(self.draws[0])
        how: Any = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
        if self._rest.requires_grad:
            (g,) = torch.autograd.grad(self._rest.sum(), self.draws, create_graph=True, **how)
            if g.requires_grad:
                (product,) = torch.autograd.grad(g.sum(), self.draws, **how)
                self.prior = product.mean(0).detach()

    def forget(self) -> None:
        """At the end of a step: its graph is no longer needed."""
        self.draws = self.log_det = self._rest = torch.empty(0)
