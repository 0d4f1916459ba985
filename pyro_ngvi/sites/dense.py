r"""Gaussian algebra of a block with white prior noise: D x D, or smaller where there are fewer data.

    p(eps) = N(0, I),   f_n = A_n eps + b_n,   t_n(f_n) = exp(nu_n' f_n - f_n' Lambda_n f_n / 2),
    prod_n t_n = exp(c + h' eps - eps' P eps / 2),
    c = sum nu_n' b_n - b_n' Lambda_n b_n / 2,
    h = sum A_n' (nu_n - Lambda_n b_n),  P = sum A_n' Lambda_n A_n,
    q(eps) = N(W^-1 h, W^-1),  W = I + P,   log Z = c + h' W^-1 h / 2 - log |W| / 2.

q is proper where W is positive definite, whatever the signs of single Lambda_n.  W >= I where all are
positive semi-definite, so nothing is badly conditioned, however wide or degenerate the prior.

With fewer rows in A than D, the data see Q' eps only, A = A~ Q' (A~ square and triangular, Q D x R with
orthonormal columns): everything happens in these R directions, and the others keep the prior.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log, pi
from typing import Any, ClassVar

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from ..linalg.products import BLOCK, matvec, symmetric_product
from .structure import LinearMap

__all__ = ["GaussianPotential", "NoisePosterior", "WhitePosterior", "collect", "reduced"]


@dataclass(frozen=True)
class GaussianPotential:
    """What sites say of eps: exp(constant + linear' eps - eps' precision eps / 2); (), (R,), (R, R)."""

    constant: Tensor
    linear: Tensor
    precision: Tensor

    @staticmethod
    def none(like: Tensor, *shape: int) -> GaussianPotential:
        """That of no sites: zeros (), ``shape`` and (*shape, R) of the kind of ``like``, R last."""
        zeros = (), shape, (*shape, shape[-1])
        return GaussianPotential(*(like.new_zeros(s) for s in zeros))

    def __add__(self, other: GaussianPotential) -> GaussianPotential:
        return self.plus(other, 1.0)

    def where(self, condition: Tensor, other: GaussianPotential) -> GaussianPotential:
        """self where the 0-dim ``condition`` holds, else ``other``."""
        return GaussianPotential(
            torch.where(condition, self.constant, other.constant),
            torch.where(condition, self.linear, other.linear),
            torch.where(condition, self.precision, other.precision),
        )

    def of(self, root: Tensor, shift: Tensor) -> GaussianPotential:
        """The same, said of eta (R,) with eps = root eta + shift."""
        slope = self.linear - self.precision @ shift
        constant = self.constant + 0.5 * (self.linear + slope) @ shift
        return GaussianPotential(constant, root.mT @ slope, root.mT @ self.precision @ root)

    def plus(self, step: GaussianPotential, share: float | Tensor) -> GaussianPotential:
        """self + share * step."""
        return GaussianPotential(
            self.constant + share * step.constant,
            self.linear + share * step.linear,
            self.precision + share * step.precision,
        )


def collect(at: LinearMap, linear: Tensor, precision: Tensor) -> GaussianPotential:
    """The evidence of sites ``linear`` (N, k), ``precision`` (N, k, k)."""
    weighted = matvec(precision, at.offset)
    A = at.design.flatten(0, 1)
    scaled = precision.flatten(1) * A if A.shape[0] == len(linear) else precision @ at.design
    scaled = scaled.reshape(A.shape)
    return GaussianPotential(
        (linear * at.offset - 0.5 * weighted * at.offset).sum(),
        A.mT @ (linear - weighted).flatten(),
        symmetric_product(A, scaled) if at.triangular else A.mT @ scaled,
    )


class WhitePosterior:
    """q(eps) = N(mean, W^-1).  ``proper`` is a 0-dim bool; without it nothing holds.

    W is factored from its last row on: with J the reversal of the entries, J W J = C C', C lower
    triangular.  Where A is triangular C^-1 J A' is too, after the reversal, and costs half as much.
    """

    def __init__(self, evidence: GaussianPotential) -> None:
        W = evidence.precision.flip(0, 1)
        W.diagonal().add_(1.0)
        self.evidence = evidence
        self.root, info = torch.linalg.cholesky_ex(W)
        self.proper = info == 0
        self.mean = self.solve(evidence.linear)
        log_det = self.root.diagonal().log().sum()
        self.log_normalizer = evidence.constant + 0.5 * (evidence.linear @ self.mean) - log_det

    def marginals(self, at: LinearMap) -> tuple[Tensor, Tensor]:
        """Mean (N, k) and covariance (N, k, k) of A eps + b, without the rest."""
        n, k, _ = at.design.shape
        A = at.design.flatten(0, 1)
        learns = A.requires_grad or self.root.requires_grad  # slices would each leave a gradient
        block = max(1, BLOCK // k) if at.triangular and not learns else max(n, 1)
        parts = []
        for start in range(0, n, block):
            stop = min(start + block, n)
            rows = A[start * k : stop * k]
            half = self.half(rows[:, : stop * k] if at.triangular else rows)
            half = half.reshape(-1, stop - start, k)
            if k == 1:  # a row's square, without the n products of 1 x 1
                parts.append(torch.linalg.vector_norm(half, dim=0).square().unsqueeze(-1))
            else:
                parts.append(torch.einsum("rni,rnj->nij", half, half))
        covariance = torch.cat(parts) if parts else A.new_zeros(0, k, k)
        return (A @ self.mean).reshape(n, k) + at.offset, covariance

    def half(self, rows: Tensor) -> Tensor:
        """H (r, M) with H'H the covariance of rows (M, R) of eps; of R columns the last may be left
        out where they are 0: then ``rows`` is (M, r)."""
        rest = self.root[len(self.root) - rows.shape[-1] :, len(self.root) - rows.shape[-1] :]
        return torch.linalg.solve_triangular(rest, rows.flip(-1).mT, upper=False)

    def solve(self, vectors: Tensor) -> Tensor:
        """W^-1 times each of ``vectors`` (..., R)."""
        columns = vectors.reshape(-1, vectors.shape[-1]).flip(-1).mT
        half = torch.linalg.solve_triangular(self.root, columns, upper=False)
        full = torch.linalg.solve_triangular(self.root.mT, half, upper=True)
        return full.mT.flip(-1).reshape(vectors.shape)

    def expected(self, evidence: GaussianPotential) -> Tensor:
        """E_q of the logarithm of what some sites say, 0-dim, in nats."""
        half = self.half(torch.eye(len(self.mean), dtype=self.mean.dtype, device=self.mean.device))
        second = half.mT @ half + torch.outer(self.mean, self.mean)
        at_mean = evidence.constant + evidence.linear @ self.mean
        return at_mean - 0.5 * (evidence.precision * second).sum()

    def kl(self, sites: Iterable[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """KL(q || p) = (|mean|^2 + tr W^-1 - R + log det W) / 2, 0-dim, in nats.

        Without terms of the size of the data in units of their noise, which cancel in log normalizers.
        ``sites`` spare a matrix where they are all that q knows: their Lambda (N, k, k), and the
        marginal covariances C (N, k, k) of A eps, for tr W^-1 - R = -sum_n tr Lambda_n C_n.
        """
        if sites is None:
            size = len(self.mean)
            one = torch.eye(size, dtype=self.mean.dtype, device=self.mean.device)
            trace = self.half(one).square().sum() - size
        else:
            trace = -sum((Lambda * C).sum() for Lambda, C in sites)
        return 0.5 * (self.mean.square().sum() + trace) + self.root.diagonal().log().sum()

    def draw(self, noise: Tensor) -> Tensor:
        """A draw for white ``noise`` (..., R)."""
        scaled = torch.linalg.solve_triangular(self.root.mT, noise.unsqueeze(-1), upper=True)
        return self.mean + scaled.squeeze(-1).flip(-1)

    def log_prob(self, eta: Tensor) -> Tensor:
        """log q(eta) for eta (..., R), in nats."""
        z = (eta - self.mean).flip(-1) @ self.root
        log_det = self.root.diagonal().log().sum()
        return log_det - 0.5 * (z.square().sum(-1) + len(self.mean) * log(2 * pi))


class NoisePosterior(TorchDistribution):
    """q(eps) over all D entries: ``white`` in the directions of ``basis`` (D, R), else the prior."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support: Any = constraints.real_vector
    has_rsample = True

    def __init__(self, white: WhitePosterior, basis: Tensor | None, batch_shape: Any = ()) -> None:
        self.white, self.basis = white, basis
        dim = len(white.mean) if basis is None else len(basis)
        super().__init__(torch.Size(batch_shape), torch.Size((dim,)), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> NoisePosterior:
        return NoisePosterior(self.white, self.basis, batch_shape)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        white = self.white
        shape = torch.Size(sample_shape) + self.batch_shape + self.event_shape
        noise = torch.randn(shape, dtype=white.mean.dtype, device=white.mean.device)
        if self.basis is None:
            return white.draw(noise)
        seen = noise @ self.basis
        return noise + (white.draw(seen) - seen) @ self.basis.mT

    def log_prob(self, value: Tensor) -> Tensor:
        if self.basis is None:
            return self.white.log_prob(value)
        seen = value @ self.basis
        unseen = value.square().sum(-1) - seen.square().sum(-1)
        others = len(self.basis) - self.basis.shape[-1]
        return self.white.log_prob(seen) - 0.5 * (unseen + others * log(2 * pi))

    @property
    def mean(self) -> Tensor:
        mean = self.white.mean
        return mean if self.basis is None else self.basis @ mean

    def root(self) -> Tensor:
        """Rows whose products sum to the covariance of eps: S (D, D) with cov = S' S."""
        white = self.white
        identity = torch.eye(len(white.mean), dtype=white.mean.dtype, device=white.mean.device)
        inner = white.half(identity)
        if self.basis is None:
            return inner
        full = torch.eye(len(self.basis), dtype=inner.dtype, device=inner.device)
        return (full - self.basis @ self.basis.mT) + self.basis @ inner @ self.basis.mT


def reduced(maps: Mapping[str, LinearMap]) -> tuple[dict[str, LinearMap], Tensor | None]:
    """The maps in the directions that the data see, and these (D, R); ``None`` for all D.

    Only where the data have fewer rows than D.
    """
    rows = torch.cat([m.design.flatten(0, 1) for m in maps.values()])
    if len(rows) >= rows.shape[-1]:
        return dict(maps), None
    basis, triangle = torch.linalg.qr(rows.mT)
    parts = triangle.mT.split([m.offset.numel() for m in maps.values()])
    smaller = {
        name: LinearMap(part.reshape(*m.offset.shape, -1), m.offset, m.rest, len(maps) == 1)
        for (name, m), part in zip(maps.items(), parts, strict=True)
    }
    return smaller, basis
