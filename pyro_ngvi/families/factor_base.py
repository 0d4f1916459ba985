r"""Gaussians whose covariance, or whose precision, is M = B B' + diag(c^2) with B (d, r) of any rank r.

In units of c, B~ = B / c and M~ = I + B~ B~'.  With R R' = C = I + B~' B~, R lower triangular,

    T = c [I + B~ (I + R)^-1 B~'],   T T' = M            (check: (I + R) (I + R') = I + R + R' + R R').

**Local frame:** a tangent (t, U, v) means dB = c U, d log c = v, and dmu = T t, or T'^-1 t if M is the
precision, so that F t = t for every q: momentum may carry t to the next step.

The metric of (U, v) is tr(M^-1 dM M^-1 dM) / 2, whichever of the two M is.  With W = M~^-1 B~ and
dM~ = U B~' + B~ U' + 2 diag(v),

    F_B(U,v) = M~^-1 dM~ W,   F_c(U,v) = diag(M~^-1 dM~ M~^-1).

**Solving with F exactly, the cross block between B and c included.**  Write W = B~ C^-1, E = B~' W and
B+ = B~ (B~' B~)^-1.  For a given v the B-equation has the closed form

    U = (M~ R - B~ E^-1 H_R / 2) E^-1,  R = G - 2 M~^-1 diag(v) W,  H_R = B~' R

(check: W'U = H_R E^-1 / 2 solves the r x r equation left after multiplying by W').  Eliminating U
leaves an equation for v alone,

    2 (Pi o Pi) v = h - 2 rowsum(G o B+) + rowsum((B+ H) o B+),   H = B~' G,

where Pi = I - B~ (B~' B~)^-1 B~' projects away from the factors and o is the entrywise product: the
Schur complement does not depend on the size of B at all.  Conjugate gradients, preconditioned by its
diagonal, take O(d r^2) a product; their number follows the largest leverage, not d.

B is determined up to a rotation of its columns, so F has a null space (B A, A antisymmetric), from
which noise in a gradient is removed.  The blocks of F agree with Ong et al. (2018, JCGS 27:465).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from ..linalg.spectral import solve_squared_projection
from .base import NormalFamily, Tensors, clamp_exponent

Rows = Callable[[Tensor], Tensor]


class Factors:
    """M and its r x r pieces, in units of c.  Factors are rows here, ``B`` is B~' (r, d)."""

    def __init__(self, factor: Tensor, log_c: Tensor) -> None:
        self.log_c = log_c
        self.c = log_c.exp()
        self.B = factor.mT.contiguous() / self.c
        self.identity = torch.eye(self.B.shape[-2], dtype=self.B.dtype, device=self.B.device)
        C = torch.addmm(self.identity, self.B, self.B.mT)
        self.C_chol, _ = torch.linalg.cholesky_ex(C)

    def inverse_product(self, x: Tensor) -> Tensor:
        """M~^-1 x' for rows x (n, d): the residual after regressing x on the factors."""
        return x - torch.cholesky_solve(self.B @ x.mT, self.C_chol).mT @ self.B

    def solve(self, x: Tensor) -> Tensor:
        """M^-1 x' for rows x (n, d)."""
        return self.inverse_product(x / self.c) / self.c

    def inverse_square(self, x: Tensor) -> Tensor:
        """x M~^-1 x' for each row of x (n, d), shape (n,)."""
        m = torch.cholesky_solve(self.B @ x.mT, self.C_chol).mT
        # |x - B~ m|^2 + |m|^2 = x' M~^-1 x without a difference of large numbers
        return (x - m @ self.B).square().sum(-1) + m.square().sum(-1)

    def root(self, x: Tensor) -> Tensor:
        """T x' for rows x (n, d), with T = c [I + B~ (I + R)^-1 B~'], R R' = C, so that T T' = M."""
        corner = self.identity + self.C_chol
        m = solve_triangular(corner.mT, x @ self.B.mT, upper=True, left=False)
        return self.c * (x + m @ self.B)

    def root_transposed(self, x: Tensor) -> Tensor:
        """T' x' for rows x (n, d)."""
        y = self.c * x
        m = solve_triangular(self.identity + self.C_chol, y @ self.B.mT, upper=False, left=False)
        return y + m @ self.B

    def inverse_root(self, x: Tensor) -> Tensor:
        """T^-1 x' = [I - B~ (R + R R')^-1 B~'] x' / c for rows x (n, d), by Woodbury's identity."""
        R, y = self.C_chol, x / self.c
        m = solve_triangular(R.mT, y @ self.B.mT, upper=True, left=False)
        m = solve_triangular(self.identity + R, m, upper=False, left=False)
        return y - m @ self.B

    def inverse_root_transposed(self, x: Tensor) -> Tensor:
        """T'^-1 x' for rows x (n, d): a root of M^-1, as T'^-1 T^-1 = M^-1."""
        R = self.C_chol
        m = solve_triangular((self.identity + R).mT, x @ self.B.mT, upper=True, left=False)
        m = solve_triangular(R, m, upper=False, left=False)
        return (x - m @ self.B) / self.c

    @property
    def W(self) -> Tensor:
        """C^-1 B~' (r, d): substitution from the right is ten times faster than from the left."""
        half = solve_triangular(self.C_chol.mT, self.B.mT, upper=True, left=False)
        return solve_triangular(self.C_chol, half, upper=False, left=False).mT

    @property
    def leverage(self) -> Tensor:
        """diag(I - M~^-1) (d,), in (0, 1)."""
        leverage = (self.W * self.B).sum(-2)
        return leverage.clamp_max(1.0 - torch.finfo(leverage.dtype).eps)

    @property
    def half_log_det(self) -> Tensor:
        """log det M / 2."""
        return self.log_c.sum(-1) + self.C_chol.diagonal().log().sum(-1)

    def quadratic_diagonal(self, v: Tensor, W: Tensor, vW: Tensor, PvW: Tensor) -> Tensor:
        """diag(M~^-1 diag(v) M~^-1) (d,), given W, v o W and M~^-1 (v o W)."""
        return v - ((vW + PvW) * self.B).sum(-2)  # M~^-1 = I - B~ W'

    def fisher_product(self, U: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """F (U, v) as rows (r, d) and (d,), for a tangent of that form."""
        B, W = self.B, self.W
        vW = v * W
        PU, PvW = self.inverse_product(U), self.inverse_product(vW)
        along_B = torch.addmm(W @ B.mT @ PU, W @ U.mT, W) + 2.0 * PvW
        along_c = 2.0 * (PU * W).sum(-2) + 2.0 * self.quadratic_diagonal(v, W, vW, PvW)
        return along_B, along_c

    def fisher_solve(self, G: Tensor, h: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
        """(U, v) with F (U, v) = (G, h), for rows G (r, d) and h (d,)."""
        B, W, identity = self.B, self.W, self.identity
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
        v = solve_squared_projection(Q, 0.5 * rhs, iterations)

        vW = v * W
        H_R = torch.addmm(H, W, vW.mT, alpha=-2.0)
        K = torch.addmm(H, H_R, E_inverse, alpha=-0.5)
        U = E_inverse @ torch.addmm(torch.add(G, vW, alpha=-2.0), K, B)
        return U, v

    def move(self, U: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Changes of B', in rows (r, d), and of log c, for a step (U, v): bounded for any step.

        M~ changes by U B~' + B~ U' + U U', whose last term |U' M~^-1 U| / sqrt(2) shortens U.
        """
        second = torch.linalg.matrix_norm(self.inverse_product(U) @ U.mT)
        return U * (self.c * (1.0 + second).rsqrt()), v * (1.0 + v.square()).rsqrt()


def row(function: Rows, x: Tensor) -> Tensor:
    return function(x.unsqueeze(-2)).squeeze(-2)


class FactorFamily(NormalFamily):
    """What both share."""

    #: the name of the stored logarithm, which is ``power`` times log c; M is Sigma^sign
    diagonal: str
    power: float
    sign: float

    def __init__(self, rank: int, cg_iterations: int = 16) -> None:
        if not isinstance(rank, int) or rank < 1:
            name = type(self).__name__
            raise ValueError(f"{name} needs a whole rank of at least 1, got rank={rank!r}.")
        self.rank = rank
        self.cg_iterations = cg_iterations

    @abstractmethod
    def _roots(self, factors: Factors) -> tuple[Rows, Rows]:
        """x -> T x and T' x for rows x (n, d), with T T' = Sigma."""

    @abstractmethod
    def _precise(self, params: Tensors, factors: Factors, x: Tensor) -> tuple[Tensor, Tensor]:
        """P x' for rows x (n, d), and the rows y with d log q = sign (y dM y' - tr M^-1 dM) / 2."""

    def _factors(self, params: Tensors) -> Factors:
        return Factors(params["factor"], params[self.diagonal] / self.power)

    def _cosines(self, like: Tensor) -> Tensor:
        """Columns (d, r) of orthogonal cosines, of norm (d/2)^(1/2) each: a start without a seed."""
        d, r = like.shape[-1], self.rank
        if r >= d:
            raise ValueError(
                f"{type(self).__name__} has rank={r}, but the latent vector has only {d} "
                f"dimension{'s' * (d > 1)}. "
                f"Use {f'a rank of at most {d - 1}, or ' if d > 1 else ''}the full-rank family."
            )
        i = torch.arange(d, dtype=like.dtype, device=like.device).unsqueeze(-1)
        k = torch.arange(1, r + 1, dtype=like.dtype, device=like.device)
        return torch.cos(math.pi * (i + 0.5) * k / d)

    def log_det(self, params: Tensors) -> Tensor:
        return self.sign * self._factors(params).half_log_det

    def score(self, params: Tensors, z: Tensor) -> Tensors:
        factors = self._factors(params)
        loc, y = self._precise(params, factors, z - params["loc"])
        square = y.unsqueeze(-1) * (y @ params["factor"]).unsqueeze(-2)
        diagonal = (y * factors.c).square() - (1.0 - factors.leverage)
        return {
            "loc": loc,
            "factor": self.sign * (square - (factors.W / factors.c).mT),
            self.diagonal: self.sign / self.power * diagonal,
        }

    def dilation(self, params: Tensors) -> Tensors:
        growth = torch.full_like(params[self.diagonal], self.sign * self.power)
        return {"factor": self.sign * params["factor"], self.diagonal: growth}

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        factors = self._factors(params)
        return {
            "loc": row(self._roots(factors)[0], tangent["loc"]),
            "factor": factors.c.unsqueeze(-1) * tangent["factor"],
            self.diagonal: self.power * tangent[self.diagonal],
        }

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        factors = self._factors(params)
        return {
            "loc": row(self._roots(factors)[1], grads["loc"]),
            "factor": (grads["factor"].mT * factors.c).mT,
            self.diagonal: self.power * grads[self.diagonal],
        }

    def fisher_product(self, params: Tensors, tangent: Tensors) -> Tensors:
        U, v = tangent["factor"].mT, tangent[self.diagonal]
        along_B, along_c = self._factors(params).fisher_product(U, v)
        return {"loc": tangent["loc"], "factor": along_B.mT, self.diagonal: along_c}

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        G, h = gradient["factor"].mT.contiguous(), gradient[self.diagonal]
        U, v = self._factors(params).fisher_solve(G, h, self.cg_iterations)
        return {"loc": gradient["loc"], "factor": U.mT, self.diagonal: v}

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        factors, name = self._factors(params), self.diagonal
        move, change = factors.move(step * tangent["factor"].mT, step * tangent[name])
        return {
            "loc": params["loc"] + step * row(self._roots(factors)[0], tangent["loc"]),
            "factor": params["factor"] + move.mT,
            name: clamp_exponent(params[name] + self.power * change),
        }
