r"""Coordinates of a likelihood in which its Fisher matrix is the identity, at one point.

For parameters theta with Fisher matrix F = R'R at theta_0 these are g = R(theta_0) theta, or a function
of the same derivative there, so that J' F J = (dg/dxi)' (dg/dxi) for theta = theta(xi).  ``c`` marks
what is held at theta_0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor

from ..runtime.density import Sites, innermost, site_kind, site_log_prob
from ..runtime.pyro_adapter import masks_of
from .whitening import entry

GAMMA = 0.5772156649015329  # Euler's constant
ROOT2 = math.sqrt(2.0)


def c(x: Tensor) -> Tensor:
    return x.detach()


def psi1(x: Tensor) -> Tensor:
    return torch.polygamma(1, c(x))


def location(fn: Any, of_loc: float, of_scale: float) -> list[Tensor]:
    """F = diag(of_loc, of_scale) in (loc / scale, log scale), as where the density is symmetric."""
    return [of_loc**0.5 * fn.loc / c(fn.scale), of_scale**0.5 * fn.scale.log()]


def pair(a: Tensor, b: Tensor, aa: Any, ab: Any, bb: Any) -> list[Tensor]:
    """F = [[aa, ab], [ab, bb]] in (a, b): its square is bb (db + ab/bb da)^2 + (aa - ab^2/bb) da^2."""
    aa, ab, bb = (torch.as_tensor(x).to(a) for x in (aa, ab, bb))
    return [bb.sqrt() * (b + ab / bb * a), (aa - ab**2 / bb).sqrt() * a]


def extreme(loc: Tensor, scale: Tensor, sign: float) -> list[Tensor]:
    """Gumbel's, of maxima (1) or minima (-1)."""
    aa, bb = 1.0, math.pi**2 / 6.0 + (1.0 - GAMMA) ** 2
    return pair(loc / c(scale), scale.log(), aa, -sign * (1.0 - GAMMA), bb)


def gamma(fn: Any) -> list[Tensor]:
    a = fn.concentration
    return pair(a, fn.rate.log(), psi1(a), -1.0, c(a))


def beta(fn: Any) -> list[Tensor]:
    a, b = fn.concentration1, fn.concentration0
    both = psi1(a + b)
    return pair(a, b, psi1(a) - both, -both, psi1(b) - both)


def student(fn: Any) -> list[Tensor]:
    v = c(fn.df)
    of_loc, of_scale = (v + 1.0) / (v + 3.0), 2.0 * v / (v + 3.0)
    aa = 0.25 * (psi1(v / 2) - psi1(v / 2 + 0.5)) - (v + 5) / (2 * v * (v + 1) * (v + 3))
    ab = -2.0 / ((v + 1.0) * (v + 3.0))
    return [of_loc.sqrt() * fn.loc / c(fn.scale), *pair(fn.df, fn.scale.log(), aa, ab, of_scale)]


def negative_binomial(fn: Any) -> list[Tensor]:
    if fn.total_count.requires_grad:
        raise NotImplementedError("of latent total_count")
    return [(fn.total_count * c(fn.probs)).sqrt() * fn.logits]


def categorical(fn: Any, count: Any = 1.0) -> list[Tensor]:
    p = c(fn.probs)
    return [(count * p).sqrt() * (fn.logits - (p * fn.logits).sum(-1, keepdim=True))]


def normal(fn: Any) -> list[Tensor]:
    """With B = L_0^-1 L the part of L is tr (dB + dB')^2 / 2."""
    L = c(fn.scale_tril)
    B = torch.linalg.solve_triangular(L, fn.scale_tril, upper=False)
    loc = torch.linalg.solve_triangular(L, fn.loc.unsqueeze(-1), upper=False)
    return [loc, B.tril(-1), ROOT2 * B.diagonal(dim1=-2, dim2=-1)]


def logits(count: Callable[[Any], Any] = lambda fn: 1.0) -> Callable[[Any], list[Tensor]]:
    """Of counts out of ``count``."""
    return lambda fn: [(count(fn) * c(fn.probs) * (1.0 - c(fn.probs))).sqrt() * fn.logits]


#: coordinates by distribution, each a list of tensors (*batch_shape, ...)
COORDINATES: dict[type, Callable[[Any], list[Tensor]]] = {
    td.Normal: lambda fn: location(fn, 1.0, 2.0),
    td.LogNormal: lambda fn: location(fn, 1.0, 2.0),
    td.Laplace: lambda fn: location(fn, 1.0, 1.0),
    td.Cauchy: lambda fn: location(fn, 0.5, 0.5),
    dist.Logistic: lambda fn: location(fn, 1.0 / 3.0, (3.0 + math.pi**2) / 9.0),
    td.StudentT: student,
    td.Gumbel: lambda fn: extreme(fn.loc, fn.scale, 1.0),
    td.Weibull: lambda fn: extreme(fn.scale.log(), 1.0 / fn.concentration, -1.0),
    td.HalfNormal: lambda fn: [ROOT2 * fn.scale.log()],
    td.Exponential: lambda fn: [fn.rate.log()],
    td.Gamma: gamma,
    dist.InverseGamma: gamma,
    td.Beta: beta,
    td.Poisson: lambda fn: [2.0 * fn.rate.sqrt()],
    td.Bernoulli: logits(),
    td.Binomial: logits(lambda fn: fn.total_count),
    td.Geometric: lambda fn: [(1.0 - c(fn.probs)).sqrt() * fn.logits],
    td.NegativeBinomial: negative_binomial,
    td.Categorical: categorical,
    td.OneHotCategorical: categorical,
    td.Multinomial: lambda fn: categorical(fn, fn.total_count),
    td.MultivariateNormal: normal,
}


def coordinates(sites: Sites) -> Tensor:
    """Those of all observed sites that depend on the latent ones, (n,), with their scales and masks."""
    found = []
    for name, site in sites.items():
        if site_kind(site) in ("observed", "factor") and site_log_prob(site)[1].requires_grad:
            fn, what = innermost(site["fn"]), ""
            of_kind = entry(COORDINATES, fn)
            try:
                found += [] if of_kind is None else _weighted(site, fn, of_kind(fn))
            except NotImplementedError as error:
                of_kind, what = None, f" {error}"
            if of_kind is None:
                raise ValueError(
                    f"AutoMetricNormal: the Fisher matrix of {name!r}, {type(fn).__name__}{what}, is "
                    f"not known. Take a likelihood of pyro_ngvi.metric.COORDINATES, or a guide that "
                    f"needs none, such as AutoFactorNormal."
                )
    return torch.cat(found) if found else torch.zeros(0)


def _weighted(site: Any, fn: Any, parts: list[Tensor]) -> list[Tensor]:
    """Times the roots of scale and masks, each flat; those that depend on nothing left out."""
    value = site["value"]
    shape = value.shape[: value.dim() - fn.event_dim]
    weight: Any = torch.ones(shape, dtype=parts[0].dtype, device=value.device)
    for factor, skipped in [(site["scale"], site["fn"].event_dim), *masks_of(site)]:
        factor = torch.as_tensor(factor).to(weight)
        weight = weight * factor.reshape(factor.shape + (1,) * (skipped - fn.event_dim))
    flat = weight.sqrt().reshape(-1, 1)
    parts = [x.expand(shape + x.shape[len(fn.batch_shape) :]) for x in parts if x.requires_grad]
    return [(flat * x.reshape(len(flat), -1)).reshape(-1) for x in parts]
