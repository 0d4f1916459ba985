"""Draws from any Pyro guide, with the model and the guide evaluated at them."""

import operator
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor

from ..hierarchy import AutoHierarchical, ExactUnits
from ..linalg.host import apart
from ..runtime.checks import LatentSupports, check_data, refuse_minibatches
from ..runtime.density import (
    Kind,
    LatentLayout,
    Site,
    Sites,
    check_guide_of_this_model,
    is_auxiliary,
    is_latent,
    is_minibatch,
    site_kind,
    site_log_prob,
)
from ..runtime.model_density import map_draws, without_plates
from ..runtime.pyro_adapter import is_marked, unmasked
from ..runtime.run import Minibatches, look, run_both
from ..runtime.summed_out import summed_out
from .khat import KHat, khat_from_log_weights
from .over_batches import OverBatches, need_all_data
from .weights import systematic_resample

MOST_DOUBLES = 10_000_000  # in an array that is stored in float64
AT_ONCE = 1 << 21  # numbers in the matrices of draws of units that are made at once
# weights that may be noise: nats above those of the bulk, draws at most, and the share of each number
# by which log p is not another by a nat, where it is smooth
BULK, HUGE, MOST_HUGE, BESIDE = 0.99, 5.0, 100, 1e-6


@dataclass(frozen=True)
class Draws:
    """S draws from a guide: ``values`` of the model's latent sites, each (S, *shape), log q(z) and
    log p(data, z) (S,) there, with scales and masks, in float64, over the sites as the model writes
    them, and what ``rounding`` may do to the difference; ``sites`` are latent and deterministic."""

    values: dict[str, Tensor]
    log_q: Tensor
    log_joint: Tensor
    rounding: float
    sites: dict[str, Tensor]
    log_prior: dict[str, Tensor]
    log_likelihood: dict[str, Tensor]

    def without_nan(self) -> "Draws":
        """The same with weights of 0 where a density is NaN, as far out, where scales round to 0."""
        lost = (self.log_joint - self.log_q).isnan()
        log_q = torch.where(lost, 0.0, self.log_q)
        return replace(self, log_q=log_q, log_joint=torch.where(lost, -torch.inf, self.log_joint))

    @property
    def log_ratio(self) -> np.ndarray:
        """log p(data, z) - log q(z), (S,)."""
        return (self.log_joint - self.log_q).numpy(force=True)

    @cached_property
    def weights(self) -> KHat:
        """The importance weights, and their tail."""
        return khat_from_log_weights(self.log_ratio, self.rounding)

    @property
    def point_masses(self) -> str:
        """The latent sites of which all draws are one point, as from an AutoDelta for a part."""
        drawn = {n: x for n, x in self.values.items() if x.numel() and x.is_floating_point()}
        return ", ".join(repr(name) for name, x in drawn.items() if bool((x == x[0]).all()))


def resample(weights: KHat, count: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Numbers (S,), or ``count`` of them, of the draws, with copies, that stand for exact ones, and the
    log of the weights, of sum one, by which they do: smoothed ones where the tail has a mean."""
    heavy = weights.tail_is_too_heavy
    log_weights = weights.log_weights if heavy else weights.psis_log_weights
    uniform = float(torch.rand((), dtype=torch.float64))
    return systematic_resample(log_weights, uniform, count), log_weights


@contextmanager
def random_state(seed: int | None, stream: int = 0) -> Iterator[None]:
    """Seeds all of Pyro's generators, :func:`.apart`, and puts their states back."""
    if seed is None:
        yield
        return
    before = get_rng_state()
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        pyro.set_rng_seed(apart(operator.index(seed), stream + 2))
        try:
            yield
        finally:
            set_rng_state(before)


class Fitted:
    """A model and its guide at the full data, and what one plain run of both shows.

    Attributes:
        sites: the model's sample sites at a draw from the guide, plates left out.
        latent: the names of its latent sites, but for those that are summed out.
        joint: the model with its enumerated sites summed out, all arguments bound.
        in_sum: the sites of ``joint``.
        shown: the latent and deterministic sites whose values the sum leaves as they are.
        whole: the model, where it is that of several processes, which are all at the same call then.
        batches: the model, where it is one of minibatches; the rest is then of the first of them.
        seconds: of this thread, that the last call of ``draw`` took.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        batches: bool = False,
    ) -> None:
        if not batches:
            need_all_data(model)
        if isinstance(model, AutoGuide):
            raise ValueError(
                f"The model is an {type(model).__name__}, a guide: give the model first, then it."
            )
        if not callable(guide):
            what = f"{type(guide).__name__} is no guide. Of a fit give fit.guide, or read the fit"
            raise TypeError(f"{what}, which has khat, verdict, summary, to_arviz and loo.")
        self.model, self.guide = partial(model, *args, **kwargs), partial(guide, *args, **kwargs)
        self.whole: Any = model if hasattr(model, "over_ranks") else None
        if self.whole and hasattr(guide, "draw_units") and len(self.whole.of_all(None)) > 1:
            raise ValueError(
                "Each rank has units of its own, and weights of all of them are not known. Read those "
                "of a rank by to_arviz, with its data and the model of one process."
            )
        with torch.no_grad():
            of_guide, of_model = run_both(model, guide, args, kwargs, Minibatches())
        self.batches, self._kwargs = model if isinstance(model, OverBatches) else None, kwargs
        if self.batches is None:
            plates = [n for n, x in of_model.sites.items() if is_minibatch(x)]
            refuse_minibatches(of_model.sites, plates)
        drawn = _of_guide(of_guide.sites)
        self.sites = without_plates(of_model.sites)
        for name in drawn.keys() & self.sites.keys():  # what the guide samples is not summed out
            self.sites[name]["infer"] = {**(self.sites[name]["infer"] or {}), "enumerate": None}
        self.latent = sites_of_kind(self.sites, "latent")
        if missing := sorted(set(self.latent) - drawn.keys()):
            raise ValueError(
                f"The guide does not sample the model's latent sites {missing}. If they are data, "
                f"pass them; else give a guide of all, discrete ones infer={{'enumerate': 'parallel'}}."
            )
        check_guide_of_this_model(drawn, {name: self.sites[name] for name in self.latent})
        LatentSupports(guide).check(self.sites)
        with torch.no_grad():
            check_data(self.sites, self.model, drawn)
        params = {n: x for n, x in of_model.params.items() if n not in of_guide.params}
        self.parameters = {name: x.numpy(force=True) for name, x in params.items()}
        self.joint = summed_out(self.model, self.sites)
        values = {name: self.sites[name]["value"] for name in self.latent}
        summed = self.joint is not self.model
        self.in_sum = without_plates(look(self.joint, values)) if summed else self.sites
        shape = {name: site["value"].shape for name, site in self.in_sum.items()}
        names = [*self.latent, *sites_of_kind(self.sites, "deterministic")]
        names = self.latent if self.batches else names  # the others may be of single data
        self.shown = [n for n in names if shape.get(n) == self.sites[n]["value"].shape]

    @cached_property
    def layout(self) -> LatentLayout:
        """Where latent sites lie in a vector; the guide's prototype may be of a minibatch of units."""
        trace = pyro.poutine.Trace()
        for name in self.latent:
            trace.add_node(name, **self.sites[name])
        return LatentLayout(trace)

    def joints(self) -> Iterator[tuple[float, Any]]:
        """``joint``, or that of each minibatch, with its share in the log density of all data."""
        if self.batches is None:
            yield 1.0, self.joint
            return
        values = {name: self.sites[name]["value"] for name in self.latent}
        for share, model in self.batches.bound(values, self._kwargs):
            yield share, summed_out(model, self.sites)

    def draw(
        self, num_samples: int, batch_size: int | None, log_likelihood_of: Collection[str] = ()
    ) -> Draws:
        """Draws from the guide, and the model there."""
        # of this thread: a verdict does not depend on what else a machine does
        start, (drawn, of_guide) = time.thread_time(), guide_draws(self.guide, num_samples)
        log_q, squares_q = of_guide
        values = {name: drawn[name] for name in self.latent}
        if all((x == x[0]).all() for x in values.values()):
            raise ValueError(
                "All draws from the guide are the same point (AutoDelta?): there is no density to "
                "judge. Use guide.median(), or pyro_ngvi.predict with it."
            )

        def evaluated(sites: Sites) -> tuple[Any, ...]:
            terms = {name: site_log_prob(site) for name, site in sites.items()}
            likelihood = {}
            for name in log_likelihood_of:
                seen = torch.where(mask_of(sites[name]), terms[name][0], 0.0)
                likelihood[name] = compact(seen, num_samples)
            prior = {name: compact(terms[name][1], num_samples) for name in self.latent}
            shown = {name: sites[name]["value"] for name in self.shown}
            return density_of(sites, terms), shown, prior, likelihood

        log_p: Any = 0.0
        squares: Any = 0.0
        found: list[Any] = []
        for share, joint in self.joints():
            part, *found = map_draws(joint, evaluated, values, num_samples, batch_size)
            log_p = log_p + share * part[0]
            squares = squares + share**2 * part[1]
        if self.whole:
            log_p, squares = map(self.whole.over_ranks, (log_p, squares))
        self.seconds = time.thread_time() - start
        rounding = 64.0 * sum(float(x.max()) ** 0.5 for x in (squares, squares_q))
        draws = Draws(values, log_q, log_p, rounding, *found)
        if not isinstance(self.guide.func, ExactUnits):
            return draws
        return self._without_noise(draws.without_nan(), batch_size)

    def _without_noise(self, draws: Draws, batch_size: int | None) -> Draws:
        """The same with weights of 0 where a huge one is that of roundings, as log gammas of 10^16
        are: of a draw far out in a tail of r, beside which log p is another by nats."""
        log_w = torch.from_numpy(draws.log_ratio)
        huge = (log_w > log_w.quantile(BULK) + HUGE).nonzero()[:, 0][:MOST_HUGE]
        if not len(huge):
            return draws
        near = {n: (1.0 - BESIDE) * x[huge.to(x.device)] for n, x in draws.values.items()}
        with pyro.validation_enabled(False):  # a simplex is none beside
            beside = map_draws(self.joint, joint_of, near, len(huge), batch_size)
        huge = huge.to(beside.device)
        noise = huge[~((draws.log_joint[huge] - beside).abs() <= 1.0)]
        log_joint = draws.log_joint.index_fill(0, noise, -torch.inf)
        return replace(draws, log_joint=log_joint)


def sites_of_kind(sites: Sites, kind: Kind) -> list[str]:
    """The names of the sample sites of a kind, in the order of the model, but those summed out."""
    return [n for n, site in sites.items() if site_kind(site) == kind and not is_marked(site)]


def guide_draws(
    guide: partial[Any], num_samples: int
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Draws of a guide's latent sites, its arguments bound, (S, *shape), and ``density_of`` there."""
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; give at least 1.")
    if getattr(guide.func, "prototype_trace", guide) is None:
        how = "Train it first."
        if getattr(guide.func, "_waiting_state", None) is not None:
            how = "It takes the state that was loaded when you call it with the data: guide(X, y)."
        raise ValueError(f"{type(guide.func).__name__} has never been called. {how}")

    def drawn(sites: Sites) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
        return _of_guide(sites), density_of(sites, {n: site_log_prob(s) for n, s in sites.items()})

    if not isinstance(guide.func, ExactUnits):
        size = num_samples
        if isinstance(guide.func, AutoHierarchical):
            size = max(1, min(size, AT_ONCE // max(1, guide.func.sites.precision.numel())))
        return map_draws(guide, drawn, {}, num_samples, batch_size=size)
    # units given globals, for many draws at once
    values, (log_q, squares) = guide_draws(partial(guide.func.globals), num_samples)
    units, of_units = guide.func.collapsed.drawn_in_pieces(values)
    rounded = torch.finfo(of_units.dtype).eps * of_units.double().nan_to_num(0.0, 0.0, 0.0)
    return values | units, (log_q + of_units.double().sum(-1), squares + rounded.square().sum(-1))


def _of_guide(sites: Sites) -> dict[str, Tensor]:
    """Values of the latent sites of the model; the guide may draw from others to get there."""
    return {n: x["value"] for n, x in sites.items() if is_latent(x) and not is_auxiliary(x)}


def density_of(sites: Sites, terms: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The log density of one draw, summed in float64, and the sum of squares of terms' roundings."""
    logs, squares = [], []
    for name, site in sites.items():
        # Improper priors put their log_prob on the CPU, whatever their value lies on.
        term = terms[name][1].to(site["value"].device)
        eps = torch.finfo(term.dtype).eps if term.is_floating_point() else 0.0
        logs.append(term.double().sum())
        squares.append((eps * term.double().nan_to_num(0.0, 0.0, 0.0)).square().sum())
    return torch.stack(logs).sum(), torch.stack(squares).sum()


def joint_of(sites: Sites) -> Tensor:
    """The log density of one draw, summed in float64."""
    return density_of(sites, {name: site_log_prob(site) for name, site in sites.items()})[0]


def with_likelihood(fitted: Fitted) -> list[str]:
    """The observed sites with a likelihood by example; warns of those that ArviZ would misread."""
    data = sites_of_kind(fitted.in_sum, "observed")
    observed = {name: fitted.sites[name] for name in sites_of_kind(fitted.sites, "observed")}
    whole = [n for n in data if n not in observed and not fitted.in_sum[n]["cond_indep_stack"]]
    if whole:
        warnings.warn(
            f"The data {', '.join(map(repr, whole))} share an enumerated variable and have no "
            f"likelihood by example: left out. A plate of independent series gives it theirs.",
            stacklevel=3,
        )
    for name, site in observed.items():
        scale = torch.as_tensor(site["scale"])
        if bool(((scale != 1.0) & (scale != getattr(fitted.whole, "factor", 1.0))).any()):
            warnings.warn(
                f"The observed site {name!r} stands under poutine.scale, so the posterior holds "
                f"p^c and log_likelihood log p: az.loo and waic are wrong here; ngvi.diagnostics.loo "
                f"is not. log_likelihood=False leaves the group out.",
                stacklevel=3,
            )
    plates = {frame.name for site in observed.values() for frame in site["cond_indep_stack"]}
    for name, site in fitted.sites.items():
        if site_kind(site) == "factor" and plates & {f.name for f in site["cond_indep_stack"]}:
            warnings.warn(
                f"The pyro.factor {name!r} lies in a plate with data, and log_likelihood does not "
                f"have it. Where it is a likelihood az.loo is wrong: make it an observed site.",
                stacklevel=3,
            )
    return [name for name in data if name not in whole]


def mask_of(site: Site) -> Tensor:
    """Which data of a site count, in a shape that broadcasts to that of its terms."""
    return torch.as_tensor(unmasked(site), device=site["value"].device)


def compact(x: Tensor, num_samples: int) -> Tensor:
    """In float32 where that many of them would make a large array."""
    large = x.dtype is torch.float64 and x.numel() * num_samples > MOST_DOUBLES
    return x.float() if large else x
