"""Where the globals of a hierarchy start: at the centres of their priors, unless that is far too far.

The centre of a wide prior may be thousands of nats from where data put it, with a likelihood between
that tells steps of q(v) nothing, or leads them to an optimum of the ELBO that is none of the posterior.
What is left of log p(y, v) after steps of the units' sites at v is one smooth function of few numbers,

    f(v) = log p(v) + E_q(w) [log p(y | u, v)] - KL(q(w) | N(0, I)),    u = m(v) + A(v) w,

a bound on log p(y, v), tight where units are Gaussian given data and v.  The q(w) that those steps make
is held still in the gradient, which it does not move to first order.  Where f is much larger elsewhere
q(v) starts at the Gaussian of its mode, by Newton steps (:mod:`..guides.laplace`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..families.base import Tensors
from ..guides.deadline import is_late
from ..guides.laplace import FEW, HESSIANS, Search
from ..guides.search import mode_of, start_points
from ..linalg.cubature import gauss_hermite
from ..linalg.hessian import differences
from ..linalg.host import fixed_normal, own_random_state
from ..linalg.products import matvec
from ..runtime.density import LatentLayout
from ..runtime.model_density import MOST_NUMBERS
from ..runtime.pyro_adapter import model_as_given, unblocked
from .conditional import Conditionals, UnitPriors
from .runs import Call, Given
from .slopes import Slopes, slopes
from .unit_sites import Sites
from .units import Units

#: steps of the units' sites at each v at most, fewer of many units, and first ones without noise; sds
#: within which a unit has settled, and points behind its expectations
SETTLING, FEWER, CALM, SETTLED, POINTS = 30, 6, 2, 0.01, 5
#: points, or steps of L-BFGS, that look whether a search pays, steps where Newton's are too dear, nats
#: that show it, and from how many of these points it begins
TRIED, FIRST, STEPS, FAR, PATHS = 32, 2, 30, 100.0, 3


class MarginalSearch(Search):
    """The search on f, with Hessians by differences: second derivatives at a q that is held still are
    not those of f."""

    #: no mode of f is degenerate
    falling = HESSIANS
    _lengths: Tensor | None = None

    def derivatives(self, theta: Tensor, away: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = differences(self.f, theta, away, self._lengths)
        self._lengths = found.lengths
        return found.value, found.gradient, found.hessian


def better_start(units: Units, call: Call, globals: Any, loc: Tensor) -> Tensors | None:
    """The member of the family of the globals at the mode of f, where f is larger by 100 nats at one of
    a few points than at ``loc`` (d,), unconstrained."""
    # a block may have several modes at each v
    if units.is_block or not units.smooth or loc.is_meta:
        return None
    f = Marginal(units, call, globals)
    with suppress(Exception), own_random_state(), poutine.block(), pyro.validation_enabled(False):
        # whatever it is, the first step meets it
        model, names = unblocked(model_as_given(globals)), globals._unconstrained_shapes
        points = start_points(names, model, loc, call.args, dict(call.kwargs))
        points = islice(points, TRIED) if f.is_cheap else (loc, mode_of(f, loc, steps=FIRST))
        tried = torch.stack([*points])
        values = f(tried).nan_to_num(-torch.inf)
        far = values > values[0] + FAR
        if not bool(far.any()):
            return None
        best, family = tried[values.argmax()], globals.family
        if not f.is_cheap or len(loc) > FEW or not hasattr(family, "matched"):
            return family.init(mode_of(f, best, steps=STEPS), globals.init_scale)
        search = MarginalSearch(f, loc)
        with torch.no_grad():
            before = search.elbo(family, family.init(loc, globals.init_scale))
            for x in tried[values.argsort(descending=True)[: min(PATHS, int(far.sum()))]]:
                end = search.path(x, [])
                if end is not None and end.spread < 2.0 * len(loc) and end.elbo > before:
                    return search.member(end, family)
    return None


class Marginal:
    """f at v (S, d), unconstrained: (S,), expectations by a few points of each unit.

    ``is_cheap``: units are so few that many v fit into one batch.  Else q(w) is Laplace's approximation
    and a pair of points gives f.
    """

    def __init__(self, units: Units, call: Call, globals: Any) -> None:
        self.units = replace(units, coordinates={})  # sites are made anew at each v
        self.call, self.layout = call, LatentLayout(globals.prototype_trace)
        numbers = units.size * units.width**2
        self.is_cheap = numbers * POINTS * TRIED <= MOST_NUMBERS
        self._points = POINTS if self.is_cheap else 2
        self._rows = max(1, MOST_NUMBERS // (numbers * self._points))

    def __call__(self, theta: Tensor) -> Tensor:
        if is_late() and not self.is_cheap:  # else searches look at the clock
            raise TimeoutError
        return torch.cat([self._at(part) for part in theta.split(self._rows)])

    def _at(self, theta: Tensor) -> Tensor:
        values, log_det = self.layout.unpack_with_log_det(theta)
        with own_random_state(0):  # of a minibatch: the same one
            given = self.units.given(self.call, values)
        q = self._settled(given.detached())._replace(prior=given.priors)
        noise, weights = _noise(q.white, self._points)
        w, each = q.drawn(noise), given.repeated(self._points)
        of_units = (q.prior.log_prob(w) - q.log_q(noise)).sum(-1)
        log_p = self.units.log_likelihood(each, each.priors.at(w.flatten(0, 1)))
        total = log_p.reshape(of_units.shape) + given.seen.scale * of_units
        return weights.to(total) @ total + log_det

    @torch.no_grad()
    def _settled(self, given: Given) -> Conditionals:
        """q(w | v) at each of S v after steps of sites of their own, that start at the prior."""

        def flat(x: Tensor) -> Tensor:
            return x.flatten(0, 1).unsqueeze(0)

        # S B units at one v, as it were
        priors: UnitPriors = tree_map_only(Tensor, flat, given.priors)
        shape, zero = given.priors.offset.shape, torch.zeros_like(priors.offset[0])
        phi, cross = zero.new_zeros(1, 0), zero.new_zeros(*zero.shape, 0)
        sites = Sites(zero, torch.zeros_like(priors.root[0]), cross, cross[:, 0], zero[:, 0])
        q = Conditionals.of(priors, sites.linear, sites.precision)
        noise, weights = _noise(given.priors.offset, self._points if self.is_cheap else 1)
        noise, each = noise.reshape(len(noise), 1, *zero.shape), given.repeated(len(noise))
        for k in range(SETTLING if self.is_cheap else FEWER):
            # at their means at first, as expectations under a wide prior may overflow
            x = q.draw(0.0 * noise if k < CALM else noise).reshape(-1, *shape[1:])
            found: Any = slopes(self.units, each, x)
            if found is None or found.H is None:
                break
            parts = (y.reshape(len(noise), *shape, -1) for y in found)
            g, H = (torch.einsum("p,p...->...", weights, y) for y in parts)
            of_each = Slopes(flat(g)[..., 0], flat(H).reshape(priors.root.shape))
            sites = sites.moved(priors, phi, q.mean, q.mean, of_each)
            before, q = q, Conditionals.of(priors, sites.linear, sites.precision)
            moved = matvec(q.root.mT, q.white - before.white).abs().amax()
            if k > CALM and bool(
                moved.maximum((q.log_det - before.log_det).abs().amax()) < SETTLED
            ):
                break
        return Conditionals(given.priors, q.white.reshape(shape), q.root.reshape(*shape, shape[-1]))


def _noise(like: Tensor, points: int) -> tuple[Tensor, Tensor]:
    """White noise (points, S, B, k), exact for each entry alone, and weights of the points."""
    nodes, weights = gauss_hermite(points, dtype=like.dtype, device=like.device)
    signs = fixed_normal(1, *like.shape[1:], seed=0).to(like).sign().expand_as(like)
    return nodes[:, None, None, None] * signs, weights
