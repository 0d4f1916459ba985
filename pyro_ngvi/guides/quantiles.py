"""Quantiles of constrained sites from those of the unconstrained vector.

A transform T that works element by element is monotone.  Where it increases, the p-quantile of
x = T(z) is T(z_p); where it decreases (support x < a), it is T(z_(1-p)).  Either way

    x_p = min(T(z_p), T(z_(1-p)))  for p <= 1/2,    and the max of the two for p > 1/2.

Not for transforms of whole vectors (a simplex, a correlation matrix), whose entries have no order of
their own: there x_p is T(z_p), the image of the coordinates' quantiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Transform, biject_to
from torch.distributions.transforms import IndependentTransform

__all__ = ["site_quantiles"]


def site_quantiles(guide: Any, quantiles: Any) -> dict[str, Tensor]:
    """Quantiles (n, *shape) of each latent site of ``guide`` at n levels in (0, 1)."""
    params = guide._current()
    like = next(iter(params.values()))
    levels = torch.as_tensor(quantiles, dtype=like.dtype, device=like.device)
    at, mirrored = (guide.family.icdf(params, p) for p in (levels, 1.0 - levels))
    result: dict[str, list[Tensor]] = {}
    for level, z, other in zip(levels, at, mirrored, strict=True):
        pairs = zip(guide._unpack_latent(z), guide._unpack_latent(other), strict=True)
        for (site, own), (_, opposite) in pairs:
            transform: Any = biject_to(site["fn"].support)
            value = transform(own)
            if _elementwise(transform):
                ends = value, transform(opposite)
                value = torch.where(level > 0.5, torch.maximum(*ends), torch.minimum(*ends))
            result.setdefault(site["name"], []).append(value)
    return {name: torch.stack(values) for name, values in result.items()}


def _elementwise(transform: Transform) -> bool:
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    return transform.domain.event_dim == 0 and transform.codomain.event_dim == 0
