"""What weights of better draws say of a guide, where they can be relied on: no chain is needed then."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch

from ..guides import AutoExponentialFamily, AutoFullRankNormal
from ..hierarchy import AutoHierarchical
from ..hierarchy.whole import Whole
from ..runtime.run import CannotBatch
from .correction import MORE, MOST_DRAWS, POOL, Corrected, moved_by_weights
from .defence import PLACES, Place
from .diagnosis import Diagnosis
from .draws import MOST_DOUBLES, Fitted, random_state
from .elsewhere import moments
from .khat import EVEN, HALF, KHat
from .proposal import LIGHT, proposal
from .verdict import PATIENCE, QUICK

#: latent variables that a copula of slices is tried for, and the share of even weights it must have
FEW, SHARE = 20, 0.25
#: proposals that are tried, which differ: the second where k-hat is above by so much, or half the share
TRIES, NEAR = 2, 0.1
#: draws that tell what one costs, and those behind a proposal or so
TRIED, BEFORE = 250, 4000


def has_few(guide: Any) -> bool:
    """Whether slices are tried for such a guide."""
    one_mode = isinstance(guide, AutoFullRankNormal | AutoExponentialFamily)
    return one_mode and guide.latent_dim <= FEW


def can_be_corrected(guide: Any) -> bool:
    """Whether draws of such a guide are corrected where they are off."""
    return has_few(guide) or isinstance(guide, AutoHierarchical)


def times_for_loo(guide: Any) -> int:
    """How many times as many draws leave one datum out: without one tails are longer, and these draws
    cost little."""
    return POOL if isinstance(getattr(guide, "collapsed", None), Whole) else 1


def for_loo(word: Any, weighed: tuple[Any, ...]) -> Corrected | None:
    """What judged few latent variables, or would have, whose tails are longer than a good guide's;
    ``weighed`` are the arguments of :func:`by_weights`."""
    judged = word
    if isinstance(word, KHat) and word.nearly_equal and has_few(weighed[1]):
        judged = by_weights(*weighed, patience=QUICK)
    exact: Any = getattr(judged, "exact", None)
    if exact is None or not isinstance(exact[0].collapsed, Whole):
        return None
    return Corrected(exact[0], exact[1], word.verdict)


def by_weights(
    model: Any,
    guide: Any,
    args: Any,
    kwargs: Any,
    weights: KHat,
    num_draws: int = 500,
    seed: int | None = 0,
    patience: float = PATIENCE,
) -> Diagnosis | None:
    """As :func:`pyro_ngvi.diagnose`, by weights of corrected draws, if there are any for such a guide,
    these can be relied on, and slices take ``patience`` seconds at most; ``weights`` are those of the
    guide's own draws."""
    if not can_be_corrected(guide):
        return None
    with random_state(seed, stream=2):
        if has_few(guide):
            judged = _by_slices(model, guide, args, kwargs, weights, patience)
            weights = weights.of_modes_held  # r is in the others too
        else:
            judged = moved_by_weights(model, guide, args, kwargs, num_draws)
    if judged is None:
        return None
    sites, unconstrained, exact = judged
    heavy = {name: m for name, m in sites.items() if has_few(guide) and not m.is_known}
    sites = {name: m for name, m in sites.items() if name not in heavy}
    how: Any = {"exact": exact, "heavy": tuple(heavy)}
    return Diagnosis(sites, unconstrained, weights, float("nan"), **how)


def _by_slices(model: Any, guide: Any, args: Any, kwargs: Any, known: KHat, patience: float) -> Any:
    """:func:`.moved_by_weights`, of a model all of whose latent variables are globals, few of them.

    A tail that is so long that a few draws make the sd is none of theirs, but in a deterministic site,
    as a ratio, nor are other modes, but for those that draws of the prior are in, or where the search
    for a start ended."""
    if known.mirrored or known.rounded or known.ess == 0.0:
        return None
    # a support that depends on a latent site has no slices, say
    with suppress(ValueError, RuntimeError, CannotBatch):
        fitted = Fitted(model, guide, args, kwargs)
        for _ in range(2):  # what a first call costs is no draw's
            fitted.draw(TRIED, None)
        each = fitted.seconds / TRIED
        draws = next((n for n in (MOST_DRAWS, MORE) if (n + BEFORE) * each <= patience), 0)
        if not draws:
            return None
        held = sum(site["value"].numel() for site in fitted.in_sum.values())
        room = MOST_DOUBLES / max(1, held)
        whole = Whole(model, guide, args, kwargs, fitted.joint, room)
        missed = (known.missed or 0.0) > 0.0
        wide = moments(fitted, whole.layout) if missed else None
        if missed and wide is None:
            return None
        others = _ends(guide)
        # r is in all of the modes, or nothing is said
        if known.other_modes and not len(guide.start_report.ends) == len(others) <= PLACES:
            return None
        most = LIGHT if missed else HALF  # r of one mode and long tails is no shape of several
        for _ in range(TRIES):
            better = proposal(whole, wide=wide, others=others)
            judged = moved_by_weights(model, guide, args, kwargs, draws, better)
            if judged is None:
                break
            sites, _, (_, weights) = judged
            share = weights.ess / len(weights.log_weights)
            k = -math.inf if share >= EVEN else weights.khat  # which says little of even weights
            even = k <= most and share >= SHARE
            lost = {name for name, moved in sites.items() if not moved.is_known}
            if even and not lost & {*fitted.latent}:
                return judged
            if k > most + NEAR or share < 0.5 * SHARE:
                break
    return None


def _ends(guide: Any) -> list[Place]:
    """Where the search for the guide's start ended."""
    report, params = guide.start_report, next(guide.parameters())
    ends = [] if report is None else report.ends
    inverses = [torch.linalg.inv(q.precision).to(params) for q in ends]
    places = [
        Place(q.loc.to(params), 0.5 * (C + C.mT), math.exp(q.elbo - ends[0].elbo))
        for q, C in zip(ends, inverses, strict=True)
    ]
    return [p for p in places if int(torch.linalg.cholesky_ex(p.covariance)[1]) == 0]
