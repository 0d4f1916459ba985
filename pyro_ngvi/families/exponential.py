r"""What exponential families over R^d share here, and the product of families over parts of the vector.

A member of an exponential family, log q(z) = <eta, T(z)> - A(eta), has as Fisher matrix in its natural
parameters eta the Hessian of the log-normaliser A.  The families here choose the local frame in which
that matrix is the identity, so that a natural gradient costs a ``pull``, and move linearly in eta:

    eta <- eta - b F^-1 g = eta - b dL/d(mean parameters),

which for b = 1 lands on the posterior of a conjugate model (Khan & Nielsen 2018; Hoffman, Blei, Wang &
Paisley 2013).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Family, Tensors


class WhitenedFamily(Family):
    """A family with independent entries of z and the identity as Fisher matrix in the local frame."""

    coordinates = ("local", "natural")  # one and the same
    orthogonal_frame = True

    def covariance(self, params: Tensors) -> Tensor:
        return torch.diag(self.stddev(params).square())

    def scale_tril(self, params: Tensors) -> Tensor:
        return torch.diag(self.stddev(params))

    def fisher_product(self, params: Tensors, tangent: Tensors) -> Tensors:
        return dict(tangent)

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        return dict(gradient)
