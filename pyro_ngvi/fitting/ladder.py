"""From a cheap family to richer ones, while it pays."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from torch import nn

from ..guides import AutoCouplingFlow
from ..hierarchy import AutoHierarchical
from ..linalg.host import own_random_state
from ..runtime.store import traced_params
from .advice import Structure

#: latent variables above which a flow costs too much
FLOW = 100
#: how much more time the next guide may take than all before it, and seconds that it may in any case
PATIENCE, SECONDS = 4.0, 10.0


@dataclass(frozen=True)
class Rung:
    """What one guide has reached.

    Attributes:
        guide: its name.
        elbo: ELBO in nats, and ``error`` its standard error.
        khat: k-hat of the importance weights.
        decision: of the fit's ``verdict``.
        why_stopped: of the fit.
        seconds: of fit and verdict.
    """

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


def guides(structure: Structure) -> Iterator[Any]:
    """Guides of a model, the cheapest that suits it first."""
    first, _ = structure.guide()
    yield first
    if structure.units is not None and first is not AutoHierarchical:
        yield AutoHierarchical
    if structure.d <= FLOW:
        yield AutoCouplingFlow


def climb(structure: Structure, fit: Callable[..., Any], max_time: float | None) -> Any:
    """The fit of the guide with the highest ELBO, of those up to the first that is good enough; of two
    that no standard error tells apart, the one whose draws may be taken as they are.

    Good enough are draws that may be taken as they are, or an ELBO that is no better than that of the
    best guide before it by the standard error of the difference.  Where the model has parameters of its
    own, which every guide would train, the first guide is all.

    A guide after the first takes at most four times as long as those before it, or ten seconds.

    Args:
        structure: what is known of the model.
        fit: ``fit(guide, max_time, best)`` gives a fit; ``best``: that of the guides before.
        max_time: seconds in all.
    """
    best: Any = None
    rungs, start = [], time.monotonic()
    for guide in guides(structure):
        began = time.monotonic()
        limit = max_time
        if best is not None:
            limit = max(SECONDS, PATIENCE * (began - start))
            limit = limit if max_time is None else min(limit, max_time - (began - start))
            if limit <= 0.0:
                break
        found = best
        try:
            found = fit(guide, limit, best)
            decision, k = found.verdict.decision, found.khat
        except (ValueError, TypeError, RuntimeError) as error:
            # a minibatch has no verdict, and a rule may refuse a guide
            if found is None:
                raise
            message = f'fit(guide="auto") ends with {guide.__name__}: no verdict on it, {error}'
            warnings.warn(message[:240], UserWarning, stacklevel=3)
            best = best or found
            break
        why, seconds = str(found.why_stopped), time.monotonic() - began
        rungs.append(Rung(guide.__name__, k.elbo, k.elbo_error, k.khat, decision, why, seconds))
        gain = math.inf if best is None else k.elbo - best.khat.elbo
        error = 0.0 if best is None else math.hypot(k.elbo_error, best.khat.elbo_error)
        good = decision == "intervals"
        best = found if gain > 0.0 or (good and gain > -error) else best
        if good or gain < error or why in ("interrupted", "terminated"):
            break
        if _has_params(structure):
            break
    best.rungs = tuple(rungs)
    return best


def _has_params(structure: Structure) -> bool:
    """Whether a model has parameters that are trained beside the guide's."""
    model = structure.model
    if isinstance(model, nn.Module) and any(p.requires_grad for p in model.parameters()):
        return True
    with own_random_state(), torch.no_grad(), poutine.trace(param_only=True) as seen:
        model(*structure.args, **structure.kwargs)
    return bool(traced_params(seen))
