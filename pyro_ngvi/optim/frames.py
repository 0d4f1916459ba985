r"""Frames of parameters of a guide that is not ours: the tangents in which IFVB steps them.

Of a parameter under ``constraints.positive_definite``, ``lower_cholesky`` or Pyro's
``softplus_lower_cholesky`` the store holds x (..., d, d), of which the factor is

    L = tril(x, -1) + diag(e(x_ii)),    e = exp, or softplus for the last,

and the value L, or L L'.  Its tangent is a lower triangle M, d (d + 1) / 2 numbers in place of d^2; and
that of the location m of a ``MultivariateNormal`` made of both is t (..., d):

    push      dL = L M                  dm = L t, or L^-T t where L L' is the precision
    pull      tril(L'G)                 L'g, or L^-1 g:  <pull(g), u> = <g, push(u)>
    retract   L (I + M + M^2 / 2)       m + dm

The middle of the last line is the exponential to second order, and its diagonal stays positive.

**Transport.**  These are the left translations of a group, of triangles or of affine maps: who keeps
the numbers of a tangent while q moves, as estimates of F^-1 and averages of gradients do, has
transported it.  The scores of a Gaussian are in this frame functions of the whitened draw alone, so F
is the same at every q.

All other parameters move straight.  Not for unit triangles times scales (``AutoMultivariateNormal``),
two parameters where the group has one.

Sources: Draca, Matsubara & Tran (2026, arXiv:2604.02969), of which only the abstracts were at hand; Tan
(2021, arXiv:2109.00375), Lin, Nielsen, Khan & Schmidt (2021, arXiv:2102.07405): triangles as a group.
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

from ..families.base import Tensors
from ..linalg import stiefel


class Straight:
    """The frame of any parameter, called ``name``: its stored, unconstrained coordinates."""

    def push(self, params: Tensors, name: str, tangent: Tensor) -> Tensor:
        """The velocity of the parameter along a tangent."""
        return tangent

    def pull(self, params: Tensors, name: str, grad: Tensor) -> Tensor:
        """The gradient in the tangent of one in the parameter: the transpose of :meth:`push`."""
        return grad

    def retract(self, params: Tensors, name: str, tangent: Tensor) -> Tensor:
        """Where the parameter goes along a tangent."""
        return params[name] + self.push(params, name, tangent)

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
    """The frame of x; ``diagonal`` is e.

    Example:
        >>> frame = Triangles(transforms.ExpTransform())
        >>> x = torch.zeros(2, 2)  # L = I
        >>> frame.retract({"x": x}, "x", torch.tensor([[0.0, 0.0], [0.5, 0.0]]))
        tensor([[0.0000, 0.0000],
                [0.5000, 0.0000]])
    """

    diagonal: transforms.Transform

    def factor(self, x: Tensor) -> Tensor:
        """L."""
        return _with_diagonal(x.tril(-1), self.diagonal(x.diagonal(dim1=-2, dim2=-1)))

    def _slope(self, x: Tensor) -> Tensor:
        """The derivative of e on the diagonal."""
        stored = x.diagonal(dim1=-2, dim2=-1)
        return self.diagonal.log_abs_det_jacobian(stored, self.diagonal(stored)).exp()

    def push(self, params: Tensors, name: str, tangent: Tensor) -> Tensor:
        x = params[name]
        velocity = stiefel.push(self.factor(x), tangent.tril(), 0)
        return _with_diagonal(velocity, velocity.diagonal(dim1=-2, dim2=-1) / self._slope(x))

    def pull(self, params: Tensors, name: str, grad: Tensor) -> Tensor:
        x = params[name]
        G = _with_diagonal(grad.tril(), grad.diagonal(dim1=-2, dim2=-1) / self._slope(x))
        return stiefel.pull(self.factor(x), G, 0)

    def retract(self, params: Tensors, name: str, tangent: Tensor) -> Tensor:
        new = stiefel.retract(self.factor(params[name]), tangent.tril(), 0)
        return _with_diagonal(new, self.diagonal.inv(new.diagonal(dim1=-2, dim2=-1)))

    def pack(self, tangent: Tensor) -> Tensor:
        return stiefel.pack(tangent, 0).reshape(-1)

    def unpack(self, vector: Tensor, like: Tensor) -> Tensor:
        rows = vector.reshape(*like.shape[:-2], self.size(like.shape[-2:]))
        return stiefel.unpack(rows, like.shape[-1], 0)

    def size(self, shape: torch.Size) -> int:
        return shape[:-1].numel() * (shape[-1] + 1) // 2


@dataclass(frozen=True)
class Location(Straight):
    """The frame of m: L is that of the parameter ``of``, whose frame is ``triangles``."""

    of: str
    triangles: Triangles
    #: whether L L' is the precision
    inverse: bool

    def push(self, params: Tensors, name: str, tangent: Tensor) -> Tensor:
        L, t = self.triangles.factor(params[self.of]), tangent.unsqueeze(-1)
        velocity = torch.linalg.solve_triangular(L.mT, t, upper=True) if self.inverse else L @ t
        return velocity.squeeze(-1)

    def pull(self, params: Tensors, name: str, grad: Tensor) -> Tensor:
        L, g = self.triangles.factor(params[self.of]), grad.unsqueeze(-1)
        pulled = torch.linalg.solve_triangular(L, g, upper=False) if self.inverse else L.mT @ g
        return pulled.squeeze(-1)


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
