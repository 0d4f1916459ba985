r"""Deterministic ADVI: a mean-field Gaussian from a few fixed draws, by a trust-region Newton method.

The expectation in the ELBO becomes an average over N draws e_n of N(0, I) that stay the same,

    F(m, u) = 1/N sum_n log p(m + exp(u) e_n) + sum_i u_i,

and that function is maximised to its end: scipy's "trust-ncg" with products of its Hessian and a
vector, from automatic differentiation.  No rate, no noise, and an end that can be seen.  The price
is the error of N draws, N = 30 as published, which no time removes.

For the full-rank family see ``benchmarks.problems.sample_average``, which needs more draws than
dimensions: with fewer, F has no maximum.

Source: Giordano, Ingram & Broderick (2024, JMLR 25:18), "Black box variational inference with a
deterministic objective: faster, more accurate, and even more black box".
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from .gaussian import Gaussian, LogDensity, Report, ignore

__all__ = ["dadvi"]


def dadvi(
    log_density: LogDensity,
    loc: Tensor,
    scale: Tensor,
    noise: Tensor,
    max_steps: int = 1000,
    report: Report = ignore,
) -> Gaussian:
    """The best N(m, diag(exp(2 u))) for draws ``noise`` (N, d), from a start (d,), (d,).

    Example:
        >>> import torch
        >>> from benchmarks.baselines import dadvi
        >>> def target(theta):  # N(3, 1/4)
        ...     return -2.0 * (theta - 3.0).square().sum(-1)
        >>> noise = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
        >>> loc, scale = dadvi(target, torch.zeros(1).double(), torch.ones(1).double(), noise)
        >>> loc.round(decimals=3), scale.round(decimals=3)
        (tensor([3.], dtype=torch.float64), tensor([[0.5000]], dtype=torch.float64))
    """
    dim = len(loc)

    def negative(x: Tensor) -> Tensor:
        m, u = x.split(dim)
        return -(log_density(m + u.exp() * noise).mean() + u.sum())

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        variable = torch.as_tensor(x).requires_grad_()
        value = negative(variable)
        (gradient,) = torch.autograd.grad(value, variable)
        if not bool(torch.isfinite(value) and torch.isfinite(gradient).all()):
            return 1e30, np.zeros(2 * dim)
        return float(value.detach()), gradient.numpy()

    def product(x: np.ndarray, v: np.ndarray) -> np.ndarray:
        variable = torch.as_tensor(x).requires_grad_()
        (gradient,) = torch.autograd.grad(negative(variable), variable, create_graph=True)
        (result,) = torch.autograd.grad(gradient @ torch.as_tensor(v), variable)
        return result.nan_to_num().numpy()

    def unpack(x: np.ndarray) -> Gaussian:
        m, u = torch.as_tensor(x.copy()).split(dim)
        return m, u.exp().diag()

    def look(x: np.ndarray) -> None:
        if report(*unpack(x)):
            raise StopIteration

    found = minimize(
        objective,
        torch.cat([loc, scale.log()]).numpy(),
        jac=True,
        hessp=product,
        method="trust-ncg",
        callback=look,
        options={"maxiter": max_steps, "gtol": 1e-6},
    )
    return unpack(found.x)
