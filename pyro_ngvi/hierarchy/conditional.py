r"""Units given globals: a prior times a site for each unit, for many draws of the globals at once.

For unit i with k latent variables u_i, whose prior given the globals v is Gaussian,

    p(u_i | v) = N(u_i; P(v)^-1 h(v), P(v)^-1),      t_i(u_i) = exp(nu_i' u_i - u_i' Lambda_i u_i / 2),
    q(u_i | v) propto p(u_i | v) t_i(u_i) = N(m_i(v), Q_i(v)^-1),
    Q_i = P + Lambda_i,   m_i = Q_i^-1 (h + nu_i).

So effects shrink as their scale does.  In white coordinates, u = b + A w with w of N(0, I) a priori,

    q(w | v) = N((R R')^-1 A' (nu - Lambda b), (R R')^-1),      R R' = I + A' Lambda A,

which needs no inverse of the prior's covariance A A': smooth fields have nearly singular ones.  Where
sites come from, and how they move with v: :mod:`pyro_ngvi.hierarchy.unit_sites`.
"""

from __future__ import annotations

from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..families.mixture import quantiles_of_normals
from ..linalg.cholesky import cholesky, solve, solve_columns, solve_transposed
from ..linalg.host import own_random_state
from ..linalg.products import matvec


class UnitPriors(NamedTuple):
    """p(u_i | v) of B units at S draws of v: u = b + A w, w white; b (S, B, k), A (S, B, k, k).

    A = P T with T lower triangular, where u are in the place of Gaussians z, u = P z + p (``turn`` is
    P^-1); else A = T, which may be known to be ``diagonal``.
    """

    offset: Tensor
    root: Tensor
    triangle: Tensor
    turn: Tensor | None = None
    diagonal: bool = False

    @classmethod
    def of(
        cls, offset: Tensor, mixing: Tensor | None, root: Tensor, diagonal: bool = False
    ) -> UnitPriors:
        """u = offset + mixing u + root w, mixing strictly lower triangular, root lower triangular, or
        ``diagonal``."""
        if mixing is None:
            return cls(offset, root, root, diagonal=diagonal)
        left = torch.eye(offset.shape[-1], dtype=offset.dtype, device=offset.device) - mixing
        root = solve_columns(left, root)
        return cls(solve(left, offset), root, root)

    @property
    def log_det(self) -> Tensor:
        """log det T, (S, B)."""
        return torch.diagonal(self.triangle, dim1=-2, dim2=-1).log().sum(-1)

    def at(self, w: Tensor) -> Tensor:
        """u (..., S, B, k) of white w."""
        return self.offset + matvec(self.root, w)

    def log_prob(self, w: Tensor) -> Tensor:
        """log p(z_i | v) at white w, (..., S, B), in nats."""
        return _log_normal(w) - self.log_det

    def sd(self) -> Tensor:
        """Standard deviations (S, B, k) of u."""
        return torch.linalg.vector_norm(self.root, dim=-1)

    def precise(self, change: Tensor) -> Tensor:
        """P_i (..., S, B, k) times a change of u, P_i = (A A')^-1 the precision."""
        z = change if self.turn is None else matvec(self.turn, change)
        z = solve_transposed(self.triangle, solve(self.triangle, z))
        return z if self.turn is None else matvec(self.turn.mT, z)

    def typical(self) -> UnitPriors:
        """At one draw of v, (1, B, ...): the median one by volume."""
        chosen = self.log_det.sum(-1).nanmedian(0).indices.reshape(1)
        return tree_map_only(Tensor, lambda x: x.index_select(0, chosen), self)


class Conditionals(NamedTuple):
    """q(u_i | v) of B units at S draws of v: u = m + A R^-T e, e white; in white coordinates w the
    mean is ``white`` (S, B, k) and the precision R R'."""

    prior: UnitPriors
    white: Tensor
    root: Tensor

    @classmethod
    def of(cls, prior: UnitPriors, linear: Tensor, precision: Tensor) -> Conditionals:
        """From sites nu (B, k) or (S, B, k), Lambda (B, k, k)."""
        A = prior.root
        one = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        sd = torch.diagonal(A, dim1=-2, dim2=-1).unsqueeze(-1)
        inner = sd * precision * sd.mT if prior.diagonal else A.mT @ (precision @ A)
        root = cholesky(one + inner)
        pull = matvec(A.mT, linear - matvec(precision, prior.offset))
        return cls(prior, solve_transposed(root, solve(root, pull)), root)

    def detached(self) -> Conditionals:
        return tree_map_only(Tensor, Tensor.detach, self)

    @property
    def mean(self) -> Tensor:
        """m (S, B, k)."""
        return self.prior.at(self.white)

    @property
    def log_det(self) -> Tensor:
        """log det R, (S, B): how much narrower than the prior."""
        return torch.diagonal(self.root, dim1=-2, dim2=-1).log().sum(-1)

    def drawn(self, noise: Tensor) -> Tensor:
        """White w (..., S, B, k) for white noise e."""
        return self.white + solve_transposed(self.root, noise)

    def draw(self, noise: Tensor) -> Tensor:
        """u (..., S, B, k) for white noise e."""
        return self.prior.at(self.drawn(noise))

    def log_q(self, noise: Tensor) -> Tensor:
        """log q(z_i | v) of what is drawn with ``noise``, (..., S, B), in nats."""
        return _log_normal(noise) + self.log_det - self.prior.log_det

    def log_prob(self, w: Tensor) -> Tensor:
        """log q(z_i | v) at white w, (..., S, B), in nats."""
        return self.log_q(matvec(self.root.mT, w - self.white))

    def sd(self) -> Tensor:
        """Standard deviations (S, B, k) of u."""
        return torch.linalg.vector_norm(solve_columns(self.root, self.prior.root.mT), dim=-2)


def _log_normal(w: Tensor) -> Tensor:
    return -0.5 * (w.square().sum(-1) + w.shape[-1] * log(2.0 * pi))


def antithetic(like: Tensor, apart: int | None = None) -> Tensor:
    """White noise (S, B, k), in pairs e, -e; one is left over where S is odd.  Where ``apart`` differs
    the noise does, and what is drawn after it does not."""
    half = like[: (len(like) + 1) // 2]
    if apart is None:
        half = torch.randn_like(half)
    else:
        with own_random_state((int(torch.randint(2**62, (), device="cpu")) + apart) % 2**62):
            half = torch.randn_like(half)
    return torch.cat([half, -half[: len(like) // 2]])


def mixture_quantiles(mean: Tensor, sd: Tensor, levels: Tensor) -> Tensor:
    """Quantiles (L, ...) of equal mixtures of S normals, ``mean`` and ``sd`` (S, ...)."""
    equal = mean.new_full((len(mean),), 1.0 / len(mean))
    # one level at a time, of which each takes S numbers for one
    return torch.cat([quantiles_of_normals(equal, mean, sd, level) for level in levels.split(1)])
