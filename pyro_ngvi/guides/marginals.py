"""q of single sites: their place in the vector, their factor of q, their quantiles."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pyro
import torch
from pyro.distributions import Delta, Distribution
from torch import Tensor
from torch.distributions import biject_to
from torch.distributions.kl import register_kl
from torch.distributions.transforms import IndependentTransform

from ..families import MeanFieldNormal, ProductFamily
from ..families.base import Family, Tensors
from ..families.vectors import sample_quantiles
from ..linalg.host import host_bool

#: numbers that are drawn at most, until there are 1,024 draws
MOST = 2**26


class SiteValue(Delta):
    """The value of a site within the flat vector, with its share of log q, a log-Jacobian."""


def sample_value(node: Any, plates: Mapping[str, Any], value: Tensor, log_q: Any) -> Tensor:
    """Sample the site that a prototype has as ``node``, in its plates."""
    with ExitStack() as stack:
        for frame in node["cond_indep_stack"]:
            stack.enter_context(plates[frame.name])
        return pyro.sample(node["name"], SiteValue(value, log_q, node["fn"].event_dim))


@register_kl(SiteValue, Distribution)
def _kl_of_value(p: SiteValue, q: Any) -> Tensor:
    # Pyro's own for Delta leaves out log_density, the Jacobian, under TraceMeanField_ELBO
    return p.log_density - q.log_prob(p.v)


def place(shapes: Mapping[str, torch.Size], name: str) -> slice:
    """Where a site lies in the flat vector of sites of these unconstrained shapes."""
    before = list(shapes)[: list(shapes).index(name)]
    start = sum(shapes[other].numel() for other in before)
    return slice(start, start + shapes[name].numel())


def factor(
    family: Family, params: Tensors, own: slice, alone: bool = False
) -> tuple[Family, Tensors] | None:
    """The factor of q over the entries ``own``, or all (``alone``), of its vector, if there is one."""
    if isinstance(family, MeanFieldNormal):
        return family, {name: value[own] for name, value in params.items()}
    if not isinstance(family, ProductFamily):
        return (family, params) if alone else None
    start = 0
    for index, (part, length) in enumerate(family.segments):
        if slice(start, start + length) == own:
            if sum(owner == part for owner, _ in family.segments) == 1:
                return family.parts[part], family.own(part, params)
            if isinstance(family.parts[part], MeanFieldNormal):
                return family.parts[part], family.segment(params, index)
        start += length
    return None


def levels_like(quantiles: Any, like: Tensor) -> Tensor:
    """The levels that a user asks for as a tensor of the dtype and device of ``like``."""
    levels = torch.as_tensor(quantiles, dtype=like.dtype, device=like.device)
    if host_bool(((levels >= 0.0) & (levels <= 1.0)).all()) is False:
        low, high = levels.min(), levels.max()
        raise ValueError(
            f"quantiles are at levels from 0 to 1, such as [0.05, 0.95], not from {low:g} to {high:g}."
        )
    return levels


def of_monotone(at: Tensor, mirrored: Tensor, levels: Tensor) -> Tensor:
    """Quantiles of x = T(z), T monotone in each entry: from T(z_p) and T(z_(1-p)) at levels p (L,)."""
    above = levels.reshape(-1, *[1] * (at.dim() - 1)) > 0.5
    return torch.where(above, torch.maximum(at, mirrored), torch.minimum(at, mirrored))


def site_quantiles(guide: Any, params: Tensors, quantiles: Any) -> dict[str, Tensor]:
    """Quantiles (L, *shape) of each latent site of ``guide`` at L levels in (0, 1), entry by entry.

    Those that the guide knows; else, where the transform T to the support is monotone, the smaller of
    T(z_p) and T(z_(1-p)) for p <= 1/2, the larger above; else of 16,384 draws, 1,024 at least.
    """
    family, shapes = guide.family, guide._unconstrained_shapes
    like = next(iter(params.values()))
    levels = levels_like(quantiles, like)
    flat = levels.reshape(-1)
    at, mirrored, drawn = family.icdf(params, flat), family.icdf(params, 1.0 - flat), None
    n = max(1024, min(16384, MOST // max(1, guide.latent_dim)))
    result: dict[str, Tensor] = {}
    for name, site in guide.prototype_trace.iter_stochastic_nodes():
        value, own, shape = guide._exact_quantiles(name, flat), place(shapes, name), shapes[name]
        transform: Any = biject_to(site["fn"].support)
        if value is None and entry_by_entry(transform):
            ends = [transform(z[:, own].reshape(len(z), *shape)) for z in (at, mirrored)]
            value = of_monotone(ends[0], ends[1], flat)
        elif value is None:
            drawn = family.fixed_draws(params, n) if drawn is None else drawn
            value = sample_quantiles(transform(drawn[:, own].reshape(len(drawn), *shape)), flat)
        result[name] = value.reshape(levels.shape + value.shape[1:])
    return result


def entry_by_entry(transform: Any) -> bool:
    """Whether each entry of the result depends on the same entry of the argument alone."""
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    return transform.domain.event_dim == 0 and transform.codomain.event_dim == 0
