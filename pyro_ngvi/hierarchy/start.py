"""Where the globals of a hierarchy start: at the centres of their priors, unless that is far too far.

The centre of a wide prior may be thousands of nats from where data put it, with a likelihood between
that tells steps of q(v) nothing.  What is left of log p(y, v) after a few steps of the units' sites at
v is one smooth function of few numbers, which a few evaluations climb:

    f(v) = log p(v) + E_q(w) [log p(y | u, v)] - KL(q(w) | N(0, I)),    u = m(v) + A(v) w,

with the q(w) that those steps make held still in the gradient, which it does not move to first order.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..guides.deadline import is_late
from ..guides.search import mode_of
from ..linalg.host import fixed_normal, own_random_state
from ..runtime.density import LatentLayout
from .conditional import Conditionals, Sites
from .runs import Call, Given
from .units import Units

#: steps of the units' sites at each v; of L-BFGS, which are one line search, and nats that show that it
#: is worth more
SETTLING, FIRST, FAR = 6, 2, 100.0


def better_start(units: Units, call: Call, globals: Any, loc: Tensor) -> Tensor:
    """``loc`` (d,), unconstrained, or the mode of f where a line search finds f larger by 100 nats."""
    # a block may have several modes at each v
    if units.is_block or not units.smooth or loc.is_meta:
        return loc
    layout = LatentLayout(globals.prototype_trace)
    units = replace(units, followed=())  # sites are made anew at each v

    def f(theta: Tensor) -> Tensor:
        if is_late():
            raise TimeoutError
        values, log_det = layout.unpack_with_log_det(theta)
        with own_random_state(0):  # of a minibatch: the same one
            given = units.given(call, values)
        q = replace(_settled(units, given.detached()), prior=given.priors)
        half = fixed_normal(1, *q.white.shape[1:], seed=0).to(q.white)
        noise = torch.cat([half, -half])
        w, twice = q.drawn(noise), given.repeated(2)
        of_units = (q.prior.log_prob(w) - q.log_q(noise)).sum(-1)
        log_p = units.log_likelihood(twice, twice.priors.at(w))
        return (log_p + given.seen.scale * of_units).mean() + log_det

    best = loc
    with suppress(Exception), own_random_state(), poutine.block(), pyro.validation_enabled(False):
        # whatever it is, the first step meets it
        first = mode_of(f, loc, steps=FIRST)
        here, there = (f(x.unsqueeze(0)) for x in (loc, first))
        if bool(there > here + FAR):
            best = first
            best = mode_of(f, first)
    return best


@torch.no_grad()
def _settled(units: Units, given: Given) -> Conditionals:
    """q(w | v) at one v after a few steps of sites that start at the prior."""
    zero = torch.zeros_like(given.priors.offset[0])
    phi, cross = zero.new_zeros(1, 0), zero.new_zeros(*zero.shape, 0)
    sites = Sites(zero, torch.zeros_like(given.priors.root[0]), cross, zero[:, 0])
    for _ in range(SETTLING):
        mean = Conditionals.of(given.priors, sites.linear, sites.precision).mean
        slopes = units.slopes(given, mean)
        if slopes is None:
            break
        each = tree_map_only(Tensor, lambda s: s / given.seen.scale, slopes)  # those of one unit
        sites = sites.moved(given.priors, phi, mean, mean, each)
    return Conditionals.of(given.priors, sites.linear, sites.precision)
