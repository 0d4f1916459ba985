r"""How far to go in a sweep: a secant on the slope of the ELBO, and a way back where it fell.

With all data, r = target - lambda is the gradient of the ELBO in the mean parameters mu, so along the
step d = b r_old that led from mu_old to mu its slopes at both ends are known without another
evaluation, and the secant through them crosses zero at the gain

    b* = <d, mu - mu_old> / (<d, mu - mu_old> / b - <r, mu - mu_old>).

<d, mu - mu_old> is KL(q || q_old) + KL(q_old || q) > 0.  A sweep that overshoots makes the second
slope negative, and the next one is shorter (Barzilai & Borwein 1988, in the geometry of the family).
Where the ELBO fell all the same, half of d is taken back, again and again; nearly all of it, where the
ELBO is not finite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..families.base import Tensors
from ..optim.rule import part

__all__ = ["Sweep", "next_sweep", "pairing", "same", "start_sweeps", "taken", "towards"]

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
    like = next(iter(values.values()))
    zero = torch.zeros((), dtype=like.dtype, device=like.device)
    memory = {"sweep.elbo": zero - torch.inf, "sweep.gain": zero.clone()}
    memory["sweep.backs"] = zero.clone()
    for name, v in values.items():
        memory |= {f"sweep.step.{name}": torch.zeros_like(v)}
        memory |= {f"sweep.moment.{name}": torch.zeros_like(v)}
    for name, (nu, _) in _pairs(values).items():
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
    last, before = _pairs(part(memory, "sweep.step.")), _pairs(part(memory, "sweep.moment."))
    moved = {n: (m - before[n][0], M - before[n][1]) for n, (m, M) in moments.items()}
    best = memory["sweep.elbo"]
    slack = ROUNDINGS * torch.finfo(elbo.dtype).eps * (1.0 + size)
    # where the ELBO is -inf so is best - slack
    fell = best.isfinite() & ~(elbo.isfinite() & (elbo >= best - slack))
    back = comparable & fell & (memory["sweep.backs"] < MOST_BACKS)
    along, slope = pairing(last, moved), pairing(residual, moved)
    secant = along / (along / memory["sweep.gain"] - slope)
    gain = torch.where(comparable & (along > 0) & (secant > 0), secant, lr).clamp(SMALLEST * lr, lr)
    step = towards(residual, exact, gain)
    share = torch.where(elbo.isfinite(), 0.5, LOST).to(elbo)
    left: Pairs = {n: (share * a, share * b) for n, (a, b) in last.items()}
    kept = {
        name: torch.where(back, memory[name], value)
        for name, value in _named("sweep.moment.", moments).items()
    }
    kept |= _named("sweep.step.", _choose(back, left, step))
    kept["sweep.backs"] = torch.where(back, memory["sweep.backs"] + 1.0, 0.0)
    kept["sweep.elbo"] = torch.where(back, best, elbo)
    kept["sweep.gain"] = torch.where(back, share * memory["sweep.gain"], gain)
    undone = {n: (left[n][0] - a, left[n][1] - b) for n, (a, b) in last.items()}
    change = _choose(back, undone, step)
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
    made = _named("sweep.step.", {n: (share * a, share * b) for n, (a, b) in change.items()})
    made["sweep.gain"] = share * sweep.gain
    chosen = {n: torch.where(sweep.back, sweep.memory[n], v) for n, v in made.items()}
    return sweep.memory | chosen


def _named(prefix: str, pairs: Pairs) -> Tensors:
    named = {f"{prefix}linear_{name}": a for name, (a, _) in pairs.items()}
    return named | {f"{prefix}precision_{name}": b for name, (_, b) in pairs.items()}


def _pairs(tensors: Tensors) -> Pairs:
    return {
        name.removeprefix("linear_"): (a, tensors["precision_" + name.removeprefix("linear_")])
        for name, a in tensors.items()
        if name.startswith("linear_")
    }


def same(memory: Tensors, prints: Tensors) -> Tensor:
    """Whether every fingerprint (n, k + 1) equals that of the sweep before: a 0-dim tensor."""
    checks = []
    for name, x in prints.items():
        last = memory["sweep.print." + name]
        checks.append(((x == last) | (x.isnan() & last.isnan())).all())
    return torch.stack(checks).all()


def _choose(condition: Tensor, a: Pairs, b: Pairs) -> Pairs:
    return {
        n: (torch.where(condition, a[n][0], b[n][0]), torch.where(condition, a[n][1], b[n][1]))
        for n in b
    }
