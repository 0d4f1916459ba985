"""Whether a later call of a guide of sites is like its first one and its last step.

A coefficient whose covariate is 0 in all data of the first call, a parameter that begins at 0, an
outcome of which all values are missing would be left at their priors for ever.  So with new data or
parameters the model runs once more, with the predictors held at another noise of the block: no log
likelihood may change.  And data that come later must be in the support of their likelihood.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..distributions.gaussian_process import GaussianProcess
from ..linalg.host import at_hand, fixed_normal
from ..runtime.density import Site, site_kind
from .bound_model import BoundModel, disjoint_sets
from .conditioned_model import other_size
from .probe_points import TOLERANCE, same
from .structure import aligned, data_terms, missing, unwrapped


def check_seen(call: BoundModel) -> None:
    """Refuse data that see more of the block than those of the first call, or are out of support."""
    plan, sites = call.plan, call.sites
    places = {name: group.places for group in plan.groups for name in group.observed}
    if not at_hand(plan.zero()) or not all(n in sites and sites[n]["is_observed"] for n in places):
        return  # without data it is refused later
    unseen = [n for n, s in sites.items() if site_kind(s) == "observed" and n not in places]
    for number, together in enumerate(disjoint_sets(plan.groups)):
        held = call.places_of(together, call.at_probe)
        with torch.no_grad():
            others = call.runner.sites(-1.7 * call.probe, replace=held)
        names = [name for group in together for name in group.observed]
        for name in names if number else names + unseen:
            before, after = call.terms_at_probe[name].detach(), data_terms(others[name]).detach()
            if not same(after, before, TOLERANCE * torch.finfo(before.dtype).eps):
                raise ValueError(
                    f"AutoSites: the data of {name!r} depend on more of the latent block in this call "
                    f"than in the guide's first one, where they saw "
                    f"{' and '.join(map(str, places.get(name, ['nothing'])))}. Make a first call "
                    f"with data and parameters that show all that the data can see."
                )
    outside = [name for name in places if not bool(_allowed(sites[name]).all())]
    if outside:
        # a support may move with the latent block, so that only what is out at its mean too is
        at_mean = call.runner.sites(None)
        for name in outside:
            check_support(at_mean[name])


def _allowed(site: Site) -> Tensor:
    """Which data the likelihood can produce, or are not there (or hidden by a mask)."""
    allowed = unwrapped(site).support.check(site["value"])
    mask, absent = site["mask"], missing(site)
    if mask is False:
        return torch.ones_like(allowed)
    if isinstance(mask, Tensor):
        allowed = allowed | ~aligned(mask, site, allowed)
    return allowed if absent is None else allowed | absent


def check_support(site: Site) -> None:
    """Refuse data that the likelihood cannot produce: its log_prob may be a number all the same."""
    wrong = (~_allowed(site)).reshape(-1).nonzero().reshape(-1)
    if len(wrong):
        raise ValueError(
            f"AutoSites: {len(wrong)} of the data of {site['name']!r} lie outside of the support of "
            f"{type(unwrapped(site)).__name__}, the first is number {int(wrong[0])}. Correct them, or "
            f"mark data that are not there by NaN or by a mask."
        )


@torch.no_grad()
def check_prior(before: BoundModel, call: BoundModel, leave_out: bool) -> list[str]:
    """Refuse a call at which q would be the sites with another prior than in the call ``before``: only
    a ``GaussianProcess`` knows its inputs, and follows to others.

    With ``leave_out``, and a process to be predicted, the names of sites that have another shape now;
    otherwise these are refused too.
    """
    first, now = before.block, call.block
    process = any(isinstance(fn, GaussianProcess) for fn in now.values())
    fixed = [name for name, fn in first.items() if not isinstance(fn, GaussianProcess)]
    others = [name for name in fixed if now[name].shape() != first[name].shape()]
    if others and not (leave_out and process):
        raise other_size(others[0], now[others[0]].shape(), first[others[0]].shape())
    if not process:  # whose noise has another length with other inputs
        # given others that are not 0: there Normal(X @ w, 1) is the same for all X
        first, now = (c.runner(c.probe, look_at=c.plan.block_places).own for c in (before, call))
    for name in other_priors({n: first[n] for n in fixed if n not in others}, now):
        raise ValueError(
            f"AutoSites: the prior of {name!r} is another one with these arguments than with those of "
            f"the last step. Let new times or inputs be among those of the steps, with NaN for their "
            f"data, or give the site a GaussianProcess."
        )
    return others


def other_priors(block: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The sites of two runs of a block whose priors are not the same."""
    return [n for n, fn in block.items() if not torch.equal(_mark(fn), _mark(other[n]))]


def _mark(fn: Any) -> Tensor:
    """Numbers that tell a prior from another one, without a matrix of all data."""
    if isinstance(fn, GaussianProcess):
        some = fn.inputs[:8]
        return torch.cat([fn.kernel(some, fn.inputs).flatten(), fn.loc])
    # at a point where nothing is zero by symmetry
    size = fn.shape().numel()
    point = fixed_normal(size, seed=size).to(fn.mean).reshape(fn.shape())
    mark = fn.log_prob(point)
    times = getattr(fn, "times", None)  # a stationary chain is the same at all times as far apart
    return mark if times is None else torch.cat([mark.reshape(-1), times.to(mark)])
