r"""The sites of the data of an AutoSites guide: as a user sees them, and as data come, go or change.

Every datum has a site of its own, so taking data G away divides these out:

    q without G   propto   q / prod_(n in G) t_n   =   p prod_(n not in G) t_n,

exact with a Gaussian likelihood.  New data begin with a site of 0.  Not for models whose latent block
has an entry for each datum (a Gaussian process at the data's inputs): without the datum that is another
block, which the next call refuses.  ``reset`` works there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..linalg.products import matvec
from .structure import Group, ModelStructure

Indices = int | Sequence[int] | Tensor


@dataclass(frozen=True)
class SiteView:
    """The sites of a group: exp(nu' f - f' Lambda f / 2), one a datum.

    ``linear`` is nu (N, k), ``precision`` Lambda (N, k, k).  ``mean`` (N, k) is Lambda^-1 nu: the site
    reads as an observation of f_n with that value and covariance Lambda^-1; NaN where there is none.
    """

    linear: Tensor
    precision: Tensor
    mean: Tensor

    @classmethod
    def of(cls, linear: Tensor, precision: Tensor) -> SiteView:
        linear, precision = linear.detach().clone(), precision.detach().clone()
        values, vectors = torch.linalg.eigh(precision)
        size = values.abs()
        least = precision.shape[-1] * torch.finfo(precision.dtype).eps * size.amax(-1)
        exists = (size.amin(-1) > least).unsqueeze(-1)  # not singular to working precision
        mean = matvec(vectors, matvec(vectors.mT, linear) / values)
        return cls(linear, precision, torch.where(exists, mean, torch.nan))


def group_of(plan: ModelStructure, name: str | None, table: bool = True) -> Group:
    """The group of that name, or the only one; ``table``: whether its data may have two dimensions."""
    groups = {g.name: g for g in plan.groups}
    if name is None and len(groups) == 1:
        (name,) = groups
    if name is None or name not in groups:
        what = "name a group of data" if name is None else f"there is no group {name!r}"
        raise ValueError(f"AutoSites: {what}, one of {', '.join(map(repr, groups))}.")
    group = groups[name]
    if len(group.batch) != 1 and not table:
        raise ValueError(
            f"AutoSites: the data of {name!r} have the shape {tuple(group.batch)}, and only data along "
            f"one dimension can come or go. Set data to NaN instead (they are then missing), and "
            f"guide.reset(indices) their sites."
        )
    return group


def numbers(indices: Indices | None, group: Group, device: torch.device) -> Tensor:
    """Numbers (n,) of data of a group, each once; ``indices`` as torch takes them, ``None`` for all."""
    every = torch.arange(group.size, device=device)
    if indices is None:
        return every
    index = torch.as_tensor(indices, device=device).detach()
    mask = index.dtype == torch.bool
    if not mask and (index.numel() == 0 or index.dtype == torch.uint8):
        index = index.long()  # to torch an empty list has fractions, and bytes are a mask
    wrong = index.shape != (group.size,) if mask else bool((index < 0).any())
    if wrong:
        raise ValueError(
            f"AutoSites: name data of {group.name!r} by numbers from 0 to {group.size - 1}, or by "
            f"a mask of shape ({group.size},)."
        )
    found = every[index].reshape(-1)
    if len(found.unique()) < len(found):
        raise ValueError(f"AutoSites: a number of {group.name!r} comes more than once.")
    return found
