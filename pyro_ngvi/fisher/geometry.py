"""The geometry of a guide whose Fisher matrix is estimated: a frame, and a product with F^-1.

The rule that steps (:class:`~pyro_ngvi.optim.natural_gradient.NaturalGradientRule`) asks a family for
``pull``, ``natural_gradient`` and ``retract``.  Here the second comes from scores, the others from the
family, or, for guides of other packages, from the plain coordinates in which their parameters are
stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..families.base import Family, Tensors, interpolate, pack, unpack

__all__ = ["Coordinates", "EstimatedGeometry"]


@dataclass(frozen=True)
class Coordinates:
    """Named tensors moved along straight lines: all that is known of a guide that is not ours."""

    names: tuple[str, ...]
    coordinates: tuple[str, ...] = ("local",)
    newton_like: bool = True
    noise_radius: float = 0.6
    orthogonal_frame: bool = False
    known_fisher: bool = False
    nearly_singular: bool = False
    """Whether some are weights of networks or transforms, as in a flow: their Fisher matrix is so."""

    @property
    def location(self) -> tuple[str, ...]:
        """Nothing tells locations from scales here, so momentum acts on all."""
        return self.names

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        return grads

    def pull_curvature(self, params: Tensors, gradient: Tensors, curvature: Tensors) -> Tensors:
        raise NotImplementedError("Plain coordinates do not know which of them are scales.")

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        raise NotImplementedError(
            "Plain coordinates know no Fisher matrix: it has to be estimated."
        )

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        return {name: p + step * tangent[name] for name, p in params.items()}

    def average(self, average: Tensors, params: Tensors, rate: Tensor) -> Tensors:
        return interpolate(average, params, rate)

    def pack(self, tensors: Tensors) -> Tensor:
        return pack(tensors)

    def unpack(self, vector: Tensor, like: Tensors) -> Tensors:
        return unpack(vector, like)

    def layer_sizes(self, params: Tensors) -> tuple[int, ...]:
        """One part: names do not tell which parameters belong together."""
        return (sum(v.numel() for v in params.values()),)

    def not_finite(self, params: Tensors) -> Tensor:
        return ~torch.isfinite(pack(params))


@dataclass(frozen=True)
class EstimatedGeometry:
    """A frame whose natural gradient is ``product``, an estimate of F^-1 times a packed gradient."""

    frame: Family | Coordinates
    product: Callable[[Tensor], Tensor]

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        return self.frame.unpack(self.product(self.frame.pack(gradient)), gradient)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.frame, name)
