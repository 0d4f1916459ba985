"""What an export warns of: likelihoods that ArviZ would misread, data that cannot be drawn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..runtime.density import Sites, site_kind
from ..runtime.run import look
from .draws import SampleObserved, sites_of_kind

__all__ = ["can_be_drawn", "warn_of_factors", "warn_of_scales", "with_likelihood"]


def warn_of_scales(sites: Sites, observed: Iterable[str]) -> None:
    """ArviZ takes for granted that the posterior holds each likelihood once."""
    for name in observed:
        if bool((torch.as_tensor(sites[name]["scale"]) != 1.0).any()):
            warnings.warn(
                f"The observed site {name!r} stands under poutine.scale, so the posterior holds p^c, "
                f"and log_likelihood is log p. az.loo and waic weigh draws by 1 / p and are wrong "
                f"here; AutoSites.loo() is not. log_likelihood=False leaves the group out.",
                UserWarning,
                stacklevel=3,
            )


def warn_of_factors(sites: Sites, observed: Iterable[str]) -> None:
    """A factor in the plate of data may be a part of their likelihood, as of censored data."""
    plates = {frame.name for name in observed for frame in sites[name]["cond_indep_stack"]}
    for name, site in sites.items():
        if site_kind(site) == "factor" and plates & {f.name for f in site["cond_indep_stack"]}:
            warnings.warn(
                f"The pyro.factor {name!r} lies in a plate with data, and log_likelihood does not have "
                f"it. Where it stands for a likelihood (of censored data, say) az.loo and waic are "
                f"wrong: write it as an observed site.",
                UserWarning,
                stacklevel=3,
            )


def with_likelihood(in_sum: Sites, prototype: Sites) -> list[str]:
    """The observed sites with a likelihood by example: all but the sums without a plate."""
    data = sites_of_kind(in_sum, "observed")
    whole = [n for n in data if n not in prototype and not in_sum[n]["cond_indep_stack"]]
    if whole:
        warnings.warn(
            f"The data {', '.join(map(repr, whole))} share an enumerated variable and have no "
            f"likelihood by example: log_likelihood leaves them out. A plate of independent series "
            f"around them gives it their likelihoods.",
            UserWarning,
            stacklevel=3,
        )
    return [name for name in data if name not in whole]


def can_be_drawn(
    model: Callable[[], Any], observed: Collection[str], at: Mapping[str, Tensor]
) -> bool:
    """Whether the data can be drawn anew; else a warning says which groups that leaves out."""
    try:
        look(SampleObserved(observed)(model), at)
    except NotImplementedError as error:
        warnings.warn(
            f"An observed site cannot be drawn ({error or 'it has no sample method'}): the predictive "
            f"groups are left out. Give its distribution a sample method, or pass "
            f"posterior_predictive=False.",
            UserWarning,
            stacklevel=3,
        )
        return False
    return True
