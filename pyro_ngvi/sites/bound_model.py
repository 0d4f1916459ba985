"""The structure of a model at the arguments of one call, which may be a minibatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..distributions import GaussianProcess
from ..families.vectors import split
from ..linalg.host import at_hand, fixed_normal
from ..linalg.products import eye_like
from ..runtime.density import Sites, is_minibatch, minibatch_scale, site_kind, site_log_prob
from ..runtime.told_in import told_in
from .conditioned_model import ConditionedModel, WhitenedRun, for_each, log_det_root
from .structure import (
    Group,
    LinearMap,
    ModelStructure,
    TensorRef,
    data_shape,
    data_terms,
)

#: entries of A that are made at once
CHUNK = 2**24


class BoundModel:
    """A structure at the arguments of one call; the model runs when something is asked for: up to the
    last site of the block for what concerns the prior, as a whole for what concerns data."""

    def __init__(self, plan: ModelStructure, runner: ConditionedModel) -> None:
        self.plan, self.runner = plan, runner
        #: whether handlers around this are not to see the run that looks at all sites
        self.hidden = True

    # --- the block

    @property
    def block(self) -> dict[str, Any]:
        """The Gaussians of the block's sites, with their graph in the parameters of the model."""
        return self._run.own if "_run" in self.__dict__ else self._block

    @cached_property
    def _block(self) -> dict[str, Any]:
        return self.runner(None, look_at=self.plan.block_places).own

    def by_site(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat block (..., D) as a value for each of its sites, (..., *shape)."""
        return split(flat, {name: fn.shape() for name, fn in self.block.items()})

    def block_at(self, noise: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Every site of the block at a noise (D,): its value, and -log |det dz / deps| by its batch."""
        run = self.runner(noise, look_at=self.plan.block_places)
        return {
            name: (run.seen[TensorRef(site=name)], -log_det_root(run.own[name], event_dim))
            for name, event_dim in self.plan.event_dims.items()
        }

    def flat_block(self, noise: Tensor, makers: Mapping[str, Any] | None = None) -> Tensor:
        """The block z (D,) in a row at a noise; ``makers`` as in a :class:`WhitenedRun`."""
        run = self.runner(noise, look_at=self.plan.block_places, makers=makers)
        return torch.cat([run.seen[place].reshape(-1) for place in self.plan.block_places])

    # --- the data

    @cached_property
    def probe(self) -> Tensor:
        """A fixed random noise (D,), at which two linear maps would differ."""
        noise = fixed_normal(self.plan.dim, seed=self.plan.dim)
        return noise.to(self.plan.zero(), non_blocking=True)

    @cached_property
    def _run(self) -> WhitenedRun:
        """The one at the probe, which makes parameters, and draws minibatches."""
        places = (*self.plan.places, *self.plan.block_places)
        return self.runner(self.probe, hidden=self.hidden, look_at=places, go_on=True)

    @property
    def sites(self) -> Sites:
        """All sites of the model, the block at the probe."""
        return self._run.sites

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        return {g.name: data_shape(self._observed(g)) for g in self.plan.groups}

    def _observed(self, group: Group, with_data: bool = False) -> Any:
        """The first observed site of a group, whose others come too."""
        for name in group.observed:
            site = self.sites.get(name)
            if site is None or (with_data and not site["is_observed"]):
                raise ValueError(
                    f"AutoSites: the site {name!r} has no data in this call (obs=None), or does not "
                    f"come. A step and the loss need them; to predict, call the guide or Predictive."
                )
        return self.sites[group.observed[0]]

    @cached_property
    def index(self) -> dict[str, Tensor | None]:
        """Numbers (n,) of the data among all of the group; ``None`` where these are all, in order."""
        return {g.name: _index(g, self._observed(g), self._run) for g in self.plan.groups}

    @property
    def whole(self) -> bool:
        return all(index is None for index in self.index.values())

    def rows(self, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The rows (n, ...) of this call of two tensors (N, ...) over all data of a group."""
        index = self.index[name]
        return (a, b) if index is None else (a.index_select(0, index), b.index_select(0, index))

    def weight(self, name: str) -> float:
        """N / n: how many data of the group one datum of this call stands for."""
        return self.plan.group(name).size / max(self.shapes[name].numel(), 1)

    # --- predictors

    @cached_property
    def at_probe(self) -> dict[str, Tensor]:
        """The predictors (n, k) at the probe."""
        return self._joined(self._run)

    def predictors(
        self, noise: Tensor, makers: Mapping[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """f (n, k) of every group at a noise (D,); ``makers`` as in a :class:`WhitenedRun`."""
        return self._joined(self.runner(noise, look_at=self.plan.places, makers=makers))

    def _joined(self, run: WhitenedRun) -> dict[str, Tensor]:
        return {g.name: g.join(run.seen, self.shapes[g.name]) for g in self.plan.groups}

    def places_of(
        self, groups: Sequence[Group], predictors: Mapping[str, Tensor]
    ) -> dict[TensorRef, Tensor]:
        """f (n, k) of some groups as the values at the places where the model makes them."""
        found = {}
        for g in groups:
            found |= g.split(predictors[g.name], self.shapes[g.name])
        return found

    def linear_maps(self) -> dict[str, LinearMap]:
        """A and b of every group, with their graph in the parameters of the model."""
        plan, fn = self.plan, next(iter(self.block.values()))
        if plan.is_one_vector and hasattr(fn, "scale_tril"):  # what the runs would find
            loc = fn.loc.expand(fn.shape()).unsqueeze(-1)
            own = LinearMap(fn.scale_tril.unsqueeze(1), loc, triangular=True)
            return {group.name: own for group in plan.groups}
        units = eye_like(plan.zero())
        return affine_maps(self.predictors, units)

    # --- log densities

    @cached_property
    def terms_at_probe(self) -> dict[str, Tensor]:
        """log p of each datum at the probe, by observed site, with their graph in parameters."""
        with torch.enable_grad():
            observed = {n: s for n, s in self.sites.items() if site_kind(s) == "observed"}
            return {name: data_terms(site) for name, site in observed.items()}

    def fingerprint(self) -> dict[str, Tensor]:
        """f and log p at the probe, (n, k + 1) by group: other hyperparameters or data change it."""
        with torch.no_grad():
            prints = {}
            for g in self.plan.groups:
                terms = _summed([self.terms_at_probe[n] for n in g.observed]) + self._prior_at_probe
                prints[g.name] = torch.cat([self.at_probe[g.name], terms[:, None]], -1)
            return prints

    def seen(self) -> dict[str, Tensor]:
        """f and log p of the prior at the probe, (n, k + 1) by group: what data see of the block, and
        no other values of data change it."""
        return {
            name: torch.cat([f.detach(), f.new_zeros(len(f), 1) + self._prior_at_probe], -1)
            for name, f in self.at_probe.items()
        }

    @cached_property
    @torch.no_grad()
    def _prior_at_probe(self) -> Any:
        prior: Any = 0.0
        if self.plan.direct:  # elsewhere f at the probe depends on the prior
            for name, fn in self.block.items():
                if not isinstance(fn, GaussianProcess):  # whose algebra replaces the probe
                    prior = prior + site_log_prob(self.sites[name])[0].sum()
        return prior

    def other_terms(self) -> Tensor:
        """log p, a 0-dim tensor, of sites that are neither of the block nor data with a predictor."""
        total = self.plan.zero().new_zeros(())
        known = {*self.plan.shapes, *(name for g in self.plan.groups for name in g.observed)}
        for name, site in self.sites.items():
            if name in known or site_is_subsample(site):
                continue
            if site_kind(site) == "observed":  # without what is missing
                term = self.terms_at_probe[name] * minibatch_scale(site)
            else:
                term = site_log_prob(site)[1]
            total = total + term.sum()
        return total

    def log_likelihood(
        self, predictors: Mapping[str, Tensor], scaled: bool = True
    ) -> dict[str, Tensor]:
        """log p(y_n | f_n) (Q, n) for f (Q, n, k) by group, in nats; times the scale, if ``scaled``."""
        for group in self.plan.groups:
            self._observed(group, with_data=True)
        sets = disjoint_sets(self.plan.groups)

        def terms(f: dict[str, Tensor]) -> dict[str, Tensor]:
            found = {}
            for together in sets:
                held = self.places_of(together, f)
                sites = self.runner.sites(None, replace=held)
                for g in together:
                    found[g.name] = _summed([data_terms(sites[n], scaled) for n in g.observed])
            return found

        return for_each(terms, dict(predictors))


def _summed(terms: list[Tensor]) -> Tensor:
    """log p (n,) of data, of each of which several observed sites tell."""
    return torch.stack([x.reshape(-1) for x in terms]).sum(0)


def disjoint_sets(groups: Sequence[Group]) -> list[list[Group]]:
    """The groups in sets of which no two see one place: each sees it at points of its own."""
    sets: list[list[Group]] = []
    for group in groups:
        for members in sets:
            if not any(set(group.places) & set(other.places) for other in members):
                members.append(group)
                break
        else:
            sets.append([group])
    return sets


def affine_maps(
    predictors: Callable[[Tensor], dict[str, Tensor]], units: Tensor
) -> dict[str, LinearMap]:
    """A and b of affine ``predictors`` by group, from their values at 0 and at ``units``."""
    at_zero = predictors(torch.zeros_like(units[0]))
    rows = max(1, CHUNK // max(f.numel() for f in at_zero.values()))
    at_units = for_each(predictors, units, None if rows >= len(units) else rows)
    return {name: LinearMap((at_units[name] - b).movedim(0, -1), b) for name, b in at_zero.items()}


def moves(affine: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """What an affine function adds to its value at 0, at every row of ``inputs``."""
    origin = affine(torch.zeros_like(inputs[0]))
    return for_each(lambda x: affine(x) - origin, inputs)


@told_in("guides.md#data-that-come-go-or-are-empty")
def _index(group: Group, site: Any, run: WhitenedRun) -> Tensor | None:
    """Numbers (n,) of the data of a call among those of the group; ``None`` for all in order."""
    full, rank = list(data_shape(site)), len(site["fn"].batch_shape)
    chosen: dict[int, Tensor] = {}
    for frame in site["cond_indep_stack"]:
        plate, given = run.sites.get(frame.name), frame.name in run.given
        if frame.dim is None or plate is None:
            continue
        index = plate["value"]
        every = torch.arange(len(index))
        if not is_minibatch(plate):  # a loader whose batch holds all data may have shuffled them
            if not given or (at_hand(index) and torch.equal(index.reshape(-1), every)):
                continue
        # drawn, and not looked at, or -1
        if id(index) in run.unread or (at_hand(index) and bool((index < 0).any())):
            raise ValueError(
                f"AutoSites: the observed site {site['name']!r} lies in the plate {frame.name!r}, and "
                f"the model does not say which data: pass their numbers, pyro.plate({frame.name!r}, "
                f"{plate['fn'].size}, subsample=index), for bayesianize svi.step(x, y, index)."
            )
        full[rank + frame.dim] = frame.full_size
        chosen[rank + frame.dim] = index.reshape(-1)
    if tuple(full) != tuple(group.batch):
        raise ValueError(
            f"AutoSites: the observed site {site['name']!r} has data of shape {tuple(full)} in this "
            f"call, the guide has sites for shape {tuple(group.batch)}. Announce data that come or go "
            f"by guide.add(count) or guide.remove(indices); new inputs take obs=None."
        )
    if not chosen:
        return None
    device = next(iter(chosen.values())).device
    numbers = torch.arange(group.size, device=device).reshape(full)
    for dim, index in chosen.items():
        numbers = numbers.index_select(dim, index.to(device))
    return numbers.reshape(-1)
