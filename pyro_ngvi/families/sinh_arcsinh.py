r"""The elementwise, strictly increasing activation psi of an orthogonal flow.

    psi(x) = sinh(e^t arcsinh(x) + c),      t = T tanh(u / T),      c and u learnt for each coordinate

It is the identity at the start; c bends it to either side (at t = 0 it is the hyperbola
a x + b sqrt(1 + x^2)), and e^t is the power of its tails (Jones & Pewsey 2009, Biometrika 96:761),
bounded by T = 1/4: a tail heavier than the posterior's costs nothing at the draws of a step until one
falls into it, and then the ELBO is lost (seen on the funnel with free t).

For a flow's scores at fixed y = psi(x), with g = d log q / dx, of what lies within:

    delta = (g - psi''/psi') / psi',    score of a parameter c  =  -delta dpsi/dc - dlog psi'/dc.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Tensors, clamp_exponent

__all__ = ["SinhArcsinh"]

#: largest |t|: the power of a tail stays within e^-T and e^T
TAIL = 0.25
LOG_2 = math.log(2.0)


@dataclass(frozen=True)
class SinhArcsinh:
    """psi of one layer; ``layer`` tells its parameters from those of other layers."""

    layer: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its parameters, each (d,) and 0 at the start."""
        return f"skew_{self.layer}", f"tail_{self.layer}"

    def _log_power(self, params: Tensors) -> tuple[Tensor, Tensor]:
        """t, and dt / du."""
        share = torch.tanh(params[self.names[1]] / TAIL)
        return TAIL * share, 1.0 - share.square()

    def _inner(self, params: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
        """(e^t arcsinh(x), the same + c), the second bounded so that sinh of it does not overflow."""
        v = self._log_power(params)[0].exp() * torch.asinh(x)
        return v, clamp_exponent(v + params[self.names[0]])

    def forward(self, params: Tensors, x: Tensor) -> Tensor:
        return torch.sinh(self._inner(params, x)[1])

    def inverse(self, params: Tensors, y: Tensor) -> Tensor:
        t, _ = self._log_power(params)
        v = (torch.asinh(y) - params[self.names[0]]) * (-t).exp()
        return torch.sinh(clamp_exponent(v))

    def log_slope(self, params: Tensors, x: Tensor) -> Tensor:
        """log psi'(x)."""
        _, w = self._inner(params, x)
        log_cosh = w.abs() + torch.log1p(torch.exp(-2.0 * w.abs())) - LOG_2
        return log_cosh + self._log_power(params)[0] - 0.5 * torch.log1p(x.square())

    def bend(self, params: Tensors, x: Tensor) -> Tensor:
        """d log psi' / dx = psi'' / psi'."""
        _, w = self._inner(params, x)
        power = self._log_power(params)[0].exp()
        square = 1.0 + x.square()
        return power * torch.tanh(w) * torch.rsqrt(square) - x / square

    def score(self, params: Tensors, x: Tensor, delta: Tensor) -> Tensors:
        """Scores (n, d) of its parameters."""
        v, w = self._inner(params, x)
        tanh = torch.tanh(w)
        skew = -delta * torch.cosh(w) - tanh
        return {self.names[0]: skew, self.names[1]: self._log_power(params)[1] * (skew * v - 1.0)}
