"""What counts as a datum: an entry of the log probability of an observed site in a plate."""

from __future__ import annotations

import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..runtime.density import Site, Sites, site_kind, site_log_prob, sum_log_prob
from ..runtime.pyro_adapter import masks_of

__all__ = ["data_of", "is_data", "log_prob_of_rest"]


def data_of(sites: Sites) -> tuple[Tensor, Tensor]:
    """Log probability of each datum (N,), without scale, and its scale times mask (N,)."""
    log_probs, weights = [], []
    for site in filter(is_data, sites.values()):
        plain, _ = site_log_prob(site)
        log_probs.append(scale_and_mask(plain, 1.0, site["mask"]).reshape(-1))
        weights.append(scale_and_mask(_shown(site, plain), site["scale"], None).reshape(-1))
    if not log_probs:
        raise ValueError(
            "Products of the gradients of single data need to know what a datum is, and no observed "
            'site of the model lies in a plate. Put it in one (with pyro.plate("data", N): '
            'pyro.sample("y", ..., obs=y)), or use curvature="hessian".'
        )
    return torch.cat(log_probs), torch.cat(weights)


def _shown(site: Site, log_prob: Tensor) -> Tensor:
    """1 for the data that the site's masks leave, 0 for others."""
    shown = torch.ones_like(log_prob)
    for mask, left_out in masks_of(site):
        within = site["fn"].event_dim - left_out
        if within and isinstance(mask, Tensor):
            # of an event some parts may be hidden: the datum is there while one of them is
            mask = mask.expand(log_prob.shape + site["fn"].event_shape[:within])
            mask = mask.flatten(-within).any(-1)
        shown = shown * mask
    return shown


def log_prob_of_rest(sites: Sites) -> Tensor:
    """The log probability of all else."""
    return sum_log_prob({name: site for name, site in sites.items() if not is_data(site)})


def is_data(site: Site) -> bool:
    """Whether a site is observed in a plate, so that its entries are data."""
    if site_is_subsample(site) or site_kind(site) != "observed":
        return False
    return any(f.vectorized for f in site["cond_indep_stack"])
