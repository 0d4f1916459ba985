"""Moments by draws, for families that do not know them: good to about 0.02 sd."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg.random import own_random_state
from .base import Family, Tensors

__all__ = ["MonteCarloFamily"]

#: draws behind entropies and divergences
DRAWS = 4096


class MonteCarloFamily(Family):
    """Answers from 4,096 draws of a fixed seed: the same q always gives the same numbers."""

    known_fisher = False
    nearly_singular = True

    def mean(self, params: Tensors) -> Tensor:
        return self.fixed_draws(params).mean(0)

    def stddev(self, params: Tensors) -> Tensor:
        return self.fixed_draws(params).std(0)

    def covariance(self, params: Tensors) -> Tensor:
        d = self.dim(params)
        return torch.cov(self.fixed_draws(params).mT).reshape(d, d)

    def entropy(self, params: Tensors) -> Tensor:
        with own_random_state(0):
            return -self.log_prob(params, self.draw(params, torch.Size((DRAWS,)))).mean()

    def kl(self, params: Tensors, other: Tensors) -> Tensor:
        with own_random_state(0):
            z = self.draw(params, torch.Size((DRAWS,)))
        return (self.log_prob(params, z) - self.log_prob(other, z)).mean()

    def fisher_product(self, params: Tensors, tangent: Tensors) -> Tensors:
        raise NotImplementedError(self._unknown())

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        raise NotImplementedError(self._unknown())

    def _unknown(self) -> str:
        return (
            f"{type(self).__name__} has no Fisher matrix in closed form: estimate it from scores, by "
            f"pyro_ngvi.optim.SPRING, IFVB or AIFVB."
        )
