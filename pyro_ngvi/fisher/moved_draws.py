"""Guides that transform their noise themselves, and so have no scores by holding draws fixed.

``AutoStructured`` and ``AutoGaussian`` draw noise e at an auxiliary site and put z = f(e, lambda) into
a ``Delta`` site with a log density.  With e held fixed z still moves with lambda: the gradient of the
sum of log densities is then not the score, and its part in the location is even zero.
"""

from __future__ import annotations

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from ..runtime.density import Site

__all__ = ["MovedDraws"]


class MovedDraws(Messenger):
    """Watches one run of a guide for Delta sites computed from draws *and* from parameters.

    A Delta of parameters alone is a point estimate, one of draws alone a transformed draw: both
    are fine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Tensor] = []
        self.deltas: dict[str, Tensor] = {}

    def _pyro_post_sample(self, msg: Site) -> None:
        fn, value = msg["fn"], msg["value"]
        while isinstance(fn, dist.Independent | dist.MaskedDistribution):
            fn = fn.base_dist
        if msg["is_observed"] or not isinstance(value, Tensor):
            return
        if isinstance(fn, dist.Delta):
            self.deltas[msg["name"]] = value
        elif value.is_floating_point():
            msg["value"] = value.detach().requires_grad_()
            self.draws.append(msg["value"])

    def find(self, leaves: list[Tensor]) -> str | None:
        """Name of the first such site."""

        def depends(value: Tensor, on: list[Tensor]) -> bool:
            found = torch.autograd.grad(value.sum(), on, allow_unused=True, retain_graph=True)
            return any(g is not None for g in found)

        for name, value in self.deltas.items():
            if self.draws and value.requires_grad:
                if depends(value, self.draws) and depends(value, leaves):
                    return name
        return None
