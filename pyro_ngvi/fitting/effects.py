"""Gaussian effects with a scale of their own, for which one Gaussian over everything is too narrow.

An effect z and its scale s show by what becomes of the model as s goes to 0: either the prior of z
narrows, or the data cease to depend on z, as they do on s z.  A vector of coefficients with a fixed
prior, and the scale of noise, do neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from ..linalg.host import own_random_state
from ..runtime.density import innermost, is_latent
from ..runtime.pyro_adapter import is_marked
from ..runtime.run import look
from ..runtime.store import ModuleParams
from ..sites import AutoSites

#: entries that make an effect, and hyperparameters up to which ``integrate`` takes a minute or so
FEWEST, HYPERPARAMETERS = 5, 3
#: by which scales shrink, and the share of a change of the log likelihood that counts as none
SMALL, NONE = 1e-4, 1e-2


def way_of_effect(model: Any, args: Any, kwargs: Any) -> str:
    """What suits a model with an effect better than one Gaussian, in words; empty where it has none."""
    with suppress(ValueError, RuntimeError, NotImplementedError):
        with own_random_state(0), torch.no_grad(), poutine.block(), ModuleParams():
            return _way(model, args, kwargs)
    return ""


def _way(model: Any, args: Any, kwargs: Any) -> str:
    found = look(model, {}, args, kwargs)
    latents = {n: s for n, s in found.items() if is_latent(s) and not is_marked(s)}
    kinds = dist.Normal | dist.MultivariateNormal
    effects = {n: s for n, s in latents.items() if isinstance(innermost(s["fn"]), kinds)}
    others = {n: s["value"] for n, s in latents.items() if n not in effects}
    few = sum(x.numel() for x in others.values()) <= HYPERPARAMETERS
    instead = "take ngvi.integrate(model, *args), for up to three hyperparameters"
    for name in sorted(effects, key=lambda n: -effects[n]["value"].numel()):
        site = effects[name]
        if site["value"].numel() < FEWEST:
            break
        values = others | {name: site["value"]}
        moved = values | {name: site["fn"].sample()}
        for small in _shrunk(latents, others):
            (a, b, c, d) = (
                look(model, v | at, args, kwargs) for at in ({}, small) for v in (values, moved)
            )
            priors = [x[name]["fn"].log_prob(site["value"]) for x in (a, c)]
            narrows = not torch.equal(*priors)
            before, after = (
                abs(_log_likelihood(x) - _log_likelihood(y)) for x, y in ((a, b), (c, d))
            )
            if not narrows and not after < NONE * before:
                continue
            suits = few and sites_take(poutine.condition(model, data=others), args, kwargs)
            if narrows:
                return f"{name!r} is an effect with a scale of its own: {instead}." * suits
            return (
                f"{name!r} has a scale of its own: name the effect, as u = "
                f'pyro.deterministic("u", scale * {name}), and leave guide= out'
                + f"; or {instead}" * suits
                + "."
            )
    return ""


def sites_take(model: Any, args: Any, kwargs: Any) -> bool:
    """Whether :class:`~pyro_ngvi.AutoSites`, which ``integrate`` fits too, takes a model."""
    with suppress(ValueError), poutine.block(), own_random_state(), torch.no_grad():
        with pyro.get_param_store().scope():
            AutoSites(model, name="advice")(*args, **kwargs)
        return True
    return False


def _shrunk(latents: Any, others: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Each positive number, nearly zero."""
    for name, x in others.items():
        small = SMALL * x
        if x.numel() == 1 and bool(latents[name]["fn"].support.check(small).all()):
            yield {name: small}


def _log_likelihood(sites: Any) -> float:
    seen = (s for s in sites.values() if s["is_observed"])
    return sum(float(s["fn"].log_prob(s["value"]).double().sum()) for s in seen)
