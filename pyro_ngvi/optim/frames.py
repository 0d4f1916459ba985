r"""Frames of parameters of a guide that is not ours: the tangents in which IFVB steps them.

Of a parameter under ``constraints.positive_definite``, ``lower_cholesky`` or Pyro's
``softplus_lower_cholesky`` the store holds x (..., d, d), the factor is

    L = tril(x, -1) + diag(e(x_ii)),    e = exp, or softplus for the last,

and the value is L, or L L'.  Its tangent is a lower triangle M, d (d + 1) / 2 numbers in place of d^2:

    push      dL = L M
    pull      tril(L'G), G a gradient in L:  <pull(G), M> = <G, push(M)>
    retract   L (I + M + M^2 / 2), the exponential to second order; the diagonal stays positive

**Transport.**  Left translation carries M from one L to another without a change of its numbers, so
who keeps the numbers, as estimates of F^-1 and averages of gradients do, has transported them.  For a
Gaussian with the covariance, or the precision, L L' the score in M is a function of the whitened draw
alone: F is the same at every L, and the transport is an isometry of it.  The frame of Bures and
Wasserstein, dSigma = S Sigma + Sigma S, has no such F (``benchmarks/any_guide/manifold.py``).

**Means.**  The plain average of x is the Riemannian mean of the log-Cholesky metric (Lin 2019), since
that metric is flat in x for e = exp; averages need no frame.

All other parameters move straight.  Not for unit triangles times scales (``AutoMultivariateNormal``),
whose stored coordinates are about as good, nor for matrices whose factor means nothing to the guide.

Sources: Draca, Matsubara & Tran (2026, arXiv:2604.02969), of which only the abstracts were at hand, for
scores and rank-one updates of F^-1 in tangent spaces; Tan (2021, arXiv:2109.00375) and Lin, Nielsen,
Khan & Schmidt (2021, arXiv:2102.07405) for triangles as a group.  That its frame carries F is derived
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions.transforms import (
    CholeskyTransform,
    SoftplusLowerCholeskyTransform,
    SoftplusTransform,
)
from torch import Tensor
from torch.distributions import transform_to, transforms


class Straight:
    """The frame of any parameter: its stored, unconstrained coordinates."""

    def push(self, x: Tensor, tangent: Tensor) -> Tensor:
        """The velocity of x along a tangent."""
        return tangent

    def pull(self, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient in the tangent of one in x: the transpose of :meth:`push`."""
        return grad

    def retract(self, x: Tensor, tangent: Tensor) -> Tensor:
        """Where x goes along a tangent."""
        return x + tangent

    def pack(self, tangent: Tensor) -> Tensor:
        """The free numbers of a tangent, one vector."""
        return tangent.reshape(-1)

    def unpack(self, vector: Tensor, like: Tensor) -> Tensor:
        """The inverse of :meth:`pack`, in the shape of ``like``."""
        return vector.reshape(like.shape)

    def size(self, shape: torch.Size) -> int:
        """The length of that vector."""
        return shape.numel()


@dataclass(frozen=True)
class Triangles(Straight):
    """The frame above; ``diagonal`` is e.

    Example:
        >>> frame = Triangles(transforms.ExpTransform())
        >>> x = torch.zeros(2, 2)  # L = I
        >>> frame.retract(x, torch.tensor([[0.0, 0.0], [0.5, 0.0]]))
        tensor([[0.0000, 0.0000],
                [0.5000, 0.0000]])
    """

    diagonal: transforms.Transform

    def _factor(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """L, and the derivative of e on its diagonal."""
        stored = x.diagonal(dim1=-2, dim2=-1)
        value: Any = self.diagonal(stored)
        slope = self.diagonal.log_abs_det_jacobian(stored, value).exp()
        return _with_diagonal(x.tril(-1), value), slope

    def push(self, x: Tensor, tangent: Tensor) -> Tensor:
        L, slope = self._factor(x)
        velocity = L @ tangent.tril()
        return _with_diagonal(velocity, velocity.diagonal(dim1=-2, dim2=-1) / slope)

    def pull(self, x: Tensor, grad: Tensor) -> Tensor:
        L, slope = self._factor(x)
        G = _with_diagonal(grad.tril(), grad.diagonal(dim1=-2, dim2=-1) / slope)
        return (L.mT @ G).tril()

    def retract(self, x: Tensor, tangent: Tensor) -> Tensor:
        L, _ = self._factor(x)
        M = tangent.tril()
        LM = L @ M
        new = L + LM + 0.5 * LM @ M
        return _with_diagonal(new, self.diagonal.inv(new.diagonal(dim1=-2, dim2=-1)))

    def pack(self, tangent: Tensor) -> Tensor:
        i, j = torch.tril_indices(*tangent.shape[-2:], device=tangent.device)
        return tangent[..., i, j].reshape(-1)

    def unpack(self, vector: Tensor, like: Tensor) -> Tensor:
        i, j = torch.tril_indices(*like.shape[-2:], device=vector.device)
        whole = vector.new_zeros(*like.shape[-2:], *like.shape[:-2])
        rows = vector.reshape(*like.shape[:-2], len(i)).movedim(-1, 0)
        return whole.index_put((i, j), rows).movedim((0, 1), (-2, -1))

    def size(self, shape: torch.Size) -> int:
        return shape[:-1].numel() * (shape[-1] + 1) // 2


def _with_diagonal(matrix: Tensor, diagonal: Any) -> Tensor:
    return torch.diagonal_scatter(matrix, diagonal, dim1=-2, dim2=-1)


STRAIGHT = Straight()
#: e, by the map from x to L that Pyro takes
_DIAGONALS: dict[type[transforms.Transform], transforms.Transform] = {
    transforms.LowerCholeskyTransform: transforms.ExpTransform(),
    transforms.PositiveDefiniteTransform: transforms.ExpTransform(),
    SoftplusLowerCholeskyTransform: SoftplusTransform(),
}


def frame_under(constraint: Any) -> Straight:
    """The frame of a parameter that Pyro stores under ``constraint``."""
    whole = transforms.identity_transform if constraint is None else transform_to(constraint)
    while isinstance(whole, transforms.IndependentTransform):
        whole = whole.base_transform
    parts = whole.parts if isinstance(whole, transforms.ComposeTransform) else [whole]
    known = parts[1:] in ([], [CholeskyTransform().inv])
    diagonal = _DIAGONALS.get(type(parts[0])) if parts and known else None
    return STRAIGHT if diagonal is None else Triangles(diagonal)
