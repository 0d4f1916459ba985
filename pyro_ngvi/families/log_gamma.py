"""Functions around the log-gamma function that keep their digits for large and small arguments.

lgamma, digamma and trigamma follow a power of a, and a density needs the small difference to it.
Above ``LARGE`` it comes from asymptotic series (Abramowitz & Stegun 1964, 6.1.40, 6.3.18, 6.4.12), to
1e-14; below, PyTorch's trigamma is accurate to 5e-10.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: the series are used from here on
LARGE = 16.0
#: below, a^2 trigamma(a) - a = 1 - a + ... stays what it is here: its factors would overflow
TINY = 1e-9


def _switch(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whether to use the series, and an argument for each branch that is harmless in it."""
    return a > LARGE, a.clamp_max(LARGE), a.clamp_min(LARGE).reciprocal()


def stirling(a: Tensor) -> Tensor:
    """lgamma(a) - [(a - 1/2) log a - a + log(2 pi) / 2], about 1 / (12 a)."""
    large, b, r = _switch(a)
    direct = torch.lgamma(b) - (b - 0.5) * b.log() + b - 0.5 * math.log(2.0 * math.pi)
    s = r * r
    series = r * (1 / 12 - s * (1 / 360 - s * (1 / 1260 - s * (1 / 1680 - s / 1188))))
    return torch.where(large, series, direct)


def digamma_gap(a: Tensor) -> Tensor:
    """log a - digamma(a), about 1 / (2 a)."""
    large, b, r = _switch(a)
    s = r * r
    series = 0.5 * r + s * (1 / 12 - s * (1 / 120 - s * (1 / 252 - s * (1 / 240 - s / 132))))
    return torch.where(large, series, b.log() - torch.digamma(b))


def trigamma_excess(a: Tensor) -> Tensor:
    """a^2 trigamma(a) - a, which falls from 1 at 0 to 1/2 at infinity."""
    large, b, r = _switch(a)
    b = b.clamp_min(TINY)
    s = r * r
    series = 0.5 + r * (1 / 6 - s * (1 / 30 - s * (1 / 42 - s * (1 / 30 - s * 5 / 66))))
    return torch.where(large, series, b.square() * torch.polygamma(1, b) - b)


def inverse_trigamma(y: Tensor) -> Tensor:
    """The a > 0 with trigamma(a) = y, by Newton's method on 1 / trigamma, which is almost linear."""
    a = torch.where(y > 1.0, y.rsqrt(), 0.5 + y.reciprocal())  # its limits at 0 and infinity
    for _ in range(8):
        trigamma = torch.polygamma(1, a)
        a = a + trigamma * (1.0 - trigamma / y) / torch.polygamma(2, a)
    return a


def log_gamma_draw(concentration: Tensor, shape: torch.Size) -> Tensor:
    """log(g / a) for g ~ Gamma(a, 1), differentiable in a, below 1 by Gamma(a + 1) U^(1/a) in logs."""
    a = concentration.expand(shape)
    boost = (a.detach() < 1.0).to(a)
    boosted = a + boost
    if a.is_meta:  # PyTorch has no such kernel for the implicit gradient; the shape is all there is
        g = boosted + boosted.sqrt() * torch.randn_like(boosted)
    else:
        one = torch.ones((), dtype=a.dtype, device=a.device)
        g = torch.distributions.Gamma(boosted, one, validate_args=False).rsample()
    return (g / a).log() - boost * torch.empty_like(a).exponential_() / a
