"""The log likelihood of an observed site, a number for each datum."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from ..runtime.density import Site

__all__ = [
    "aligned",
    "data_shape",
    "data_terms",
    "minibatch_scale",
    "missing",
    "own_scale",
    "unwrapped",
]


def unwrapped(site: Site) -> Any:
    """The distribution of an observed site without ``to_event``, so that its entries stand alone."""
    fn = site["fn"]
    while isinstance(fn, dist.Independent):
        fn = fn.base_dist
    return fn


def data_shape(site: Site) -> torch.Size:
    """The shape of :func:`data_terms`."""
    return torch.Size(unwrapped(site).batch_shape)


def missing(site: Site) -> Tensor | None:
    """Which data are NaN: bool, ``data_shape``; ``None`` for whole numbers, of which none can be."""
    value = site["value"]
    if not value.is_floating_point():
        return None
    absent = value.isnan()
    events = len(unwrapped(site).event_shape)
    return absent.flatten(absent.dim() - events).any(-1) if events else absent


def _filled(value: Tensor, absent: Tensor, fn: Any) -> Tensor:
    """A datum that is there in the place of each that is missing: gradients at NaN would be NaN."""
    events = len(fn.event_shape)
    flat = value.reshape((-1, *fn.event_shape))
    there = (~absent).reshape(-1).to(torch.uint8).argmax()
    where = absent.reshape(absent.shape + (1,) * events)
    stand_in = flat.index_select(0, there.reshape(1))[0].nan_to_num(0.5)  # where none is there
    return torch.where(where, stand_in, value)


def own_scale(site: Site) -> Any:
    """The scale of a site, a number or a tensor, without that of a minibatch's plate."""
    return site["scale"] / minibatch_scale(site)


def minibatch_scale(site: Site) -> float:
    """How many data one of the site stands for, by its subsampled plates."""
    scale = 1.0
    for frame in site["cond_indep_stack"]:
        if frame.full_size is not None and frame.full_size != frame.size:
            scale *= frame.full_size / frame.size
    return scale


def data_terms(site: Site, scaled: bool = True) -> Tensor:
    """log p of each datum, ``data_shape``, in nats: with masks, without the scale of a minibatch.

    A scale that is not that of a subsampled plate stays, unless not ``scaled``: it makes a datum count
    more, or less.  A datum that is NaN is missing, and its term 0.
    """
    fn = unwrapped(site)
    value, absent = site["value"], missing(site)
    if absent is not None and absent.numel():
        value = _filled(value, absent, fn)
    terms = fn.log_prob(value)
    if absent is not None:
        terms = torch.where(absent, torch.zeros_like(terms), terms)
    wrapped = site["fn"].batch_shape
    weight, mask = own_scale(site) if scaled else 1.0, site["mask"]
    if isinstance(weight, Tensor) or weight != 1.0:
        terms = terms * aligned(weight, wrapped, terms)
    if mask is False:
        return torch.zeros_like(terms)
    if isinstance(mask, Tensor):
        terms = torch.where(aligned(mask, wrapped, terms), terms, torch.zeros_like(terms))
    return terms


def aligned(x: Any, batch: torch.Size, terms: Tensor) -> Any:
    """``x``, which broadcasts against the site's batch, made to broadcast against its entries."""
    if not isinstance(x, Tensor) or x.dim() == 0:
        return x
    return x.reshape(x.shape + (1,) * (terms.dim() - len(batch)))
