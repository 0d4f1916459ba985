"""Finds the Gaussian block of a model and the predictors of its data, once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..distributions import GaussianStateSpace
from ..linalg.host import fixed_normal
from ..runtime.density import site_kind, site_log_prob
from .check_new_data import check_support
from .conditioned_model import ConditionedModel, TensorRef, WhitenedRun
from .log_likelihood import data_shape
from .predictor import Predictor, find_predictor
from .probe_points import Plane, same
from .structure import Group, ModelStructure
from .whitening import refuse_other_prior

__all__ = ["make_plan"]


def make_plan(
    runner: ConditionedModel, other: ConditionedModel | None = None, latent: str | None = None
) -> ModelStructure:
    """Find the Gaussian block of a model and the predictors of its data.

    ``other`` is a runner at other values of latent sites outside of the block, ``latent`` the site to
    take as the predictor.

    Raises:
        ValueError: for a latent site that is not Gaussian, data without a local linear predictor, a
            model without latent or without observed sites.
    """
    run = runner(None)
    if not run.own:
        raise ValueError("AutoSites: the model has no latent site of its own to infer.")
    first_fn, *more = run.own.values()
    chain = not more and isinstance(first_fn, GaussianStateSpace)
    runner.direct = runner.direct or chain
    if other is not None:
        other.direct = runner.direct
    first = run.sites[next(iter(run.own))]["value"]
    shapes = {name: run.sites[name]["value"].shape for name in run.own}
    # sites share a group where they are of the same data, so in the same plates, and see the same
    grouped: dict[tuple[Predictor, Any, Any], list[str]] = {}
    for name, site in run.sites.items():
        if site_kind(site) == "observed":
            predictor = find_predictor(runner, run.used, name, other, latent)
            if predictor is not None:
                plates = tuple(frame.name for frame in site["cond_indep_stack"])
                grouped.setdefault((predictor, data_shape(site), plates), []).append(name)
        elif site_kind(site) == "factor":
            _refuse_factor(name, runner, run)
    if not grouped:
        raise ValueError(
            "AutoSites: no observed site depends on the latent block, so the posterior is the prior. "
            "Pass the data (obs=...) at the guide's first call."
        )
    if not runner.direct:
        _check_block(runner, run)
    if other is not None:  # of sites that no datum sees the search has not found it out
        refuse_other_prior(run.own, other(None).own)
    groups = []
    for (predictor, *_), names in grouped.items():
        for name in names:
            check_support(run.sites[name])
        site = run.sites[names[0]]
        full = list(data_shape(site))
        for frame in site["cond_indep_stack"]:
            if frame.full_size is not None and frame.dim is not None:
                full[len(site["fn"].batch_shape) + frame.dim] = frame.full_size
        taken = [group.name for group in groups]
        groups.append(Group(_key(names[0], taken), tuple(names), predictor, torch.Size(full)))
    event_dims = {name: run.sites[name]["fn"].event_dim for name in run.own}
    return ModelStructure(
        shapes, event_dims, tuple(groups), run.used, first.dtype, first.device, runner.direct
    )


def _check_block(runner: ConditionedModel, run: WhitenedRun) -> None:
    """Refuse a site that is Gaussian given the others, and not jointly: no data may have shown it."""
    plane = Plane(*fixed_normal(3, run.used, seed=run.used))
    e, u, v = plane.e, plane.u, plane.v
    places = tuple(TensorRef(site=name) for name in run.own)
    corners = [runner(noise, look_at=places).seen for noise in (e, e + u, e + v, e + u + v)]
    for place, straight in plane.affine(runner, corners).items():
        if not straight:
            raise ValueError(
                f"AutoSites: the prior of {place} is Gaussian given the other latent sites, but not "
                f"together with them: its mean is not linear in them, or its scale changes with them. "
                f"Infer one of them by another guide of an AutoGuideList."
            )


def _key(name: str, taken: list[str]) -> str:
    """The name of a group: that of a site, made into one that a parameter of a module may have."""
    key = name.replace(".", "_")
    while key in taken:
        key += "_"
    return key


def _refuse_factor(name: str, runner: ConditionedModel, run: WhitenedRun) -> None:
    """Refuse a factor that depends on the noise: by its graph, which sees what is zero here too, or
    by its values, which show a branch."""

    def factor(noise: Tensor) -> Tensor:
        return site_log_prob(runner(noise).sites[name])[0]

    noise = torch.zeros(run.used, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        value: Any = factor(noise)
        depends = value.requires_grad and bool(
            torch.autograd.grad(value.sum(), noise, allow_unused=True)[0] is not None
        )
    if not depends:
        far = Plane(*fixed_normal(3, run.used, seed=run.used)).on_circles(factor)
        depends = not same(far, value.detach().expand_as(far))
    if depends:
        raise ValueError(
            f"AutoSites: the factor {name!r} depends on the latent block, and is neither a Gaussian "
            f"prior nor a datum with a likelihood. Write it as an observed site."
        )
