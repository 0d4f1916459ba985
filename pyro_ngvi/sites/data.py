r"""Data of an AutoSites guide that come, go or change.

Every datum has a site of its own, so taking it away divides that site out:

    q without G   propto   q / prod_(n in G) t_n   =   p prod_(n not in G) t_n,

at once and without its likelihood: with a Gaussian likelihood this is the exact posterior without G,
with another one its approximation by the other sites as they are.  New data begin with a site of 0.

Not for models whose latent block has an entry for each datum (a Gaussian process at the data's inputs,
an effect of every datum): without the datum that is another block.  ``reset`` works there too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..linalg.host import host_bool
from .algebra import Algebra, Marginals, View, apart
from .bound_model import BoundModel
from .last_step import Changes, LastStep
from .site_parameters import SiteParameters
from .structure import Group, ModelStructure

__all__ = ["SiteData", "Snapshot", "take_snapshot"]


@dataclass(frozen=True)
class SiteData:
    """The sites of a guide, with what they stand for: to change both at once.

    ``before`` is the model at the arguments of the last step, with the data of then.
    """

    plan: ModelStructure
    sites: SiteParameters
    algebra: Algebra
    last: LastStep
    before: BoundModel | None

    @property
    def changes(self) -> Changes:
        """What became of the data since the last step."""
        return self.last.changes or Changes.none(self.plan)

    def group_to_resize(self, what: str, name: str | None) -> Group:
        """A group of which data can come or go; refuses any other."""
        group = self.sites.group(what, name)
        if len(group.batch) != 1:
            raise ValueError(
                f"AutoSites.{what}: the data of {group.name!r} have the shape {tuple(group.batch)}, "
                f"and only data along one dimension can come or go. Set data to NaN instead (they are "
                f"then missing), and guide.reset(indices) their sites."
            )
        if self.before is not None and self.algebra.has_latent_at_data:
            _refuse_latent_each(what, group, self.changes.plan, self.before)
        return group

    def remove(self, group: Group, index: Tensor) -> ModelStructure:
        """Delete the sites of these data of a group; the structure of what is left."""
        if len(index) == group.size:
            raise ValueError(
                f"AutoSites.remove: these are all {group.size} data of {group.name!r}, and a group "
                f"without data has no place in the guide. guide.reset() forgets what they said."
            )
        self.clear("remove", group, index)
        keep = torch.ones(group.size, dtype=torch.bool, device=index.device)
        keep[index] = False
        kept = keep.nonzero().squeeze(-1)
        numbers = self.changes.numbers[group.name].index_select(0, kept)
        return self._resized(group, [p.detach()[kept] for p in self.sites.of(group)], numbers)

    def add(self, group: Group, count: int) -> ModelStructure:
        """Append ``count`` sites of 0 to those of a group; the structure of all."""
        tensors = [p.detach() for p in self.sites.of(group)]
        numbers = self.changes.numbers[group.name]
        new = numbers.new_full((count,), -1)
        grown = [torch.cat([t, t.new_zeros(count, *t.shape[1:])]) for t in tensors]
        plan = self._resized(group, grown, torch.cat([numbers, new]))
        self.algebra.make_room(plan)
        return plan

    @torch.no_grad()
    def clear(self, what: str, group: Group, index: Tensor) -> None:
        """Zero sites, and the evidence made anew of all others: differences would lose digits."""
        tensors = self.sites.of(group)
        if not any(bool(p[index].any()) for p in tensors):
            return
        if self.before is None or not self.before.whole:
            raise RuntimeError(
                f"AutoSites.{what}: the guide does not know what these data see of the latent block, "
                f"as its last call had a minibatch, or it is an unpickled copy without one. Call "
                f"guide.refresh(*args) with all data before."
            )
        view = self.algebra.view(self.before)
        for p in tensors:
            p[index] = 0.0
        changes, full = self.changes, {}
        for g in self.plan.groups:
            size, numbers = changes.plan.group(g.name).size, changes.numbers[g.name]
            there = (numbers >= 0).nonzero().squeeze(-1)
            full[g.name] = tuple(
                p.new_zeros(size, *p.shape[1:]).index_copy(0, numbers[there], p[there])
                for p in self.sites.of(g)
            )
        self.algebra.recollect(view, full)
        self.last.stale = False

    def _resized(self, group: Group, tensors: Sequence[Tensor], numbers: Tensor) -> ModelStructure:
        before = self.changes
        for p, t in zip(self.sites.of(group), tensors, strict=True):
            # the parameter stays the same object, so Pyro's store and SVI keep it under its name
            p.data, p.grad = t.contiguous(), None
        self.last.changed(replace(before, numbers={**before.numbers, group.name: numbers}))
        return self.plan.resized(group, len(numbers))


def _refuse_latent_each(what: str, group: Group, plan: ModelStructure, call: BoundModel) -> None:
    """Latent sites in a plate of the data, or the predictor itself, would come and go too."""
    frames = {f.name for f in call.sites[group.observed[0]]["cond_indep_stack"]}
    for name in plan.shapes:
        shared = frames & {f.name for f in call.sites[name]["cond_indep_stack"]}
        if shared or plan.direct or any(place.site == name for place in group.predictor.places):
            raise ValueError(
                f"AutoSites.{what}: the latent site {name!r} has an entry for each datum of "
                f"{group.name!r}, so other data make another block: fit a new guide. Data that "
                f"are to be forgotten can be set to NaN, and their sites guide.reset(indices)."
            )


@dataclass(frozen=True)
class Snapshot:
    """``sites`` are nu (N, k) and Lambda (N, k, k) by group, copies without a graph.

    ``basis`` (D, R) are the directions of a dense algebra that does not keep all.
    """

    call: BoundModel
    view: View
    posterior: Any
    marginals: dict[str, Marginals]
    sites: dict[str, tuple[Tensor, Tensor]]
    basis: Tensor | None


@torch.no_grad()
def take_snapshot(
    algebra: Algebra, sites: Mapping[str, tuple[Tensor, Tensor]], call: BoundModel
) -> Snapshot:
    """q as its sites and the model's parameters make it now, for a call with all data.

    Raises:
        RuntimeError: where prior and sites do not make a proper Gaussian.
    """
    algebra = apart(algebra)  # a look at other data leaves q alone
    view = algebra.view(call)
    copies = {name: (a.clone(), b.clone()) for name, (a, b) in sites.items()}
    # the view may have changed the coordinates of the evidence, so it is made anew
    q = algebra.posterior(view, algebra.recollect(view, copies))
    if host_bool(q.proper) is False:
        raise RuntimeError(
            "AutoSites: with the parameters of the model as they are now, prior and sites do not make "
            "a proper Gaussian. Take more steps, or guide.reset()."
        )
    return Snapshot(
        call, view, q, algebra.marginals(view, q), copies, getattr(algebra, "basis", None)
    )
