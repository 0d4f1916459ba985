"""Latent sites as maps of white noise, x = f(xi) with xi ~ N(0, I), and a model as a function of xi.

A prior that depends on other sites, such as Normal(m, s), becomes m + s xi, the non-centred form.
Other scalars are x = F^-1(Phi(xi)), those without an upper end by the smaller of both tails, so that
neither is rounded away.  As f takes N(0, I) to the prior, log |det dx/dxi| = log N(xi) - log p(x).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.distributions as td
from pyro import poutine
from pyro.distributions.transforms import LowerCholeskyAffine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.transforms import AffineTransform, ComposeTransform, Transform
from torch.special import erfc, erfcx, ndtri

from ..distributions import GaussianProcess
from ..families.base import log_normal
from ..families.vectors import split
from ..runtime.density import LatentLayout, Sites, innermost, is_latent, is_minibatch
from ..runtime.pyro_adapter import masks_of
from ..runtime.run import Minibatches, run_particles, run_plainly

Map = Callable[[Tensor], Tensor]
#: the site of the noise, and its value where the sites of the model are given in its place
WHITE, NONE = "_white", torch.zeros(0)
PI, ROOT2, LOG2 = math.pi, math.sqrt(2.0), math.log(2.0)


class FromNoise(Transform):
    """x = loc + scale h(xi), where h and its inverse are given."""

    domain, codomain, bijective = constraints.real, constraints.real, True

    def __init__(self, h: Map, inverse: Map, loc: Any = 0.0, scale: Any = 1.0) -> None:
        super().__init__()
        self.h, self.inverse, self.loc, self.scale = h, inverse, loc, scale

    def _call(self, x: Tensor) -> Tensor:
        return self.loc + self.scale * self.h(x)

    def _inverse(self, y: Tensor) -> Tensor:
        return self.inverse((y - self.loc) / self.scale)


def ndtr(x: Tensor) -> Tensor:
    """Phi, of which torch's own loses the lower tail."""
    return 0.5 * erfc(-x / ROOT2)


def white(below: Tensor, above: Tensor) -> Tensor:
    """xi with Phi(xi) = ``below`` = 1 - ``above``, from the smaller one."""
    return ndtri(below.clamp_max(0.5)) - ndtri(above.clamp_max(0.5))


def halves(lower: Map, upper: Map) -> Map:
    """A function that is ``lower`` below 0 and ``upper`` above, neither being called elsewhere."""
    return lambda x: torch.where(x < 0.0, lower(x.clamp_max(0.0)), upper(x.clamp_min(0.0)))


HALF_NORMAL = (
    halves(lambda x: ROOT2 * torch.erfinv(ndtr(x)), lambda x: -ndtri(0.5 * ndtr(-x))),
    lambda y: white(torch.erf(y / ROOT2), erfc(y / ROOT2)),
)
HALF_CAUCHY = (
    halves(lambda x: (PI / 2 * ndtr(x)).tan(), lambda x: 1.0 / (PI / 2 * ndtr(-x)).tan()),
    lambda y: white(y.atan() / (PI / 2), (1.0 / y).atan() / (PI / 2)),
)
EXPONENTIAL = (  # torch's log_ndtr has no rule under vmap
    halves(
        lambda x: -torch.log1p(-ndtr(x)),
        lambda x: LOG2 + 0.5 * x.square() - erfcx(x / ROOT2).log(),
    ),
    lambda y: white(-torch.expm1(-y), (-y).exp()),
)


def joint(fn: Any) -> Transform:
    return LowerCholeskyAffine(fn.loc, fn.scale_tril)


#: how white noise becomes a draw; other scalars go by their ``icdf``, images by their transforms
PRIORS: dict[type, Callable[[Any], Transform]] = {
    td.Normal: lambda fn: AffineTransform(fn.loc, fn.scale),
    td.MultivariateNormal: joint,
    td.LowRankMultivariateNormal: joint,
    GaussianProcess: joint,
    td.Exponential: lambda fn: FromNoise(*EXPONENTIAL, scale=1.0 / fn.rate),
    td.HalfNormal: lambda fn: FromNoise(*HALF_NORMAL, scale=fn.scale),
    td.HalfCauchy: lambda fn: FromNoise(*HALF_CAUCHY, scale=fn.scale),
}


def entry(table: dict[type, Any], fn: Any) -> Any:
    """What a table has for a distribution, or for the nearest class that it comes from."""
    return next((table[kind] for kind in type(fn).__mro__ if kind in table), None)


def from_white(fn: Any) -> Any:
    """The transform of white noise to draws of ``fn``; ``None`` where there is none in closed form."""
    fn = innermost(fn)
    found = entry(PRIORS, fn)
    if found is not None:
        return found(fn)
    if isinstance(fn, td.TransformedDistribution):
        base = from_white(fn.base_dist)
        folded = not all(t.bijective for t in fn.transforms)
        return None if base is None or folded else ComposeTransform([base, *fn.transforms])
    if type(fn).icdf is td.Distribution.icdf:
        return None
    return FromNoise(lambda x: fn.icdf(ndtr(x)), lambda y: ndtri(fn.cdf(y)))


class _FromWhite(Messenger):
    """Makes the latent sites of a model, by name, of white noise."""

    def __init__(self, noise: dict[str, Tensor]) -> None:
        super().__init__()
        self.noise = noise

    def _pyro_sample(self, msg: Any) -> None:
        if is_latent(msg) and msg["name"] in self.noise:
            value, fn = from_white(msg["fn"])(self.noise[msg["name"]]), msg["fn"]
            point = dist.Delta(value, event_dim=fn.event_dim).mask(False)
            msg.update(value=value, fn=point, is_observed=True, done=True)


class WhiteModel:
    """A model, its arguments bound, whose latent site is xi ~ N(0, I), (d,): a Pyro program."""

    def __init__(self, model: Any, prototype: Any, args: Any, kwargs: Any) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.layout = LatentLayout(prototype)
        self.names = list(self.layout.transforms)
        values = {name: prototype.nodes[name]["value"] for name in self.names}
        self.zero = torch.zeros(self.layout.dim).to(values[self.names[0]])
        for name, site in self.sites(values | {WHITE: NONE}).items():
            kind, reason = type(innermost(site["fn"])).__name__, ""
            if is_minibatch(site):
                reason = "is a subsampled plate: pass all data, or take AutoFactorNormal"
            elif is_latent(site) and name not in self.names:
                reason = "is not of this guide, which takes all of a model, none enumerated"
            elif is_latent(site) and (
                masks_of(site) or bool((self.zero + site["scale"] != 1).any())
            ):
                reason = (
                    "is masked or scaled, so it has no N(0, I) for a prior: do so with data alone"
                )
            elif is_latent(site) and from_white(site["fn"]) is None:
                reason = (
                    "is no closed form of normal noise: take LogNormal, HalfNormal, Exponential or "
                    "another of pyro_ngvi.metric.PRIORS"
                )
            if reason:
                raise ValueError(f"AutoMetricNormal: the site {name!r} ({kind}) {reason}.")

    def __call__(self) -> None:
        noise: Any = pyro.sample(WHITE, dist.Normal(self.zero, 1.0).to_event(1))
        given = len(noise) == len(self.zero)
        with _FromWhite(split(noise, self.layout.unconstrained_shapes) if given else {}):
            self.model(*self.args, **self.kwargs)

    def sites(self, values: dict[str, Tensor]) -> Sites:
        """One run with the noise, or with values of the latent sites."""
        with poutine.block(), pyro.validation_enabled(False):
            sites = run_plainly(self, values, (), {}, Minibatches())
        return {name: site for name, site in sites.items() if name != WHITE}

    def _run(self, reduce: Any, values: dict[str, Tensor], count: int) -> Any:
        with poutine.block():
            return run_particles(self, reduce, values, count, (), {}, minibatches=Minibatches())

    def theta(self, xi: Tensor) -> Tensor:
        """The flat vector of unconstrained sites (S, d) of white coordinates (S, d)."""

        def values(sites: Sites) -> dict[str, Tensor]:
            return {name: sites[name]["value"] for name in self.names}

        return self.layout.pack(self._run(values, {WHITE: xi}, len(xi)))

    def white(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of :meth:`theta`, and log |det dxi/dtheta| (S,)."""

        def noise(sites: Sites) -> tuple[Tensor, Tensor]:
            found, log_p = [], theta.new_zeros(())
            for site in map(sites.__getitem__, self.names):
                found.append(from_white(site["fn"]).inv(site["value"]).reshape(-1))
                log_p = log_p + site["fn"].log_prob(site["value"]).sum()
            return torch.cat(found), log_p

        values, log_det = self.layout.unpack_with_log_det(theta)
        xi, log_p = self._run(noise, values | {WHITE: theta[:, :0]}, len(theta))
        return xi, log_p + log_det - log_normal(xi)
