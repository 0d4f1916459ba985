"""Gaussian latent sites as affine maps of white noise.

A block of latent sites z_1, z_2, ... that are jointly Gaussian a priori is

    z_i = loc_i(z_1, ..., z_(i-1)) + R_i eps_i,        eps ~ N(0, I),

with R_i free of the other sites and loc_i affine in them.  So z, and everything that is affine in z,
is affine in the flat vector eps (D,): a posterior over eps is one over z, and the prior is always
N(0, I), whatever the scales and correlations of the model.
"""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.util import sum_rightmost
from torch import Tensor

from .._particles import Site

__all__ = ["colour", "gaussian_of", "log_det_root", "noise_size"]


def gaussian_of(site: Site) -> Any:
    """The Gaussian of a latent site, without ``to_event``; refuses any other distribution."""
    fn = site["fn"]
    while isinstance(fn, dist.Independent):
        fn = fn.base_dist
    if not (isinstance(fn, dist.Normal | dist.MultivariateNormal) or hasattr(fn, "from_noise")):
        raise ValueError(
            f"AutoSites: the latent site {site['name']!r} is {type(fn).__name__}, and the latent "
            f"block must be jointly Gaussian (Normal, MultivariateNormal, GaussianProcess, "
            f"GaussianStateSpace). Give this site to another guide: "
            f"guide = AutoGuideList(model); "
            f"guide.append(ngvi.AutoSites(poutine.block(model, hide=[{site['name']!r}]))); "
            f"guide.append(ngvi.AutoMeanFieldNormal(poutine.block(model, "
            f"expose=[{site['name']!r}])))."
        )
    _refuse_weights(site)
    return fn


def _refuse_weights(site: Site) -> None:
    scale, mask = site["scale"], site["mask"]
    plain = not isinstance(scale, Tensor) and scale == 1.0
    if not plain or not (mask is None or mask is True):
        raise ValueError(
            f"AutoSites: the prior of {site['name']!r} stands under a scale or a mask (a subsampled "
            f"plate, poutine.scale, poutine.mask), and would not be a Gaussian of its own. Take "
            f"the site out of it."
        )


def noise_size(fn: Any) -> int:
    """How many entries of white noise make one draw."""
    return fn.shape().numel()


def colour(fn: Any, noise: Tensor) -> Tensor:
    """loc + R noise in the shape of a draw, for the flat ``noise`` (noise_size,)."""
    shaped = noise.reshape(fn.shape())
    if isinstance(fn, dist.Normal):
        return fn.loc + fn.scale * shaped
    if hasattr(fn, "from_noise"):
        return fn.from_noise(shaped)
    return fn.loc + (fn.scale_tril @ shaped.unsqueeze(-1)).squeeze(-1)


def log_det_root(fn: Any, event_dim: int) -> Tensor:
    """log |det R|, summed over the last ``event_dim`` dimensions of a draw, in nats."""
    if isinstance(fn, dist.Normal):
        each, summed = fn.scale.log().expand(fn.shape()), event_dim
    elif hasattr(fn, "log_det_root"):
        each, summed = fn.log_det_root(), event_dim - len(fn.event_shape)
    else:
        diagonal = torch.diagonal(fn.scale_tril, dim1=-2, dim2=-1)
        each, summed = diagonal.log().sum(-1).expand(fn.batch_shape), event_dim - 1
    total: Any = sum_rightmost(each, summed)
    return total
