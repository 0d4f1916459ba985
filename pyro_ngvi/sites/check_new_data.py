r"""Whether later calls are like the first, which told what the data see of the latent block.

A predictor is found by what the data of the first call depend on.  A coefficient whose covariate is 0
in all of them, a parameter that begins at 0, an outcome of which all values are missing: all of these
are seen by nothing then, and would be left at their priors for ever.  So with new data or parameters
the model runs once more, with the predictors held at another noise of the block: no log likelihood
may change.  And data that come later must be in the support of their likelihood, as the first ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..distributions.gaussian_process import GaussianProcess
from ..linalg.host import at_hand
from ..runtime.density import Site, site_kind
from .bound_model import BoundModel, apart
from .log_likelihood import aligned, data_terms, missing, own_scale, unwrapped
from .probe_points import TOLERANCE, same
from .whitening import other_priors

__all__ = [
    "check_later_data",
    "check_scaled_data",
    "check_support",
    "likelihood_learns",
    "of_other_shape",
]


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
            held = call.places_of(together, call.at_probe)
            others = call.runner.sites(-1.7 * call.probe, replace=held)
            names = [name for group in together for name in group.observed]
            for name in names if number else names + unseen:
                before, after = call.terms_at_probe[name], data_terms(others[name])
                if not same(after, before, TOLERANCE * torch.finfo(before.dtype).eps):
                    raise ValueError(_message(call, name))
        outside = [name for name in seen if not bool(_allowed(sites[name]).all())]
        if outside:
            # a support may move with the latent block, so that only what is out at its mean too is
            at_mean = call.runner.sites(plan.zero(), at_mean=True)
            for name in outside:
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


def _allowed(site: Site) -> Tensor:
    """Which data the likelihood can produce, or are not there (or hidden by a mask)."""
    fn, value, mask = unwrapped(site), site["value"], site["mask"]
    allowed = fn.support.check(value)
    if mask is False:
        return torch.ones_like(allowed)
    if isinstance(mask, Tensor):
        allowed = allowed | ~aligned(mask, site["fn"].batch_shape, allowed)
    absent = missing(site)
    return allowed if absent is None else allowed | absent


def check_support(site: Site) -> None:
    """Refuse data that the likelihood cannot produce: its log_prob may be a number all the same."""
    allowed = _allowed(site)
    if not bool(allowed.all()):
        wrong = (~allowed).reshape(-1).nonzero().reshape(-1)
        raise ValueError(
            f"AutoSites: {len(wrong)} of the data of {site['name']!r} lie outside of the support of "
            f"{type(unwrapped(site)).__name__}, the first is number {int(wrong[0])}. Correct them, or "
            f"mark data that are not there by NaN or by a mask."
        )


def check_scaled_data(call: BoundModel, before: list[Tensor] | None) -> list[Tensor] | None:
    """Refuse a minibatch that comes as a scale instead of a plate, by the data of the step ``before``.

    In stochastic gradients poutine.scale(scale=N / M) around M data stands for all N of them.  A guide
    with a site for each datum would give the M sites to one batch after the other, and end at the last.

    Returns:
        The data of this call, if a scale above 1 makes them count for more than themselves.

    Raises:
        ValueError: with the name of the site.
    """
    name = _scaled(call)
    if name is None:
        return None
    now = _data(call, name)
    # data of another number were announced, or are refused elsewhere
    pairs = zip(before or (), now, strict=False)
    if any(a.shape == b.shape and not same(a, b) for a, b in pairs):
        frames = call.sites[name]["cond_indep_stack"]
        plate = frames[-1].name if frames else "data"
        raise ValueError(
            f"AutoSites: the data of {name!r} are not those of the step before, under a "
            f"poutine.scale. For a minibatch write pyro.plate({plate!r}, N, subsample=index), without "
            f"the scale. For new data in the place of the old call guide.reset() before."
        )
    # copies, since a loader may write each batch into the same tensors
    return [x.detach().clone() for x in now]


def _scaled(call: BoundModel) -> str | None:
    """An observed site whose scale is a number above 1, of a group with all its data here."""
    for group in call.plan.groups:
        for name in group.observed if call.index[group.name] is None else ():
            scale = torch.as_tensor(own_scale(call.sites[name]))
            if at_hand(scale) and scale.numel() == 1 and float(scale) > 1.0:
                return name
    return None


def _data(call: BoundModel, name: str) -> list[Tensor]:
    """The tensors among the arguments; where there are none, what is observed.

    What is observed may be made of parameters and draws, and be another tensor with the same data.
    """
    given = [*call.runner.args, *call.runner.kwargs.values()]
    tensors = [x for x in given if isinstance(x, Tensor) and x.numel() > 1]
    found = tensors or [call.sites[name]["value"]]
    return [x for x in found if at_hand(x) and not x.requires_grad]


@torch.no_grad()
def of_other_shape(before: BoundModel, call: BoundModel, leave_out: bool) -> list[str]:
    """Refuse a call at which q would be the sites with another prior than in the call ``before``.

    A ``GaussianProcess`` knows its inputs, and follows to others; of no other prior that is made of
    the model's arguments can be told which of its entries saw which datum.

    Returns:
        With ``leave_out``, and a process to be predicted, the names of sites that have another shape
        now; otherwise these are refused too.

    Raises:
        ValueError: with the name of the latent site.
    """
    first, now = _blocks(before, call)
    fixed = {n: fn for n, fn in first.items() if not isinstance(fn, GaussianProcess)}
    others = [name for name, fn in fixed.items() if now[name].shape() != fn.shape()]
    if others and not (leave_out and len(fixed) < len(now)):
        name = others[0]
        raise ValueError(
            f"AutoSites: {name!r} has the shape {tuple(now[name].shape())} with these arguments, "
            f"and {tuple(fixed[name].shape())} with those of the last step, so it cannot be "
            f"predicted. Give it a GaussianProcess, or make it a part of the likelihood."
        )
    for name in other_priors({n: fixed[n] for n in fixed if n not in others}, now):
        raise ValueError(
            f"AutoSites: the prior of {name!r} is another one with these arguments than with "
            f"those of the last step. Let the times or inputs to predict at be among those of "
            f"the steps, with NaN for their data, or give the site a GaussianProcess."
        )
    return others


def _blocks(before: BoundModel, now: BoundModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """The Gaussians of the block at two calls, given others of it that are not 0.

    At 0 the prior of a site given another one, such as Normal(X @ w, 1), is the same for all X.
    """
    if any(isinstance(fn, GaussianProcess) for fn in now.block.values()):
        return before.block, now.block  # whose noise has another length with other inputs
    first, second = (c.runner(c.probe, look_at=c.plan.block_places).own for c in (before, now))
    return first, second
