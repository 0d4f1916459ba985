r"""Single-path Pathfinder: a Gaussian from the path of a quasi-Newton search for the mode.

L-BFGS maximises log p from a start.  At every point theta of its path a Gaussian is read off,

    Sigma = diag(alpha) + beta gamma beta^T,     mu = theta + Sigma grad log p(theta),

and the one whose ELBO, estimated with K draws, is the largest is the answer.  With the last J pairs
of steps s = theta' - theta and changes z = grad log p(theta) - grad log p(theta') as columns of S
and Z, R the upper triangle of S^T Z (diagonal included) and E = diag(S^T Z),

    beta = [diag(alpha) Z, S],
    gamma = [[0, -R^-1], [-R^-T, R^-T (E + Z^T diag(alpha) Z) R^-1]],

which is the inverse BFGS matrix of these pairs from diag(alpha) (Byrd, Nocedal & Schnabel 1994).
The diagonal starts at 1 and follows the pairs (Gilbert & Lemarechal 1989): with a = z^T diag(alpha)
z, b = z^T s, c = s^T diag(alpha)^-1 s,

    1 / alpha_i  <-  a / (b alpha_i) + z_i^2 / b - a s_i^2 / (b c alpha_i^2).

Pairs with b <= 1e-12 |z|^2 are left out, from both.  J = 5 and K = 25 are the defaults of Stan.

The matrices are formed, which is O(d^2) memory; the paper draws from the factors in O(d J^2).  One
path, hence no resampling over several.

Source: Zhang, Carpenter, Gelman & Vehtari (2022, JMLR 23:306), "Pathfinder: parallel quasi-Newton
variational inference".
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from .gaussian import Gaussian, LogDensity, Report, ignore, value_and_gradient

__all__ = ["diagonal_update", "inverse_hessian", "pathfinder"]

SMALLEST = 1e-12


def diagonal_update(alpha: Tensor, s: Tensor, z: Tensor) -> Tensor:
    """The diagonal after one more pair."""
    a, b, c = (alpha * z.square()).sum(), (z * s).sum(), (s.square() / alpha).sum()
    return 1.0 / (a / (b * alpha) + z.square() / b - a * s.square() / (b * c * alpha.square()))


def inverse_hessian(alpha: Tensor, S: Tensor, Z: Tensor) -> Tensor:
    """diag(alpha) + beta gamma beta^T from pairs as columns (d, J)."""
    products = S.mT @ Z
    R_inverse = torch.linalg.inv(products.triu())
    scaled = alpha.unsqueeze(-1) * Z
    middle = products.diagonal().diag() + Z.mT @ scaled
    beta = torch.cat([scaled, S], dim=1)
    top = torch.cat([torch.zeros_like(middle), -R_inverse], dim=1)
    bottom = torch.cat([-R_inverse.mT, R_inverse.mT @ middle @ R_inverse], dim=1)
    return alpha.diag() + beta @ torch.cat([top, bottom]) @ beta.mT


def pathfinder(
    log_density: LogDensity,
    start: Tensor,
    history: int = 5,
    draws: int = 25,
    max_steps: int = 1000,
    report: Report = ignore,
) -> Gaussian | None:
    """The best Gaussian along the path from ``start`` (d,); nothing where no point has one.

    Example:
        >>> import torch
        >>> from benchmarks.baselines import pathfinder
        >>> def target(theta):  # N(3, 1/4)
        ...     return -2.0 * (theta - 3.0).square().sum(-1)
        >>> loc, scale = pathfinder(target, torch.zeros(1, dtype=torch.float64))
        >>> loc.round(decimals=2), scale.round(decimals=2)
        (tensor([3.], dtype=torch.float64), tensor([[0.5000]], dtype=torch.float64))
    """
    dim = len(start)
    gradients: dict[bytes, Tensor] = {}

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = value_and_gradient(log_density, torch.as_tensor(x)[None])
        if not bool(torch.isfinite(value).all() and torch.isfinite(gradient).all()):
            return 1e30, np.zeros(dim)
        gradients[x.tobytes()] = gradient[0]
        return -float(value), -gradient[0].numpy()

    begin = start.numpy().astype(np.float64)
    objective(begin)
    last, alpha = start.clone(), torch.ones_like(start)
    steps: list[Tensor] = []
    changes: list[Tensor] = []
    best: tuple[float, Gaussian | None] = (-math.inf, None)

    def look(x: np.ndarray) -> None:
        nonlocal last, alpha, best
        theta = torch.as_tensor(x.copy())
        gradient = gradients.get(x.tobytes())
        if gradient is None:
            gradient = value_and_gradient(log_density, theta[None])[1][0]
        s, z = theta - last, gradients[last.numpy().tobytes()] - gradient
        gradients.clear()
        gradients[x.tobytes()] = gradient
        last = theta
        if (s * z).sum() > SMALLEST * z.square().sum():
            alpha = diagonal_update(alpha, s, z)
            steps.append(s)
            changes.append(z)
            del steps[:-history], changes[:-history]
        if not steps:
            return
        sigma = inverse_hessian(alpha, torch.stack(steps, 1), torch.stack(changes, 1))
        factor, failed = torch.linalg.cholesky_ex((sigma + sigma.mT) / 2.0)
        if not failed:
            loc = theta + sigma @ gradient
            noise = torch.randn(draws, dim, dtype=start.dtype)
            with torch.no_grad():
                values = log_density(loc + noise @ factor.mT) + noise.square().sum(-1) / 2.0
            elbo = float(values.mean() + factor.diagonal().log().sum())
            if elbo > best[0]:
                best = elbo, (loc, factor)
        if best[1] is not None and report(*best[1]):
            raise StopIteration

    options = {"maxiter": max_steps, "maxcor": history, "ftol": 1e-12, "gtol": 1e-8}
    minimize(objective, begin, jac=True, method="L-BFGS-B", options=options, callback=look)
    return best[1]
