r"""Elementwise, strictly increasing activations psi of a flow, each with its inverse in closed form.

    "sinh-arcsinh"   sinh(e^t arcsinh(x) + c), t = T tanh(u / T); c and u learnt for each coordinate
    "arcsinh"        arcsinh(x)
    "leaky"          ((1 + l) x + (1 - l) (sqrt(1 + x^2) - 1)) / 2: slopes from l = 0.1 to 1
    "sigmoid"        1 / (1 + e^-x)

The first is the identity at the start; c bends it to either side (at t = 0 it is the hyperbola
a x + b sqrt(1 + x^2)), and e^t is the power of its tails (Jones & Pewsey 2009, Biometrika 96:761),
bounded by T = 1/4: a tail heavier than the posterior's costs nothing at the draws of a step until one
falls into it, and then the ELBO is lost (seen on the funnel with free t).
The others are fixed: the tails of arcsinh are far lighter than a Gaussian's, and leaky always bends to
the same side.

For a flow's scores at fixed y = psi(x), with g = d log q / dx, of what lies within:

    delta = (g - psi''/psi') / psi',    score of a parameter c  =  -delta dpsi/dc - dlog psi'/dc.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .base import Tensors, clamp_exponent

__all__ = ["ACTIVATIONS", "Activation"]

#: slope of "leaky" far to the left; far to the right it is 1
LEAK = 0.1
P, Q = 0.5 * (1.0 + LEAK), 0.5 * (1.0 - LEAK)
#: largest |t|: the power of a tail stays within e^-T and e^T
TAIL = 0.25
LOG_2 = math.log(2.0)


@dataclass(frozen=True)
class Activation:
    """psi of one layer; ``layer`` tells its parameters from those of other layers."""

    layer: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its parameters, each (d,) and 0 at the start."""
        return ()

    def forward(self, params: Tensors, x: Tensor) -> Tensor:
        raise NotImplementedError

    def inverse(self, params: Tensors, y: Tensor) -> Tensor:
        raise NotImplementedError

    def log_slope(self, params: Tensors, x: Tensor) -> Tensor:
        """log psi'(x)."""
        raise NotImplementedError

    def bend(self, params: Tensors, x: Tensor) -> Tensor:
        """d log psi' / dx = psi'' / psi'."""
        raise NotImplementedError

    def inside(self, y: Tensor) -> Tensor | None:
        """Which ``y`` psi takes at all; ``None`` for all."""
        return None

    def score(self, params: Tensors, x: Tensor, delta: Tensor) -> Tensors:
        """Scores (n, d) of its parameters."""
        return {}


class _SinhArcsinh(Activation):
    @property
    def names(self) -> tuple[str, ...]:
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
        _, w = self._inner(params, x)
        log_cosh = w.abs() + torch.log1p(torch.exp(-2.0 * w.abs())) - LOG_2
        return log_cosh + self._log_power(params)[0] - 0.5 * torch.log1p(x.square())

    def bend(self, params: Tensors, x: Tensor) -> Tensor:
        _, w = self._inner(params, x)
        power = self._log_power(params)[0].exp()
        square = 1.0 + x.square()
        return power * torch.tanh(w) * torch.rsqrt(square) - x / square

    def score(self, params: Tensors, x: Tensor, delta: Tensor) -> Tensors:
        v, w = self._inner(params, x)
        tanh = torch.tanh(w)
        skew = -delta * torch.cosh(w) - tanh
        return {self.names[0]: skew, self.names[1]: self._log_power(params)[1] * (skew * v - 1.0)}


class _Arcsinh(Activation):
    def forward(self, params: Tensors, x: Tensor) -> Tensor:
        return torch.asinh(x)

    def inverse(self, params: Tensors, y: Tensor) -> Tensor:
        return torch.sinh(clamp_exponent(y))

    def log_slope(self, params: Tensors, x: Tensor) -> Tensor:
        return -0.5 * torch.log1p(x.square())

    def bend(self, params: Tensors, x: Tensor) -> Tensor:
        return -x / (1.0 + x.square())


class _Leaky(Activation):
    def forward(self, params: Tensors, x: Tensor) -> Tensor:
        square = x.square()
        # sqrt(1 + x^2) - 1 without cancellation
        return P * x + Q * square / (1.0 + torch.sqrt(1.0 + square))

    def inverse(self, params: Tensors, y: Tensor) -> Tensor:
        y = y + Q
        return (P * y - Q * torch.sqrt(y.square() + LEAK)) / LEAK

    def log_slope(self, params: Tensors, x: Tensor) -> Tensor:
        return torch.log(P + Q * x * torch.rsqrt(1.0 + x.square()))

    def bend(self, params: Tensors, x: Tensor) -> Tensor:
        r = torch.rsqrt(1.0 + x.square())
        return Q * r * r * r / (P + Q * x * r)


class _Sigmoid(Activation):
    def forward(self, params: Tensors, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def inverse(self, params: Tensors, y: Tensor) -> Tensor:
        eps = torch.finfo(y.dtype).eps
        return torch.logit(y.clamp(eps, 1.0 - eps))

    def log_slope(self, params: Tensors, x: Tensor) -> Tensor:
        return logsigmoid(x) + logsigmoid(-x)

    def bend(self, params: Tensors, x: Tensor) -> Tensor:
        return -torch.tanh(0.5 * x)

    def inside(self, y: Tensor) -> Tensor | None:
        # what rounding does to a value near an end on its way through the rotations is no reason for
        # a density of 0
        margin = torch.finfo(y.dtype).eps ** 0.5
        return (y > -margin) & (y < 1.0 + margin)


ACTIVATIONS: dict[str, type[Activation]] = {
    "sinh-arcsinh": _SinhArcsinh,
    "arcsinh": _Arcsinh,
    "leaky": _Leaky,
    "sigmoid": _Sigmoid,
}
