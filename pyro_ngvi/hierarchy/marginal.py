r"""Likelihoods of single units with their latent variables integrated out.

    L_i(v) = p(y_i | v) = E_q(u_i | v) [p(y_i | u_i, v) p(u_i | v) / q(u_i | v)],

an average over draws of a q that is near p(u_i | y_i, v).  Leaving unit i out,

    p(y_i | y_-i) = 1 / E_p(v | y) [1 / L_i(v)]

(Gelfand, Dey & Chang 1992; for random effects Vehtari, Mononen, Tolvanen, Sivula & Winther 2016).
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from ..runtime.density import Sites, site_log_prob, with_density
from .conditional import Conditionals, antithetic
from .runs import Given
from .units import Units, gradient


def log_marginals(units: Units, given: Given, q: Conditionals, points: int) -> Tensor:
    """log L_i(v) (S, B), by so many ``points`` of q at each draw of v."""
    prior = Conditionals.without_sites(given.priors)
    total = torch.full_like(q.mean[..., 0], -torch.inf)
    noise = antithetic(q.mean.new_empty(points, *q.mean.shape[1:]))
    for e in noise:  # one at a time: S B k numbers
        x = q.draw(e.expand_as(q.mean))
        ratio = _log_likelihoods(units, given, x) + prior.log_prob(x) - q.log_prob(x)
        total = torch.logaddexp(total, ratio)
    return total - log(points)


def check_sites(units: Units, given: Given, x: Tensor) -> None:
    """Refuse models in which units do not have their data to themselves."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        slope = gradient(_log_likelihoods(units, given, x), x)
    whole = units.gradient(given, x) / given.seen.scale
    size = 1e-3 * whole.abs().max().clamp_min(1e-3)
    if not bool(((slope - whole).abs() <= size).all()):
        raise ValueError(
            f"AutoHierarchical: data outside the plate {units.plate!r} see its units, so that they are "
            f"not told apart by unit. Put what is observed of a unit into the plate."
        )


def _log_likelihoods(units: Units, given: Given, x: Tensor) -> Tensor:
    """log p(y_i | u_i, v) (S, B) at x (S, B, k), of the sites in the plate of the units."""

    def of_units(sites: Sites) -> Tensor:
        total = x.new_zeros(x.shape[1])
        for name, site in with_density(sites).items():
            frames = [frame.name for frame in site["cond_indep_stack"]]
            if name in units.names or units.plate not in frames:
                continue
            plain, weighted = site_log_prob(site)
            weighted = weighted / given.seen.scale
            rows = weighted.expand(plain.shape).movedim(units.dim, 0)
            total = total + rows.reshape(len(rows), -1).sum(-1)
        return total

    values = units.values(given.gaussians(x), given.maps)
    return given.call.batched(of_units, {**given.values, **values})
