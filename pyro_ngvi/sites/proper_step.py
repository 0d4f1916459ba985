"""A step of the sites after which q is a proper Gaussian.

Single sites may have a negative precision, where the likelihood is not log-concave, as long as prior
and sites together do not.  Where the whole step would go too far, a share 2^-j of it is taken; where no
share of it is proper, sites lose the negative part of their precision, and then q always is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..linalg.host import host_bool
from ..linalg.spectral import positive_part
from .algebra import Algebra
from .dense import GaussianPotential
from .loss import SiteTargets
from .secant import Pairs

__all__ = ["ProperStep", "proper_step"]

#: halvings of a step that would leave the proper densities
HALVINGS = 6


@dataclass(frozen=True)
class ProperStep:
    """The change of every site, with its share in it; log Z and evidence after it, and q if known."""

    change: Pairs
    share: Tensor
    log_normalizer: Tensor
    evidence: GaussianPotential
    q: Any


def proper_step(algebra: Algebra, targets: SiteTargets, change: Pairs) -> ProperStep:
    """``change``, or as much of it as leaves q proper.  ``share`` is that of the change given."""
    step = _halved(algebra, targets, change)
    if host_bool(step.share > 0.0):
        return step
    positive: Pairs = {}
    for name, (nu, Lambda) in change.items():
        before = targets.sites[name][1]
        positive[name] = nu, positive_part(before + Lambda) - before
    other = _halved(algebra, targets, positive)
    found = step.share > 0.0
    chosen = {
        n: (torch.where(found, a, positive[n][0]), torch.where(found, b, positive[n][1]))
        for n, (a, b) in step.change.items()
    }
    share = torch.where(found, step.share, other.share)
    log_normalizer = torch.where(found, step.log_normalizer, other.log_normalizer)
    evidence = step.evidence.where(found, other.evidence)
    return ProperStep(chosen, share, log_normalizer, evidence, None)


def _halved(algebra: Algebra, targets: SiteTargets, change: Pairs) -> ProperStep:
    """The largest share 2^-j of a change that leaves q proper, or 0."""
    sites, view, before = targets.sites, targets.view, algebra.evidence
    one = torch.ones_like(before.constant)
    moved = {n: (sites[n][0] + a, sites[n][1] + b) for n, (a, b) in change.items()}
    if targets.call.whole:  # summed anew, so that roundings do not add up from sweep to sweep
        after = algebra.collect(view, moved)
    else:
        after = algebra.after(view, change, moved, targets.call)
    q = algebra.posterior(view, after)
    if host_bool(q.proper):  # nothing to halve
        return ProperStep(change, one, q.log_normalizer, after, q)
    step = after.plus(before, -1.0)
    found, log_normalizer = q.proper, q.log_normalizer
    share = torch.where(found, one, torch.zeros_like(one))
    log_normalizer = torch.where(found, log_normalizer, targets.posterior.log_normalizer)
    for j in range(1, HALVINGS + 1):
        q = algebra.posterior(view, before.plus(step, 0.5**j))
        fits = q.proper & ~found
        share = torch.where(fits, 0.5**j, share)
        log_normalizer = torch.where(fits, q.log_normalizer, log_normalizer)
        found = found | fits
        if host_bool(found):
            break
    evidence = after.where(share == 1.0, before.plus(step, share))
    return ProperStep(change, share, log_normalizer, evidence, None)
