"""How much is asked of a fit unasked: importance weights, weights of better draws, or short chains."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..diagnostics import Diagnosis, KHat
from ..diagnostics.by_weights import by_weights
from ..diagnostics.correction import doubt_of
from ..diagnostics.verdict import PATIENCE, QUICK
from ..guides import AutoFullRankNormal
from ..hierarchy import AutoHierarchical
from ..hierarchy.marginal import work_of_draw
from ..runtime.run import CannotBatch

#: latent variables times data up to which a fit is diagnosed by short chains unasked; up to which it is
#: where weights have doubts, and took no more than so many seconds: chains take ten times that, or more
LITTLE, MUCH, PATIENT = 10_000, 1_000_000, 1.0
#: data times points of the quadrature up to which units of a hierarchy are integrated out, or so
SUMMED = 100_000
#: whose tails are lighter than a posterior's, which few weights that are all but equal may not show
TAILS = AutoFullRankNormal, AutoHierarchical


def word_on(fit: Any) -> KHat | Diagnosis:
    """The diagnosis of the guide; k-hat where weights are all but equal, the fit diverged, or latent
    variables times data are more than 10,000, and it is good or took long, or they are more than 10^6
    (for units of a hierarchy points of quadrature times data, 10^5; for few latent variables where
    slices take long), ``vmap`` cannot run the model, or the data are minibatches."""
    if fit.is_spread or fit._is_stream or fit.why_stopped == "diverged":
        return fit.khat
    guide, d, data = fit.guide, fit._structure.d, fit._structure.data
    work = d * max(d, data)
    little = work <= LITTLE
    with suppress(CannotBatch, ValueError):  # a chain may come where there is no density
        if isinstance(guide, AutoHierarchical) and (guide.units.is_block or not little):
            # whose chains would take minutes
            if work_of_draw(guide.units, data) <= SUMMED:
                found = by_weights(*fit._weighed)
                return found or replace(fit.khat, doubt=doubt_of(*fit._weighed[1:4]))
        elif fit.khat.nearly_equal and not isinstance(guide, TAILS):
            return fit.khat  # chains have more noise
        elif little or (work <= MUCH and not fit.khat.ok and fit._weighing <= PATIENT):
            return fit.diagnosis
        elif found := by_weights(*fit._weighed, patience=QUICK if fit.khat.ok else PATIENCE):
            return found
    return fit.khat
