"""From a cheap family to richer ones, while it pays."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from textwrap import shorten
from typing import Any

import torch

from ..diagnostics import Corrected
from ..guides import AutoCouplingFlow, AutoExponentialFamily, AutoMixtureNormal
from ..guides.found import SHARE, held
from ..hierarchy import AutoHierarchical
from ..runtime.density import LatentLayout
from .checkpoint import called
from .structure import Structure

#: latent variables above which a flow costs too much
FLOW = 100
#: how much more time the next guide may take than all before it, and seconds that it may in any case
PATIENCE, SECONDS = 4.0, 10.0
#: nats that draws which may be taken are worth beside others that may not: a fifth of the mass
WORTH = 0.25
#: ends of a run that end the climb
ASKED = "interrupted", "terminated"
#: seconds of the first guide, while others wait
FIRST = 60.0


@dataclass(frozen=True)
class Rung:
    """What one guide has reached: ELBO and ``error`` in nats, the seconds of fit and verdict."""

    guide: str
    elbo: float
    error: float
    khat: float
    decision: str
    why_stopped: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.guide}: ELBO {self.elbo:.2f} +- {self.error:.2f}, k-hat {self.khat:.2f}, "
            f"{self.decision}, {self.seconds:.2g} s"
        )


def climb(structure: Structure, fit: Callable[..., Any], max_time: float | None) -> Any:
    """The best fit, as :func:`pyro_ngvi.fit` says of ``guide="auto"``; of two that no error tells
    apart, the one whose draws, or corrected ones, may be taken as they are, which are given up only for
    others that may be.  ``fit(guide, max_time, best)`` gives a fit; ``best`` is that of the guides
    before, or with no guide the one to go on with.

    A mixture follows where the search for a start has found several modes, where draws of the prior
    show that a guide after the first missed one or that the first did and the next one left its own,
    and again where its own search finds more.  No guide that is in fewer modes takes its place.  A
    model with parameters, which every guide would train, has its first guide.
    """
    choices, total = [structure.guide()[0]], math.inf if max_time is None else max_time
    if structure.units is not None and AutoHierarchical not in choices:
        choices.append(AutoHierarchical)
    if not structure.is_free and AutoExponentialFamily not in choices:
        choices.append(AutoExponentialFamily)
    if structure.d <= FLOW:
        choices.append(AutoCouplingFlow)
    if len(choices) > 1 and structure.has_params:
        del choices[1:]
    best: Any = None
    fits, rungs, start = [], [], time.monotonic()
    for guide in choices:
        began = time.monotonic()
        if not rungs:
            limit = min(FIRST if len(choices) > 1 else math.inf, total)
        else:
            limit = min(max(SECONDS, PATIENCE * (began - start)), total - (began - start))
        if limit <= 0.0:
            break
        found = best
        try:
            found = fit(guide, limit, best)
            fits.append(found)
            rung = _rung(called(guide), found, began)
        except (ValueError, TypeError, RuntimeError) as error:
            # a minibatch has no verdict, and a rule may refuse a guide
            if found is None:
                raise
            message = f'fit(guide="auto") ends with {called(guide)}: no verdict on it, {error}'
            warnings.warn(shorten(message, 240, placeholder=" ..."), stacklevel=3)
            best = best or found
            break
        rungs.append(rung)
        # the verdict on some modes knows nothing of others
        mixture = isinstance(found.guide, AutoMixtureNormal)
        modes = found.khat.modes if mixture or len(rungs) == 1 else 1
        if len(fits) > 1 and not any(isinstance(f.guide, AutoMixtureNormal) for f in fits):
            left_one = _missed(fits[0]) and _has_left(fits[0], found)
            modes = 2 if left_one or _missed(found) else 1
        more = modes > (len(found.guide.weights) if mixture else 1) and len(choices) > 1
        if more:
            choices.insert(len(rungs), partial(AutoMixtureNormal, num_components=modes))
        gain = math.inf if best is None else rung.elbo - best.khat.elbo
        error = 0.0 if best is None else math.hypot(rung.error, best.khat.elbo_error)
        good = rung.decision == "intervals"
        reach = 0.0
        if best is not None and not best.verdict.ok:
            # of corrected draws up to the log evidence, ELBO + KL
            reach = max(0.0, found.khat.kl) if isinstance(found.verdict, Corrected) else WORTH
        better = gain > 0.0 or (good and gain > -error - reach)
        better &= good or best is None or not best.verdict.ok
        better |= _loses_a_mode(best, of=found)
        best = found if better and not _loses_a_mode(found, of=best) else best
        stuck = gain < error and (mixture or not more)
        done = good and not found.verdict.is_rough
        if (done and not more) or stuck or rung.why_stopped in ASKED:
            break
    left = total - (time.monotonic() - start)
    asked = bool(rungs) and rungs[-1].why_stopped in ASKED
    hurried = len(choices) > 1 and fits[0].why_stopped == "max_time" and not asked
    if hurried and fits.index(best) == 0 and left > 0.0:
        began = time.monotonic()
        best = fit(None, left, best)
        rungs = [_rung(rung.guide, best, began - rung.seconds) for rung in rungs[:1]] + rungs[1:]
    best.rungs = tuple(rungs)
    return best


def _missed(fit: Any) -> bool:
    """Whether draws of the prior show more than a guide holds."""
    return (fit.khat.missed or 0.0) > 0.0


def _has_left(first: Any, found: Any) -> bool:
    """Whether a guide has too few draws where those of the first are, all but 1 % of them, for what
    both ELBOs say of the masses there."""
    share = math.exp(min(0.0, first.khat.elbo - found.khat.elbo))
    if type(first.guide) is type(found.guide) or share < SHARE:
        return False
    layout = LatentLayout(first.guide.prototype_trace)
    count = max(1000, 10 * layout.dim)  # enough for a covariance
    own, new = (layout.pack(fit.sample(count, seed=0)).detach().double() for fit in (first, found))
    root, singular = torch.linalg.cholesky_ex(own.mT.cov().reshape(2 * own.shape[1:]))
    if bool(singular):
        return False
    own, new = (
        torch.linalg.solve_triangular(root, (x - own.mean(0)).mT, upper=False).square().sum(0)
        for x in (own, new)
    )
    return float((new <= own.quantile(0.99)).double().mean()) < 0.5 * share


def _loses_a_mode(found: Any, of: Any) -> bool:
    """Whether draws of a fit are in fewer of the modes ``of`` a mixture than its own: what is lost may
    be too few nats for a verdict on the others to see, and most of the variance."""
    if of is None or found is None or not isinstance(of.guide, AutoMixtureNormal):
        return False
    layout = LatentLayout(of.guide.prototype_trace)
    modes = (of.guide.modes_at(layout.pack(fit.sample(seed=0))) for fit in (found, of))
    lost, kept = map(held, modes)
    return lost < kept


def _rung(guide: str, found: Any, began: float) -> Rung:
    decision, k, seconds = found.verdict.decision, found.khat, time.monotonic() - began
    return Rung(guide, k.elbo, k.elbo_error, k.khat, decision, str(found.why_stopped), seconds)
