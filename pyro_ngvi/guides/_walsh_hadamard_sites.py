"""Which sites Walsh-Hadamard guides take, why not others, and what stands for them in their trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from torch import Tensor
from torch.distributions import Transform, biject_to, constraints

from ..runtime.density import feasible_value
from .reparam import normal_of

__all__ = ["MOST_ENTRIES", "Stub", "check_priors", "choose_sites", "start_within_memory"]

#: of a site: a step makes every entry of W, with about ten numbers for each on the way
MOST_ENTRIES = 2**30


class _Support(constraints.Constraint):
    """Of a site in the guide's own copy of the model's trace: where its values come from."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform
        codomain: Any = transform.codomain
        self.event_dim = codomain.event_dim

    def check(self, value: Tensor) -> Tensor:
        return torch.isfinite(value).flatten(-self.event_dim).all(-1)


@biject_to.register(_Support)
def _to_support(support: _Support) -> Transform:
    return support.transform


class Stub:
    """What autoguides read of the distribution of a site: its support, and how long an event is."""

    def __init__(self, transform: Transform, shape: torch.Size) -> None:
        self.support, self._shape = _Support(transform), shape
        self.event_dim = self.support.event_dim

    def shape(self) -> torch.Size:
        return self._shape


def start_within_memory(guide: str, init_loc_fn: Callable[..., Any]) -> Callable[..., Any]:
    """``init_loc_fn``, which refuses a site that no step could make."""

    def init(site: Any) -> Any:
        shape = site["fn"].shape()
        if shape.numel() > MOST_ENTRIES:
            raise ValueError(
                f"{guide}: the site {site['name']!r} has shape {tuple(shape)}, and a step would "
                f"make all of its {shape.numel():,} entries (allowed: {MOST_ENTRIES:,}). Write the "
                "model with pyro_ngvi.nn.WalshHadamardLinear layers, which never make the matrix."
            )
        return init_loc_fn(site)

    return init


def choose_sites(guide: str, prototype: Any, names: Sequence[str] | None) -> list[str]:
    """The sites to reparameterise; refuses what cannot be."""
    sites = dict(prototype.iter_stochastic_nodes())
    if names is not None:
        if unknown := [name for name in names if name not in sites]:
            raise ValueError(
                f"{guide}: the model has no latent site {unknown[0]!r}; it has "
                f"{', '.join(map(repr, sites))}."
            )
        chosen = [name for name in sites if name in names]
    else:
        events = {n: site for n, site in sites.items() if not site["cond_indep_stack"]}
        matrices = [n for n, site in events.items() if len(site["fn"].event_shape) == 2]
        hidden = matrices[:-1] if len(matrices) > 1 else matrices
        chosen = [n for n in hidden if min(sites[n]["value"].shape) > 1]
        chosen = [n for n in chosen if normal_of(sites[n]["fn"]) is not None]
    for name in chosen:
        if reason := _refusal(sites[name]):
            raise ValueError(f"{guide}: the site {name!r} {reason}")
    if not chosen:
        shapes = ", ".join(f"{n!r} {tuple(site['value'].shape)}" for n, site in sites.items())
        raise ValueError(
            f"{guide} found no Gaussian matrix, declared by .to_event(2), to "
            f"reparameterise, the last one left out: {shapes}. Name some by sites=[...], or use "
            f"pyro_ngvi.AutoMeanFieldNormal(model)."
        )
    return chosen


def check_priors(
    prototype: Any, model: Callable[..., Any], chosen: list[str], args: Any, kwargs: Any
) -> None:
    """Refuse a prior that moves when other latent sites do, or that is trained."""

    def moved(site: Any) -> Tensor:
        if site["name"] not in prototype.nodes:
            return feasible_value(site)
        transform = biject_to(site["fn"].support)
        return transform(transform.inv(prototype.nodes[site["name"]]["value"]) + 0.37)

    with poutine.block(), torch.enable_grad():
        other: Any = poutine.trace(InitMessenger(moved)(model)).get_trace(*args, **kwargs)
    for name in chosen:
        trained = normal_of(other.nodes[name]["fn"])
        if trained is not None and any(x.requires_grad for x in trained):
            raise ValueError(
                f"AutoWalshHadamard: the prior of the site {name!r} has a parameter that is trained, "
                f"which the guide does not follow. Use poutine.reparam(model, {{{name!r}: "
                f"pyro_ngvi.nn.WalshHadamardReparam()}}), or AutoProperWalshHadamard(model)."
            )
        before, after = (normal_of(t.nodes[name]["fn"]) for t in (prototype, other))
        if after is None or not all(map(torch.equal, before or (), after)):
            raise ValueError(
                f"AutoWalshHadamard: the prior of the site {name!r} depends on other latent sites. "
                f"Use poutine.reparam(model, {{{name!r}: pyro_ngvi.nn.WalshHadamardReparam()}}) and "
                f"a guide of its result, or name other sites."
            )


def _refusal(site: Any) -> str | None:
    """Why a site cannot be reparameterised: the end of a sentence."""
    fn, shape = site["fn"], tuple(site["value"].shape)
    if normal_of(fn) is None:
        return f"has a prior that is not independent normals ({type(fn).__name__})."
    if site["cond_indep_stack"] or fn.event_dim != len(shape) or not shape:
        return (
            f"has shape {shape} and event shape {tuple(fn.event_shape)}; declare all its dimensions "
            f"as one event by .to_event({len(shape) or 1}), outside of plates."
        )
    if not site["value"].numel():
        return f"has shape {shape} and no entries."
    if site["scale"] != 1.0 or site["mask"] is not None:
        return "is scaled or masked by poutine, which the prior of g would not follow."
    return None
