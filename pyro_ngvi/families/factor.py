r"""Gaussians with a few factors beside a diagonal, in the covariance or in the precision.

**Precision:** P = U U' + diag(s).  In units of e = s^(1/2), B = U / e and P~ = I + B B'.  With
R R' = I + B'B, R lower triangular, z is

    z = mu + T eps,   T = e^-1 [I - B R^-T (I + R)^-1 B'],   T T' = e^-1 (I - B (I + B'B)^-1 B') e^-1,

and gradients of E f(z), with Price's dE/dSigma = sym(E[g (z - mu)'] P) / 2, g = grad f, x = z - mu,

    dE/dP = -Sigma (dE/dSigma) Sigma = -E[sym(h x')] / 2,   h = Sigma g.

With H the expected Hessian of -log p, dLoss/dSigma = (H - P) / 2 becomes
dLoss/dP~ = (P~^-1 - P~^-1 H~ P~^-1) / 2, H~ = H / (e e'); O(d L (n + L)) for H = rows'rows + diag.

Local frame and natural gradient of both: :mod:`pyro_ngvi.families.factor_base`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..linalg.cholesky import SMALLEST, inverse_cholesky
from ..linalg.host import host_bool
from ..linalg.spectral import leading_rows, principal_factors
from .base import LOG_2PI, Tensors, clamp_exponent, with_backward
from .factor_base import FactorFamily, Factors, Rows, row


def _draw(loc: Tensor, factor: Tensor, log_scale: Tensor, noise: Tensor) -> Tensor:
    r = factor.shape[-1]
    return loc + noise[..., :r] @ factor.mT + log_scale.exp() * noise[..., r:]


def _given_the_draw(
    g: Tensor, loc: Tensor, B: Tensor, log_scale: Tensor, noise: Tensor, z: Tensor
) -> tuple[Any, ...]:
    """Gradients with the noise replaced by its expectation given z (Rao-Blackwell).

    q depends on (e1, e2) through z = mu + B e1 + c e2 alone: E[e1 | z] = B' w and E[e2 | z] = c w with
    w = Sigma^-1 (z - mu).  The product g w' is symmetric in expectation and is symmetrised too.
    """
    d = loc.shape[-1]
    g = g.reshape(-1, d)
    w = Factors(B, log_scale).solve((z - loc).reshape(-1, d))
    rows = 0.5 * torch.addmm((w @ B).mT @ g, (g @ B).mT, w)
    return g.sum(0), rows.mT, (g * w).sum(0) * (2.0 * log_scale).exp(), None


_draw_given = with_backward(_draw, _given_the_draw)


class FactorNormal(FactorFamily):
    """Gaussians with covariance Sigma = B B' + diag(c^2): z = mu + B e1 + c o e2 of noise (r + d,).

    Stored: ``loc`` = mu (d,), ``factor`` = B (d, r), ``log_scale`` = log c (d,).  Local frame, Fisher
    matrix and its inverse in O(d r^2): :mod:`pyro_ngvi.families.factor_base`.  Not for posteriors close
    to independent (:class:`MeanFieldNormal`) nor d below about 100 (:class:`FullRankNormal`).

    Args:
        rank: number r of columns of B, at least 1 and smaller than d.
        cg_iterations: conjugate-gradient iterations for the c-block of the natural gradient, at
            most; for d up to 128 it is exact without them.

    Raises:
        ValueError: for a rank that is not a whole number from 1; from ``init``, for one of d or more.

    Example:
        >>> import torch
        >>> family = FactorNormal(rank=1)
        >>> q = family.init(torch.zeros(4), scale=0.5)
        >>> family.stddev(q)
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    names = ("loc", "factor", "log_scale")
    diagonal, power, sign = "log_scale", 1.0, 1.0

    def _roots(self, factors: Factors) -> tuple[Rows, Rows]:
        return factors.root, factors.root_transposed

    def init(self, loc: Tensor, scale: float | Tensor) -> Tensors:
        # a quarter of every variance, about, or a twentieth where sds are known, which factors of
        # no meaning disturb; the rest makes every sd exact
        size, sd = 0.1 if isinstance(scale, Tensor) else 0.5, torch.ones_like(loc) * scale
        share = self._cosines(loc) * math.sqrt(size / self.rank)
        log_scale = sd.log() + 0.5 * torch.log1p(-share.square().sum(-1))
        return {"loc": loc.clone(), "factor": sd.unsqueeze(-1) * share, "log_scale": log_scale}

    def noise_dim(self, params: Tensors) -> int:
        return params["loc"].shape[-1] + self.rank

    def rsample(self, params: Tensors, noise: Tensor) -> Tensor:
        return _draw_given(params["loc"], params["factor"], params["log_scale"], noise)

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        factors = self._factors(params)
        x = ((z - params["loc"]) / factors.c).reshape(-1, z.shape[-1])
        square = factors.inverse_square(x).reshape(z.shape[:-1])
        return -0.5 * (square + z.shape[-1] * LOG_2PI) - factors.half_log_det

    def _precise(self, params: Tensors, factors: Factors, x: Tensor) -> tuple[Tensor, Tensor]:
        w = factors.solve(x)
        return w, w

    def covariance(self, params: Tensors) -> Tensor:
        B = params["factor"]
        return B @ B.mT + torch.diag((2.0 * params["log_scale"]).exp())

    def stddev(self, params: Tensors) -> Tensor:
        c = params["log_scale"].exp()
        return torch.linalg.vector_norm(torch.cat([params["factor"], c.unsqueeze(-1)], -1), dim=-1)


def _draw_by_precision(loc: Tensor, factor: Tensor, log_precision: Tensor, noise: Tensor) -> Tensor:
    factors = Factors(factor, 0.5 * log_precision)
    eps = noise.reshape(-1, noise.shape[-1])
    return loc + factors.inverse_root_transposed(eps).reshape(noise.shape)


def _price(
    g: Tensor, loc: Tensor, U: Tensor, log_precision: Tensor, noise: Tensor, z: Tensor
) -> tuple[Any, ...]:
    """The gradient at the head of this file."""
    d = loc.shape[-1]
    g, x = g.reshape(-1, d), (z - loc).reshape(-1, d)
    h = Factors(U, 0.5 * log_precision).solve(g)
    rows = -0.5 * torch.addmm((h @ U).mT @ x, (x @ U).mT, h)
    return g.sum(0), rows.mT, -0.5 * (h * x).sum(0) * log_precision.exp(), None


_draw_priced = with_backward(_draw_by_precision, _price)


class FactorPrecisionNormal(FactorFamily):
    """Gaussians with precision P = U U' + diag(s), of Mishkin et al. (2018, arXiv:1811.04504).

    Stored: ``loc`` = mu (d,), ``factor`` = U (d, L), ``log_precision`` = log s (d,).  Local frame:
    :mod:`pyro_ngvi.families.factor_base` with M = P, B = U and c = s^(1/2), so that d log s = 2 v.

    Not where :class:`FactorNormal` is not, nor for L above some d / 3: where s is superfluous, NGVB's
    steps in log s are slow and at times astray.

    Args:
        rank: number L of columns of U, at least 1 and smaller than d.
        cg_iterations: as for :class:`FactorNormal`, whose errors it raises.

    Example:
        >>> import torch
        >>> family = FactorPrecisionNormal(rank=1)
        >>> q = family.init(torch.zeros(4), scale=0.5)
        >>> family.stddev(q)
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    names = ("loc", "factor", "log_precision")
    diagonal, power, sign = "log_precision", 2.0, -1.0
    curvature_form = "low_rank"

    def _roots(self, factors: Factors) -> tuple[Rows, Rows]:
        return factors.inverse_root_transposed, factors.inverse_root

    def init(self, loc: Tensor, scale: float | Tensor) -> Tensors:
        # Orthogonal columns of B that double the precision along each; at U = 0 its gradient is zero.
        # s then makes every sd exact.
        B = self._cosines(loc) * math.sqrt(2.0 / loc.shape[-1])
        variance = 1.0 - Factors(B, torch.zeros_like(loc)).leverage
        log_precision = variance.log() - 2.0 * (torch.ones_like(loc) * scale).log()
        factor = (0.5 * log_precision).exp().unsqueeze(-1) * B
        return {"loc": loc.clone(), "factor": factor, "log_precision": log_precision}

    def matched(self, loc: Tensor, precision: Tensor) -> Tensors:
        """A member with nearly the least KL(q || N(loc, precision^-1)), of ``precision`` (d, d)."""
        factor, s = principal_factors(precision, self.rank)
        return {"loc": loc.clone(), "factor": factor, "log_precision": s.log()}

    def rsample(self, params: Tensors, noise: Tensor) -> Tensor:
        return _draw_priced(params["loc"], params["factor"], params["log_precision"], noise)

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        x = z - params["loc"]
        scaled = x * (0.5 * params["log_precision"]).exp()
        square = scaled.square().sum(-1) + (x @ params["factor"]).square().sum(-1)
        return self._factors(params).half_log_det - 0.5 * (square + z.shape[-1] * LOG_2PI)

    def _precise(self, params: Tensors, factors: Factors, x: Tensor) -> tuple[Tensor, Tensor]:
        U, s = params["factor"], params["log_precision"].exp()
        return s * x + x @ U @ U.mT, x

    def scale_tril(self, params: Tensors) -> Tensor:
        U, s = params["factor"], params["log_precision"].exp()
        return inverse_cholesky(U @ U.mT + torch.diag(s))

    def stddev(self, params: Tensors) -> Tensor:
        factors = self._factors(params)
        return (1.0 - factors.leverage).sqrt() / factors.c

    def pull_curvature(self, params: Tensors, gradient: Tensors, curvature: Tensors) -> Tensors:
        factors = self._factors(params)
        W, v = factors.W, curvature["diagonal"] / factors.c.square()
        vW = v * W
        PvW = factors.inverse_product(vW)
        product, diagonal = PvW, factors.quadratic_diagonal(v, W, vW, PvW)
        if "rows" in curvature:
            rows = curvature["rows"] / factors.c
            half = factors.inverse_product(rows)
            product = torch.addmm(product, W @ rows.mT, half)
            diagonal = diagonal + half.square().sum(-2)
        return gradient | {
            "factor": (W - product).mT,
            "log_precision": 1.0 - factors.leverage - diagonal,
        }

    def precision_step(
        self, params: Tensors, grads: Tensors, curvature: Tensors, rate: Tensor, safe: bool
    ) -> Tensors:
        """The best that rank L can do for P + rate (H - P), its diagonal kept; see ``SLANG``."""
        if "rows" not in curvature:
            raise ValueError(
                "A step of a factor precision needs the gradients of single data: pass "
                'loss=pyro_ngvi.BatchedELBO(num_particles, curvature="gauss_newton").'
            )
        G, delta, s = curvature["rows"], curvature["diagonal"], params["log_precision"].exp()
        A = torch.cat([(1.0 - rate).sqrt() * params["factor"].mT, rate.sqrt() * G])
        diagonal = A.square().sum(0)
        # a finite sum of squares bounds every entry of the matrices whose eigenvalues are sought
        finite = torch.isfinite(diagonal.sum() + delta.abs().sum())
        if not host_bool(finite):
            A = torch.where(finite, A, 0.0)
        rows = leading_rows(A, params["factor"].shape[-1])
        correction = (diagonal - rows.square().sum(0)).clamp_min(0.0)
        # precisions stay positive, in flat directions (delta = 0) at rate 1 too
        floor = torch.where(delta < 0.0, SMALLEST * s, torch.finfo(s.dtype).eps * s)
        s = torch.maximum((1.0 - rate) * s + rate * delta + correction, floor)
        # what is not finite refuses the step
        log_precision = torch.where(finite & torch.isfinite(s), clamp_exponent(s.log()), torch.nan)
        return params | {"factor": rows.mT, "log_precision": log_precision}

    def covariance_product(
        self, params: Tensors, v: Tensor, damping: Tensor | float = 0.0
    ) -> Tensor:
        log_precision = params["log_precision"]
        if isinstance(damping, Tensor) or damping:
            log_precision = (log_precision.exp() + damping).log()
        return row(Factors(params["factor"], 0.5 * log_precision).solve, v)
