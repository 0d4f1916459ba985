r"""Gaussians around a Walsh-Hadamard matrix: a density over every entry.

The matrices U = S1 H diag(g) H S2 of :mod:`pyro_ngvi.linalg.walsh_hadamard_matrix`, with signs as S1
and S2, are a linear space of R^d, d the number of entries: u_e = w_e h_k(e), w_e = +-1, with k(e) the
class of the entry, i xor j within its block.  A Gaussian g has no density there, u = A g + sigma E with
E ~ N(0, I_d) has one.  The classes partition the entries, so A has orthogonal columns in h, of
squared length c_k = the number of entries of class k; K of them have entries.  So

    y_k = c_k^(-1/2) sum_{e in class k} w_e u_e,     v = R y,     Q' u = v,    Q'Q = I_K,         (1)

with R the Hadamard transform of every block none of whose classes is empty (the identity for another,
which can only be the last), are orthonormal coordinates of the space.  The family is

    v ~ N(loc, S_v) of a Gaussian family of K dimensions,    (I - QQ') u ~ N(0, sigma^2) on d - K.   (2)

It holds u = A g + sigma E with g ~ N(m, S), as S_v = Q'A S A'Q + sigma^2 I: any S if S_v is full; the
diagonal S if S_v is diagonal and all classes of a block have as many entries, for then v = sqrt(c) g.
Fisher matrix: the parts' own, 2 (d - K) that of log sigma.  A draw or a density is O(d).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..linalg.walsh_hadamard import walsh_hadamard_transform
from ..linalg.walsh_hadamard_matrix import WalshHadamardMatrix
from .base import LOG_2PI, NormalFamily, Tensors, clamp_exponent
from .mean_field import MeanFieldNormal
from .product import AugmentedGaussian

NOISE = "log_noise"
#: of each entry: its class, and w_e c_k^(-1/2)
Frame = tuple[Tensor, Tensor]


class WalshHadamardNormal(AugmentedGaussian, NormalFamily):
    """Gaussians on the entries u (d,) of a matrix: any in a Walsh-Hadamard space, white noise outside.

    Equations: :mod:`pyro_ngvi.families.walsh_hadamard`, where v (K,) is of ``base`` and Q is
    :meth:`embed`.  Not for K close to d (:class:`MeanFieldNormal`), nor for S1, S2 that are not signs.

    Args:
        matrix: the blocks; d is the number of its entries.
        diagonals: returns ``left`` and ``right`` of ``matrix``, all of them +-1.
        base: the family of v: ``MeanFieldNormal`` or ``FullRankNormal``.

    ``params``: those of ``base``, K-dimensional, and ``log_noise`` = log sigma if d > K.

    Example:
        >>> import torch
        >>> matrix = WalshHadamardMatrix(3, 4)
        >>> signs = matrix.signs(0, torch.zeros(()))
        >>> family = WalshHadamardNormal(matrix, lambda: signs)
        >>> q = family.init(torch.ones(12), scale=0.5)
        >>> q["loc"].shape, family.entropy(q)  # 12 (log 0.5 + (1 + log 2 pi) / 2)
        (torch.Size([4]), tensor(8.7095))
    """

    orthogonal_frame = True

    def __init__(
        self,
        matrix: WalshHadamardMatrix,
        diagonals: Callable[[], tuple[Tensor, Tensor]],
        base: NormalFamily | None = None,
    ) -> None:
        self.matrix, self.diagonals = matrix, diagonals
        self.gaussian = MeanFieldNormal() if base is None else base
        self.entries, live = matrix.entries, matrix.has_entries()
        #: K, the dimension of the space
        self.rank = int(live.sum())
        # coordinates of whole blocks; only the last one can lack a class
        self._whole = matrix.size * int(live.reshape(-1, matrix.size).all(1).sum())
        self.rest = self.entries - self.rank
        self.names = (*self.gaussian.names, NOISE) if self.rest else self.gaussian.names
        self.location = self.gaussian.location

    def _frame(self) -> Frame:
        left, right = self.diagonals()
        index, weights = self.matrix.classes(left.device), self.matrix.weights(left, right)
        counts = torch.zeros(self.matrix.num_g, dtype=left.dtype, device=left.device)
        counts = counts.index_add(0, index, torch.ones_like(weights))
        weights = weights * counts.rsqrt()[index]
        if self.rank < self.matrix.num_g:  # the classes that stay, counted
            index = ((counts > 0.0).cumsum(0) - 1)[index]
        return index, weights

    def _rotate(self, y: Tensor) -> Tensor:
        """R y of (1), its own inverse, along the last dimension."""
        if not self._whole:
            return y
        whole = y[..., : self._whole].unflatten(-1, (-1, self.matrix.size))
        whole = walsh_hadamard_transform(whole).flatten(-2)
        rest = y[..., self._whole :]
        return torch.cat([whole, rest], -1) if rest.shape[-1] else whole

    def coordinates_of(self, u: Tensor, frame: Frame | None = None) -> Tensor:
        """v = Q' u of points ``u``: (..., d) to (..., K)."""
        index, weights = frame or self._frame()
        zero = u.new_zeros((*u.shape[:-1], self.rank))
        return self._rotate(zero.index_add(-1, index, u * weights))

    def embed(self, v: Tensor, frame: Frame | None = None) -> Tensor:
        """Q v, the points of the space with coordinates ``v``: (..., K) to (..., d)."""
        index, weights = frame or self._frame()
        return self._rotate(v).index_select(-1, index) * weights

    def _split(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """v and the part of ``u`` outside of the space (not from |u|^2 - |v|^2, which cancels)."""
        frame = self._frame()
        v = self.coordinates_of(u, frame)
        return v, u - self.embed(v, frame)

    def init(self, loc: Tensor, scale: float) -> Tensors:
        """The mean is the point of the space nearest to ``loc`` (d,), made as long as ``loc``."""
        v = self.coordinates_of(loc)
        long, short = torch.linalg.vector_norm(loc), torch.linalg.vector_norm(v)
        own = self.gaussian.init(v * torch.where(short > 0.0, long / short, 1.0), scale)
        return own | ({NOISE: torch.full_like(loc[0], scale).log()} if self.rest else {})

    def dim(self, params: Tensors) -> int:
        return self.entries

    def _log_noise(self, params: Tensors) -> Tensor:
        """log sigma; 0 where nothing is outside of the space."""
        return params[NOISE] if self.rest else params["loc"].new_zeros(())

    def rsample(self, params: Tensors, noise: Tensor) -> Tensor:
        # coordinates of white noise within and without the space are independent
        frame = self._frame()
        e = self.coordinates_of(noise, frame)
        u = self.embed(self.gaussian.rsample(params, e), frame)
        return u + self._log_noise(params).exp() * (noise - self.embed(e, frame))

    def mean(self, params: Tensors) -> Tensor:
        return self.embed(params["loc"])

    def not_finite(self, params: Tensors) -> Tensor:
        # each number is part of all entries of a block
        return super().not_finite(params).any().expand(self.entries)

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        v, outside = self._split(z)
        log_noise = self._log_noise(params)
        square = (outside * (-log_noise).exp()).square().sum(-1)
        inside = self.gaussian.log_prob(params, v)
        return inside - 0.5 * square - self.rest * (log_noise + 0.5 * LOG_2PI)

    def score(self, params: Tensors, z: Tensor) -> Tensors:
        v, outside = self._split(z)
        own = self.gaussian.score(params, v)
        if not self.rest:
            return own
        w = outside * (-params[NOISE]).exp()
        return own | {NOISE: w.square().sum(-1) - self.rest}

    def log_det(self, params: Tensors) -> Tensor:
        return self.gaussian.log_det(params) + self.rest * self._log_noise(params)

    def covariance(self, params: Tensors) -> Tensor:
        frame = self._frame()
        inside = self.embed(self.embed(self.gaussian.covariance(params), frame).mT, frame)
        identity = torch.eye(self.entries, dtype=inside.dtype, device=inside.device)
        outside = identity - self.embed(self.coordinates_of(identity, frame), frame)
        return inside + (2.0 * self._log_noise(params)).exp() * outside

    def stddev(self, params: Tensors) -> Tensor:
        index, weights = self._frame()
        share = weights.square()  # of each entry in the square of its coordinate y
        inside = self._class_stddev(params).index_select(0, index) * weights.abs()
        outside = self._log_noise(params).exp() * (1.0 - share).clamp_min(0.0).sqrt()
        return torch.hypot(inside, outside)

    def _class_stddev(self, params: Tensors) -> Tensor:
        """sd of each y_k, (K,); norms, because squares would overflow sooner."""
        if not isinstance(self.gaussian, MeanFieldNormal):
            tril = self.gaussian.scale_tril(params)
            return torch.linalg.vector_norm(self._rotate(tril.mT), dim=0)
        sd, D = self.gaussian.stddev(params), self.matrix.size
        if not self._whole:
            return sd
        norm = torch.linalg.vector_norm(sd[: self._whole].unflatten(-1, (-1, D)), dim=-1)
        whole = (norm / math.sqrt(D)).unsqueeze(-1).expand(-1, D).flatten()
        return torch.cat([whole, sd[self._whole :]])

    def dilation(self, params: Tensors) -> Tensors:
        noise = {NOISE: torch.ones_like(params[NOISE])} if self.rest else {}
        return self.gaussian.dilation(params) | noise

    def fisher_product(self, params: Tensors, tangent: Tensors) -> Tensors:
        own = self.gaussian.fisher_product(params, tangent)
        return own | {k: 2.0 * self.rest * v for k, v in self._others(tangent).items()}

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        own = self.gaussian.natural_gradient(params, gradient)
        return own | {k: v / (2.0 * self.rest) for k, v in self._others(gradient).items()}

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        new = super().retract(params, tangent, step)
        return new | {k: clamp_exponent(v) for k, v in self._others(new).items()}
