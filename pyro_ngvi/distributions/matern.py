r"""Matern Gaussian processes on a line as chains of states, exactly (Hartikainen & Sarkka 2010).

    k(t, t') = variance e^-x p(x),   x = sqrt(2 nu) |t - t'| / lengthscale,
    p = 1,  1 + x,  1 + x + x^2 / 3    for nu = 1/2, 3/2, 5/2.

f solves a linear differential equation of order nu + 1/2 driven by white noise.  The state holds f and
its derivatives in units of lengthscale / sqrt(2 nu), so that a step depends on x only:

    A = exp(F x) = e^-x (I + N x + N^2 x^2 / 2),       N = F + I nilpotent,
    Q = variance int_0^x q b(u) b(u)' du,   b(u) = exp(F u) e_last,   q = 2, 4, 16/3.

With z = 2 x, P_a(z) the regularised lower incomplete gamma function and P_a - P_{a+1} =
z^a e^-z / a!, each entry of Q is one P_a and polynomials times e^-z: no entry is a difference of nearly
equal numbers, however short the step (Q's first entry is of order x^(2 nu)).

Not for more than one input, nor for nu between these; a squared-exponential kernel has no such form.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .state_space import GaussianStateSpace, positive_number, validates

__all__ = ["matern_state_space"]


def matern_state_space(
    times: Tensor,
    lengthscale: Tensor | float,
    variance: Tensor | float,
    nu: float = 1.5,
    *,
    validate_args: bool | None = None,
) -> GaussianStateSpace:
    """A Matern process f at ``times``: a chain whose states' first component is f(t).

    States have nu + 1/2 components: f, f' l, f'' l^2 with l = lengthscale / sqrt(2 nu).
    Differentiable in ``lengthscale`` and ``variance``.

    Args:
        times: (T,), strictly increasing, at any distances.
        lengthscale, variance: positive numbers, or 0-dim tensors.
        nu: 0.5, 1.5 or 2.5; f has nu - 1/2 derivatives.

    Raises:
        ValueError: for an unknown ``nu``, ``times`` of a wrong shape, a lengthscale or variance that
            is not one number; with validation on also for times that are not strictly increasing, or a
            lengthscale or variance that is not positive.

    Example:
        >>> import torch
        >>> f = matern_state_space(torch.tensor([0.0, 0.3, 2.0]), 1.0, 4.0, nu=1.5)
        >>> f.event_shape, f.variance[:, 0].round(decimals=3)
        (torch.Size([3, 2]), tensor([4., 4., 4.]))
    """
    if nu not in (0.5, 1.5, 2.5):
        raise ValueError(f"nu must be 0.5, 1.5 or 2.5, got {nu}.")
    if times.dim() != 1 or not len(times):
        raise ValueError(f"times has shape {tuple(times.shape)}; it must be (T,).")
    if not times.dtype.is_floating_point:
        times = times.to(torch.get_default_dtype())
    lengthscale = positive_number("lengthscale", lengthscale, times, validate_args)
    variance = positive_number("variance", variance, times, validate_args)
    gaps = times.diff()
    if validates(validate_args):
        _check_sorted(gaps)

    x = gaps * (math.sqrt(2.0 * nu) / lengthscale)
    order = round(nu + 0.5)
    stationary = torch.tensor(STATIONARY[order], dtype=times.dtype, device=times.device)
    transition, noise = STEPS[order](x)
    chain = GaussianStateSpace(
        torch.zeros_like(stationary[0]),
        variance * stationary,
        transition,
        variance * noise,
        validate_args=validate_args,
    )
    chain.times = times
    return chain


def _check_sorted(gaps: Tensor) -> None:
    if bool((gaps > 0.0).all()):
        return
    first = int((~(gaps > 0.0)).nonzero()[0])
    problem = "the same" if float(gaps[first]) == 0.0 else "not in increasing order"
    raise ValueError(
        f"times must be strictly increasing: times[{first}] and times[{first + 1}] are {problem}. "
        "Sort them, and give data at one time one state."
    )


def _step1(x: Tensor) -> tuple[Tensor, Tensor]:
    return _matrices([[(-x).exp()]]), _matrices([[-torch.expm1(-2.0 * x)]])


def _step3(x: Tensor) -> tuple[Tensor, Tensor]:
    e, z = (-x).exp(), 2.0 * x
    w = (-z).exp()
    p = _gamma(3, z)
    A = [[e * (1.0 + x), e * x], [-e * x, e * (1.0 - x)]]
    cross = w * z.square() / 2.0
    return _matrices(A), _matrices([[p, cross], [cross, p + 2.0 * w * z]])


def _step5(x: Tensor) -> tuple[Tensor, Tensor]:
    e, z = (-x).exp(), 2.0 * x
    w = (-z).exp()
    p = _gamma(5, z)
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
    return _matrices(A), _matrices([[p, q12, q13], [q12, q22, q23], [q13, q23, q33]])


STEPS = {1: _step1, 2: _step3, 3: _step5}

#: Covariances of the state under the stationary law, for variance 1
STATIONARY = {
    1: ((1.0,),),
    2: ((1.0, 0.0), (0.0, 1.0)),
    3: ((1.0, 0.0, -1.0 / 3.0), (0.0, 1.0 / 3.0, 0.0), (-1.0 / 3.0, 0.0, 1.0)),
}


def _gamma(a: int, z: Tensor) -> Tensor:
    """P_a(z), accurate relative to itself."""
    return torch.special.gammainc(torch.full_like(z, float(a)).detach(), z)


def _matrices(rows: list[list[Tensor]]) -> Tensor:
    """(n, S, S) from entries (n,)."""
    return torch.stack([torch.stack(row, -1) for row in rows], -2)
