"""The parameters of the sites by group of data, as a user sees them, and which data he means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..linalg.products import matvec
from .structure import Group

__all__ = ["Indices", "SiteParameters", "SiteView", "checked"]

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


@dataclass(frozen=True)
class SiteParameters:
    """The parameters nu (N, k) and Lambda (N, k, k) of every group, by "linear_" and "precision_"."""

    groups: tuple[Group, ...]
    tensors: dict[str, nn.Parameter]

    def of(self, group: Group) -> tuple[nn.Parameter, nn.Parameter]:
        """nu and Lambda of a group."""
        return self.tensors[f"linear_{group.name}"], self.tensors[f"precision_{group.name}"]

    def views(self) -> dict[str, SiteView]:
        """The sites by group, as copies."""
        views = {}
        for group in self.groups:
            linear, precision = (p.detach().clone() for p in self.of(group))
            views[group.name] = SiteView(linear, precision, _peak(linear, precision))
        return views

    def group(self, what: str, name: str | None) -> Group:
        """The group of that name, or the only one, for the method ``what`` of the guide."""
        groups = {g.name: g for g in self.groups}
        names = ", ".join(map(repr, groups))
        if name is None and len(groups) > 1:
            raise ValueError(f"AutoSites.{what}: name a group of data, one of {names}.")
        if name is not None and name not in groups:
            raise ValueError(f"AutoSites.{what}: there is no group {name!r}; there are {names}.")
        return groups[next(iter(groups)) if name is None else name]

    def zero(self) -> None:
        """Set all of them to 0."""
        for p in self.tensors.values():
            p.detach().zero_()


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
