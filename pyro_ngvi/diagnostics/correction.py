r"""Hierarchies put right by weights on their globals, whose number units do not raise.

Draws v_s of a proposal r(v), and of each unit u_i given v_s, exactly; then with L_i(v) = p(y_i | v)

    w_s propto p(v_s) prod_i L_i(v_s) / r(v_s)

(:mod:`pyro_ngvi.hierarchy.collapsed`).  A Gaussian q(v) falls off faster than the posterior of a log
scale, so r has marginals from slices of p(v | y) through it (:mod:`.slices`); and again, through mean
and covariance of the weighted draws, until weights have a third moment, k-hat <= 1/3, or are all but
equal.  Of all r that of the smallest k-hat is taken.

The points of L_i(v) lie around q(u_i | v), which far from q(v) is not near p(u_i | y_i, v).  Points are
doubled until that changes log p(y | v) by little on average over draws of r with their weights, or no
probability by more than half of that.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from time import thread_time
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer.autoguide import AutoContinuous
from torch import Tensor

from ..guides import init_to_center
from ..hierarchy import AutoHierarchical
from ..hierarchy.collapsed import Collapsed, ExactUnits, collapse
from ..hierarchy.marginal import MOST, ORDERS, point_count
from ..linalg.host import own_random_state
from ..runtime.density import LatentLayout
from ..runtime.model_density import NaNWhereSingular, batched_trace
from ..runtime.run import CannotBatch
from .draws import MOST_DOUBLES, Draws, Fitted, guide_draws, resample
from .khat import EVEN, FEWEST, KHat, khat_from_log_weights
from .moved import Moved, by_site, derived, values_at
from .shifts import shift_of
from .slices import copula
from .verdict import PATIENCE
from .weights import MIN_DRAWS

#: draws behind the choice of r and, for each global, behind q's covariance, rounds, and where they end
DRAWS, EACH, ROUNDS, LIGHT = 1000, 50, 3, 1.0 / 3.0
#: draws of a guide's own, which cost little, and numbers in them
MANY, NUMBERS = 4000, 4_000_000
#: draws of r where fewer leave it open whether the guide is off, or whether weights can be relied on;
#: and where these leave the latter open, at which k-hat has an error of 0.1
MORE, MOST_DRAWS = 2000, 8000
#: copies of one draw in what is read, and the share of it, above which that is of more draws, and how
#: many times as many
COPIES, SHARE, POOL = 10.0, 0.01, 4
#: draws at which twice the points are tried, the most for a unit, and the nats by which they may change
#: log p(y | v), by latent variables of a unit: they cost 2, 4 or 8 times as much
TRIED, MOST_POINTS, FINE = 250, 1024, {1: 1e-3, 2: 5e-3, 3: 1e-2}


def corrected(guide: Any, *args: Any, points: int | None = None, **kwargs: Any) -> ExactUnits:
    """The guide r(v) prod_i p(u_i | y_i, v) that ``to_arviz(..., corrected=True)`` takes draws of.

    Units u_i follow their globals v exactly, and r(v) has marginals from slices of p(v | y), tails too.
    It is a guide of the whole model, for :func:`pyro_ngvi.khat` and the rest, whose weights no number
    of units makes uneven (``to_arviz(..., resample="psis")`` takes them):

        w_s propto p(v_s) prod_i p(y_i | v_s) / r(v_s).

    Args:
        guide: a trained :class:`~pyro_ngvi.AutoHierarchical`.
        args: those of its model, and ``kwargs``, with all data.
        points: of the quadrature, as in :func:`pyro_ngvi.collapse`, whose errors it has.

    Raises:
        ValueError: as :func:`pyro_ngvi.collapse`.

    Source:
        Martins, Simpson, Lindgren & Rue 2013, CSDA 67, for the slices; Oh & Berger 1992, J. Stat.
        Comput. Simul. 41, for the rounds of importance sampling behind r.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y):
        ...     s = pyro.sample("s", dist.HalfNormal(5.0))
        ...     with pyro.plate("schools", len(y)):
        ...         pyro.sample("y", dist.Normal(pyro.sample("u", dist.Normal(0.0, s)), 2.0), obs=y)
        >>> y = torch.tensor([3.0, 5.0, 1.0, -2.0])
        >>> fit = ngvi.fit(model, y, guide="AutoHierarchical", max_steps=10, progress=False, seed=0)
        >>> exact = ngvi.diagnostics.corrected(fit.guide, y)
        >>> found = ngvi.khat(model, exact, y, num_samples=200, seed=0)
        >>> found.khat < 0.5, found.ess > 150
        (True, True)
    """
    model = collapse(guide, *args, points=points, **kwargs)
    return proposal(model) if model.missed or points is not None else refined(model)


def refined(model: Collapsed, draws: int = DRAWS) -> ExactUnits:
    """:func:`proposal` with as many points as its own draws need, at most 1024 for a unit."""
    exact, units = proposal(model, draws), model.units
    layout = model.layout
    while units.width in ORDERS and not units.is_block:
        count = 2 * model.point_count
        if count > MOST or point_count(units, count)[1] > MOST_POINTS:
            break
        finer = Collapsed(model.guide, *model.given, count)
        theta, log_r = _drawn(exact, layout, TRIED)
        few, more = log_density(model, layout, theta), log_density(finer, layout, theta)
        change = torch.softmax(more - log_r, 0) * (more - few).abs()
        if float(change.nan_to_num(torch.inf).sum()) <= FINE[units.width]:
            break
        model, exact = finer, proposal(finer, draws)
    return exact


def proposal(model: Collapsed, draws: int = DRAWS) -> ExactUnits:
    """With that r(v) of the smallest k-hat among a few."""
    layout, tried = model.layout, []
    theta, log_q = _drawn(ExactUnits(model), layout, max(draws, EACH * layout.dim))
    theta = theta[log_q.isfinite()]
    mean, covariance = theta.mean(0), theta.mT.cov().reshape(2 * theta.shape[1:])
    if bool((theta == theta[0]).all(0).any()):  # a guide that is a point in some of them
        return ExactUnits(model)
    for _ in range(ROUNDS):
        guide = ExactUnits(model, _Sliced(model, layout, mean, covariance))
        theta, weights = weighted_globals(guide, layout, draws)
        d = layout.dim
        tried.append((weights.khat, guide))
        few = weights.ess < MIN_DRAWS + d * (d + 1) / 2
        if is_light(weights) or few:
            break
        w = torch.from_numpy(weights.psis_log_weights).to(theta).exp()
        mean = w @ theta
        rest = w.sqrt().unsqueeze(-1) * (theta - mean)
        covariance = rest.mT @ rest
    return min(tried, key=itemgetter(0))[1]


def resampled(guide: ExactUnits, num_samples: int) -> dict[str, Tensor]:
    """Draws (S, ...) of all latent sites of a hierarchy, by weights of 1,000 or more of r: those of
    :func:`pyro_ngvi.to_arviz`, where it takes as many."""
    call = guide.collapsed.call
    with own_random_state():  # apart, as there
        fitted = Fitted(call.model, guide, call.args, call.kwargs)
    total = max(num_samples, DRAWS) if num_samples > 0 else num_samples  # which is refused
    draws = for_resampling(fitted, total)
    kept = torch.from_numpy(resample(draws.weights, total)[0])
    if num_samples < len(kept):  # copies lie side by side
        kept = kept[torch.randperm(len(kept), device="cpu")[:num_samples]]
    return {name: x[kept.to(x.device)] for name, x in draws.values.items()}


def for_resampling(
    fitted: Fitted, count: int, batch_size: int | None = None, likelihoods: Any = ()
) -> Draws:
    """Draws of r of which ``count`` are to be taken by weight: as many, or ``POOL`` times, as memory
    allows, where one of these would be so many of them that ends of intervals jump."""
    draws = fitted.draw(count, batch_size, likelihoods)
    copies = count * float(np.exp(draws.weights.psis_log_weights.max()))
    held = sum(x[0].numel() for x in (*draws.sites.values(), *draws.log_likelihood.values()))
    if copies <= max(COPIES, SHARE * count) or POOL * count * held > MOST_DOUBLES:
        return draws
    return fitted.draw(POOL * count, batch_size, likelihoods)


@dataclass(frozen=True)
class Corrected:
    """The word on a hierarchy whose own draws are off where corrected ones may be taken, and are: the
    ``verdict`` of a :class:`~pyro_ngvi.fitting.Fit`, with ``decision`` "intervals".

    Attributes:
        guide: what draws are of, :func:`corrected`.
        khat: the weights of its globals (S,), worth ``khat.ess`` exact draws.
        own: the word on the draws of the trained guide.

    Example: ``fit.verdict`` is one for the ``fit`` in the example of :func:`corrected`; what is read of
    it, as ``fit.sample()`` or ``fit.summary()``, is of these draws.
    """

    guide: ExactUnits
    khat: KHat
    own: str

    decision = "intervals"
    ok, is_rough = True, False

    @property
    def verdict(self) -> str:
        """The decision and its reasons, in words."""
        _, words = decision_on(self.khat, self.guide.collapsed)
        return f"{words} All that is read of this fit is corrected; its guide alone: {self.own}"

    def __str__(self) -> str:
        return self.verdict


def moved_by_weights(
    model: Any,
    guide: AutoHierarchical,
    args: Any,
    kwargs: Any,
    draws: int,
    known: Collapsed | ExactUnits | None = None,
) -> tuple[dict[str, Moved], dict[str, Moved], tuple[ExactUnits, KHat]] | None:
    """By how much a trained guide is off, with its units integrated out, from so many draws of r, or
    more where these leave it open or refuse, with the guide that has r and its weights; ``None`` where
    quadrature or weights are not to be relied on."""
    start = thread_time()
    try:
        if isinstance(known, ExactUnits):
            better = known
        else:
            collapsed = known or Collapsed(guide, args, kwargs, None)
            if collapsed.is_rough:
                return None
            better = refined(collapsed, draws)
        fitted = Fitted(model, better, args, kwargs)
        exact = fitted.draw(draws, None)
    except (ValueError, CannotBatch):  # data of several units, a likelihood without vmap
        return None
    better.judged = weights = exact.weights
    more = MORE if draws < MORE else MOST_DRAWS
    how = model, guide, args, kwargs, more
    patient = draws < more and more / draws * (thread_time() - start) <= PATIENCE
    if not can_weigh(weights):
        light = more == MORE or more * sum(x[0].numel() for x in exact.values.values()) <= NUMBERS
        worth = patient and light and weights.khat <= 1.0
        return moved_by_weights(*how, better.collapsed) if worth else None
    of_all = pyro.poutine.Trace()  # the guide's own prototype may be of a minibatch of units
    for name in fitted.latent:
        of_all.add_node(name, **fitted.sites[name])
    layout = LatentLayout(of_all)
    many = max(draws, min(MANY, NUMBERS // layout.dim))
    of_guide, _ = guide_draws(partial(guide, *args, **kwargs), many)
    own, new = layout.pack(of_guide), layout.pack(exact.values)
    log_w = weights.psis_log_weights

    def shifted(a: Tensor, b: Tensor) -> Moved:
        shift = shift_of(b.numpy(force=True), log_w, a.numpy(force=True))
        found = {name: torch.as_tensor(x, device=a.device) for name, x in vars(shift).items()}
        return Moved(**found, rho=torch.zeros(a.shape[1:], device=a.device))

    found = by_site(layout, own, new, shifted)
    few = MOST_DOUBLES // many
    names = [n for n in fitted.shown if n not in fitted.latent and exact.sites[n][0].numel() <= few]
    if names:  # of deterministic sites
        found[0].update(derived(values_at(fitted.joint, names, of_guide), exact.sites, shifted))
    each = [m for part in found for m in part.values()]
    undecided = not all(m.is_sure for m in each)
    if more == MORE and undecided and patient:
        if again := moved_by_weights(*how, better):
            return again
        better.judged = weights  # not those that could not be relied on
    return *found, (better, weights)


def doubt_of(guide: AutoHierarchical, args: Any, kwargs: Any) -> str:
    """Why the weights of a guide's own draws are not enough where :func:`moved_by_weights` says
    nothing, as quadrature does not reach what they may miss; in words."""
    with suppress(ValueError, CannotBatch):
        model = Collapsed(guide, args, kwargs, None)
        if model.is_rough:
            return (
                f"log p(y | v) with the {model.units.called} integrated out is off by "
                f"{model.error:.2g} nats, and weights of the guide's own draws do not see what these "
                f"miss. Take ngvi.integrate(model, *args) or NUTS"
            )
    return ""


def _drawn(guide: ExactUnits, layout: LatentLayout, draws: int) -> tuple[Tensor, Tensor]:
    """Draws (S, d) of the globals, unconstrained, and their log density as constrained ones, infinite
    where a number is rounded to the end of its support."""
    values, (log_r, _) = guide_draws(partial(guide.globals), draws)
    theta = layout.pack(values)
    lost = log_r.isnan() | ~theta.isfinite().all(1)
    return theta.where(~lost[:, None], 0.0), log_r.where(~lost, torch.inf)


def weighted_globals(guide: ExactUnits, layout: LatentLayout, draws: int) -> tuple[Tensor, KHat]:
    """Draws (S, d) of the globals, unconstrained, and their weights p(v, y) / r(v)."""
    theta, log_r = _drawn(guide, layout, draws)
    log_w = log_density(guide.collapsed, layout, theta) - log_r
    return theta, khat_from_log_weights(log_w.numpy(force=True))


@torch.no_grad()
def log_density(model: Collapsed, layout: LatentLayout, theta: Tensor) -> Tensor:
    """log p(v, y) of constrained v at unconstrained points (S, d), (S,), in float64."""
    # far out parameters leave their support, and covariances are singular
    with pyro.validation_enabled(False), NaNWhereSingular():
        trace = batched_trace(model, layout.unpack(theta), chunk_size=max(1, int(model.room)))
    return trace.log_joint().double().nan_to_num(-torch.inf)


def is_light(weights: KHat) -> bool:
    """Whether weights have a third moment, or are all but equal."""
    return weights.khat <= LIGHT or weights.ess > EVEN * len(weights.log_weights)


def can_weigh(weights: KHat) -> bool:
    """Whether weights of globals can be relied on."""
    share = weights.ess / len(weights.log_weights)
    steady = weights.reliable or share >= EVEN
    return steady and share >= FEWEST and not (weights.missed or 0.0) > 0.0


def decision_on(weights: KHat, model: Collapsed) -> tuple[str, str]:
    """Whether to take corrected draws, and the same in words."""
    draws = len(weights.log_weights)
    if model.too_rough:
        return "unusable", (
            f"Not usable: log p(y | v) is off by {model.error:.2g} nats or more. Pass points= to "
            f"ngvi.collapse(guide, ...), or take NUTS."
        )
    figures = f"k-hat of the globals {weights.khat:.2f} from {draws} draws, worth {weights.ess:.0f}"
    if model.missed:
        return (
            "unusable",
            f"Not usable. {model.missed_in_words}. Check against NUTS from several starts.",
        )
    if can_weigh(weights):
        return "intervals", f"Take the corrected intervals as they are ({figures} exact ones)."
    return "unusable", (
        f"Not usable: globals cannot be corrected ({figures}). Take NUTS on ngvi.collapse(guide, ...), "
        f"whose draw_units(draws) adds the units."
    )


class _Sliced(AutoContinuous):
    """The globals by slices of their density through a Gaussian: :func:`.slices.copula`."""

    def __init__(
        self, model: Collapsed, layout: LatentLayout, mean: Tensor, covariance: Tensor
    ) -> None:
        super().__init__(model, init_loc_fn=init_to_center)

        def log_p(theta: Tensor) -> Tensor:
            _, log_det = layout.unpack_with_log_det(theta)
            return log_density(model, layout, theta) + log_det

        self._posterior = copula(log_p, mean, covariance)
        with torch.no_grad():
            self()

    def get_posterior(self, *args: Any, **kwargs: Any) -> Any:
        return self._posterior
