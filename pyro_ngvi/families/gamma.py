r"""Independent Gamma variables x = e^z, as a family over z = log x on the real line.

With concentration a and mean m = a / b (rate b), and u = z - log m,

    log q(z) = a (u - e^u) + a log a - lgamma(a),
    natural parameters (a, -b),   sufficient statistics (z, e^z),   A = lgamma(a) - a log b.

Stored: ``log_mean`` = log m (n,), ``log_concentration`` = log a (n,).  In these coordinates the Hessian
of the log-normaliser A is diagonal (mean and concentration of a Gamma are orthogonal),

    F = diag(a, a^2 trigamma(a) - a),

which (log a, log b) would make a difference of large numbers.  The local frame divides by the root of
F, so that there F = I.

Retraction: linear in the natural parameters.  With relative velocities v of the mean and w of the
concentration,

    a <- a (1 + s w),   b <- b (1 + s (w - v)),

where s = 1, or smaller in those elements where a or b would lose more than 3/4.  Each element has an s
of its own: each still moves along its own natural gradient, and none holds up the others.

Sources: Amari (1998); Khan & Nielsen (2018, arXiv:1807.04489); Figurnov, Mohamed & Mnih (2018) for the
implicit gradients of torch.distributions.  Not for: real-valued sites, and not where positive sites are
strongly correlated a posteriori; a full-rank Gaussian over their logarithms sees the correlation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..linalg.cholesky import SMALLEST
from ._special import digamma_gap, inverse_trigamma, log_gamma_draw, stirling, trigamma_excess
from .base import LOG_2PI, Tensors, clamp_exponent
from .exponential import WhitenedFamily

__all__ = ["MeanFieldGamma"]


class MeanFieldGamma(WhitenedFamily):
    """Independent Gamma distributions, over the logarithms of their variables.

    Example:
        >>> import torch
        >>> family = MeanFieldGamma()
        >>> q = family.init(torch.zeros(3), scale=0.5)
        >>> family.mean(q).abs().max() < 1e-6, family.stddev(q)
        (tensor(True), tensor([0.5000, 0.5000, 0.5000]))
    """

    names = ("log_mean", "log_concentration")
    location = names

    def init(self, loc: Tensor, scale: float) -> Tensors:
        # the sd of z is the root of trigamma(a), its mean log m - (log a - digamma(a))
        a = inverse_trigamma(torch.full_like(loc, scale**2))
        return {"log_mean": loc + digamma_gap(a), "log_concentration": a.log()}

    def dim(self, params: Tensors) -> int:
        return params["log_mean"].shape[-1]

    def draw(self, params: Tensors, shape: torch.Size) -> Tensor:
        a = params["log_concentration"].exp()
        z = params["log_mean"] + log_gamma_draw(a, torch.Size(shape) + a.shape)
        # as torch.distributions.Gamma: the model sees x = e^z, and log 0 is not a number to work with
        return z.clamp_min(math.log(torch.finfo(z.dtype).tiny))

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        log_a = params["log_concentration"]
        a, u = log_a.exp(), z - params["log_mean"]
        return (a * (u - u.expm1()) + 0.5 * (log_a - LOG_2PI) - stirling(a)).sum(-1)

    def score(self, params: Tensors, z: Tensor) -> Tensors:
        a = params["log_concentration"].exp()
        u = z - params["log_mean"]
        e = u.expm1()
        return {"log_mean": a * e, "log_concentration": a * (u - e + digamma_gap(a))}

    def entropy(self, params: Tensors) -> Tensor:
        log_a = params["log_concentration"]
        a = log_a.exp()
        return (a * digamma_gap(a) - 0.5 * (log_a - LOG_2PI) + stirling(a)).sum()

    def kl(self, params: Tensors, other: Tensors) -> Tensor:
        log_a, log_b = params["log_concentration"], other["log_concentration"]
        a, b = log_a.exp(), log_b.exp()
        ratio = params["log_mean"] - other["log_mean"]
        mean = b * (ratio.expm1() - ratio)
        shape = (b - a) * digamma_gap(a) + 0.5 * (log_a - log_b) + stirling(b) - stirling(a)
        return (mean + shape).sum()

    def mean(self, params: Tensors) -> Tensor:
        return params["log_mean"] - digamma_gap(params["log_concentration"].exp())

    def stddev(self, params: Tensors) -> Tensor:
        a = params["log_concentration"].exp()
        return (a + trigamma_excess(a)).sqrt() / a

    def icdf(self, params: Tensors, levels: Tensor) -> Tensor:
        from scipy.special import gammaincinv

        a = params["log_concentration"].detach().exp()
        p = levels.unsqueeze(-1)
        x = gammaincinv(a.double().cpu().numpy(), p.double().cpu().numpy())
        x = torch.as_tensor(x).to(a.device)
        # P(x) = x^a / Gamma(a + 1) to first order, where x itself underflows
        small = (p.log() + torch.lgamma(a + 1.0)) / a
        z = torch.where(x > 1e-30, x.log().to(a), small)
        return z + (params["log_mean"] - params["log_concentration"]).detach()

    def frame(self, params: Tensors) -> Tensors:
        log_a = params["log_concentration"]
        excess = trigamma_excess(log_a.exp())
        return {"log_mean": (-0.5 * log_a).exp(), "log_concentration": excess.rsqrt()}

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        velocity = self.push(params, tangent)
        w = step * velocity["log_concentration"]
        rate = w - step * velocity["log_mean"]
        room = 1.0 - SMALLEST
        shrink = room / torch.maximum(-w, -rate).clamp_min(room)
        change = torch.log1p(shrink * w)
        log_mean = params["log_mean"] + change - torch.log1p(shrink * rate)
        return {
            "log_mean": log_mean,
            "log_concentration": clamp_exponent(params["log_concentration"] + change),
        }

    def not_finite(self, params: Tensors) -> Tensor:
        return ~(params["log_mean"].isfinite() & params["log_concentration"].isfinite())
