"""The way on from a fit whose verdict is bad, or blind: what a model has that its guide lacks."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro.distributions as dist
import torch
from pyro import poutine

from ..diagnostics.draws import guide_draws
from ..guides import AutoFlow, AutoMixtureNormal, AutoOrthogonalFlow
from ..hierarchy import AutoHierarchical
from ..hierarchy.collapsed import can_collapse
from ..linalg.host import own_random_state
from ..probing.flat import flat_sites
from ..probing.kinks import PAIRS, jumping_sites
from ..runtime.density import Sites, innermost, is_latent, site_kind
from ..runtime.model_density import ModelDensity
from ..runtime.pyro_adapter import is_marked
from ..runtime.run import look
from ..runtime.store import ModuleParams
from ..sites.site_guide import SiteGuide
from .ladder import FLOW
from .structure import sites_take

if TYPE_CHECKING:
    from .result import Result

#: entries that make an effect, and hyperparameters up to which ``integrate`` takes a minute or so
FEWEST, HYPERPARAMETERS = 5, 3
#: by which scales shrink, and the share of a change of the log likelihood that counts as none
SMALL, NONE = 1e-4, 1e-2
#: draws at which a site that matters has a gradient: a unit of ReLU may be dead at some
TRIED = 8


def way_on(fit: Result) -> str:
    """What to do where the verdict on a fit is bad, or blind, and does not say so itself."""
    verdict, guide = fit.verdict, fit.guide
    whole = not (fit.is_spread or fit._is_stream)
    richest = isinstance(guide, AutoFlow | AutoOrthogonalFlow)
    # "auto" would try a flow, but of a model with parameters
    climbs = whole and not fit.rungs and not richest and fit._structure.d <= FLOW
    climbs = climbs and not getattr(fit.svi.optim, "_has_others", False)
    if fit.khat.rounded and not verdict.ok:
        return ""  # that says what comes first
    if whole and not verdict.ok and (flat := fit._structure.improper):
        return f"{flat[0]!r} has an improper prior, and the posterior may be: give it a proper one."
    if isinstance(guide, AutoHierarchical):
        # what is not k-hat has tried corrected draws, which may not be taken then
        call = guide, *fit.args
        if whole and not verdict.ok and verdict is fit.khat and can_collapse(*call, **fit.kwargs):
            return "Or take fit.to_arviz(corrected=True), which has its own verdict."
    elif whole and (units := fit._structure.units) and (units.pooled or not verdict.ok):
        if verdict.ok:
            blind = "Neither chains nor weights see the neck of a funnel, where scales are small"
            lost = guide.lost if isinstance(guide, AutoMixtureNormal) else ""
            return lost or f'{blind}: if there is one, pass guide="AutoHierarchical".'
        if any(rung.guide == "AutoHierarchical" for rung in fit.rungs):
            how = 'to_arviz(corrected=True) of a fit with guide="AutoHierarchical"'
            return f"Take {how}, which has its own verdict."
        how = 'pass guide="AutoHierarchical"'
        more = ', or "auto", which goes on to others' * climbs
        there = "is" if units.is_block else "are"
        return f"There {there} {units}: {how}{more}."
    if isinstance(guide, AutoMixtureNormal):
        return guide.lost
    if (
        whole
        and not verdict.ok
        and verdict.decision != "resample"
        and not fit.khat.other_modes
        and fit.khat.ess > 0.0  # else no guide has a density here
        and not np.isnan(fit.khat.khat)  # else rounding is what is wrong
    ):
        narrow = not isinstance(guide, AutoHierarchical | SiteGuide | AutoFlow)
        model = fit.model, fit.args, fit.kwargs
        return (
            _way_of_jump(guide, *model)
            or _way_of_cut(fit._flat)
            or (way_of_effect(*model) if narrow else "")
            or 'Pass guide="auto", which goes on to richer guides.' * climbs
        )
    less = verdict.is_rough if verdict.ok else verdict.decision == "resample"
    return 'For less error pass guide="auto", which goes on to richer guides.' * (less and climbs)


def prior_alone(flat: dict[str, bool]) -> str:
    """Which latent sites nothing else of the model depends on, in words."""
    unseen = [name for name, moves in flat.items() if not moves]
    if not unseen:
        return ""
    names = ", ".join(map(repr, unseen[:3])) + f" and {len(unseen) - 3} more" * (len(unseen) > 3)
    return f"Nothing else in the model depends on {names}: the posterior of that is its prior."


def _way_of_cut(flat: dict[str, bool]) -> str:
    for name, moves in flat.items():
        if moves:
            return (
                f"log p depends on {name!r} and has no gradient there: keep it a tensor in the model, "
                f"without .item(), float() or .detach()."
            )
    return ""


def flat_in(model: Any, guide: Any, args: Any, kwargs: Any) -> dict[str, bool]:
    """:func:`pyro_ngvi.probing.flat.flat_sites` at draws of a guide; none where these fail."""
    failures = suppress(ValueError, RuntimeError)
    with failures, own_random_state(0), poutine.block(), ModuleParams(), torch.no_grad():
        values, _ = guide_draws(partial(guide, *args, **kwargs), TRIED)
        return flat_sites(model, values, args, kwargs)
    return {}


def _way_of_jump(guide: Any, model: Any, args: Any, kwargs: Any) -> str:
    with suppress(ValueError, RuntimeError), own_random_state(0):
        density = ModelDensity(model, args, kwargs)
        values, _ = guide_draws(partial(guide, *args, **kwargs), 2 * PAIRS)
        for name in jumping_sites(density, density.pack(values).detach()):
            return (
                f"log p jumps along {name!r}, and a gradient sees no jump: sum a switch out, by a "
                f'discrete site with infer={{"enumerate": "parallel"}}, or smooth it.'
            )
    return ""


def way_of_effect(model: Any, args: Any, kwargs: Any) -> str:
    """What suits a model with an effect better than one Gaussian, in words; empty where it has none:
    as the scale of an effect z goes to 0 either its prior narrows, or data cease to depend on z, as at
    z = 0.  (As a concentration goes to 0 they cease to depend on any mean, and are no such data.)"""
    with suppress(ValueError, RuntimeError), own_random_state(0), poutine.block(), ModuleParams():
        return _way(model, args, kwargs)
    return ""


def _way(model: Any, args: Any, kwargs: Any) -> str:
    found = look(model, {}, args, kwargs)
    latents = {n: s for n, s in found.items() if is_latent(s) and not is_marked(s)}
    kinds = dist.Normal | dist.MultivariateNormal
    effects = {n: s for n, s in latents.items() if isinstance(innermost(s["fn"]), kinds)}
    others = {n: s["value"] for n, s in latents.items() if n not in effects}
    few = sum(x.numel() for x in others.values()) <= HYPERPARAMETERS
    numbers = {n: SMALL * x for n, x in others.items() if x.numel() == 1}  # and nearly zero
    positive = (n for n, x in numbers.items() if latents[n]["fn"].support.check(x).all())
    shrunk = [{n: numbers[n]} for n in positive]
    instead = "take ngvi.integrate(model, *args), for up to three hyperparameters"
    summed = next((n for n, s in found.items() if is_marked(s)), "")
    for name in sorted(effects, key=lambda n: -effects[n]["value"].numel()):
        site = effects[name]
        if site["value"].numel() < FEWEST:
            break
        values = others | {name: site["value"]}
        moved = values | {name: site["fn"].sample()}
        for small in shrunk:
            (a, b, c, d) = (
                look(model, v | at, args, kwargs) for at in ({}, small) for v in (values, moved)
            )
            priors = [x[name]["fn"].log_prob(site["value"]) for x in (a, c)]
            narrows = not torch.equal(*priors)
            before, after = (
                abs(_log_likelihood(x) - _log_likelihood(y)) for x, y in ((a, b), (c, d))
            )
            if not narrows:
                none = look(model, values | {name: torch.zeros_like(site["value"])}, args, kwargs)
                left = abs(_log_likelihood(none) - _log_likelihood(c))
                if not max(after, left) < NONE * before:
                    continue
            if summed:
                return (
                    f"{name!r} has a scale of its own, and the enumerated {summed!r} keeps units from "
                    f"being taken: write that sum as one observed distribution (MixtureSameFamily, "
                    f"ZeroInflatedDistribution), and leave guide= out."
                )
            suits = few and sites_take(poutine.condition(model, data=others), args, kwargs)
            if narrows:
                return f"{name!r} is an effect with a scale of its own: {instead}." * suits
            if _is_named(found, name):
                return f"{name!r} has a scale of its own: {instead}." * suits
            return (
                f"{name!r} has a scale of its own: name the effect, as u = "
                f'pyro.deterministic("u", scale * {name}), and leave guide= out'
                + f"; or {instead}" * suits
                + "."
            )
    return ""


def _is_named(sites: Sites, name: str) -> bool:
    """Whether a deterministic site is that one times a number, plus a number."""
    z = sites[name]["value"]
    if z.numel() < 3:
        return False
    each = (s["value"] for s in sites.values() if site_kind(s) == "deterministic")
    moves = (u.flatten().diff() / z.flatten().diff() for u in each if u.shape == z.shape)
    return any(torch.allclose(r, r[0], rtol=1e-3, atol=0.0) for r in moves)


def _log_likelihood(sites: Any) -> float:
    seen = (s for s in sites.values() if s["is_observed"])
    return sum(float(s["fn"].log_prob(s["value"]).double().sum()) for s in seen)
