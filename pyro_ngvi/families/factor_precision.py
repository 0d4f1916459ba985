r"""Factor-precision Gaussian, q(z) = N(z; mu, P^-1) with P = U U' + diag(s) and U of any rank L.

Stored: ``loc`` = mu (d,), ``factor`` = U (d, L), ``log_precision`` = log s (d,).
In units of e = s^(1/2), B = U / e and P~ = I + B B'.

**Draws** take d normals.  With R R' = I + B'B = C, R lower triangular,

    z = mu + T eps,   T = e^-1 [I - B R^-T (I + R)^-1 B'],

has covariance T T' = e^-1 (I - B C^-1 B') e^-1: for K = R^-T (I + R)^-1, K + K' - K (C - I) K' = C^-1.
T is the transposed inverse of the root of P in :class:`~pyro_ngvi.families._factors.Factors`.
No symmetric root of an L x L matrix, hence no eigenvalues, are needed.

**Local frame:** a tangent (t, V, v) means dmu = T t, dU = e V, d log s = 2 v, hence F t = t.  (With
dmu = t / e, F t = P~ t is so large along B that momentum from the step before, made with another B,
throws q away.)  The metric of P is that of a covariance of the same form, tr(P^-1 dP P^-1 dP) / 2, so
the equations for (V, v), and their exact solution without a d x d matrix, stand in
:mod:`pyro_ngvi.families._factors`.

**Gradients** of E f(z), with Price's dE/dSigma = sym(E[g (z - mu)'] P) / 2, g = grad f, x = z - mu:

    dE/dP = -Sigma (dE/dSigma) Sigma = -E[sym(h x')] / 2,   h = Sigma g.

The draws alone enter, whatever noise made them, so nothing of the noise is left to average over.

**Curvature.**  With H the expected Hessian of -log p, dLoss/dSigma = (H - P) / 2 becomes
dLoss/dP~ = (P~^-1 - P~^-1 H~ P~^-1) / 2 in units of e, H~ = H / (e e'); O(d L (n + L)) for
H = rows'rows + diag.

Few factors of a *precision* are directions that the data determine well; all others stay as wide as the
diagonal has them.  Posteriors with few *wide* directions are for ``FactorNormal``.  Not for posteriors
close to independent (``MeanFieldNormal``), for d below about 100 (``FullRankNormal``), nor for L above
some d / 3: where s is superfluous, NGVB's steps in log s are slow and at times astray.

Source: the form is that of Mishkin et al. (2018, arXiv:1811.04504), the formulas are derived here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from ..linalg.cholesky import SMALLEST
from ..linalg.host import host_bool
from ..linalg.spectral import leading_rows
from ._factors import Factors, cosine_columns
from ._normal import NormalFamily, exportable
from .base import LOG_2PI, Tensors, clamp_exponent, keep_signature

__all__ = ["FactorPrecisionNormal"]


def _factors(params: Tensors) -> Factors:
    return Factors(params["factor"], 0.5 * params["log_precision"])


class _Sample(torch.autograd.Function):
    """z = mu + T eps, with the gradient at the head of this file."""

    generate_vmap_rule = True

    @staticmethod
    @keep_signature
    def forward(loc: Tensor, factor: Tensor, log_precision: Tensor, noise: Tensor) -> Tensor:
        eps = noise.reshape(-1, noise.shape[-1])
        return loc + Factors(factor, 0.5 * log_precision).inverse_root_transposed(eps).reshape(
            noise.shape
        )

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        loc, factor, log_precision, _ = inputs
        ctx.save_for_backward(loc, factor, log_precision, output)

    @staticmethod
    def backward(ctx, g: Tensor):
        loc, U, log_precision, z = ctx.saved_tensors
        d = loc.shape[-1]
        g, x = g.reshape(-1, d), (z - loc).reshape(-1, d)
        factors = Factors(U, 0.5 * log_precision)
        h = factors.inverse_product(g / factors.c) / factors.c
        rows = -0.5 * torch.addmm((h @ U).mT @ x, (x @ U).mT, h)
        return g.sum(0), rows.mT, -0.5 * (h * x).sum(0) * log_precision.exp(), None


class FactorPrecisionNormal(NormalFamily):
    """Gaussians with precision U U' + diag(s).

    Args:
        rank: number L of columns of U, at least 1 and smaller than d.
        cg_iterations: as for :class:`~pyro_ngvi.families.FactorNormal`.

    Example:
        >>> import torch
        >>> family = FactorPrecisionNormal(rank=1)
        >>> q = family.init(torch.zeros(4), scale=0.5)
        >>> family.stddev(q)
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    names = ("loc", "factor", "log_precision")
    curvature_form = "low_rank"

    def __init__(self, rank: int, cg_iterations: int = 16) -> None:
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(
                f"FactorPrecisionNormal needs a whole rank of at least 1, got rank={rank!r}."
            )
        self.rank = rank
        self.cg_iterations = cg_iterations

    def init(self, loc: Tensor, scale: float) -> Tensors:
        d, L = loc.shape[-1], self.rank
        if L >= d:
            raise ValueError(
                f"FactorPrecisionNormal has rank={L}, but the latent vector has only {d} "
                f"dimension{'s' * (d > 1)}. "
                f"Use {f'a rank of at most {d - 1}, or ' if d > 1 else ''}the full-rank family."
            )
        # Orthogonal columns of B that double the precision along each; at U = 0 its gradient is zero.
        # s then makes every sd exact.
        B = cosine_columns(d, L, loc) * math.sqrt(2.0 / d)
        variance = 1.0 - self._leverage(Factors(B, torch.zeros_like(loc)))
        log_precision = (variance / scale**2).log()
        factor = (0.5 * log_precision).exp().unsqueeze(-1) * B
        return {"loc": loc.clone(), "factor": factor, "log_precision": log_precision}

    def noise_dim(self, params: Tensors) -> int:
        return params["loc"].shape[-1]

    def rsample(self, params: Tensors, noise: Tensor) -> Tensor:
        result = exportable(_Sample)(
            params["loc"], params["factor"], params["log_precision"], noise
        )
        assert isinstance(result, Tensor)
        return result

    def _square(self, params: Tensors, x: Tensor) -> Tensor:
        """x' P x for x (..., d)."""
        scaled = x * (0.5 * params["log_precision"]).exp()
        return scaled.square().sum(-1) + (x @ params["factor"]).square().sum(-1)

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        square = self._square(params, z - params["loc"])
        return _factors(params).half_log_det - 0.5 * (square + z.shape[-1] * LOG_2PI)

    @staticmethod
    def _leverage(factors: Factors) -> Tensor:
        """What the factors take from the variances s^-1, in (0, 1)."""
        leverage = (factors.W * factors.B).sum(-2)
        return leverage.clamp_max(1.0 - torch.finfo(leverage.dtype).eps)

    def score(self, params: Tensors, z: Tensor) -> Tensors:
        factors = _factors(params)
        U, s = params["factor"], params["log_precision"].exp()
        x = z - params["loc"]
        along = x @ U
        return {
            "loc": s * x + along @ U.mT,
            "factor": (factors.W / factors.c).mT - x.unsqueeze(-1) * along.unsqueeze(-2),
            "log_precision": 0.5 * (1.0 - self._leverage(factors) - s * x.square()),
        }

    def entropy(self, params: Tensors) -> Tensor:
        d = params["loc"].shape[-1]
        return 0.5 * d * (1.0 + LOG_2PI) - _factors(params).half_log_det

    def kl(self, params: Tensors, other: Tensors) -> Tensor:
        q, p = _factors(params), _factors(other)
        # tr(P_p Sigma_q) = sum of s_p diag(Sigma_q) + tr(U_p' Sigma_q U_p)
        ratio = (p.c / q.c).square() * (1.0 - self._leverage(q))
        squares, _ = q.inverse_square(other["factor"].mT / q.c)
        d, square = params["loc"].shape[-1], self._square(other, params["loc"] - other["loc"])
        return 0.5 * (ratio.sum() + squares.sum() - d + square) + q.half_log_det - p.half_log_det

    def covariance(self, params: Tensors) -> Tensor:
        L = self.scale_tril(params)
        return L @ L.mT

    def scale_tril(self, params: Tensors) -> Tensor:
        # P = N' N with N lower triangular: Cholesky of P read from its last corner; L = N^-1
        U, s = params["factor"], params["log_precision"].exp()
        C, _ = torch.linalg.cholesky_ex((U @ U.mT + torch.diag(s)).flip(-2, -1))
        identity = torch.eye(len(s), dtype=s.dtype, device=s.device)
        return solve_triangular(C.flip(-2, -1).mT, identity, upper=False)

    def stddev(self, params: Tensors) -> Tensor:
        factors = _factors(params)
        return (1.0 - self._leverage(factors)).sqrt() / factors.c

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        factors = _factors(params)
        return {
            "loc": factors.inverse_root_transposed(tangent["loc"].unsqueeze(-2)).squeeze(-2),
            "factor": factors.c.unsqueeze(-1) * tangent["factor"],
            "log_precision": 2.0 * tangent["log_precision"],
        }

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        factors = _factors(params)
        return {
            "loc": factors.inverse_root(grads["loc"].unsqueeze(-2)).squeeze(-2),
            "factor": (grads["factor"].mT * factors.c).mT,  # in rows, see Factors
            "log_precision": 2.0 * grads["log_precision"],
        }

    def pull_curvature(self, params: Tensors, gradient: Tensors, curvature: Tensors) -> Tensors:
        factors = _factors(params)
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
            "log_precision": 1.0 - self._leverage(factors) - diagonal,
        }

    def precision_step(
        self, params: Tensors, grads: Tensors, curvature: Tensors, rate: Tensor, safe: bool
    ) -> Tensors:
        """The best that rank L can do for P + rate (H - P), its diagonal kept; see ``optim/slang.py``.

        Outer products keep the factors' part positive by themselves, so ``safe`` has nothing to add.
        """
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
        factors = Factors(params["factor"], 0.5 * log_precision)
        return factors.inverse_product((v / factors.c).unsqueeze(-2)).squeeze(-2) / factors.c

    def fisher_product(self, params: Tensors, tangent: Tensors) -> Tensors:
        factors = _factors(params)
        along_B, along_s = factors.fisher_product(tangent["factor"].mT, tangent["log_precision"])
        return {"loc": tangent["loc"], "factor": along_B.mT, "log_precision": along_s}

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        factors = _factors(params)
        G = gradient["factor"].mT.contiguous()
        V, v = factors.fisher_solve(G, gradient["log_precision"], self.cg_iterations)
        return {"loc": gradient["loc"], "factor": V.mT, "log_precision": v}

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        factors = _factors(params)
        move, change = factors.move(step * tangent["factor"].mT, step * tangent["log_precision"])
        return {
            "loc": params["loc"]
            + step * factors.inverse_root_transposed(tangent["loc"].unsqueeze(-2)).squeeze(-2),
            "factor": params["factor"] + move.mT,
            "log_precision": clamp_exponent(params["log_precision"] + 2.0 * change),
        }
