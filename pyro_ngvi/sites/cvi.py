r"""CVI: conjugate-computation variational inference (Khan & Lin 2017, eq. 21) for Gaussian sites.

    lambda_n <- (1 - b) lambda_n + b grad_mu_n E_q log p(y_n | f_n),

lambda_n the natural parameters of site n, mu_n the mean parameters of f_n: a natural-gradient step of
length b in all of q, of which only the sites move, since the prior is conjugate.  In Gaussian terms,
with g_n = E grad log p and H_n = E hess log p under q(f_n) = N(m_n, C_n),

    Lambda_n <- (1 - b) Lambda_n - b H_n,        nu_n <- (1 - b) nu_n + b (g_n - H_n m_n).

With b = 1 a Gaussian likelihood is exact after one step, and others converge as fixed points do.  A
term that is quadratic in f_n is conjugate: its site moves all the way, whatever b is.  Every step is
shortened until q is proper.  Data whose expectations are not finite keep their site.

With all data r = target - lambda is the gradient of the ELBO in the mean parameters mu, so the slopes
at both ends of a step d = b r_old from mu_old to mu are known, and their secant is zero at the gain
(Barzilai & Borwein 1988, in the geometry of the family)

    b* = <d, mu - mu_old> / (<d, mu - mu_old> / b - <r, mu - mu_old>).

<d, mu - mu_old> is KL(q || q_old) + KL(q_old || q) > 0.  Where the ELBO fell all the same, half of d is
taken back, again and again; nearly all of it, where the ELBO is not finite.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pyro.optim import PyroOptim
from torch import Tensor
from torch.utils._pytree import tree_map

from ..distributed.processes import ALONE, Ranks
from ..families.base import Tensors
from ..linalg.host import choose, host_bool
from ..optim.host import NaturalGradientOptim, describe
from ..optim.rule import Report, State, StepReport
from ..optim.state import ADAM
from .algebra import Algebra, Pairs, ProperStep, proper_step
from .loss import SiteTargets
from .site_guide import SiteGuide, find_sites

#: a fall of the ELBO by less than this many roundings of its terms is none
ROUNDINGS = 256.0
#: smallest share of lr that a secant asks for
SMALLEST = 1.0 / 16.0
#: what is left of a step after which the ELBO is not finite: halves of it could be lost as well
LOST = 2.0**-8
#: how often a step is halved; 2^-30 of it that still lowers the ELBO led nowhere up
MOST_BACKS = 30


def pairing(change: Pairs, moments: Pairs, ranks: Ranks = ALONE) -> Tensor:
    """<(nu, Lambda), (m, M)> = sum nu' m - tr(Lambda M) / 2 over all sites of all processes, 0-dim."""
    total = torch.zeros(())
    for name, (nu, Lambda) in change.items():
        m, M = moments[name]
        total = total.to(m, non_blocking=True) + (nu * m).sum() - 0.5 * (Lambda * M).sum()
    return ranks.sum(total)[0]


@dataclass(frozen=True)
class Sweep:
    """The change of every site in the next sweep, its gain, and whether it goes ``back``: the memory
    after it is ``behind`` then, else ``ahead`` with the step that was taken."""

    change: Pairs
    gain: Tensor
    back: Tensor
    behind: State
    ahead: State

    def memory(self, change: Pairs, share: Tensor) -> State:
        """That of a sweep of which the ``share`` of a ``change`` was made."""
        step = _named(tree_map(lambda x: share * x, change))
        ahead = self.ahead | {"step": step, "gain": share * self.gain}
        return choose(self.back, self.behind, ahead)


def start_sweeps(values: Tensors) -> State:
    """The memory before the first sweep, from the sites by parameter name."""
    zero, zeros = next(iter(values.values())).new_zeros(()), tree_map(torch.zeros_like, values)
    pairs = _pairs(values).items()
    prints = {n: nu.new_full((len(nu), nu.shape[1] + 1), torch.inf) for n, (nu, _) in pairs}
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
    ranks: Ranks = ALONE,
) -> Sweep:
    """What to do from here: ``residual`` is target - site, and ``exact`` terms (n,) go all the way.

    ``size`` () is that of the terms that the ELBO is the sum of.  Where a fingerprint (n, k + 1) is
    another one the sweep before had other data or another model.
    """
    pairs = [(x, memory["print"][name]) for name, x in prints.items()]
    same = torch.stack([((x == y) | (x.isnan() & y.isnan())).all() for x, y in pairs]).all()
    same = ranks.all(same)
    last, best, backs = _pairs(memory["step"]), memory["elbo"], memory["backs"]
    moved = tree_map(torch.sub, moments, _pairs(memory["moment"]))
    slack = ROUNDINGS * torch.finfo(elbo.dtype).eps * (1.0 + size)
    # where the ELBO is -inf so is best - slack
    fell = best.isfinite() & ~(elbo.isfinite() & (elbo >= best - slack))
    back = same & fell & (backs < MOST_BACKS)
    along, slope = pairing(last, moved, ranks), pairing(residual, moved, ranks)
    secant = along / (along / memory["gain"] - slope)
    gain = torch.where(same & (along > 0) & (secant > 0), secant, lr).clamp(SMALLEST * lr, lr)
    share = torch.where(elbo.isfinite(), 0.5, LOST).to(elbo)
    left = tree_map(lambda x: share * x, last)
    change = choose(back, tree_map(torch.sub, left, last), towards(residual, exact, gain))
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
    groups = [n.removeprefix("linear_") for n in named if n.startswith("linear_")]
    return {name: (named[f"linear_{name}"], named[f"precision_{name}"]) for name in groups}


@dataclass(frozen=True)
class SiteRule:
    """The step of CVI, from what the loss has left and a memory of the sweeps before."""

    lr: float

    def init(self, values: Tensors) -> State:
        """The state before the first step, from the sites."""
        zero = next(iter(values.values())).new_zeros(())
        counts = {name: zero.clone() for name in ("count", "damped", "skipped", "left")}
        return {**counts, "sweep": start_sweeps(values)}

    def step(
        self, algebra: Algebra, targets: SiteTargets, state: State, fresh: bool
    ) -> tuple[ProperStep, State, Report]:
        """The step, the state after it, and a report; ``fresh``: no site has moved before."""
        state, elbo, before = dict(state), targets.elbo, targets.posterior.log_normalizer
        moments = {n: (m.mean, m.second_moment) for n, m in targets.marginals.items()}
        residual, exact, left = targets.residuals()
        if targets.whole:
            size, prints = elbo.abs() + before.abs(), targets.call.fingerprint()
            memory = state["sweep"], residual, exact, moments
            sweep = next_sweep(*memory, elbo, size, self.lr, prints, algebra.ranks)
            step = proper_step(algebra, targets, sweep.change)
            state["sweep"] = sweep.memory(step.change, step.share)
            if fresh:  # the first targets of all are not those at q, and make no secant
                state["sweep"]["gain"] = torch.full_like(elbo, torch.nan)
            gain, back = sweep.gain, sweep.back
        else:
            gain = torch.full_like(elbo, self.lr)
            back = torch.zeros_like(gain, dtype=torch.bool)
            step = proper_step(algebra, targets, towards(residual, exact, gain))
        share = step.share
        along = share * pairing(step.change, moments, algebra.ranks)
        if algebra.running:  # where more has changed than these sites
            q, after = targets.posterior, step.q or algebra.posterior(targets.view, step.evidence)
            along = q.expected(after.evidence.plus(q.evidence, -1.0))
        kl = step.log_normalizer - before - along
        damped = back | (share < 1.0)
        state["count"] = state["count"] + 1.0
        state["damped"] = state["damped"] + damped
        state["skipped"] = state["skipped"] + (share == 0.0)
        state["left"] = left
        report = Report(
            finite=share > 0.0,
            step_norm=(2.0 * kl).clamp_min(0.0).sqrt(),
            gain=(gain * share).nan_to_num(self.lr),  # unknown after the first step went back
            radius=torch.full_like(gain, torch.inf),
            damped=damped,
            skipped=state["skipped"],
            bad_entries=torch.zeros(0, device=gain.device),
        )
        return step, state, report


@dataclass(frozen=True)
class SweepReport(StepReport):
    """What the last step did, in numbers; ``skipped_sites`` is always empty.

    Attributes:
        damped: number of steps so far that were shortened or taken back.
        left: number of data whose sites stayed at this step: their expectations are not finite.
    """

    damped: int
    left: int


class CVI(NaturalGradientOptim):
    """Conjugate-computation VI: an optimizer for ``pyro.infer.SVI`` that steps the sites of AutoSites.

    The loss must be :class:`~pyro_ngvi.SitesELBO`.  One step with all data is a sweep; some ten usually
    do.  ``report()`` says how far the last one went (in float32 rounding below about 0.1).  Other
    guides take :class:`~pyro_ngvi.NGVB`.  Equations: :mod:`pyro_ngvi.sites.cvi`.

    Args:
        guide: an :class:`~pyro_ngvi.AutoSites`, or an ``AutoGuideList`` that contains one.
        lr: largest gain b in (0, 1].  1 is right with all data, and for minibatches whose sites are
            visited in turn.  Take less where the targets are noisy: other guides in the list.
        others: a ``PyroOptim`` for parameters of the model (length-scales, noise) and of other guides;
            it begins at the second step.

    Raises:
        ValueError: for a guide without ``AutoSites``, or ``lr`` out of range.
        RuntimeError: at a step, for another loss.

    Example: see :class:`~pyro_ngvi.SitesELBO` and :class:`~pyro_ngvi.AutoSites`.
    """

    accepts: ClassVar[tuple[str | None, ...]] = ("sites",)
    needs_gradients: ClassVar[bool] = False

    def __init__(self, guide: Any, lr: float = 1.0, others: PyroOptim | None = ADAM) -> None:
        if not 0.0 < lr <= 1.0:
            raise ValueError(f"lr is a share of the way to the targets, in (0, 1], got {lr!r}.")
        self.lr = float(lr)
        self._editions: dict[str, int] = {}
        self._whole = False
        super().__init__(guide, others)
        if not self._rules:
            raise ValueError(
                f"CVI trains pyro_ngvi.AutoSites(model), and found none in {describe(guide)}. For "
                f"other guides of this package there is pyro_ngvi.NGVB."
            )

    def _blocks(self) -> Any:
        return find_sites(self.guide)

    def _adopt(self, path: str, block: Any) -> None:
        self._rules[path] = SiteRule(self.lr)
        block.curvature = None  # a step that failed may have left some

    def step_blocks(self, params: list[Tensor]) -> list[Tensor]:
        """One step; the first of all leaves every other parameter alone: at the prior gradients are so
        large that the moments of Adam would remember them for a thousand steps."""
        is_first = any(block.fresh for _, block in self._blocks())
        others = super().step_blocks(params)
        return [] if is_first else others

    def _state_of(self, path: str, block: Any, values: Tensors) -> State:
        state, edition = super()._state_of(path, block, values), block.last_step.edition
        if self._editions.setdefault(path, edition) != edition:
            # sites came, went or were reset by hand: no sweep before compares with the next
            self._editions[path] = edition
            state = {**state, "sweep": start_sweeps(values)}
        return state

    @torch.no_grad()
    def _step_block(self, path: str, block: SiteGuide, tensors: dict[str, Any]) -> None:
        targets, algebra, block.curvature = block.curvature, block.algebra, None
        self._check_curvature(block, targets)
        self._whole = targets.whole
        before = self._state_of(path, block, {n: p.detach() for n, p in tensors.items()})
        step, state, report = self._rules[path].step(algebra, targets, before, block.fresh)
        algebra.evidence = step.evidence
        for name, pair in block.site_tensors().items():
            index = targets.call.index[name]
            for p, change in zip(pair, step.change[name], strict=True):
                if index is None:
                    p.add_(step.share * change)
                else:
                    p.index_add_(0, index, step.share * change)
        if targets.call.whole and step.q is not None:
            algebra.keep(targets.view, block.natural_params().values(), step.q)
        block.fresh = block.fresh and host_bool(report.finite) is False
        self._states[path], self._reports[path] = state, report
        left = state["left"]
        if host_bool((left > 0) & (left != before["left"])):
            names = ", ".join(map(repr, targets.expected))
            warnings.warn(
                f"CVI left {int(left)} site(s) of {names} as they were: the expected log likelihood of "
                f"these data is not finite. Look for data outside of the support, a likelihood of "
                f"-inf, or a prior so wide that it overflows.",
                RuntimeWarning,
                stacklevel=4,
            )
        if algebra.running and targets.view.learns and not self._has_others:
            warnings.warn(
                "CVI: the prior has parameters that require gradients, and no optimizer learns them. "
                "In minibatches q is then a running average where it could be exact: hold them by "
                "requires_grad_(False), or pass CVI(guide, others=...).",
                RuntimeWarning,
                stacklevel=4,
            )

    @property
    def sweeps(self) -> bool:
        """Whether the last step was one of a fixed-point iteration: all data, no draws, sites alone."""
        return self._whole and not self._has_others

    def report(self, path: str | None = None) -> SweepReport:
        """As that of NGVB, with ``damped`` steps so far and sites ``left`` at this step; it waits."""
        plain = super().report(path)
        state = self._states[next(iter(self._reports)) if path is None else path]
        damped, left = (int(state[name].item()) for name in ("damped", "left"))
        return SweepReport(**vars(plain), damped=damped, left=left)
