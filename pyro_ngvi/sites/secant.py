r"""How far to go in a step of the sites: a secant, a way back, and no further than q is proper.

With all data r = target - lambda is the gradient of the ELBO in the mean parameters mu, so the slopes
at both ends of a step d = b r_old from mu_old to mu are known, and their secant is zero at the gain

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
from ..optim.rule import State
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
    """The change of every site in the next sweep, its gain, and whether it goes back.

    The memory after it is ``behind`` where it does, else ``ahead``, with the step that was taken.
    """

    change: Pairs
    gain: Tensor
    back: Tensor
    behind: State
    ahead: State

    def memory(self, change: Pairs, share: Tensor) -> State:
        """That of a sweep of which the ``share`` of a ``change`` was made."""
        step = _named(tree_map(lambda x: share * x, change))
        ahead = self.ahead | {"step": step, "gain": share * self.gain}
        return _choose(self.back, self.behind, ahead)


def start_sweeps(values: Tensors) -> State:
    """The memory before the first sweep, from the sites by parameter name."""
    zero, zeros = next(iter(values.values())).new_zeros(()), tree_map(torch.zeros_like, values)
    prints = {n: nu.new_full((len(nu), nu.shape[1] + 1), torch.inf) for n, nu in _linear(values)}
    memory: State = {"elbo": zero - torch.inf, "gain": zero, "backs": zero.clone()}
    return memory | {"step": zeros, "moment": tree_map(torch.clone, zeros), "print": prints}


def next_sweep(
    memory: State,
    residual: Pairs,
    exact: dict[str, Tensor],
    moments: Pairs,
    elbo: Tensor,
    size: Tensor,
    lr: float,
    prints: Tensors,
) -> Sweep:
    """What to do from here: ``residual`` is target - site, and ``exact`` terms (n,) go all the way.

    ``size`` () is that of the terms that the ELBO is the sum of, and with it of its roundings.  Where
    a fingerprint (n, k + 1) is another one the sweep before had other data or another model.
    """
    pairs = [(x, memory["print"][name]) for name, x in prints.items()]
    same = torch.stack([((x == y) | (x.isnan() & y.isnan())).all() for x, y in pairs]).all()
    last, best, backs = _pairs(memory["step"]), memory["elbo"], memory["backs"]
    moved = tree_map(torch.sub, moments, _pairs(memory["moment"]))
    slack = ROUNDINGS * torch.finfo(elbo.dtype).eps * (1.0 + size)
    # where the ELBO is -inf so is best - slack
    fell = best.isfinite() & ~(elbo.isfinite() & (elbo >= best - slack))
    back = same & fell & (backs < MOST_BACKS)
    along, slope = pairing(last, moved), pairing(residual, moved)
    secant = along / (along / memory["gain"] - slope)
    gain = torch.where(same & (along > 0) & (secant > 0), secant, lr).clamp(SMALLEST * lr, lr)
    share = torch.where(elbo.isfinite(), 0.5, LOST).to(elbo)
    left = tree_map(lambda x: share * x, last)
    change = _choose(back, tree_map(torch.sub, left, last), towards(residual, exact, gain))
    behind = memory | {"backs": backs + 1.0, "gain": share * memory["gain"], "step": _named(left)}
    ahead: State = {"elbo": elbo, "backs": torch.zeros_like(elbo), "moment": _named(moments)}
    gain = torch.where(back, behind["gain"], gain)
    return Sweep(change, gain, back, behind | {"print": prints}, ahead | {"print": prints})


def towards(residual: Pairs, exact: dict[str, Tensor], gain: Tensor) -> Pairs:
    """The share ``gain`` () of every residual, and all of those that are ``exact`` (n,)."""
    step: Pairs = {}
    for name, (nu, Lambda) in residual.items():
        b = torch.where(exact[name], 1.0, gain)
        step[name] = (b.unsqueeze(-1) * nu, b.reshape(-1, 1, 1) * Lambda)
    return step


def _named(pairs: Pairs) -> Tensors:
    named = {f"linear_{name}": a for name, (a, _) in pairs.items()}
    return named | {f"precision_{name}": b for name, (_, b) in pairs.items()}


def _pairs(named: Tensors) -> Pairs:
    return {name: (nu, named[f"precision_{name}"]) for name, nu in _linear(named)}


def _linear(named: Tensors) -> list[tuple[str, Tensor]]:
    return [(n.removeprefix("linear_"), v) for n, v in named.items() if n.startswith("linear_")]


def _choose(condition: Tensor, a: Any, b: Any) -> Any:
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
