r"""Whether later calls are like the first, which told what the data see of the latent block.

A predictor is found by what the data of the first call depend on.  A coefficient whose covariate is 0
in all of them, a parameter that begins at 0, an outcome of which all values are missing: all of these
are seen by nothing then, and would be left at their priors for ever.  So with new data or parameters
the model runs once more, with the predictors held at another noise of the block: no log likelihood
may change.  And data that come later must be in the support of their likelihood, as the first ones.
"""

from __future__ import annotations

import torch

from ..linalg.host_bool import at_hand
from ..runtime.density import site_kind
from ..runtime.vmap import Site
from .bound_model import BoundModel, apart
from .conditioned_model import TensorRef
from .log_likelihood import aligned, data_terms, missing, unwrapped
from .probe_points import TOLERANCE, same

__all__ = ["check_later_data", "check_support", "likelihood_learns"]


def check_later_data(call: BoundModel) -> None:
    """Refuse data that see more of the block than those of the first call, or are out of support.

    Raises:
        ValueError: with the name of the site.
    """
    plan, sites = call.plan, call.sites
    if not at_hand(plan.zero()):
        return
    if any(call.at_probe[g.name].shape[-1] != g.width for g in plan.groups):
        return  # a selection where there was none: refused with the reason later
    seen = {name for group in plan.groups for name in group.observed}
    if not all(name in sites and sites[name]["is_observed"] for name in seen):
        return  # no data: likewise
    unseen = [n for n, s in sites.items() if site_kind(s) == "observed" and n not in seen]
    with torch.no_grad():
        for number, together in enumerate(apart(plan.groups)):
            held: dict[TensorRef, torch.Tensor] = {}
            for group in together:
                held |= group.predictor.split(call.at_probe[group.name], call.shapes[group.name])
            others = call.runner.sites(-1.7 * call.probe, replace=held)
            names = [name for group in together for name in group.observed]
            for name in names if number else names + unseen:
                before, after = call.terms_at_probe[name], data_terms(others[name])
                if not same(after, before, TOLERANCE * torch.finfo(before.dtype).eps):
                    raise ValueError(_message(call, name))
        if not all(map(_in_support, (sites[name] for name in seen))):
            # a support may move with the latent block, so that only what is out at its mean too is
            at_mean = call.runner.sites(plan.zero(), at_mean=True)
            for name in seen:
                if not _in_support(sites[name]):
                    check_support(at_mean[name])


def likelihood_learns(call: BoundModel) -> bool:
    """Whether the log likelihood has parameters, which may bring in what it did not see at first."""
    return any(terms.requires_grad for terms in call.terms_at_probe.values())


def _message(call: BoundModel, name: str) -> str:
    group = next((g for g in call.plan.groups if name in g.observed), None)
    seen = "nothing" if group is None else " and ".join(map(str, group.predictor.places))
    return (
        f"AutoSites: the data of {name!r} depend on more of the latent block in this call than in the "
        f"guide's first one, where they saw {seen} (a covariate was 0, data were missing). Make a "
        f"guide's first call with data and parameters that show all that the data can see."
    )


def _in_support(site: Site) -> bool:
    return bool(_allowed(site).all())


def _allowed(site: Site) -> torch.Tensor:
    """Which data the likelihood can produce, or are not there (or hidden by a mask)."""
    fn, value, mask = unwrapped(site), site["value"], site["mask"]
    allowed = fn.support.check(value)
    if mask is False:
        return torch.ones_like(allowed)
    if isinstance(mask, torch.Tensor):
        allowed = allowed | ~aligned(mask, site["fn"].batch_shape, allowed)
    absent = missing(site)
    return allowed if absent is None else allowed | absent


def check_support(site: Site) -> None:
    """Refuse data that the likelihood can not produce: its log_prob may be a number all the same."""
    allowed = _allowed(site)
    if not bool(allowed.all()):
        wrong = (~allowed).reshape(-1).nonzero().reshape(-1)
        raise ValueError(
            f"AutoSites: {len(wrong)} of the data of {site['name']!r} lie outside of the support of "
            f"{type(unwrapped(site)).__name__}, the first is number {int(wrong[0])}. Correct them, or "
            f"mark data that are not there by NaN or by a mask."
        )
