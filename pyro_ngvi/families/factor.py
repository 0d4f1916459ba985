r"""Factor-covariance Gaussian, q(z) = N(z; mu, B B' + diag(c^2)) with B of any rank r.

Stored: ``loc`` = mu (d,), ``factor`` = B (d, r), ``log_scale`` = log c (d,).
Local frame: everything in units of c.  With B~ = B / c and Sigma~ = I + B~ B~', a tangent (t, U, v)
means dmu = c t, dB = c U, d log c = v, hence dSigma~ = U B~' + B~ U' + 2 diag(v) and

    F t      = Sigma~^-1 t
    F_B(U,v) = Sigma~^-1 dSigma~ Sigma~^-1 B~
    F_c(U,v) = diag(Sigma~^-1 dSigma~ Sigma~^-1).

**Solving with F exactly, the cross block between B and c included.**  Write C = I + B~' B~,
W = Sigma~^-1 B~ = B~ C^-1, E = B~' W and B+ = B~ (B~' B~)^-1.  For a given v the B-equation has the
closed form

    U = (Sigma~ R - B~ E^-1 H_R / 2) E^-1,  R = G - 2 Sigma~^-1 diag(v) W,  H_R = B~' R

(check: W'U = H_R E^-1 / 2 solves the r x r equation left after multiplying by W').  Eliminating U
leaves an equation for v alone,

    2 (Pi o Pi) v = h - 2 rowsum(G o B+) + rowsum((B+ H) o B+),   H = B~' G,

where Pi = I - B~ (B~' B~)^-1 B~' projects away from the factors and o is the entrywise product: the
Schur complement does not depend on the size of B at all.  Conjugate gradients with the diagonal
2 (1 - leverage)^2 as preconditioner solve it at O(d r^2) a product; the number of iterations follows
the largest leverage, not d.  No d x d matrix appears, except for small d (up to 128), where a Cholesky
factor solves it exactly for less.

B is determined up to a rotation of its columns, so F has a null space (B A, A antisymmetric).  No
gradient of a function of Sigma has a component there; noise in a gradient that has is removed.

Source: derived here; the Fisher blocks agree with Ong, Nott & Smith (2018, JCGS 27:465).
Not for posteriors that are close to independent (use ``MeanFieldNormal``) nor for d below about 100
(use ``FullRankNormal``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from ..linalg.projection import solve_squared_projection
from .base import LOG_2PI, Family, Tensors, clamp_exponent, keep_signature

__all__ = ["FactorNormal"]


class _Geometry:
    """The r x r pieces shared by all formulas, in units of c.

    Factors are rows here, ``B`` is B~' (r, d): sums over r and over d then both run along memory,
    which makes every pass some three times faster than over tall and narrow matrices.
    """

    def __init__(self, params: Tensors) -> None:
        self.c = params["log_scale"].exp()
        self.B = params["factor"].mT.contiguous() / self.c
        self.identity = torch.eye(self.B.shape[-2], dtype=self.B.dtype, device=self.B.device)
        C = torch.addmm(self.identity, self.B, self.B.mT)
        self.C_chol, _ = torch.linalg.cholesky_ex(C)

    def precision_product(self, x: Tensor) -> Tensor:
        """Sigma~^-1 x' for rows x (n, d): the residual after regressing x on the factors."""
        return x - torch.cholesky_solve(self.B @ x.mT, self.C_chol).mT @ self.B

    @property
    def W(self) -> Tensor:
        """C^-1 B~' (r, d): substitution from the right is ten times faster than from the left."""
        half = solve_triangular(self.C_chol.mT, self.B.mT, upper=True, left=False)
        return solve_triangular(self.C_chol, half, upper=False, left=False).mT


def _precision_times(B: Tensor, log_scale: Tensor, x: Tensor) -> Tensor:
    """Sigma^-1 x' for rows x (n, d)."""
    geometry = _Geometry({"factor": B, "log_scale": log_scale})
    return geometry.precision_product(x / geometry.c) / geometry.c


def _log_det(params: Tensors, geometry: _Geometry) -> Tensor:
    """log det Sigma / 2."""
    return params["log_scale"].sum(-1) + geometry.C_chol.diagonal().log().sum(-1)


def _mahalanobis(params: Tensors, geometry: _Geometry, z: Tensor) -> tuple[Tensor, Tensor]:
    """(z - mu)' Sigma^-1 (z - mu) for z (..., d), and Sigma~^-1 (z - mu) / c for its rows (n, d)."""
    x = ((z - params["loc"]) / geometry.c).reshape(-1, params["loc"].shape[-1])
    m = torch.cholesky_solve(geometry.B @ x.mT, geometry.C_chol).mT
    rest = x - m @ geometry.B
    # |x - B~ m|^2 + |m|^2 = x' Sigma~^-1 x without a difference of large numbers
    square = rest.square().sum(-1) + m.square().sum(-1)
    return square.reshape(z.shape[:-1]), rest


def _log_density(params: Tensors, z: Tensor) -> tuple[Tensor, Tensor]:
    """log q(z) and Sigma^-1 (z - mu), for z (..., d)."""
    geometry = _Geometry(params)
    square, rest = _mahalanobis(params, geometry, z)
    constant = z.shape[-1] * LOG_2PI
    log_q = -0.5 * (square + constant) - _log_det(params, geometry)
    return log_q, (rest / geometry.c).reshape(z.shape)


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


class FactorNormal(Family):
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
                f"FactorNormal has rank={r}, but the latent vector has only {d} dimensions. "
                f"Use a rank of at most {d - 1}, or the full-rank family."
            )
        # Orthogonal cosine columns give every coordinate about half of its variance; rescaling the
        # rest makes every sd exact.  Deterministic, so that equal models start equal.
        i = torch.arange(d, dtype=loc.dtype, device=loc.device).unsqueeze(-1)
        k = torch.arange(1, r + 1, dtype=loc.dtype, device=loc.device)
        factor = torch.cos(math.pi * (i + 0.5) * k / d) * (scale / math.sqrt(r) * math.sqrt(0.5))
        rest = scale**2 - factor.square().sum(-1)
        return {"loc": loc.clone(), "factor": factor, "log_scale": 0.5 * rest.log()}

    def noise_dim(self, params: Tensors) -> int:
        return params["loc"].shape[-1] + self.rank

    def rsample(self, params: Tensors, noise: Tensor) -> Tensor:
        result = _ConditionalSample.apply(
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
        geometry = _Geometry(params)
        B, c = params["factor"], geometry.c
        w = _precision_times(B, params["log_scale"], z - params["loc"])
        W = geometry.W
        leverage = (W * geometry.B).sum(-2)
        return {
            "loc": w,
            "factor": w.unsqueeze(-1) * (w @ B).unsqueeze(-2) - (W / c).mT,
            "log_scale": (w * c).square() - (1.0 - leverage),
        }

    def entropy(self, params: Tensors) -> Tensor:
        d = params["loc"].shape[-1]
        return _log_det(params, _Geometry(params)) + 0.5 * d * (1.0 + LOG_2PI)

    def kl(self, params: Tensors, other: Tensors) -> Tensor:
        q, p = _Geometry(params), _Geometry(other)
        # tr(Sigma_p^-1 Sigma_q) = sum of c_q^2 diag(Sigma_p^-1) + tr(B_q' Sigma_p^-1 B_q)
        ratio = (q.c / p.c).square() * (1.0 - (p.W * p.B).sum(-2))
        scaled = params["factor"].mT / p.c
        trace = ratio.sum() + (scaled * p.precision_product(scaled)).sum()
        square, _ = _mahalanobis(other, p, params["loc"])
        log_ratio = _log_det(params, q) - _log_det(other, p)
        return 0.5 * (trace - params["loc"].shape[-1] + square) - log_ratio

    def covariance(self, params: Tensors) -> Tensor:
        B = params["factor"]
        return B @ B.mT + torch.diag((2.0 * params["log_scale"]).exp())

    def stddev(self, params: Tensors) -> Tensor:
        c = params["log_scale"].exp()
        return torch.linalg.vector_norm(torch.cat([params["factor"], c.unsqueeze(-1)], -1), dim=-1)

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        c = params["log_scale"].exp()
        return {
            "loc": c * tangent["loc"],
            "factor": c.unsqueeze(-1) * tangent["factor"],
            "log_scale": tangent["log_scale"],
        }

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        # push is diagonal, hence its own transpose; the copy puts the factors into rows, see _Geometry
        return self.push(params, grads | {"factor": grads["factor"].mT.contiguous().mT})

    def fisher_product(self, params: Tensors, tangent: Tensors) -> Tensors:
        geometry = _Geometry(params)
        B, W = geometry.B, geometry.W
        t, U, v = tangent["loc"], tangent["factor"].mT, tangent["log_scale"]
        vW = v * W
        PU, PvW = geometry.precision_product(U), geometry.precision_product(vW)
        # diag(Sigma~^-1 diag(v) Sigma~^-1), with Sigma~^-1 = I - B~ W'
        quadratic = v - ((vW + PvW) * B).sum(-2)
        return {
            "loc": geometry.precision_product(t.unsqueeze(-2)).squeeze(-2),
            "factor": (torch.addmm(W @ B.mT @ PU, W @ U.mT, W) + 2.0 * PvW).mT,
            "log_scale": 2.0 * (PU * W).sum(-2) + 2.0 * quadratic,
        }

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        geometry = _Geometry(params)
        B, W, identity = geometry.B, geometry.W, geometry.identity
        g, G, h = gradient["loc"], gradient["factor"].mT.contiguous(), gradient["log_scale"]
        gram = B @ B.mT
        # a relative jitter keeps a vanishing or repeated column from breaking the solve
        jitter = gram.diagonal().sum().clamp_min(1e-30)
        eps = torch.finfo(B.dtype).eps
        gram_chol, _ = torch.linalg.cholesky_ex(torch.addcmul(gram, jitter, identity, value=eps))
        gram_inverse = torch.cholesky_solve(identity, gram_chol)
        E_inverse = identity + gram_inverse
        B_plus = gram_inverse @ B

        H = B @ G.mT
        symmetric = 0.5 * (H + H.mT)
        G = torch.addmm(G, (H - symmetric) @ E_inverse, W)  # remove noise along the null space
        H = symmetric
        rhs = h + (torch.addmm(G, H, B_plus, beta=-2.0) * B_plus).sum(-2)
        Q = solve_triangular(gram_chol.mT, B.mT, upper=True, left=False).mT
        v = solve_squared_projection(Q, 0.5 * rhs, self.cg_iterations)

        vW = v * W
        H_R = torch.addmm(H, W, vW.mT, alpha=-2.0)
        K = torch.addmm(H, H_R, E_inverse, alpha=-0.5)
        U = E_inverse @ torch.addmm(torch.add(G, vW, alpha=-2.0), K, B)
        t = torch.addmv(g, B.mT, B @ g)
        return {"loc": t, "factor": U.mT, "log_scale": v}

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        # The chart is curved: Sigma~ changes by step (U B~' + B~ U') + step^2 U U'.  Where B~ is
        # small the second term can be the larger one, so U is shortened in proportion to the Fisher
        # length |U' Sigma~^-1 U| / sqrt(2) of that term; log c is bounded likewise.
        geometry = _Geometry(params)
        move = step * tangent["factor"].mT
        second = torch.linalg.matrix_norm(geometry.precision_product(move) @ move.mT)
        move = move * (geometry.c * (1.0 + second).rsqrt())
        change = step * tangent["log_scale"]
        return {
            "loc": params["loc"] + step * geometry.c * tangent["loc"],
            "factor": params["factor"] + move.mT,
            "log_scale": clamp_exponent(
                torch.addcmul(params["log_scale"], change, (1.0 + change.square()).rsqrt())
            ),
        }
