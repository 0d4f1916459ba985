"""Gaussians with any covariance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from ..linalg import stiefel
from ..linalg.cholesky import (
    inverse_cholesky,
    inverse_cholesky_of_improved,
    inverse_cholesky_of_shifted,
)
from ..linalg.triangular import solve
from .base import NormalFamily, Tensors, with_backward


def _draw(loc: Tensor, scale_tril: Tensor, noise: Tensor) -> Tensor:
    return loc + noise @ scale_tril.mT


def _symmetrised(g: Tensor, loc: Tensor, L: Tensor, eps: Tensor, z: Tensor) -> tuple[Any, ...]:
    """Without the antisymmetric part of L' G, G = sum_s g_s eps_s': noise, as q depends on L L'."""
    d = L.shape[-1]
    g, eps = g.reshape(-1, d), eps.reshape(-1, d)
    # L^-T times the symmetric part of L' g' eps, in products of S rows instead of d
    left = torch.cat([g, solve_triangular(L, eps, upper=False, left=False)])
    right = torch.cat([eps, g @ L])
    return g.sum(0), (0.5 * left.mT @ right).tril(), None


_draw_symmetrised = with_backward(_draw, _symmetrised)


class FullRankNormal(NormalFamily):
    """Gaussians with any covariance, q(z) = N(z; mu, L L').

    Stored: ``loc`` = mu (d,), ``scale_tril`` = L (d, d), lower triangular.
    Local frame: mu + L t and L (I + M) with M lower triangular.  In it the Fisher matrix is diagonal,

        <u, F u> = |t|^2 + sum_{i>j} M_ij^2 + 2 sum_i M_ii^2,

    so the natural gradient is closed form and free of inverses: from Euclidean gradients g_mu, G_L

        t = L' g_mu,   M = tril(L' G_L) with its diagonal halved.

    Retraction: mu + b L t and L (I + A + A^2 / 2), A = b M: the exponential to second order, whose
    diagonal stays positive.

    Natural coordinates (Khan & Nielsen 2018, eq. 14; Tan 2021), with H = M + M' the whitened expected
    Hessian minus the identity:

        P <- P + b L^-T H L^-1,   mu <- mu - b P_new^-1 g_mu,

    b halved until P_new >= P / 4.  "improved" adds the second-order term of Lin, Schmidt & Khan (2020),
    P_new = L^-T (I + A + A^2 / 2) L^-1 with A = b H, b shortened until the eigenvalues of A lie in
    [-1, 1].

    O(d^2) a draw, O(d^3) a step.  Not for d above a few thousand: use :class:`FactorNormal`.

    Example:
        >>> import torch
        >>> family = FullRankNormal()
        >>> q = family.init(torch.zeros(2), scale=0.5)
        >>> family.covariance(q)
        tensor([[0.2500, 0.0000],
                [0.0000, 0.2500]])
    """

    names = ("loc", "scale_tril")
    coordinates = ("local", "natural", "improved")
    newton_like = True
    orthogonal_frame = True
    curvature_form = "dense"
    triangles: Mapping[str, int] = {"scale_tril": 0}

    def init(self, loc: Tensor, scale: float | Tensor) -> Tensors:
        return {"loc": loc.clone(), "scale_tril": torch.diag(torch.ones_like(loc) * scale)}

    def matched(self, loc: Tensor, precision: Tensor) -> Tensors:
        """N(loc, precision^-1), for loc (d,) and precision (d, d)."""
        return {"loc": loc.clone(), "scale_tril": inverse_cholesky(precision)}

    def rsample(self, params: Tensors, noise: Tensor) -> Tensor:
        return _draw_symmetrised(params["loc"], params["scale_tril"].tril(), noise)

    def log_det(self, params: Tensors) -> Tensor:
        return params["scale_tril"].diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)

    def transport(self, params: Tensors, noise: Tensor) -> tuple[Tensor, Tensor]:
        # rsample has no gradient in the noise
        z = _draw(params["loc"], params["scale_tril"].tril(), noise)
        return z, self.log_det(params).expand(noise.shape[:-1])

    def noise_of(self, params: Tensors, z: Tensor) -> Tensor:
        return solve(params["scale_tril"], z - params["loc"])

    def score(self, params: Tensors, z: Tensor) -> Tensors:
        L = params["scale_tril"].tril()
        w = self.noise_of(params, z)
        g = solve(L, w, transposed=True)
        # d(-log|det L|)/dL is diagonal for a triangular L
        scale = (g.unsqueeze(-1) * w.unsqueeze(-2)).tril() - torch.diag(1.0 / L.diagonal())
        return {"loc": g, "scale_tril": scale}

    def scale_tril(self, params: Tensors) -> Tensor:
        return params["scale_tril"].tril()  # exact where forming the covariance would not be

    def stddev(self, params: Tensors) -> Tensor:
        # torch.linalg.vector_norm does not overflow where the sum of squares would
        return torch.linalg.vector_norm(params["scale_tril"].tril(), dim=-1)

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        return super().push(params, tangent) | {"loc": params["scale_tril"].tril() @ tangent["loc"]}

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        return super().pull(params, grads) | {"loc": params["scale_tril"].tril().mT @ grads["loc"]}

    def dilation(self, params: Tensors) -> Tensors:
        return {"scale_tril": params["scale_tril"]}

    def pull_curvature(self, params: Tensors, gradient: Tensors, curvature: Tensors) -> Tensors:
        L = params["scale_tril"].tril()
        dense = "dense" in curvature
        whitened = (L.mT @ curvature["dense"] if dense else L.mT * curvature["diagonal"]) @ L
        identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
        return gradient | {"scale_tril": (0.5 * (whitened + whitened.mT) - identity).tril()}

    def covariance_product(
        self, params: Tensors, v: Tensor, damping: Tensor | float = 0.0
    ) -> Tensor:
        L = params["scale_tril"].tril()
        t = L.mT @ v
        if isinstance(damping, Tensor) or damping:
            # L (I + damping L'L)^-1 L' v
            identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
            root, _ = torch.linalg.cholesky_ex(identity + damping * (L.mT @ L))
            t = torch.cholesky_solve(t.unsqueeze(-1), root).squeeze(-1)
        return L @ t

    def fisher_product(self, params: Tensors, tangent: Tensors) -> Tensors:
        M = tangent["scale_tril"]
        return tangent | {"scale_tril": torch.diagonal_scatter(M, 2.0 * M.diagonal())}

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        M = gradient["scale_tril"]
        return gradient | {"scale_tril": torch.diagonal_scatter(M, 0.5 * M.diagonal())}

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        loc, L = params["loc"], params["scale_tril"].tril()
        if coordinates == "local":
            scale = stiefel.retract(L, step * tangent["scale_tril"], 0)
            return {"loc": loc + step * (L @ tangent["loc"]), "scale_tril": scale}
        # moving along -natural gradient adds b H to the whitened precision
        H = -(tangent["scale_tril"] + tangent["scale_tril"].mT)
        improved = coordinates == "improved"
        inverse = inverse_cholesky_of_improved if improved else inverse_cholesky_of_shifted
        T, shrink = inverse(H, step)
        new = L @ T
        # L^-1 P_new^-1 L^-T = T T', applied to the whitened gradient
        return {"loc": loc + shrink * step * (new @ (T.mT @ tangent["loc"])), "scale_tril": new}
