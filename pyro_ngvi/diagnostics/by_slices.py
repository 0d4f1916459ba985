"""Corrected draws of a model of few latent variables, where short chains see errors."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ..guides import AutoFullRankNormal
from ..hierarchy import AutoHierarchical
from ..hierarchy.whole import Whole
from ..runtime.run import CannotBatch
from .correction import MORE, MOST_DRAWS, POOL, Corrected, moved_by_weights
from .diagnosis import Diagnosis
from .draws import MOST_DOUBLES, Fitted, random_state
from .khat import HALF, KHat
from .proposal import proposal
from .verdict import PATIENCE

#: latent variables that a copula of slices is tried for, and the share of even weights it must have: of
#: weights without a variance, k-hat above 1/2, ends of intervals were off by .6 sd
FEW, SHARE = 20, 0.25
#: draws that tell what one costs, those behind a proposal or so, and seconds for a guide that is good
TRIED, BEFORE, QUICK = 250, 4000, 4.0


def has_few(guide: Any) -> bool:
    """Whether slices are tried for such a guide."""
    return isinstance(guide, AutoFullRankNormal) and guide.latent_dim <= FEW


def can_be_corrected(guide: Any) -> bool:
    """Whether draws of such a guide are corrected where they are off."""
    return has_few(guide) or isinstance(guide, AutoHierarchical)


def times_for_loo(guide: Any) -> int:
    """How many times as many draws leave one datum out: without one tails are longer, and these draws
    cost little."""
    return POOL if isinstance(getattr(guide, "collapsed", None), Whole) else 1


def by_slices(
    model: Any, guide: Any, args: Any, kwargs: Any, found: KHat | Diagnosis
) -> Corrected | None:
    """Corrected draws of a model of few latent variables, where those of a full-rank guide may be off
    by a third of the bounds, as chains ``found``: by weights that can be relied on, and agree.

    A tail that is so long that a few draws make the sd is none of theirs."""
    if not (has_few(guide) and isinstance(found, Diagnosis)):
        return None
    known = found.khat
    apart = known.other_modes or known.rounded or known.ess == 0.0 or (known.missed or 0.0) > 0.0
    if apart or not found.may_be_off:
        return None
    patience = QUICK if found.ok else PATIENCE
    # a support that depends on a latent site has no slices, say
    with suppress(ValueError, RuntimeError, CannotBatch), random_state(0, stream=3):
        fitted = Fitted(model, guide, args, kwargs)
        for _ in range(2):  # what a first call costs is no draw's
            fitted.draw(TRIED, None)
        each = fitted.seconds / TRIED
        draws = next((n for n in (MOST_DRAWS, MORE) if (n + BEFORE) * each <= patience), 0)
        if not draws:
            return None
        held = sum(site["value"].numel() for site in fitted.in_sum.values())
        room = MOST_DOUBLES / max(1, held)
        better = proposal(Whole(model, guide, args, kwargs, fitted.joint, room))
        judged = moved_by_weights(model, guide, args, kwargs, draws, better)
        if judged is None:
            return None
        sites, unconstrained, exact = judged
        better, weights = exact
        even = weights.khat <= HALF and weights.ess >= SHARE * len(weights.log_weights)
        sure = all(m.is_known for m in sites.values())
        agree = not any(
            m.is_far_from(sites[n], less=2.0) for n, m in found.sites.items() if n in sites
        )
        seen = Diagnosis(sites, unconstrained, known, float("nan"), exact=exact)
        if even and sure and agree and not (found.ok and not seen.may_be_off):
            return Corrected(better, weights, found.verdict)
    return None
