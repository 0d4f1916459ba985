"""Families whose parameters are those of a Gaussian and more beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import Family, Tensors

__all__ = ["AugmentedGaussian"]


class AugmentedGaussian(Family):
    """Local frame: that of ``gaussian`` for its parameters, plain coordinates for the others."""

    gaussian: Any

    def _own(self, tensors: Tensors) -> Tensors:
        """The part of the Gaussian."""
        return {name: tensors[name] for name in self.gaussian.names}

    def _others(self, tensors: Tensors) -> Tensors:
        return {name: v for name, v in tensors.items() if name not in self.gaussian.names}

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        own = self.gaussian.push(self._own(params), self._own(tangent))
        return own | self._others(tangent)

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        return self.gaussian.pull(self._own(params), self._own(grads)) | self._others(grads)

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        own = self.gaussian.retract(self._own(params), self._own(tangent), step)
        return own | {name: params[name] + step * v for name, v in self._others(tangent).items()}

    def pack(self, tensors: Tensors) -> Tensor:
        others = [v.reshape(-1) for v in self._others(tensors).values()]
        return torch.cat([self.gaussian.pack(self._own(tensors)), *others])

    def unpack(self, vector: Tensor, like: Tensors) -> Tensors:
        others = self._others(like)
        sizes = [v.numel() for v in others.values()]
        first, *rest = vector.split([len(vector) - sum(sizes), *sizes])
        parts = zip(others.items(), rest, strict=True)
        return self.gaussian.unpack(first, self._own(like)) | {
            name: part.reshape(v.shape) for (name, v), part in parts
        }
