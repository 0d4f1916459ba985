r"""Data of an AutoSites guide that come, go or change, and what q would be without them.

Every datum has a site of its own, so taking it away divides that site out:

    q without G   propto   q / prod_(n in G) t_n   =   p prod_(n not in G) t_n,

at once and without its likelihood: with a Gaussian likelihood this is the exact posterior without G,
with another one its approximation by the other sites as they are.  New data begin with a site of 0.

Not for models whose latent block has an entry for each datum (a Gaussian process at the data's inputs,
an effect of every datum): without the datum that is another block.  ``reset`` works there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .bound_model import BoundModel
from .dense import GaussianPotential
from .structure import Group, ModelStructure
from .views import Indices, checked
from .without_data import WithoutData

__all__ = ["SiteData"]


@dataclass(frozen=True)
class _Since:
    """What became of the data since the last call: the plan then, and its number (N,) of each datum
    of now, -1 for one that was not there."""

    last: Any
    plan: ModelStructure
    numbers: dict[str, Tensor]


class SiteData(WithoutData):
    """Mixed into :class:`~pyro_ngvi.AutoSites`."""

    _since: _Since | None = None

    def remove(self, indices: Indices, group: str | None = None) -> None:
        """Delete the sites of these data, which the next call of the model no longer brings.

        q is the one without them from now on: exact with a Gaussian likelihood; otherwise one or
        two further steps bring the other sites up to date.

        Args:
            indices: numbers of data of the group, or a mask (N,) of bools.  The others close up.
            group: name of the group; not needed where there is one.

        Raises:
            ValueError: for a number that is not there or comes twice, for a group that is not
                there, whose data have more than one dimension or a latent variable each, and for
                all data of a group.
            RuntimeError: where the guide does not know what these data see of the latent block:
                before its first call, after a call with a minibatch, unpickled.

        Example:
            >>> import torch, pyro, pyro.distributions as dist, pyro_ngvi as ngvi
            >>> def model(y):
            ...     m = pyro.sample("m", dist.Normal(0.0, 1.0))
            ...     with pyro.plate("data", len(y)):
            ...         pyro.sample("y", dist.Normal(m, 1.0), obs=y)
            >>> guide = ngvi.AutoSites(model)
            >>> svi = pyro.infer.SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
            >>> _ = svi.step(torch.tensor([1.0, 2.0, 9.0]))
            >>> guide.remove(2)
            >>> guide.median()
            {'m': tensor(1.0000)}
        """
        chosen = self._group_to_resize("remove", group)
        index = checked("remove", indices, chosen)
        if len(index) == chosen.size:
            raise ValueError(
                f"AutoSites.remove: these are all {chosen.size} data of {chosen.name!r}, and a group "
                f"without data has no place in the guide. guide.reset() forgets what they said."
            )
        self._clear("remove", chosen, index)
        keep = torch.ones(chosen.size, dtype=torch.bool, device=index.device)
        keep[index] = False
        kept = keep.nonzero().squeeze(-1)
        numbers = self._changes().numbers[chosen.name].index_select(0, kept)
        self._resize(chosen, [p.detach()[kept] for p in self._tensors(chosen)], numbers)

    def add(self, count: int, group: str | None = None) -> None:
        """Make room for ``count`` data more, which the next call brings after those of before.

        Their sites are zero, so q stays as it is until the next step.

        Args:
            count: how many, at least 1.
            group: name of the group; not needed where there is one.

        Raises:
            ValueError: for a count below 1, and for groups as in :meth:`remove`.
            RuntimeError: before the guide's first call.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"AutoSites.add takes a number of data of at least 1, got {count!r}.")
        chosen = self._group_to_resize("add", group)
        if self._stale and self._last is not None and self._call_before().whole:
            guide: Any = self
            guide.refresh(*self._last[0], **self._last[1])  # which the data to come would not fit
        tensors = [p.detach() for p in self._tensors(chosen)]
        numbers = self._changes().numbers[chosen.name]
        new = numbers.new_full((count,), -1)
        grown = [torch.cat([t, t.new_zeros(count, *t.shape[1:])]) for t in tensors]
        self._resize(chosen, grown, torch.cat([numbers, new]))
        _make_room(self.algebra, self._plan())

    def reset(self, indices: Indices | None = None, group: str | None = None) -> None:
        """Set sites back to zero: because their data have changed, or to begin again.

        q forgets what these data said, at once.

        Args:
            indices: numbers of data of the group, or a mask (N,); ``None`` for all.
            group: name of the group; ``None`` for the only one or, without indices, for all.

        Raises:
            ValueError: for a number that is not there or comes twice, a group that is not there.
            RuntimeError: as :meth:`remove`; never without indices and group.
        """
        plan = self._plan()
        if indices is None and group is None:
            for each in plan.groups:
                for p in self._tensors(each):
                    p.detach().zero_()
            before = self.algebra.evidence.linear
            self.algebra.evidence = GaussianPotential.none(before, *before.shape)
            self.algebra.running = False
            self.fresh = True
        else:
            chosen = self._group("reset", group)
            every = torch.arange(chosen.size, device=plan.device)
            index = every if indices is None else checked("reset", indices, chosen)
            self._clear("reset", chosen, index)
        self._changed()

    # --- how the sites are changed

    def _group_to_resize(self, what: str, name: str | None) -> Group:
        group = self._group(what, name)
        if len(group.batch) != 1:
            raise ValueError(
                f"AutoSites.{what}: the data of {group.name!r} have the shape {tuple(group.batch)}, "
                f"and only data along one dimension can come or go. Set data to NaN instead (they are "
                f"then missing), and guide.reset(indices) their sites."
            )
        if self._last is not None:
            self._refuse_latent_each(what, group)
        return group

    def _refuse_latent_each(self, what: str, group: Group) -> None:
        """Latent sites in a plate of the data, or the predictor itself, would come and go too."""
        if self.inducing is not None:
            return  # the block are processes at the inducing points, whatever the data
        call, plan = self._call_before(), self._changes().plan
        frames = {f.name for f in call.sites[group.observed[0]]["cond_indep_stack"]}
        for name in plan.shapes:
            shared = frames & {f.name for f in call.sites[name]["cond_indep_stack"]}
            if shared or plan.direct or any(place.site == name for place in group.predictor.places):
                raise ValueError(
                    f"AutoSites.{what}: the latent site {name!r} has an entry for each datum of "
                    f"{group.name!r}, so other data make another block: fit a new guide. Data that "
                    f"are to be forgotten can be set to NaN, and their sites guide.reset(indices)."
                )

    def _changes(self) -> _Since:
        if self._since is None or self._since.last is not self._last:
            plan = self._plan()
            numbers = {g.name: torch.arange(g.size, device=plan.device) for g in plan.groups}
            return _Since(self._last, plan, numbers)
        return self._since

    def _call_before(self) -> BoundModel:
        assert self._last is not None
        guide: Any = self
        return BoundModel(self._changes().plan, guide.runner(*self._last))

    @torch.no_grad()
    def _clear(self, what: str, group: Group, index: Tensor) -> None:
        """Zero sites, and the evidence made anew of all others: differences would lose digits."""
        tensors = self._tensors(group)
        if not any(bool(p[index].any()) for p in tensors):
            return
        call = None if self._last is None else self._call_before()
        if call is None or not call.whole:
            raise RuntimeError(
                f"AutoSites.{what}: the guide does not know what these data see of the latent block, "
                f"as its last call had a minibatch, or it is an unpickled copy without one. Call "
                f"guide.refresh(*args) with all data before."
            )
        view = self.algebra.view(call)
        for p in tensors:
            p[index] = 0.0
        before, full = self._changes(), {}
        for g in self._plan().groups:
            size = next(b.size for b in before.plan.groups if b.name == g.name)
            numbers = before.numbers[g.name]
            there = (numbers >= 0).nonzero().squeeze(-1)
            full[g.name] = tuple(
                p.new_zeros(size, *p.shape[1:]).index_copy(0, numbers[there], p[there])
                for p in self._tensors(g)
            )
        self.algebra.recollect(view, full)
        self._stale = False

    def _resize(self, group: Group, tensors: Sequence[Tensor], numbers: Tensor) -> None:
        before, plan = self._changes(), self._plan()
        for p, t in zip(self._tensors(group), tensors, strict=True):
            # the parameter stays the same object, so Pyro's store and SVI keep it under its name
            p.data, p.grad = t.contiguous(), None
        size = torch.Size((len(numbers),))
        groups = tuple(replace(g, batch=size) if g is group else g for g in plan.groups)
        self.plan = replace(plan, groups=groups)
        if plan.direct:  # processes at the inputs of all data
            shapes = {n: size if s == group.batch else s for n, s in plan.shapes.items()}
            dim = sum(s.numel() for s in shapes.values())
            self.plan = replace(self.plan, dim=dim, shapes=shapes)
        self._since = replace(before, numbers={**before.numbers, group.name: numbers})
        self._changed()

    def _changed(self) -> None:
        self.edition += 1
        self.curvature = None  # what a loss has left is of the data before

    def __getstate__(self) -> dict[str, Any]:
        parent: Any = super()
        return {**parent.__getstate__(), "_since": None}


def _make_room(algebra: Any, plan: ModelStructure) -> None:
    """A dense algebra of the directions that data see becomes one of all, where data see them all."""
    basis = getattr(algebra, "basis", None)
    if basis is None or sum(g.size * g.width for g in plan.groups) < plan.dim:
        return
    e = algebra.evidence
    algebra.basis = algebra._cached = algebra._view = None
    algebra.evidence = GaussianPotential(
        e.constant, basis @ e.linear, basis @ e.precision @ basis.mT
    )
