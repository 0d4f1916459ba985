"""The sites of an AutoSites guide as its user sees them, and which data a call means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..linalg.products import matvec
from .structure import Group, ModelStructure

__all__ = ["Indices", "SiteView", "SiteViews", "checked"]

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


class SiteViews:
    """Mixed into :class:`~pyro_ngvi.AutoSites`, whose attributes these are."""

    plan: ModelStructure | None
    algebra: Any
    curvature: Any
    fresh: bool
    inducing: Tensor | None

    #: how often data were changed; an optimizer compares no two sweeps of different editions
    edition: int = 0
    _rest: dict[str, Tensor]
    _last: tuple[Any, Any] | None
    _stale: bool

    def sites(self) -> dict[str, SiteView]:
        """The sites by group, as copies; a group has the name of its first observed site."""
        views = {}
        for group in self._plan().groups:
            linear, precision = (p.detach().clone() for p in self._tensors(group))
            views[group.name] = SiteView(linear, precision, _peak(linear, precision))
        return views

    def _plan(self) -> ModelStructure:
        guide: Any = self
        guide._require_setup()
        assert self.plan is not None
        return self.plan

    def _tensors(self, group: Group) -> tuple[nn.Parameter, nn.Parameter]:
        guide: Any = self
        own = guide.natural_params()
        return own[f"linear_{group.name}"], own[f"precision_{group.name}"]

    def _group(self, what: str, name: str | None) -> Group:
        groups = {g.name: g for g in self._plan().groups}
        names = ", ".join(map(repr, groups))
        if name is None and len(groups) > 1:
            raise ValueError(f"AutoSites.{what}: name a group of data, one of {names}.")
        if name is not None and name not in groups:
            raise ValueError(f"AutoSites.{what}: there is no group {name!r}; there are {names}.")
        return groups[next(iter(groups)) if name is None else name]


def _peak(linear: Tensor, precision: Tensor) -> Tensor:
    """Lambda^-1 nu (N, k), NaN where Lambda is singular to working precision."""
    values, vectors = torch.linalg.eigh(precision)
    size = values.abs()
    least = precision.shape[-1] * torch.finfo(precision.dtype).eps * size.amax(-1)
    exists = (size.amin(-1) > least).unsqueeze(-1)
    along = matvec(vectors.mT, linear)
    peak = matvec(vectors, along / values)
    return torch.where(exists, peak, torch.nan)


def checked(what: str, indices: Indices, group: Group) -> Tensor:
    """Numbers of data as a tensor (n,), each there and once."""
    size, of = group.size, f"{group.name!r} has {group.size} data"
    index = torch.as_tensor(indices).detach()
    if index.dtype == torch.bool:
        if index.shape != (size,):
            raise ValueError(
                f"AutoSites.{what}: {of}, and the mask has the shape {tuple(index.shape)} instead "
                f"of ({size},)."
            )
        index = index.nonzero().squeeze(-1)
    if index.numel() == 0:
        index = index.long()
    if index.dim() > 1 or index.is_floating_point() or index.is_complex():
        raise ValueError(
            f"AutoSites.{what} takes whole numbers of data in one dimension, or a mask; got a tensor "
            f"of shape {tuple(index.shape)} and {index.dtype}."
        )
    index = index.reshape(-1).long()
    wrong = index[(index < 0) | (index >= size)]
    if len(wrong):
        raise ValueError(
            f"AutoSites.{what}: {of}, numbered from 0, and there is no number {int(wrong[0])}."
        )
    numbers, counts = index.unique(return_counts=True)
    if len(numbers) < len(index):
        twice = int(numbers[counts > 1][0])
        raise ValueError(f"AutoSites.{what}: number {twice} comes more than once.")
    return index
