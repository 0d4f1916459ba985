"""The first run of a pair of model and guide, without ``vmap`` and with every check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor

from ..guides.base import AutoFamily, find_blocks
from ..linalg.host import own_random_state
from ..runtime import checks
from ..runtime.density import site_kind
from ..runtime.summed_out import summed_out
from ..runtime.support import LatentSupports, LaterData, bounds
from ..runtime.vmap import Minibatches, is_auxiliary, is_latent, run_both, run_plainly

#: the model without its enumerated sites; sites of the guide that the model does not have; the
#: supports of the latent sites, where they might move; the check of other data; observed values
Found = tuple[Any, set[str], LatentSupports | None, LaterData, dict[str, Tensor]]


def first_run(
    model: Callable[..., Any], guide: Any, args: Any, kwargs: Any, minibatches: Minibatches
) -> Found:
    """Run both once, which creates their parameters and leaves the random state alone."""
    if isinstance(poutine.unwrap(guide), Messenger):
        raise ValueError(
            f"The guide {type(guide).__name__} is an effect handler around its model, which "
            f"BatchedELBO cannot run on its own; use pyro.infer.Trace_ELBO."
        )
    with own_random_state(), poutine.block(), torch.no_grad():
        of_guide, of_model = run_both(model, guide, args, kwargs, minibatches)
        guide_sites, drawn, sites = of_guide.sites, of_model.values, of_model.sites
        checks.check_guide(guide_sites)
        plain = summed_out(model, sites, drawn)
        if plain is not model:
            sites = run_plainly(plain, drawn, args, kwargs, minibatches)
        helpers = {name for name, site in guide_sites.items() if is_auxiliary(site)}
        own = {name for name, site in guide_sites.items() if not site["is_observed"]}
        checks.check_guide_of_this_model(own - helpers, sites)
        supports = LatentSupports(guide)
        supports.check(sites)
        for _, block in find_blocks(guide):
            checks.check_replaced_priors(block.replaced_priors, guide_sites, sites)
        checks.check_model(sites, drawn, drawn)
        checks.check_values(guide_sites)
        checks.check_values(of_model.sites)
    latent = filter(is_latent, sites.values())
    limits = [v for site in latent for v in bounds(getattr(site["fn"], "support", None))]
    moving = any(isinstance(v, Tensor) for v in limits)
    data = {name: site["value"] for name, site in sites.items() if site_kind(site) == "observed"}
    data = {name: value for name, value in data.items() if isinstance(value, Tensor)}
    return plain, helpers, supports if moving else None, LaterData(sites), data


#: by the form of curvature that a family takes, the kinds that do not have it
_OF_OTHER_FORM = {"dense": ["squared_gradient"], "low_rank": ["squared_gradient", "hessian"]}

#: by kind, the guides to take
_GUIDES = {
    "hessian": "AutoMeanFieldNormal or AutoFullRankNormal",
    "squared_gradient": "AutoMeanFieldNormal",
    "kronecker": "AutoMatrixNormal with pyro_ngvi.optim.NoisyKFAC",
}


def check_takes_curvature(guide: Any, kind: str, joint: bool) -> None:
    """Refuse a guide that has no use for a curvature."""
    ours = isinstance(guide, AutoFamily) and joint
    form = guide.family.curvature_form if ours else None
    if form is None or "kronecker" in (form, kind):
        takes = ours and (form == kind or kind == "scores")
    else:
        takes = kind not in _OF_OTHER_FORM.get(form, ())
    if not takes:
        guides = _GUIDES.get(kind, "AutoMeanFieldNormal, AutoFullRankNormal or AutoFactorPrecision")
        raise ValueError(
            f"{type(guide).__name__} has no use for BatchedELBO(curvature={kind!r}). Take {guides} "
            f"itself (not within an AutoGuideList), or leave curvature out."
        )
    if kind == "scores":
        own = {id(p) for p in guide.natural_params().values()}
        rest = [k for k, p in guide.named_parameters() if p.requires_grad and id(p) not in own]
        if rest:
            raise ValueError(
                f'BatchedELBO(curvature="scores") would not train {", ".join(rest)} of '
                f"{type(guide).__name__}, which are not its family's parameters. Leave curvature out "
                f"and take pyro_ngvi.NGVB or pyro_ngvi.IFVB."
            )
