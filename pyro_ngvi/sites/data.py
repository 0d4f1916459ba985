r"""The sites of the data of an AutoSites guide: as a user sees them, and as data come, go or change.

Every datum has a site of its own, so taking it away divides that site out:

    q without G   propto   q / prod_(n in G) t_n   =   p prod_(n not in G) t_n,

at once and without its likelihood: with a Gaussian likelihood this is the exact posterior without G,
with another one its approximation by the other sites as they are.  New data begin with a site of 0.

Not for models whose latent block has an entry for each datum (a Gaussian process at the data's inputs,
an effect of every datum): without the datum that is another block, which the next call refuses.
``reset`` works there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..linalg.products import matvec
from .algebra import Algebra
from .bound_model import BoundModel
from .site_guide import LastStep
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


@dataclass(frozen=True)
class SiteData:
    """The sites of a guide, by "linear_" and "precision_" of a group, with what they stand for.

    ``before`` is the model at the arguments of the last step, with the data of then.
    """

    plan: ModelStructure
    tensors: dict[str, nn.Parameter]
    algebra: Algebra
    last: LastStep
    before: BoundModel | None

    def of(self, group: Group) -> tuple[nn.Parameter, nn.Parameter]:
        return self.tensors[f"linear_{group.name}"], self.tensors[f"precision_{group.name}"]

    def views(self) -> dict[str, SiteView]:
        """The sites by group, as copies."""
        views = {}
        for group in self.plan.groups:
            linear, precision = (p.detach().clone() for p in self.of(group))
            views[group.name] = SiteView(linear, precision, _peak(linear, precision))
        return views

    def group(self, name: str | None) -> Group:
        """The group of that name, or the only one."""
        groups = {g.name: g for g in self.plan.groups}
        if name is None and len(groups) == 1:
            return self.plan.groups[0]
        if name is None or name not in groups:
            what = "name a group of data" if name is None else f"there is no group {name!r}"
            raise ValueError(f"AutoSites: {what}, one of {', '.join(map(repr, groups))}.")
        return groups[name]

    def numbers(self, indices: Indices, group: Group) -> Tensor:
        """Numbers (n,) of data of a group, each once; ``indices`` as torch takes them."""
        index = torch.as_tensor(indices, device=self.plan.device).detach()
        mask = index.dtype == torch.bool
        if not mask and (index.numel() == 0 or index.dtype == torch.uint8):
            index = index.long()  # to torch an empty list has fractions, and bytes are a mask
        wrong = index.shape != (group.size,) if mask else bool((index < 0).any())
        if wrong:
            raise ValueError(
                f"AutoSites: name data of {group.name!r} by numbers from 0 to {group.size - 1}, or by "
                f"a mask of shape ({group.size},)."
            )
        found = torch.arange(group.size, device=self.plan.device)[index].reshape(-1)
        if len(found.unique()) < len(found):
            raise ValueError(f"AutoSites: a number of {group.name!r} comes more than once.")
        return found

    def remove(self, indices: Indices, name: str | None) -> ModelStructure:
        """Delete the sites of these data of a group; the structure of what is left."""
        group = self.group(name)
        _refuse_table(group)
        index = self.numbers(indices, group)
        self._clear(group, index)
        keep = torch.ones(group.size, dtype=torch.bool, device=index.device)
        keep[index] = False
        return self._resized(group, keep.nonzero().squeeze(-1), 0)

    def add(self, count: int, name: str | None) -> ModelStructure:
        """Append ``count`` sites of 0 to those of a group; the structure of all."""
        group = self.group(name)
        _refuse_table(group)
        plan = self._resized(group, torch.arange(group.size, device=self.plan.device), count)
        self.algebra.make_room(plan)
        return plan

    def reset(self, indices: Indices | None, name: str | None) -> None:
        """Zero these sites; without indices all of a group, or without a group all."""
        if indices is None and name is None:
            for p in self.tensors.values():
                p.detach().zero_()
            self.algebra.reset()
        else:
            group = self.group(name)
            every = torch.arange(group.size, device=self.plan.device)
            self._clear(group, every if indices is None else self.numbers(indices, group))
        self.last.edited()

    @torch.no_grad()
    def _clear(self, group: Group, index: Tensor) -> None:
        """Zero sites, and the evidence made anew of all others: differences would lose digits."""
        if not any(bool(p[index].any()) for p in self.of(group)):
            return
        if self.before is None or not self.before.whole:
            raise RuntimeError(
                "AutoSites: the guide does not know what these data see of the latent block, as its "
                "last call had a minibatch, or it is an unpickled copy without one. Call "
                "guide.refresh(*args) with all data before."
            )
        view = self.algebra.view(self.before)
        for p in self.of(group):
            p[index] = 0.0
        full = {}
        for g in self.plan.groups:
            size, numbers = self.before.plan.group(g.name).size, self._numbers_before(g)
            there = (numbers >= 0).nonzero().squeeze(-1)
            full[g.name] = tuple(
                p.new_zeros(size, *p.shape[1:]).index_copy(0, numbers[there], p[there])
                for p in self.of(g)
            )
        self.algebra.recollect(view, full)
        self.last.stale = False

    def _numbers_before(self, group: Group) -> Tensor:
        """The number (N,) at the last step of each datum of now, -1 for a new one."""
        found = self.last.numbers.get(group.name)
        return torch.arange(group.size, device=self.plan.device) if found is None else found

    def _resized(self, group: Group, kept: Tensor, more: int) -> ModelStructure:
        """Keep the sites of these numbers, and append ``more`` of 0."""
        numbers = self._numbers_before(group)
        numbers = torch.cat([numbers[kept], numbers.new_full((more,), -1)])
        for p in self.of(group):
            # the parameter stays the same object, so Pyro's store and SVI keep it under its name
            p.data, p.grad = torch.cat([p.data[kept], p.data.new_zeros(more, *p.shape[1:])]), None
        self.last.plan = self.last.plan or self.plan
        self.last.numbers[group.name] = numbers
        self.last.edited()
        return self.plan.resized(group, len(numbers))


def _refuse_table(group: Group) -> None:
    if len(group.batch) != 1:
        raise ValueError(
            f"AutoSites: the data of {group.name!r} have the shape {tuple(group.batch)}, and only data "
            f"along one dimension can come or go. Set data to NaN instead (they are then missing), and "
            f"guide.reset(indices) their sites."
        )


def _peak(linear: Tensor, precision: Tensor) -> Tensor:
    """Lambda^-1 nu (N, k), NaN where Lambda is singular to working precision."""
    values, vectors = torch.linalg.eigh(precision)
    size = values.abs()
    least = precision.shape[-1] * torch.finfo(precision.dtype).eps * size.amax(-1)
    exists = (size.amin(-1) > least).unsqueeze(-1)
    along = matvec(vectors.mT, linear)
    return torch.where(exists, matvec(vectors, along / values), torch.nan)
