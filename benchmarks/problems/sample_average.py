"""A bracket for the optimal ELBO of a Gaussian on any differentiable model.

The expectation over the standard noise is replaced by an average over a fixed quasi-random
sample, and that deterministic function is maximised by L-BFGS (Giordano, Ingram & Broderick 2024,
"Black box variational inference with a deterministic objective: faster, more accurate, and even
more black box"). The optimum of the sample average lies above the true one in expectation; the
ELBO of its argument on fresh noise lies below it. The truth is between the two.

Needs many more draws than the Gaussian has parameters. For log joints with one mode in reach.
"""

from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from .problem import Optimum

LogDensity = Callable[[Tensor], Tensor]
Gaussian = tuple[Tensor, Tensor]


def standard_noise(draws: int, dim: int, seed: int) -> Tensor:
    """A scrambled Sobol sample of N(0, I), its mean and covariance then made exactly 0 and I.

    Integrates quadratics without error. ``draws`` must be a power of two above ``dim``.
    """
    uniform = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed).draw(
        draws, dtype=torch.float64
    )
    noise = torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12))
    noise = noise - noise.mean(0)
    factor = torch.linalg.cholesky(noise.T @ noise / draws)
    return torch.linalg.solve_triangular(factor, noise.T, upper=False).T


def gaussian_elbo(log_joint: LogDensity, loc: Tensor, scale_tril: Tensor, noise: Tensor) -> Tensor:
    """The ELBO of N(loc, scale_tril scale_tril') on given noise, in nats; differentiable."""
    dim = len(loc)
    entropy = scale_tril.diagonal().log().sum() + dim / 2 * (1 + np.log(2 * np.pi))
    return log_joint(loc + noise @ scale_tril.T).mean() + entropy


def _unpack(x: Tensor, dim: int, family: str, loc: Tensor, scale: Tensor) -> Gaussian:
    """Parameters relative to a start: loc + scale u, scale @ (lower factor, log diagonal)."""
    shift, log_diagonal, lower = x[:dim], x[dim : 2 * dim], x[2 * dim :]
    factor = torch.diag(log_diagonal.exp())
    if family == "full_rank":
        rows, columns = torch.tril_indices(dim, dim, -1)
        factor = factor.index_put((rows, columns), lower)
    return loc + scale @ shift, scale @ factor


def maximise(
    log_joint: LogDensity,
    family: str,
    noise: Tensor,
    loc: Tensor,
    scale_tril: Tensor,
    max_steps: int = 2000,
    report: Callable[[Tensor, Tensor], bool] = lambda loc, scale_tril: False,
) -> tuple[float, Tensor, Tensor]:
    """The optimum of the sample average from a start: its value, loc and scale_tril.

    The start also preconditions; for ``"mean_field"`` its ``scale_tril`` must be diagonal.
    ``report`` sees every iterate, and ends the run where it returns true.
    """
    dim = len(loc)
    size = 2 * dim + (dim * (dim - 1) // 2 if family == "full_rank" else 0)

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        variable = torch.as_tensor(x).requires_grad_()
        trial_loc, trial_scale = _unpack(variable, dim, family, loc, scale_tril)
        elbo = gaussian_elbo(log_joint, trial_loc, trial_scale, noise)
        (gradient,) = torch.autograd.grad(-elbo, variable)
        value = -float(elbo.detach())
        if not np.isfinite(value):  # the line search then shortens its step
            return 1e30, np.zeros(size)
        return value, gradient.numpy()

    def look(x: np.ndarray) -> None:
        if report(*_unpack(torch.as_tensor(x), dim, family, loc, scale_tril)):
            raise StopIteration

    options = {"maxiter": max_steps, "maxfun": 2 * max_steps, "maxcor": 50, "ftol": 1e-13}
    result = minimize(
        objective, np.zeros(size), jac=True, method="L-BFGS-B", options=options, callback=look
    )
    best_loc, best_scale = _unpack(torch.as_tensor(result.x), dim, family, loc, scale_tril)
    return -float(result.fun), best_loc, best_scale


def bracket(
    log_joint: LogDensity, family: str, dim: int, draws: int = 2**14, seed: int = 0
) -> tuple[Optimum, Tensor, Tensor]:
    """The optimal ELBO with its error, and the Gaussian that reaches its lower end.

    A coarse run from a small Gaussian at 0 preconditions the fine one.
    """
    loc, scale = torch.zeros(dim).double(), 0.1 * torch.eye(dim).double()
    for size in (max(2**8, draws // 64), draws):
        upper, loc, scale = maximise(log_joint, family, standard_noise(size, dim, seed), loc, scale)
        if family == "mean_field":
            scale = torch.diag(scale.diagonal())
    with torch.no_grad():
        fresh = [standard_noise(draws, dim, seed + k) for k in range(1, 5)]
        values = torch.stack([gaussian_elbo(log_joint, loc, scale, noise) for noise in fresh])
    lower = float(values.mean())
    noise_error = 2 * float(values.std()) / len(fresh) ** 0.5
    return Optimum((upper + lower) / 2, abs(upper - lower) / 2 + noise_error), loc, scale
