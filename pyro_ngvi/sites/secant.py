r"""How far to go in a step of the sites: a secant, a way back, and no further than q is proper.

With all data, r = target - lambda is the gradient of the ELBO in the mean parameters mu, so along the
step d = b r_old that led from mu_old to mu its slopes at both ends are known without another
evaluation, and the secant through them crosses zero at the gain

    b* = <d, mu - mu_old> / (<d, mu - mu_old> / b - <r, mu - mu_old>).

<d, mu - mu_old> is KL(q || q_old) + KL(q_old || q) > 0.  A sweep that overshoots makes the second
slope negative, and the next one is shorter (Barzilai & Borwein 1988, in the geometry of the family).
Where the ELBO fell all the same, half of d is taken back, again and again; nearly all of it, where the
ELBO is not finite.

Single sites may have a negative precision, where the likelihood is not log-concave, as long as prior
and sites together do not.  Where the whole step would go too far, a share 2^-j of it is taken; where no
share of it is proper, sites lose the negative part of their precision, and then q always is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..families.base import Tensors
from ..linalg.host import host_bool
from ..linalg.spectral import positive_part
from .algebra import Algebra, GaussianPotential
from .loss import SiteTargets

#: changes of every group's sites, or their mean parameters: (n, k) and (n, k, k)
Pairs = dict[str, tuple[Tensor, Tensor]]

#: a fall of the ELBO by less than this many roundings of its terms is none
ROUNDINGS = 256.0
#: smallest share of lr that a secant asks for
SMALLEST = 1.0 / 16.0
#: what is left of a step after which the ELBO is not finite: halves of it could be lost as well
LOST = 2.0**-8
#: how often a step is halved; 2^-30 of it that still lowers the ELBO led nowhere up
MOST_BACKS = 30
#: halvings of a step that would leave the proper densities
HALVINGS = 6


def pairing(change: Pairs, moments: Pairs) -> Tensor:
    """<(nu, Lambda), (m, M)> = sum nu' m - tr(Lambda M) / 2 over all sites, 0-dim."""
    total = torch.zeros(())
    for name, (nu, Lambda) in change.items():
        m, M = moments[name]
        total = total.to(m) + (nu * m).sum() - 0.5 * (Lambda * M).sum()
    return total


@dataclass(frozen=True)
class Sweep:
    """The change of every site in the next sweep, its gain, and whether it goes back."""

    change: Pairs
    gain: Tensor
    back: Tensor
    memory: Tensors


def start_sweeps(values: Tensors) -> Tensors:
    """The memory before the first sweep, from the sites by parameter name."""
    zero = next(iter(values.values())).new_zeros(())
    memory = {"sweep.elbo": zero - torch.inf, "sweep.gain": zero, "sweep.backs": zero.clone()}
    for name, v in values.items():
        memory |= {f"sweep.step.{name}": torch.zeros_like(v)}
        memory |= {f"sweep.moment.{name}": torch.zeros_like(v)}
    for name, (nu, _) in _recalled(values, "").items():
        memory[f"sweep.print.{name}"] = nu.new_full((len(nu), nu.shape[1] + 1), torch.inf)
    return memory


def next_sweep(
    memory: Tensors,
    residual: Pairs,
    exact: dict[str, Tensor],
    moments: Pairs,
    elbo: Tensor,
    size: Tensor,
    lr: float,
    comparable: Tensor,
) -> Sweep:
    """What to do from here.

    ``residual`` is target - site, ``exact`` (n,) marks conjugate terms, which go all the way, and
    ``size`` () is that of the terms that the ELBO is the sum of, and with it of its roundings.
    ``comparable`` () says whether the sweep before had the same data and model.  Nothing waits.
    """
    last, best = _recalled(memory, "sweep.step."), memory["sweep.elbo"]
    moved = tree_map(torch.sub, moments, _recalled(memory, "sweep.moment."))
    slack = ROUNDINGS * torch.finfo(elbo.dtype).eps * (1.0 + size)
    # where the ELBO is -inf so is best - slack
    fell = best.isfinite() & ~(elbo.isfinite() & (elbo >= best - slack))
    back = comparable & fell & (memory["sweep.backs"] < MOST_BACKS)
    along, slope = pairing(last, moved), pairing(residual, moved)
    secant = along / (along / memory["sweep.gain"] - slope)
    gain = torch.where(comparable & (along > 0) & (secant > 0), secant, lr).clamp(SMALLEST * lr, lr)
    step = towards(residual, exact, gain)
    share = torch.where(elbo.isfinite(), 0.5, LOST).to(elbo)
    left = tree_map(lambda x: share * x, last)
    kept = {
        name: torch.where(back, memory[name], value)
        for name, value in _named("sweep.moment.", moments).items()
    }
    kept |= _named("sweep.step.", _choose(back, left, step))
    kept["sweep.backs"] = torch.where(back, memory["sweep.backs"] + 1.0, 0.0)
    kept["sweep.elbo"] = torch.where(back, best, elbo)
    kept["sweep.gain"] = torch.where(back, share * memory["sweep.gain"], gain)
    change = _choose(back, tree_map(torch.sub, left, last), step)
    return Sweep(change, kept["sweep.gain"], back, kept)


def towards(residual: Pairs, exact: dict[str, Tensor], gain: Tensor) -> Pairs:
    """The share ``gain`` () of every residual, and all of those that are ``exact`` (n,)."""
    step: Pairs = {}
    for name, (nu, Lambda) in residual.items():
        b = torch.where(exact[name], 1.0, gain)
        step[name] = (b.unsqueeze(-1) * nu, b.reshape(-1, 1, 1) * Lambda)
    return step


def taken(sweep: Sweep, change: Pairs, share: Tensor) -> Tensors:
    """The memory of a sweep of which that ``share`` of a ``change`` was made.

    A sweep that goes back remembers the half of the step before that is left of it.
    """
    made = _named("sweep.step.", tree_map(lambda x: share * x, change))
    made["sweep.gain"] = share * sweep.gain
    chosen = {n: torch.where(sweep.back, sweep.memory[n], v) for n, v in made.items()}
    return sweep.memory | chosen


def _named(prefix: str, pairs: Pairs) -> Tensors:
    named = {f"{prefix}linear_{name}": a for name, (a, _) in pairs.items()}
    return named | {f"{prefix}precision_{name}": b for name, (_, b) in pairs.items()}


def _recalled(memory: Tensors, prefix: str) -> Pairs:
    start, other = prefix + "linear_", prefix + "precision_"
    names = [key.removeprefix(start) for key in memory if key.startswith(start)]
    return {name: (memory[start + name], memory[other + name]) for name in names}


def same(memory: Tensors, prints: Tensors) -> Tensor:
    """Whether every fingerprint (n, k + 1) equals that of the sweep before: a 0-dim tensor."""
    checks = []
    for name, x in prints.items():
        last = memory["sweep.print." + name]
        checks.append(((x == last) | (x.isnan() & last.isnan())).all())
    return torch.stack(checks).all()


def _choose(condition: Tensor, a: Pairs, b: Pairs) -> Pairs:
    return tree_map(lambda x, y: torch.where(condition, x, y), a, b)


@dataclass(frozen=True)
class ProperStep:
    """The change of every site, with its share in it; log Z and evidence after it, and q if known."""

    change: Pairs
    share: Tensor
    log_normalizer: Tensor
    evidence: GaussianPotential
    q: Any = None


def proper_step(algebra: Algebra, targets: SiteTargets, change: Pairs) -> ProperStep:
    """``change``, or as much of it as leaves q proper.  ``share`` is that of the change given."""
    step = _halved(algebra, targets, change)
    found = step.share > 0.0
    if host_bool(found):
        return step
    positive: Pairs = {}
    for name, (nu, Lambda) in change.items():
        before = targets.sites[name][1]
        positive[name] = nu, positive_part(before + Lambda) - before
    other = _halved(algebra, targets, positive)
    return ProperStep(
        _choose(found, step.change, positive),
        torch.where(found, step.share, other.share),
        torch.where(found, step.log_normalizer, other.log_normalizer),
        step.evidence.where(found, other.evidence),
    )


def _halved(algebra: Algebra, targets: SiteTargets, change: Pairs) -> ProperStep:
    """The largest share 2^-j of a change that leaves q proper, or 0."""
    view, before = targets.view, algebra.evidence
    one = torch.ones_like(before.constant)
    moved = tree_map(torch.add, targets.sites, change)
    if targets.call.whole:  # summed anew, so that roundings do not add up from sweep to sweep
        after = algebra.collect(view, moved)
    else:
        after = algebra.after(view, change, moved, targets.call)
    q = algebra.posterior(view, after)
    found, log_normalizer = q.proper, q.log_normalizer
    if host_bool(found):  # nothing to halve
        return ProperStep(change, one, log_normalizer, after, q)
    step = after.plus(before, -1.0)
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
    return ProperStep(change, share, log_normalizer, evidence)
