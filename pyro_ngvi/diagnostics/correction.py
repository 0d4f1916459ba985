r"""Hierarchies put right by weights on their globals, whose number units do not raise.

Draws v_s of a proposal r(v), and of each unit u_i given v_s, exactly; then with L_i(v) = p(y_i | v)

    w_s propto p(v_s) prod_i L_i(v_s) / r(v_s)

(:mod:`pyro_ngvi.hierarchy.collapsed`); r by slices (:mod:`.proposal`).  So of few latent variables,
all of them globals.

The points of L_i(v) lie around q(u_i | v), which far from q(v) is not near p(u_i | y_i, v).  Points are
doubled until that changes log p(y | v) by little on average over draws of r with their weights, or no
probability by more than half of that.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..hierarchy import AutoHierarchical
from ..hierarchy.collapsed import Collapsed, ExactUnits, collapse
from ..hierarchy.whole import Whole
from ..linalg.host import own_random_state
from ..runtime.run import CannotBatch
from .draws import MOST_DOUBLES, Draws, Fitted, guide_draws, resample
from .khat import EVEN, FEWEST, KHat
from .moved import Moved, by_site, derived, values_at
from .proposal import DRAWS, proposal, refined
from .shifts import shift_of
from .verdict import PATIENCE

#: draws of a guide's own, which cost little, and numbers in them
MANY, NUMBERS = 4000, 4_000_000
#: draws of r where fewer leave it open whether the guide is off, or whether weights can be relied on;
#: and where these leave the latter open, at which k-hat has an error of 0.1
MORE, MOST_DRAWS = 2000, 8000
#: copies of one draw in what is read, and the share of it, above which that is of more draws, and how
#: many times as many
COPIES, SHARE, POOL = 10.0, 0.01, 4


def corrected(guide: Any, *args: Any, points: int | None = None, **kwargs: Any) -> ExactUnits:
    """The guide r(v) prod_i p(u_i | y_i, v) that ``to_arviz(..., corrected=True)`` takes draws of.

    Units u_i follow their globals v exactly, and r(v) has marginals from slices of p(v | y), tails too.
    It is a guide of the whole model, for :func:`pyro_ngvi.khat` and the rest, whose weights w_s of
    :mod:`pyro_ngvi.diagnostics.correction` no number of units makes uneven
    (``to_arviz(..., resample="psis")`` takes them).

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
    allows, where they cost little, or one would be so many of them that ends of intervals jump."""
    draws = fitted.draw(count, batch_size, likelihoods)
    copies = count * float(np.exp(draws.weights.psis_log_weights.max()))
    held = sum(x[0].numel() for x in (*draws.sites.values(), *draws.log_likelihood.values()))
    steady = fitted.guide.func.collapsed.units is not None and copies <= max(COPIES, SHARE * count)
    if steady or POOL * count * held > MOST_DOUBLES:
        return draws
    return fitted.draw(POOL * count, batch_size, likelihoods)


@dataclass(frozen=True)
class Corrected:
    """The word on a hierarchy, or a model of few latent variables, where draws of the guide are off and
    corrected ones may be taken, and are: the ``verdict`` of a :class:`~pyro_ngvi.fitting.Fit`, with
    ``decision`` "intervals".

    Attributes:
        guide: what draws are of, as :func:`corrected` gives it.
        khat: the weights of its globals, or of all (S,), worth ``khat.ess`` exact draws.
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
    guide: Any,
    args: Any,
    kwargs: Any,
    draws: int,
    known: Collapsed | Whole | ExactUnits | None = None,
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
    layout = fitted.layout
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


def can_weigh(weights: KHat) -> bool:
    """Whether weights of globals can be relied on."""
    share = weights.ess / len(weights.log_weights)
    steady = weights.reliable or share >= EVEN
    return steady and share >= FEWEST and not (weights.missed or 0.0) > 0.0


def decision_on(weights: KHat, model: Collapsed | Whole) -> tuple[str, str]:
    """Whether to take corrected draws, and the same in words."""
    draws = len(weights.log_weights)
    if model.too_rough:
        return "unusable", (
            f"Not usable: log p(y | v) is off by {model.error:.2g} nats or more. Pass points= to "
            f"ngvi.collapse(guide, ...), or take NUTS."
        )
    of = " of the globals" * (model.units is not None)
    figures = f"k-hat{of} {weights.khat:.2f} from {draws} draws, worth {weights.ess:.0f}"
    if model.missed:
        return (
            "unusable",
            f"Not usable. {model.missed_in_words}. Check against NUTS from several starts.",
        )
    if can_weigh(weights):
        return "intervals", f"Take the corrected intervals as they are ({figures} exact ones)."
    if model.units is None:
        return "unusable", f"Not usable: draws cannot be corrected ({figures}). Take NUTS."
    return "unusable", (
        f"Not usable: globals cannot be corrected ({figures}). Take NUTS on ngvi.collapse(guide, ...), "
        f"whose draw_units(draws) adds the units."
    )
