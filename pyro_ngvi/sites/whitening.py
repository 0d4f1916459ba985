"""Gaussian latent sites as affine maps of white noise.

A block of latent sites z_1, z_2, ...  that are jointly Gaussian a priori is

    z_i = loc_i(z_1, ..., z_(i-1)) + R_i eps_i,        eps ~ N(0, I),

with R_i free of the other sites and loc_i affine in them.  So z, and everything that is affine in z, is
affine in the flat vector eps (D,): a posterior over eps is one over z, and the prior is always N(0, I).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.util import sum_rightmost
from torch import Tensor

from ..distributions.gaussian_process import GaussianProcess
from ..linalg.host import fixed_normal
from ..runtime.density import Site


def gaussian_of(site: Site) -> Any:
    """The Gaussian of a latent site, without ``to_event``; refuses any other distribution."""
    fn, name = site["fn"], site["name"]
    while isinstance(fn, dist.Independent):
        fn = fn.base_dist
    if not (isinstance(fn, dist.Normal | dist.MultivariateNormal) or hasattr(fn, "from_noise")):
        raise ValueError(
            f"AutoSites: latent site {name!r} is {type(fn).__name__}, not Gaussian, or has no "
            f"data. Use AutoGuideList(model) of AutoSites(block(model, hide=[{name!r}])), "
            f"AutoMeanFieldNormal(block(model, expose=[{name!r}])), or scale * z in the likelihood."
        )
    if isinstance(fn, GaussianProcess) and fn.batch_shape:
        raise fn.in_plate(fn.batch_shape)
    return fn


def refuse_weights(site: Site) -> None:
    """Refuse a prior under a scale or a mask."""
    scale, mask = site["scale"], site["mask"]
    if isinstance(scale, Tensor) or scale != 1.0 or not (mask is None or mask is True):
        raise ValueError(
            f"AutoSites: the prior of {site['name']!r} stands under a scale or a mask (a "
            "subsampled plate, poutine.scale or poutine.mask): it would not be Gaussian. Take the "
            "site out; mask missing data in the observed site alone, or leave them NaN."
        )


def colour(fn: Any, noise: Tensor) -> Tensor:
    """loc + R noise in the shape of a draw, for as many entries of flat ``noise``."""
    shaped = noise.reshape(fn.shape())
    if isinstance(fn, dist.Normal):
        return fn.loc + fn.scale * shaped
    if hasattr(fn, "from_noise"):
        return fn.from_noise(shaped)
    # as a row: under vmap that is one product of matrices, and not many with a vector
    return fn.loc + (shaped.unsqueeze(-2) @ fn.scale_tril.mT).squeeze(-2)


def log_det_root(fn: Any, event_dim: int) -> Tensor:
    """log |det R|, summed over the last ``event_dim`` dimensions of a draw, in nats."""
    if isinstance(fn, dist.Normal):
        each, summed = fn.scale.log().expand(fn.shape()), event_dim
    else:
        summed = event_dim - len(fn.event_shape)
        if hasattr(fn, "log_det_root"):
            each = fn.log_det_root()
        else:
            diagonal = torch.diagonal(fn.scale_tril, dim1=-2, dim2=-1)
            each = diagonal.log().sum(-1).expand(fn.batch_shape)
    total: Any = sum_rightmost(each, summed)
    return total


def refuse_other_prior(block: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuse a block whose prior is another one at other values of the sites outside of it."""
    for name in other_priors(block, other):
        raise ValueError(
            f"AutoSites: the prior of {name!r} depends on a latent site outside of the block, such "
            f"as a length-scale that has a prior of its own. Make that one a parameter of the "
            f"model (pyro.param, PyroParam), which CVI(guide, others=...) learns."
        )


def other_priors(block: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The sites of two runs of a block whose priors are not the same."""
    marks = {name: (_mark(fn), _mark(other[name])) for name, fn in block.items()}
    return [name for name, (a, b) in marks.items() if a.shape != b.shape or not torch.equal(a, b)]


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
