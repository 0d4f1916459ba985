r"""Factor-covariance Gaussian, q(z) = N(z; mu, B B' + diag(c^2)) with B of any rank r.

Stored: ``loc`` = mu (d,), ``factor`` = B (d, r), ``log_scale`` = log c (d,).
In units of c, B~ = B / c and Sigma~ = I + B~ B~'.  With R R' = I + B~' B~, R lower triangular,

    T = c [I + B~ (I + R)^-1 B~'],   T T' = Sigma

(check: (I + R) (I + R') = I + R + R' + R R').

**Local frame:** a tangent (t, U, v) means dmu = T t, dB = c U, d log c = v, hence F t = t, for every q.
(With dmu = c t, F t = Sigma~^-1 t is small along B~, where t is then long.  Momentum carries t to the
next step, and once B~ points elsewhere this throws q away: 1,000 nats at a step, in four dimensions.)
The equations for (U, v), and their exact solution without a d x d matrix, stand in
:mod:`pyro_ngvi.families._factors`, with M = Sigma.

Not for posteriors that are close to independent (use ``MeanFieldNormal``) nor for d below about 100
(use ``FullRankNormal``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._factors import Factors, cosine_columns
from ._normal import NormalFamily, exportable
from .base import LOG_2PI, Tensors, clamp_exponent, keep_signature

__all__ = ["FactorNormal"]


def _factors(params: Tensors) -> Factors:
    return Factors(params["factor"], params["log_scale"])


def _precision_times(B: Tensor, log_scale: Tensor, x: Tensor) -> Tensor:
    """Sigma^-1 x' for rows x (n, d)."""
    factors = Factors(B, log_scale)
    return factors.inverse_product(x / factors.c) / factors.c


def _mahalanobis(params: Tensors, factors: Factors, z: Tensor) -> tuple[Tensor, Tensor]:
    """(z - mu)' Sigma^-1 (z - mu) for z (..., d), and Sigma~^-1 (z - mu) / c for its rows (n, d)."""
    x = ((z - params["loc"]) / factors.c).reshape(-1, params["loc"].shape[-1])
    square, rest = factors.inverse_square(x)
    return square.reshape(z.shape[:-1]), rest


def _log_density(params: Tensors, z: Tensor) -> tuple[Tensor, Tensor]:
    """log q(z) and Sigma^-1 (z - mu), for z (..., d)."""
    factors = _factors(params)
    square, rest = _mahalanobis(params, factors, z)
    constant = z.shape[-1] * LOG_2PI
    log_q = -0.5 * (square + constant) - factors.half_log_det
    return log_q, (rest / factors.c).reshape(z.shape)


class _ConditionalSample(torch.autograd.Function):
    """z = mu + B e1 + c e2 whose backward replaces the noise by its expectation given z.

    q depends on (e1, e2) through z alone, so E[e1 | z] = B' w and E[e2 | z] = c w with
    w = Sigma^-1 (z - mu) may stand for them (Rao-Blackwell).  The product g w' is symmetric in
    expectation and is symmetrised too.  Unbiased, and far less noisy where B is small or r large.
    """

    generate_vmap_rule = True

    @staticmethod
    @keep_signature
    def forward(loc: Tensor, factor: Tensor, log_scale: Tensor, noise: Tensor) -> Tensor:
        r = factor.shape[-1]
        return loc + noise[..., :r] @ factor.mT + log_scale.exp() * noise[..., r:]

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        loc, factor, log_scale, _ = inputs
        ctx.save_for_backward(loc, factor, log_scale, output)

    @staticmethod
    def backward(ctx, g: Tensor):
        loc, B, log_scale, z = ctx.saved_tensors
        d = loc.shape[-1]
        g = g.reshape(-1, d)
        w = _precision_times(B, log_scale, (z - loc).reshape(-1, d))
        rows = 0.5 * torch.addmm((w @ B).mT @ g, (g @ B).mT, w)
        return g.sum(0), rows.mT, (g * w).sum(0) * (2.0 * log_scale).exp(), None


class _LogDensity(torch.autograd.Function):
    """(log q(z), w = Sigma^-1 (z - mu)) at parameters without a gradient: d log q / dz = -w.

    Sticking the landing asks for just this gradient, which the value leaves behind.
    """

    generate_vmap_rule = True

    @staticmethod
    @keep_signature
    def forward(z: Tensor, loc: Tensor, factor: Tensor, log_scale: Tensor):
        return _log_density({"loc": loc, "factor": factor, "log_scale": log_scale}, z)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[2:], output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g: Tensor | None, g_w: Tensor | None):
        B, log_scale, w = ctx.saved_tensors
        z = None if g is None else -g.unsqueeze(-1) * w
        if g_w is not None:  # second derivatives: w is an output, and linear in z
            d = log_scale.shape[-1]
            by_w = _precision_times(B, log_scale, g_w.reshape(-1, d)).reshape(g_w.shape)
            z = by_w if z is None else z + by_w
        return z, None, None, None


class FactorNormal(NormalFamily):
    """Gaussians with covariance B B' + diag(c^2).

    Args:
        rank: number r of columns of B, at least 1 and smaller than d.
        cg_iterations: conjugate-gradient iterations for the c-block of the natural gradient, at
            most: on a CPU they end once the residual is down to rounding, and for d up to 128 the
            solution is exact without them.  The error shrinks by
            about (1 - max leverage)^2 an iteration; 16 leave a relative residual under 1e-6 on
            factors that spread over ten coordinates or more.

    Example:
        >>> import torch
        >>> family = FactorNormal(rank=1)
        >>> q = family.init(torch.zeros(4), scale=0.5)
        >>> family.stddev(q)
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    names = ("loc", "factor", "log_scale")

    def __init__(self, rank: int, cg_iterations: int = 16) -> None:
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"FactorNormal needs a whole rank of at least 1, got rank={rank!r}.")
        self.rank = rank
        self.cg_iterations = cg_iterations

    def init(self, loc: Tensor, scale: float) -> Tensors:
        d, r = loc.shape[-1], self.rank
        if r >= d:
            raise ValueError(
                f"FactorNormal has rank={r}, but the latent vector has only {d} "
                f"dimension{'s' * (d > 1)}. "
                f"Use {f'a rank of at most {d - 1}, or ' if d > 1 else ''}the full-rank family."
            )
        # Orthogonal cosine columns give every coordinate about half of its variance; rescaling the
        # rest makes every sd exact.  Deterministic, so that equal models start equal.
        factor = cosine_columns(d, r, loc) * (scale / math.sqrt(r) * math.sqrt(0.5))
        rest = scale**2 - factor.square().sum(-1)
        return {"loc": loc.clone(), "factor": factor, "log_scale": 0.5 * rest.log()}

    def noise_dim(self, params: Tensors) -> int:
        return params["loc"].shape[-1] + self.rank

    def rsample(self, params: Tensors, noise: Tensor) -> Tensor:
        result = exportable(_ConditionalSample)(
            params["loc"], params["factor"], params["log_scale"], noise
        )
        assert isinstance(result, Tensor)
        return result

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        if z.requires_grad and not any(p.requires_grad for p in params.values()):
            log_q, _ = _LogDensity.apply(z, params["loc"], params["factor"], params["log_scale"])
            return log_q
        return _log_density(params, z)[0]

    def score(self, params: Tensors, z: Tensor) -> Tensors:
        factors = _factors(params)
        B, c = params["factor"], factors.c
        w = _precision_times(B, params["log_scale"], z - params["loc"])
        W = factors.W
        leverage = (W * factors.B).sum(-2)
        return {
            "loc": w,
            "factor": w.unsqueeze(-1) * (w @ B).unsqueeze(-2) - (W / c).mT,
            "log_scale": (w * c).square() - (1.0 - leverage),
        }

    def entropy(self, params: Tensors) -> Tensor:
        d = params["loc"].shape[-1]
        return _factors(params).half_log_det + 0.5 * d * (1.0 + LOG_2PI)

    def kl(self, params: Tensors, other: Tensors) -> Tensor:
        q, p = _factors(params), _factors(other)
        # tr(Sigma_p^-1 Sigma_q) = sum of c_q^2 diag(Sigma_p^-1) + tr(B_q' Sigma_p^-1 B_q)
        ratio = (q.c / p.c).square() * (1.0 - (p.W * p.B).sum(-2))
        squares, _ = p.inverse_square(params["factor"].mT / p.c)
        trace = ratio.sum() + squares.sum()
        square, _ = _mahalanobis(other, p, params["loc"])
        log_ratio = q.half_log_det - p.half_log_det
        return 0.5 * (trace - params["loc"].shape[-1] + square) - log_ratio

    def covariance(self, params: Tensors) -> Tensor:
        B = params["factor"]
        return B @ B.mT + torch.diag((2.0 * params["log_scale"]).exp())

    def stddev(self, params: Tensors) -> Tensor:
        c = params["log_scale"].exp()
        return torch.linalg.vector_norm(torch.cat([params["factor"], c.unsqueeze(-1)], -1), dim=-1)

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        factors = _factors(params)
        return {
            "loc": factors.root(tangent["loc"].unsqueeze(-2)).squeeze(-2),
            "factor": factors.c.unsqueeze(-1) * tangent["factor"],
            "log_scale": tangent["log_scale"],
        }

    def tangent_of(self, params: Tensors, velocity: Tensors) -> Tensors:
        """The tangent of a velocity of ``params``: the inverse of :meth:`push`."""
        factors = _factors(params)
        return {
            "loc": factors.inverse_root(velocity["loc"].unsqueeze(-2)).squeeze(-2),
            "factor": velocity["factor"] / factors.c.unsqueeze(-1),
            "log_scale": velocity["log_scale"],
        }

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        factors = _factors(params)
        return {
            "loc": factors.root_transposed(grads["loc"].unsqueeze(-2)).squeeze(-2),
            "factor": (grads["factor"].mT.contiguous() * factors.c).mT,  # in rows, see Factors
            "log_scale": grads["log_scale"],
        }

    def fisher_product(self, params: Tensors, tangent: Tensors) -> Tensors:
        factors = _factors(params)
        along_B, along_c = factors.fisher_product(tangent["factor"].mT, tangent["log_scale"])
        return {"loc": tangent["loc"], "factor": along_B.mT, "log_scale": along_c}

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        factors = _factors(params)
        G = gradient["factor"].mT.contiguous()
        U, v = factors.fisher_solve(G, gradient["log_scale"], self.cg_iterations)
        return {"loc": gradient["loc"], "factor": U.mT, "log_scale": v}

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        factors = _factors(params)
        move, change = factors.move(step * tangent["factor"].mT, step * tangent["log_scale"])
        return {
            "loc": params["loc"] + step * factors.root(tangent["loc"].unsqueeze(-2)).squeeze(-2),
            "factor": params["factor"] + move.mT,
            "log_scale": clamp_exponent(params["log_scale"] + change),
        }
