r"""What a guide of sites keeps of its last step, and whether a later call is like it.

A predictor is found by what the data of the first call depend on.  A coefficient whose covariate is 0
in all of them, a parameter that begins at 0, an outcome of which all values are missing: all of these
are seen by nothing then, and would be left at their priors for ever.  So with new data or parameters
the model runs once more, with the predictors held at another noise of the block: no log likelihood
may change.  And data that come later must be in the support of their likelihood, as the first ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..distributions.gaussian_process import GaussianProcess
from ..linalg.host import at_hand
from ..runtime.density import Site, site_kind
from .bound_model import BoundModel, apart
from .conditioned_model import other_size
from .probe_points import TOLERANCE, same
from .structure import ModelStructure, aligned, data_terms, minibatch_scale, missing, unwrapped
from .whitening import other_priors


class Kept:
    """The last value, with the objects and the tensors that it was made of.  Copies begin empty."""

    def __init__(self, value: Any = None, objects: Any = (), tensors: Any = ()) -> None:
        self.put(value, objects, tensors)

    def put(self, value: Any, objects: Iterable[Any] = (), tensors: Iterable[Tensor] = ()) -> None:
        """Keep ``value`` until it is asked for with others."""
        self.value, self._objects, self._tensors = value, tuple(objects), tuple(tensors)

    def get(self, objects: Iterable[Any] = (), tensors: Iterable[Tensor] = ()) -> Any:
        """The value, if it is of these very objects, and of tensors with these bits; else None."""
        if not all_same(tuple(objects), self._objects):
            return None
        return self.value if same_bits(tuple(tensors), self._tensors) else None

    def copy(self) -> Kept:
        """What is put into the copy stays there."""
        return Kept(self.value, self._objects, self._tensors)

    def __reduce__(self) -> Any:
        return Kept, ()


def all_same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    """Whether tensors agree bit for bit, so far as the host can look without waiting."""
    if len(a) != len(b) or any(t.requires_grad for t in (*a, *b)):
        return False
    pairs = zip(a, b, strict=True)
    return all(at_hand(x) and x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


class LastStep:
    """The last step of a guide of sites, as far as it matters later.  A copy begins without one.

    Attributes:
        arguments: positional and keyword arguments of the model; ``None`` before the first step.
        stale: whether hyperparameters or sites were moved since q was made.
        plan: the structure then, where data came or went since; ``None`` for that of the guide.
        numbers: with it, by group, the number (N,) then of each datum of now, -1 for a new one.
        edition: how often data were changed; an optimizer compares no two sweeps of different editions.
    """

    def __init__(self, stale: bool = False, edition: int = 0) -> None:
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.stale, self.edition = stale, edition
        self.plan: ModelStructure | None = None
        self.numbers: dict[str, Tensor] = {}
        self._scaled: list[Tensor] = []

    def __reduce__(self) -> Any:
        return LastStep, (self.stale, self.edition)

    def remember(self, args: Any, kwargs: Any, stale: bool) -> None:
        """Take the arguments of a step, and whether it moves hyperparameters."""
        self.arguments, self.stale = (args, kwargs), stale
        self.plan, self.numbers = None, {}

    def edited(self) -> None:
        """Data came, went or were reset by hand."""
        self._scaled = []
        self.edition += 1

    def or_given(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """These arguments, or where there are none those of the last step."""
        return (args, kwargs) if args or kwargs else (self.arguments or ((), {}))

    def has_arguments_of(self, call: BoundModel) -> bool:
        if self.arguments is None:
            return False
        (args, kwargs), others = self.arguments, call.runner.kwargs
        named = kwargs.keys() == others.keys() and all(x is others[n] for n, x in kwargs.items())
        return named and all_same(args, call.runner.args)

    def check_data(self, call: BoundModel) -> None:
        """Refuse data unlike the first call's, and batch after batch under a scale."""
        self._scaled = _check_scaled(call, self._scaled)
        learns = any(terms.requires_grad for terms in call.terms_at_probe.values())
        if learns or not self.has_arguments_of(call):  # parameters may bring in what was not seen
            _check_seen(call)


def _check_seen(call: BoundModel) -> None:
    """Refuse data that see more of the block than those of the first call, or are out of support."""
    plan, sites = call.plan, call.sites
    places = {name: group.places for group in plan.groups for name in group.observed}
    if not at_hand(plan.zero()) or not all(n in sites and sites[n]["is_observed"] for n in places):
        return  # without data it is refused later
    unseen = [n for n, s in sites.items() if site_kind(s) == "observed" and n not in places]
    for number, together in enumerate(apart(plan.groups)):
        held = call.places_of(together, call.at_probe)
        with torch.no_grad():
            others = call.runner.sites(-1.7 * call.probe, replace=held)
        names = [name for group in together for name in group.observed]
        for name in names if number else names + unseen:
            before, after = call.terms_at_probe[name].detach(), data_terms(others[name]).detach()
            if not same(after, before, TOLERANCE * torch.finfo(before.dtype).eps):
                raise ValueError(
                    f"AutoSites: the data of {name!r} depend on more of the latent block in this call "
                    f"than in the guide's first one, where they saw "
                    f"{' and '.join(map(str, places.get(name, ['nothing'])))}. Make a first call "
                    f"with data and parameters that show all that the data can see."
                )
    outside = [name for name in places if not bool(_allowed(sites[name]).all())]
    if outside:
        # a support may move with the latent block, so that only what is out at its mean too is
        at_mean = call.runner.sites(plan.zero(), at_mean=True)
        for name in outside:
            check_support(at_mean[name])


def _allowed(site: Site) -> Tensor:
    """Which data the likelihood can produce, or are not there (or hidden by a mask)."""
    allowed, mask, absent = (
        unwrapped(site).support.check(site["value"]),
        site["mask"],
        missing(site),
    )
    if mask is False:
        return torch.ones_like(allowed)
    if isinstance(mask, Tensor):
        allowed = allowed | ~aligned(mask, site, allowed)
    return allowed if absent is None else allowed | absent


def check_support(site: Site) -> None:
    """Refuse data that the likelihood cannot produce: its log_prob may be a number all the same."""
    wrong = (~_allowed(site)).reshape(-1).nonzero().reshape(-1)
    if len(wrong):
        raise ValueError(
            f"AutoSites: {len(wrong)} of the data of {site['name']!r} lie outside of the support of "
            f"{type(unwrapped(site)).__name__}, the first is number {int(wrong[0])}. Correct them, or "
            f"mark data that are not there by NaN or by a mask."
        )


def _check_scaled(call: BoundModel, before: list[Tensor]) -> list[Tensor]:
    """Refuse a minibatch that comes as a scale instead of a plate, by the data of the step ``before``.

    In stochastic gradients poutine.scale(scale=N / M) around M data stands for all N of them.  A guide
    with a site for each datum would give the M sites to one batch after the other, and end at the last.

    Returns:
        The data of this call, if a scale above 1 makes them count for more than themselves.
    """
    whole = (n for g in call.plan.groups if call.index[g.name] is None for n in g.observed)
    for site in (call.sites[name] for name in whole):
        scale = torch.as_tensor(site["scale"] / minibatch_scale(site))
        if not (at_hand(scale) and scale.numel() == 1 and float(scale) > 1.0):
            continue
        # what is observed may be made of parameters and draws, so the arguments tell more
        given = [*call.runner.args, *call.runner.kwargs.values()]
        tensors = [x for x in given if isinstance(x, Tensor) and x.numel() > 1]
        now = [x for x in tensors or [site["value"]] if at_hand(x) and not x.requires_grad]
        # data of another number were announced, or are refused elsewhere
        pairs = zip(before, now, strict=False)
        if any(a.shape == b.shape and not same(a, b) for a, b in pairs):
            plate = site["cond_indep_stack"][-1].name if site["cond_indep_stack"] else "data"
            raise ValueError(
                f"AutoSites: under a poutine.scale the data of {site['name']!r} are not those of the "
                f"step before. For a minibatch write pyro.plate({plate!r}, N, subsample=index), "
                f"without the scale; for new data in place of the old call guide.reset() before."
            )
        # copies, since a loader may write each batch into the same tensors
        return [x.detach().clone() for x in now]
    return []


@torch.no_grad()
def check_prior(before: BoundModel, call: BoundModel, leave_out: bool) -> list[str]:
    """Refuse a call at which q would be the sites with another prior than in the call ``before``.

    A ``GaussianProcess`` knows its inputs, and follows to others; of no other prior that is made of
    the model's arguments can be told which of its entries saw which datum.

    Returns:
        With ``leave_out``, and a process to be predicted, the names of sites that have another shape
        now; otherwise these are refused too.
    """
    first, now = before.block, call.block
    process = any(isinstance(fn, GaussianProcess) for fn in now.values())
    fixed = [name for name, fn in first.items() if not isinstance(fn, GaussianProcess)]
    others = [name for name in fixed if now[name].shape() != first[name].shape()]
    if others and not (leave_out and process):
        raise other_size(others[0], now[others[0]].shape(), first[others[0]].shape())
    if not process:  # whose noise has another length with other inputs
        # given others that are not 0: there Normal(X @ w, 1) is the same for all X
        first, now = (c.runner(c.probe, look_at=c.plan.block_places).own for c in (before, call))
    for name in other_priors({n: first[n] for n in fixed if n not in others}, now):
        raise ValueError(
            f"AutoSites: the prior of {name!r} is another one with these arguments than with those of "
            f"the last step. Let new times or inputs be among those of the steps, with NaN for their "
            f"data, or give the site a GaussianProcess."
        )
    return others
