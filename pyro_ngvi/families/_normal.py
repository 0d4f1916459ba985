"""What all Gaussian families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .base import Family, Tensors

__all__ = ["NormalFamily", "exportable"]


def exportable(function: Any) -> Callable[..., Any]:
    """``apply`` of an autograd function; its ``forward`` in traces without gradients, to be saved."""
    tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    return function.forward if tracing and not torch.is_grad_enabled() else function.apply


class NormalFamily(Family):
    """A family of Gaussians: stored with their mean, and stepped by expected Hessians if need be."""

    location = ("loc",)

    def mean(self, params: Tensors) -> Tensor:
        return params["loc"]

    def icdf(self, params: Tensors, levels: Tensor) -> Tensor:
        return self.mean(params) + self.stddev(params) * torch.special.ndtri(levels).unsqueeze(-1)

    def precision_step(
        self, params: Tensors, grads: Tensors, curvature: Tensors, rate: Tensor, safe: bool
    ) -> Tensors:
        """``params`` with precision P + rate (H - P), and, if ``safe``, the second-order term.

        H is the ``curvature``, or, if that is empty, what the gradient of the scales in ``grads`` says.
        """
        gradient = self.pull(params, grads)
        if curvature:
            gradient = self.pull_curvature(params, gradient, curvature)
        tangent = self.natural_gradient(params, gradient)
        tangent["loc"] = torch.zeros_like(tangent["loc"])
        return self.retract(params, tangent, -rate, "improved" if safe else "natural")

    def covariance_product(
        self, params: Tensors, v: Tensor, damping: Tensor | float = 0.0
    ) -> Tensor:
        """(Sigma^-1 + damping I)^-1 v for v (d,): a natural step of the mean."""
        raise NotImplementedError(f"{type(self).__name__} has no covariance product.")
