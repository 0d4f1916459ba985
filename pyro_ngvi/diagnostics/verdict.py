"""From a model and its guide to importance weights, and what they say: the one place that decides."""

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor
from torch.distributions import biject_to

from ..hierarchy import ExactUnits
from ..linalg.host import own_random_state
from ..optim.host import find_blocks
from ..runtime.density import LatentLayout, Sites, site_log_prob, to_unconstrained
from ..runtime.model_density import map_draws
from .draws import Draws, Fitted, random_state, sites_of_kind
from .elsewhere import mass_elsewhere
from .khat import EVEN, FEWEST, HALF, KHat
from .mirrors import mirrored
from .rounding import rounded, warn_of_rounding
from .shifts import shift_of
from .weights import (
    MIN_DRAWS,
    NOTICED,
    evidence_of,
    missed_nats,
    prior_evidence,
    steepest,
)

#: times as many draws where k-hat alone doubts them, if they and their data are so many numbers at most
MORE, MOST = 16, 50_000_000
#: and the seconds that they may take, where they are for the sake of resampling alone
PATIENCE = 15.0
#: and those for a look where nothing speaks of errors or of other modes
QUICK = 4.0
#: draws of the prior at most, where few leave it open whether a mode is missed, and the error of their
#: evidence from which two modes may look like one
PRIOR, UNSURE = 64_000, 0.2


def khat(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 1000,
    seed: int | None = None,
    batch_size: int | None = None,
    **kwargs: Any,
) -> KHat:
    """Whether a trained Pyro guide's draws may be taken as they are: :class:`KHat`.

    Where k-hat is too large though the weights are worth half of the draws, or draws would do for
    resampling but for its error, 16 times as many draws decide, if they and their data are no more than
    5 * 10^7 numbers; and so many of the prior where few suggest that a mode is missed. Latent sites
    marked ``infer={"enumerate": "parallel"}`` and not in the guide are summed out.

    Args:
        model: the Pyro model.
        guide: any trained Pyro guide of it.
        args: those of both, and ``kwargs``: the full data.
        num_samples: S, at least 25; it and ``seed`` give the draws of :func:`pyro_ngvi.to_arviz`.
        seed: makes the result repeatable and leaves the global random state as it was.
        batch_size: draws that the model sees at once; ``None`` for a number that bounds memory.

    Raises:
        ValueError: for fewer than 25 draws, a subsampled plate, a guide that is a point mass in
            some latent sites or does not sample the model's latent sites, and data outside the
            support of their site.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> model, narrow = (lambda s=s: pyro.sample("z", dist.Normal(0.0, s)) for s in (1.0, 0.3))
        >>> khat(model, model, seed=0).decision  # an exact guide: all weights are equal
        'intervals'
        >>> found = khat(model, narrow, seed=1)
        >>> found.decision, found.khat > found.threshold
        ('unusable', True)
    """
    with random_state(seed):  # apart: a guide's first run ever may draw more than later ones
        fitted = Fitted(model, guide, args, kwargs, batches=True)
    with random_state(seed):
        draws = fitted.draw(num_samples, batch_size)
        found = judge(fitted, draws, batch_size)
    warn_of_rounding(fitted.sites, draws.values)
    if fixed := draws.point_masses:
        why = "AutoDelta, or rounding: take float64" if found.rounded else "AutoDelta"
        raise ValueError(
            f"All draws of {fixed} from the guide are the same point ({why}?). Judge the rest "
            "given it: pass pyro.poutine.condition(model, data=...) and the guide of the other sites."
        )
    return found


def judge(fitted: Fitted, draws: Draws, batch_size: int | None = None) -> KHat:
    """What the weights of ``draws`` say, or those of 16 times as many where k-hat alone doubts them."""
    with own_random_state():
        more = may_draw_more(fitted, draws)
        found, own = weighed(fitted, draws), draws.weights
        # units that are drawn by quadrature cost too much for that
        summed = isinstance(fitted.guide.func, ExactUnits)
        cheap = MORE * fitted.seconds <= PATIENCE and not summed
        # of weights that are all but equal k-hat says little
        equal = found.nearly_equal or (summed and found.ess >= EVEN * len(draws.log_q))
        doubtful = found.doubtful and (cheap or not equal)
        if more and fitted.batches is None and (doubtful or (found.unsure and cheap)):
            draws = fitted.draw(MORE * len(draws.log_q), batch_size)
            found = weighed(fitted, draws)
            even = own.ess >= (HALF if own.khat > own.threshold else FEWEST) * len(own.log_weights)
            even = even and not own.tail_is_too_heavy
            found = replace(found, wanted=0 if even else len(draws.log_q))
        if found.ess == 0.0 and fitted.batches is None:
            found = replace(found, impossible=_impossible(fitted, draws))
        if fitted.batches is None and not fitted.whole and found.ess > 0.0:
            words, blind = rounded(fitted, draws, batch_size)
            found = replace(found, rounded=words, khat=math.nan if blind else found.khat)
        log_ratio = draws.log_ratio
        blocks = [block for _, block in find_blocks(fitted.guide.func)]
        replaced = tuple(name for block in blocks for name in block.replaced_priors)
        found = _with_modes(found, blocks, draws)
        # a guide that is far from all modes has mirror images that are as far
        near = found.reliable or (found.ess > 0.0 and not found.tail_is_too_heavy)
        near = near and not found.other_modes
        if near and not fitted.whole:
            if words := mirrored(fitted, draws, batch_size):
                found = replace(found, modes=found.modes + 1, mirrored=words)
        missed, alone = None, not (fitted.whole or replaced) and (more or not fitted.batches)
        # what depends on enumerated sites has no density of its own to draw from
        # nor do processes draw the same from it, and minibatches are gone through once more
        if found.ess > 0.0 and fitted.joint is fitted.model and alone:
            few, of_guide = max(len(log_ratio) // 4, MIN_DRAWS), evidence_of(log_ratio)
            joints = None if fitted.batches is None else fitted.joints
            counts = [few, *(n for n in (MORE * few, MORE**2 * few) if more and n <= PRIOR)]
            for count in counts:
                prior = prior_evidence(fitted.model, fitted.latent, count, batch_size, joints)
                if prior is None:
                    break
                missed = missed_nats(prior, of_guide)
                # an excess of few draws, however large, may be the luck of one of them; that there is
                # none the lack of it, where they are nearly enough to tell
                more_tell = UNSURE < prior.error < HALF
                most = prior.log + (math.log1p(2.0 * prior.error) if more_tell else 0.0)
                if most < of_guide.log + NOTICED or (missed > 0.0 and count > few):
                    break
            unseen = missed is not None and not (missed > 0.0 or found.other_modes)
            quick = MORE * fitted.seconds <= QUICK
            if unseen and more and quick and joints is None:
                missed = mass_elsewhere(fitted, draws, of_guide, batch_size) or missed
        spread = log_ratio.std(ddof=1) if np.isfinite(log_ratio).all() else np.nan
        with torch.no_grad():  # some guides estimate a constant in log q
            error = float(getattr(fitted.guide.func, "log_q_error", float)())
        error = math.hypot(spread / len(log_ratio) ** 0.5, error)
        elbo = float(log_ratio.mean())
        return replace(found, missed=missed, elbo=elbo, elbo_error=error, replaced=replaced)


def _with_modes(found: KHat, blocks: Collection[Any], draws: Draws) -> KHat:
    """With how many of the modes that searches for a start have found the draws are in."""
    for report, trace in ((block.start_report, block.prototype_trace) for block in blocks):
        if report is not None and report.apart:
            held = found.modes_held * report.seen_from(LatentLayout(trace).pack(draws.values))
            found = replace(found, modes=found.modes * report.modes, modes_held=held)
    return found


def _impossible(fitted: Fitted, draws: Draws) -> str:
    """The data of a site that have no density at any of a few draws, in words."""
    values = {name: x[:MIN_DRAWS] for name, x in draws.values.items()}
    for name in sites_of_kind(fitted.in_sum, "observed"):

        def terms(sites: Sites, name: str = name) -> Tensor:
            return site_log_prob(sites[name])[1]

        with torch.no_grad(), pyro.validation_enabled(False):
            log_l = map_draws(fitted.joint, terms, values, MIN_DRAWS)
        never = ~log_l.isfinite().any(0)
        if bool(never.any()):
            return f", at all of them for {int(never.sum())} of {never.numel()} values of {name!r}"
    return ""


def weighed(fitted: Fitted, draws: Draws) -> KHat:
    """The weights of draws, what these would change, and whether the fit has ended."""
    found, unconstrained = draws.weights, {}
    for name, x in draws.values.items():
        try:
            theta = to_unconstrained(biject_to(fitted.sites[name]["fn"].support), x)
        except NotImplementedError:  # discrete, circular: no direction to move along
            continue
        if theta.is_floating_point():
            unconstrained[name] = theta.numpy(force=True)
    values = {name: x.numpy(force=True) for name, x in draws.sites.items()}
    weights = found.psis_log_weights if found.ess > 0.0 else found.log_weights
    shifts = {name: shift_of(x, weights) for name, x in values.items() if x.dtype.kind == "f"}
    return replace(found, shifts=shifts, slope=steepest(unconstrained, draws.log_ratio))


def may_draw_more(fitted: Fitted, draws: Draws) -> bool:
    """Whether 16 times as many draws are not too many, of these sites and their data."""
    data = sites_of_kind(fitted.sites, "observed")
    numbers = sum(x.numel() for x in (*draws.values.values(), *draws.sites.values()))
    numbers += len(draws.log_q) * sum(fitted.sites[n]["fn"].shape().numel() for n in data)
    if fitted.whole:
        numbers = max(fitted.whole.of_all(numbers))
    elif fitted.batches is not None:
        numbers /= next(fitted.joints())[0]
    return MORE * numbers <= MOST
