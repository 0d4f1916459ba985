"""Finds what AutoSites knows about a model, at the first call: its Gaussian block, and predictors.

A predictor f (N, k) of an observed site with N data must be

* *affine* in the noise: f(e + a u + b v) - f(e) = a (f(e + u) - f(e)) + b (f(e + v) - f(e)),
* *sufficient*: with f held, the log likelihood does not change with the noise,
* *local*: the term of datum n changes with f_n only.

All three are tried in runs of the model at a few points.  Data are told apart by the binary digits of
their numbers, so locality takes 2 log2(N) runs, batched.  Of the predictors that pass, the first with
the fewest entries per datum is taken; where none passes alone, pairs are tried, such as the location
and the log scale of a Normal.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ..distributions import GaussianStateSpace
from ..runtime.density import site_kind, site_log_prob
from .checks import check_support, other_priors
from .conditioned_model import ConditionedModel, WhitenedRun, for_each
from .probe_points import TOLERANCE, Plane, corners, digit_masks, same
from .structure import Group, ModelStructure, TensorRef, data_shape, data_terms

#: most entries of a predictor for one datum, and candidates among which pairs are tried
MOST_ENTRIES, MOST_CANDIDATES = 64, 12


def find_structure(
    runner: ConditionedModel, other: ConditionedModel | None, latent: str | None
) -> ModelStructure:
    """The block of a model and the predictors of its data, or the site ``latent`` as their predictor;
    ``other`` is a runner at other values of latent sites outside of the block."""
    run = runner(None)
    if not run.own:
        raise ValueError("AutoSites: the model has no latent site of its own to infer.")
    first_fn, *more = run.own.values()
    runner.direct = runner.direct or (not more and isinstance(first_fn, GaussianStateSpace))
    if other is not None:
        other.direct = runner.direct
    # sites share a group where they are of the same data, so in the same plates, and see the same
    grouped: dict[tuple[Any, ...], list[str]] = {}
    for name, site in run.sites.items():
        if site_kind(site) == "observed":
            found = _Search(runner, run.used, name, other, latent).find()
            if found is not None:
                plates = tuple(frame.name for frame in site["cond_indep_stack"])
                key = found.places, found.trailing, found.batch, plates
                grouped.setdefault(key, []).append(name)
        elif site_kind(site) == "factor":
            _refuse_factor(name, runner, run)
    if not grouped:
        raise ValueError(
            "AutoSites: no observed site depends on the latent block, so the posterior is the prior. "
            "Pass the data (obs=...) at the guide's first call."
        )
    if not runner.direct:
        _refuse_bent_prior(runner, run)
    if other is not None:  # of sites that no datum sees the search has not found it out
        for name in other_priors(run.own, other(None).own):
            raise ValueError(
                f"AutoSites: the prior of {name!r} depends on a latent site outside of the block, such "
                f"as a length-scale that has a prior. Integrate it out, pyro_ngvi.integrate(model), "
                f"or make it a pyro.param, which CVI(guide, others=...) learns."
            )
    groups: list[Group] = []
    for (places, trailing, *_), names in grouped.items():
        for name in names:
            check_support(run.sites[name])
        site = run.sites[names[0]]
        full = list(data_shape(site))
        for frame in site["cond_indep_stack"]:
            if frame.full_size is not None and frame.dim is not None:
                full[len(site["fn"].batch_shape) + frame.dim] = frame.full_size
        key = names[0].replace(".", "_")  # a name that a parameter of a module may have
        while any(key == group.name for group in groups):
            key += "_"
        groups.append(Group(key, tuple(names), places, trailing, torch.Size(full)))
    own = {name: run.sites[name] for name in run.own}
    like = next(iter(own.values()))["value"]
    return ModelStructure(
        {name: site["value"].shape for name, site in own.items()},
        {name: site["fn"].event_dim for name, site in own.items()},
        tuple(groups),
        run.used,
        like.dtype,
        like.device,
        runner.direct,
        dict(runner.values),
    )


def _refuse_bent_prior(runner: ConditionedModel, run: WhitenedRun) -> None:
    """Refuse a site that is Gaussian given the others, and not jointly: no data may have shown it."""
    plane = Plane.of(run.used, seed=run.used)
    places = tuple(TensorRef(site=name) for name in run.own)
    values = [runner(noise, look_at=places).seen for noise in plane.corners()]
    for place, straight in plane.affine(runner, values).items():
        if not straight:
            raise ValueError(
                f"AutoSites: the prior of {place} is Gaussian given the other latent sites, but not "
                f"together with them: its mean is not linear in them, or its scale changes with them. "
                f"Infer one of them by another guide of an AutoGuideList."
            )


def _refuse_factor(name: str, runner: ConditionedModel, run: WhitenedRun) -> None:
    def factor(noise: Tensor) -> Tensor:
        return site_log_prob(runner(noise).sites[name])[0]

    plane = Plane.of(run.used, seed=run.used)
    if not plane.stays(factor, factor(torch.zeros_like(plane.e))):
        raise ValueError(
            f"AutoSites: the factor {name!r} depends on the latent block, and is neither a Gaussian "
            f"prior nor a datum with a likelihood. Write it as an observed site."
        )


class _Search:
    """For the predictor of the observed site ``name``, which must be free of what ``other`` changes;
    ``declared`` names a site to take."""

    def __init__(
        self,
        runner: ConditionedModel,
        dim: int,
        name: str,
        other: ConditionedModel | None,
        declared: str | None,
    ) -> None:
        self.runner, self.name, self.other, self.declared = runner, name, other, declared
        self.corners, self.plane = corners(runner, dim, name)
        site = self.corners[0].sites[name]
        self.batch, self.observed = data_shape(site), data_terms(site)
        #: values that move with the noise, at the first corner and at the last
        self.first, self.last = self.corners[0].seen, self.corners[3].seen
        #: what was wrong with places that were tried
        self.nonlinear: list[TensorRef] = []
        self.tied: list[TensorRef] = []
        self.moved_by_other = False
        if self.batch != self.observed.shape:
            raise ValueError(
                f"AutoSites: the observed site {name!r} has data of shape "
                f"{tuple(site['value'].shape)} and batch shape {tuple(self.batch)}: what is one "
                "datum? Put it into a plate of its data: with pyro.plate('data', "
                f"{self.observed.shape[-1]}): pyro.sample({name!r}, ...)."
            )

    def find(self) -> Group | None:
        """The site with its predictor; ``None`` if its data see nothing."""
        if self._is_enough({}):
            return None
        # stable: the first of each width leads, and a number that all data share comes last
        candidates = sorted(self._candidates(), key=lambda g: (self._shares(g), g.width))
        pairs = [
            Group(self.name, a.observed, a.places + b.places, a.trailing + b.trailing, self.batch)
            for a, b in combinations(candidates[:MOST_CANDIDATES], 2)
        ]
        for group in [*candidates, *sorted(pairs, key=lambda g: g.width)]:
            try:
                first = group.join(self.first, self.batch)
                if self._is_enough(group.split(first, self.batch)):
                    if self._is_local(group, first):
                        return group
                    self.tied.append(group.places[0])
            except (RuntimeError, ValueError):
                if not self._shares(group):  # else the model wants one number there
                    raise
        raise ValueError(self._refusal(bool(candidates)))

    def _shares(self, group: Group) -> bool:
        """Whether a value is one number for all data."""
        return any(not self.first[place].dim() for place in group.places) and bool(self.batch)

    def _candidates(self) -> list[Group]:
        """Values of the right shape that depend on the noise, and are affine in it."""
        affine = self.plane.affine(self.runner, [corner.seen for corner in self.corners])
        others = self.other(self.plane.e, look_at=None).seen if self.other else self.first
        candidates, rank = [], len(self.batch)
        for place in sorted(self.first, key=lambda place: place.site is None):  # sites come first
            value = self.first[place]
            trailing = torch.Size(value.shape[rank:])
            fits = not value.dim() or value.shape[:rank] == self.batch
            if not affine[place]:
                self.nonlinear.append(place)
            elif not fits or trailing.numel() > MOST_ENTRIES:
                continue
            elif not same(others[place], value):
                self.moved_by_other = True
            elif self.declared is None or place.site == self.declared:
                found = Group(self.name, (self.name,), (place,), (trailing,), self.batch)
                candidates.append(found)
        return candidates

    def _terms(self, noise: Any, held: dict[TensorRef, Tensor]) -> Tensor:
        return data_terms(self.runner.sites(noise, replace=held)[self.name])

    def _is_enough(self, held: dict[TensorRef, Tensor]) -> bool:
        """Whether nothing else changes with the noise: bit for bit, as it may do so by little."""
        before, after = (self._terms(self.corners[k].noise, held) for k in (0, 3))
        return same(after, before) and self.plane.stays(lambda noise: self._terms(noise, held))

    def _is_local(self, group: Group, first: Tensor) -> bool:
        """Move f at the data whose number has a certain binary digit; the others' terms must stay."""
        last, moved = group.join(self.last, self.batch), digit_masks(group.size, first.device)

        def terms(moved: Tensor) -> Tensor:
            f = torch.where(moved.unsqueeze(-1), last, first)
            return self._terms(self.plane.e, group.split(f, self.batch)).reshape(-1)

        after = for_each(terms, moved, 8)
        before = self.observed.reshape(-1).expand_as(after)
        return same(after[~moved], before[~moved], TOLERANCE * torch.finfo(before.dtype).eps)

    def _refusal(self, any_candidate: bool) -> str:
        start = f"AutoSites: no predictor was found for the observed site {self.name!r}: "
        if self.declared is not None and not any_candidate:
            return start + (
                f"{self.declared!r} is no site whose value is linear in the latent block and has the "
                f"shape {tuple(self.batch)} of the data, or that and a last dimension."
            )
        if self.tied:
            return start + (
                f"its data depend on {self.tied[0]} not one by one, and a site for each needs a "
                f"likelihood that is local. Use AutoFullRankNormal and NGVB."
            )
        if self.moved_by_other:
            return start + (
                "what is linear also depends on a latent site outside of the block. Write the "
                'Gaussian part as f = pyro.deterministic("f", ...), free of the others; for a latent '
                "scale z ~ Normal(0, 1), and scale * z in the likelihood."
            )
        return start + (
            f"its data, of shape {tuple(self.batch)}, do not depend on the latent block through at "
            f"most {MOST_ENTRIES} linear combinations each (first result that is not linear: "
            f"{self.nonlinear[0] if self.nonlinear else 'none'}). Use AutoFullRankNormal and NGVB."
        )
