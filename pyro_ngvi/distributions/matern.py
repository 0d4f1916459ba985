r"""Matern Gaussian processes on a line as chains of states, exactly (Hartikainen & Sarkka 2010).

f solves a linear differential equation of order nu + 1/2 driven by white noise.  The state holds f and
its derivatives in units of lengthscale / sqrt(2 nu), so that a step depends on x only:

    A = exp(F x) = e^-x (I + N x + N^2 x^2 / 2),       N = F + I nilpotent,
    Q = variance int_0^x q b(u) b(u)' du,   b(u) = exp(F u) e_last,   q = 2, 4, 16/3.

Each entry of Q is one regularised lower incomplete gamma function P_a(z), z = 2 x, and polynomials
times e^-z: no entry is a difference of nearly equal numbers, however short the step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .state_space import GaussianStateSpace, one_number, validates


def matern_state_space(
    times: Tensor,
    lengthscale: Tensor | float,
    variance: Tensor | float,
    nu: float = 1.5,
    *,
    validate_args: bool | None = None,
) -> GaussianStateSpace:
    """A Matern process f at ``times``: a chain whose states' first component is f(t), of covariance

        k(t, t') = variance e^-x p(x),   x = sqrt(2 nu) |t - t'| / lengthscale,
        p = 1,  1 + x,  1 + x + x^2 / 3    for nu = 1/2, 3/2, 5/2.

    States have nu + 1/2 components: f, f' l, f'' l^2 with l = lengthscale / sqrt(2 nu).
    Differentiable in ``lengthscale`` and ``variance``.  One input only.

    Args:
        times: (T,), strictly increasing, at any distances.
        lengthscale, variance: positive numbers, or 0-dim tensors; lengthscale in the unit of ``times``.
        nu: 0.5, 1.5 or 2.5; f has nu - 1/2 derivatives.

    Raises:
        ValueError: for an unknown ``nu``, wrong shapes; with validation on also for times that do not
            increase, or a lengthscale or variance that is not positive.

    Example:
        >>> import torch
        >>> f = matern_state_space(torch.tensor([0.0, 0.3, 2.0]), 1.0, 4.0, nu=1.5)
        >>> f.event_shape, f.variance[:, 0].round(decimals=3)
        (torch.Size([3, 2]), tensor([4., 4., 4.]))
    """
    if nu not in (0.5, 1.5, 2.5) or times.dim() != 1 or not len(times):
        raise ValueError(
            f"matern_state_space takes times (T,) and nu = 0.5, 1.5 or 2.5, got times of shape "
            f"{tuple(times.shape)} and nu = {nu}."
        )
    if not times.dtype.is_floating_point:
        times = times.to(torch.get_default_dtype())
    lengthscale = one_number("lengthscale", lengthscale, times)
    variance = one_number("variance", variance, times)
    gaps = times.diff()
    if validates(validate_args):
        wrong = (~(gaps > 0.0)).nonzero()
        if len(wrong) or not bool((lengthscale > 0.0) & (variance > 0.0)):
            where = f" (times[{int(wrong[0])}] is not below the next)" if len(wrong) else ""
            raise ValueError(
                f"matern_state_space: lengthscale and variance must be positive, and times strictly "
                f"increasing{where}. Give data at one time one state."
            )

    order = round(nu + 0.5)
    stationary = torch.tensor(STATIONARY[order], dtype=times.dtype, device=times.device)
    entries = _step(order, gaps * (math.sqrt(2.0 * nu) / lengthscale))
    transition, noise = (torch.stack([torch.stack(r, -1) for r in rows], -2) for rows in entries)
    chain = GaussianStateSpace(
        torch.zeros_like(stationary[0]),
        variance * stationary,
        transition,
        variance * noise,
        validate_args=validate_args,
    )
    chain.times = times
    return chain


Rows = list[list[Tensor]]


def _step(order: int, x: Tensor) -> tuple[Rows, Rows]:
    """The entries (n,) of A and of Q, for variance 1."""
    e, z = (-x).exp(), 2.0 * x
    if order == 1:
        return [[e]], [[-torch.expm1(-z)]]
    w = (-z).exp()
    # P_a(z), accurate relative to itself
    p = torch.special.gammainc(torch.full_like(z, 2.0 * order - 1.0).detach(), z)
    if order == 2:
        cross = w * z.square() / 2.0
        A = [[e * (1.0 + x), e * x], [-e * x, e * (1.0 - x)]]
        return A, [[p, cross], [cross, p + 2.0 * w * z]]
    xx, zz = x.square(), z.square()
    A = [
        [e * (1.0 + x + xx / 2.0), e * (x + xx), e * xx / 2.0],
        [-e * xx / 2.0, e * (1.0 + x - xx), e * (x - xx / 2.0)],
        [e * (xx / 2.0 - x), e * (xx - 3.0 * x), e * (1.0 - 2.0 * x + xx / 2.0)],
    ]
    q12 = w * zz.square() / 24.0
    q22 = p / 3.0 + w * z * zz * (2.0 / 9.0 - z / 36.0)
    q13 = w * z * zz * (1.0 / 9.0 - z / 18.0) - p / 3.0
    q23 = w * zz * (2.0 / 3.0 - z / 3.0 + zz / 24.0)
    q33 = p + w * z * (8.0 / 3.0 - 4.0 / 3.0 * z + 2.0 / 3.0 * zz)
    return A, [[p, q12, q13], [q12, q22, q23], [q13, q23, q33]]


#: Covariances of the state under the stationary law, for variance 1
STATIONARY = {
    1: ((1.0,),),
    2: ((1.0, 0.0), (0.0, 1.0)),
    3: ((1.0, 0.0, -1.0 / 3.0), (0.0, 1.0 / 3.0, 0.0), (-1.0 / 3.0, 0.0, 1.0)),
}
