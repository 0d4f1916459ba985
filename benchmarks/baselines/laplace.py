"""Laplace: the Gaussian at the mode, with the inverse of minus the Hessian for its covariance.

L-BFGS to the mode, then Newton steps while they raise the density.  No answer where the Hessian at
the end is not negative definite, as where the density has no mode.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from .gaussian import Gaussian

__all__ = ["laplace"]


def laplace(
    log_density: Callable[[Tensor], Tensor], start: Tensor, newton_steps: int = 10
) -> Gaussian | None:
    """The Laplace approximation of the log density of one point (d,), from ``start``.

    Example:
        >>> import torch
        >>> from benchmarks.baselines import laplace
        >>> def target(theta):  # N(3, 1/4)
        ...     return -2.0 * (theta - 3.0).square().sum()
        >>> loc, scale = laplace(target, torch.zeros(1, dtype=torch.float64))
        >>> loc.round(decimals=3), scale.round(decimals=3)
        (tensor([3.], dtype=torch.float64), tensor([[0.5000]], dtype=torch.float64))
    """
    gradient = torch.func.grad_and_value(log_density)

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        slope, value = gradient(torch.as_tensor(x))
        if not bool(torch.isfinite(value) and torch.isfinite(slope).all()):
            return 1e30, np.zeros(len(x))
        return -float(value), -slope.numpy()

    options = {"maxiter": 500, "maxfun": 1000, "ftol": 1e-13, "gtol": 1e-7}
    found = minimize(objective, start.numpy(), jac=True, method="L-BFGS-B", options=options)
    theta, value = torch.as_tensor(found.x), -float(found.fun)
    for _ in range(newton_steps + 1):
        precision = -torch.func.jacrev(torch.func.grad(log_density))(theta)
        factor, failed = torch.linalg.cholesky_ex((precision + precision.mT) / 2.0)
        if failed or not bool(torch.isfinite(factor).all()):
            return None
        slope, _ = gradient(theta)
        step = torch.cholesky_solve(slope.unsqueeze(-1), factor).squeeze(-1)
        trial = theta + step
        new = float(log_density(trial))
        if not new > value or float((step * slope).sum()) < 1e-10:
            break
        theta, value = trial, new
    return theta, torch.linalg.cholesky(torch.cholesky_inverse(factor))
