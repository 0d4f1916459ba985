"""Draws from any Pyro guide, with the model and the guide evaluated at them.

Everything runs under ``torch.func.vmap``, one batch element per draw; a program that can not
(data-dependent control flow, a sampler without a batching rule) runs once for each draw instead.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor
from torch.distributions import Independent, constraints

from pyro_ngvi._latent_supports import LatentSupports
from pyro_ngvi._marked import is_marked
from pyro_ngvi._particles import Minibatches, Site, Sites, run_plainly
from pyro_ngvi._random import own_random_state
from pyro_ngvi._support import check_data, plain_support
from pyro_ngvi.density import (
    BatchedSite,
    BatchedTrace,
    Kind,
    batched_trace,
    site_kind,
    site_log_prob,
)

Program = Callable[..., Any]


@dataclass(frozen=True)
class Draws:
    """S draws from a guide.

    ``values`` are the model's latent sites, each (S, *shape); ``guide`` and ``model`` are the traces
    there, both over the sites as the model writes them.
    """

    values: dict[str, Tensor]
    guide: BatchedTrace
    model: BatchedTrace

    @property
    def point_masses(self) -> list[str]:
        """Latent sites of which all draws are one point, as from an AutoDelta for a part."""
        drawn = {n: x for n, x in self.values.items() if x.numel() and x.is_floating_point()}
        return [name for name, x in drawn.items() if bool((x == x[0]).all())]

    @property
    def log_joint(self) -> Tensor:
        """log p(data, latents), (S,), in nats, with the scales and masks of the model, in float64."""
        return self.model.log_joint(torch.float64)

    @property
    def log_q(self) -> Tensor:
        """The guide's log density, (S,), in nats, in float64."""
        return self.guide.log_joint(torch.float64)


@contextmanager
def random_state(seed: int | None) -> Iterator[None]:
    """Seeds every generator that Pyro uses, and puts their states back at the end.

    Without a seed it does nothing.
    """
    if seed is None:
        yield
        return
    before = get_rng_state()
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        pyro.set_rng_seed(seed)
        try:
            yield
        finally:
            set_rng_state(before)


def prototype_sites(
    model: Program, guide: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Sites:
    """The model's sample sites in one plain run at a draw from the guide, plates left out.

    :raises ValueError: when the model is a guide, a plate is subsampled, the guide's latent sites are
        not the model's or have other supports, or data lie outside the support of their site.
    """
    if isinstance(model, AutoGuide):
        raise ValueError(
            f"The model is an {type(model).__name__}, a guide: give the model first, then the guide."
        )
    minibatches = Minibatches()
    with torch.no_grad():
        in_guide = run_plainly(guide, {}, args, kwargs, minibatches)
        own = _without_plates(in_guide)
        drawn = {
            name: own[name]["value"]
            for name, site in own.items()
            if site_kind(site) == "latent" and not (site["infer"] or {}).get("is_auxiliary")
        }
        in_model = run_plainly(model, drawn, args, kwargs, minibatches)
    for name, site in in_model.items():
        if site_is_subsample(site) and len(site["value"]) != site["fn"].size:
            raise ValueError(
                f"The plate {name!r} takes {len(site['value'])} of {site['fn'].size} examples. "
                "Figures from a minibatch would not describe the posterior of all data: make the "
                "size of the minibatch an argument of the model, and pass the full size here, with "
                "the full data."
            )
    sites = _without_plates(in_model)
    for name in drawn.keys() & sites.keys():  # what the guide samples is not summed out
        sites[name]["infer"] = {**(sites[name]["infer"] or {}), "enumerate": None}
    latent = set(sites_of_kind(sites, "latent"))
    if missing := sorted(latent - drawn.keys()):
        raise ValueError(
            f"The guide does not sample the model's latent sites {missing}, so the two densities "
            "are not over the same space. If they stand for data, pass these; else give a guide of "
            "every latent site, and mark discrete ones infer={'enumerate': 'parallel'}: they are "
            "summed out."
        )
    if unknown := sorted(drawn.keys() - latent):
        raise ValueError(
            f"The guide samples the sites {unknown}, which are not latent in the model. Is it a "
            "guide of another model? Only a variable that other sites are functions of, as Delta "
            "distributions with their log_density, may be infer={'is_auxiliary': True}."
        )

    LatentSupports(guide).check(sites)

    def unchecked() -> Sites:
        with pyro.validation_enabled(False), own_random_state():
            return run_plainly(model, drawn, args, kwargs, minibatches)

    with torch.no_grad():
        check_data(sites, unchecked)
    return sites


def _without_plates(sites: Sites) -> Sites:
    return {name: site for name, site in sites.items() if not site_is_subsample(site)}


def sites_of_kind(sites: Sites, kind: Kind) -> list[str]:
    """The names of the sample sites of a kind, in the order of the model, but those summed out."""
    return [n for n, site in sites.items() if site_kind(site) == kind and not is_marked(site)]


def draw_and_evaluate(
    model: Program,
    guide: Program,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    latent: Collection[str],
    num_samples: int,
    batch_size: int | None,
) -> Draws:
    """Draws from the guide and the model there; ``latent`` names the model's latent sites.

    :raises ValueError: when the guide is a point mass, or fewer than 2 draws are asked for.
    """
    if num_samples < 2:
        raise ValueError(f"num_samples is {num_samples}; give at least 2, better 1000.")
    drawn = run_batched(guide, {}, args, kwargs, num_samples)
    values = {name: drawn.sites[name].value for name in latent}
    if all((x == x[0]).all() for x in values.values()):
        raise ValueError(
            "All draws from the guide are the same point (AutoDelta?), so it has no density to "
            "compare with the posterior. Use guide.median(), or pyro.infer.Predictive with it."
        )
    at_draws = run_batched(model, values, args, kwargs, num_samples, batch_size)
    return Draws(values, drawn, at_draws)


def warn_of_edges(sites: Sites, values: Mapping[str, Tensor]) -> None:
    """Warn where rounding has put many draws onto the upper end of an interval, or of a simplex.

    There Pyro's transforms end at 1 - eps, and the density of the model is flat: whatever lies beyond
    in the posterior is lost, to training and to k-hat.  Numbers near 0 are not rounded like that.
    """
    for name, x in values.items():
        support = plain_support(sites[name]["fn"].support)
        if not x.numel() or not x.is_floating_point():
            continue
        near = 4.0 * torch.finfo(x.dtype).eps
        if isinstance(support, constraints.interval):
            x = (x - support.lower_bound) / (support.upper_bound - support.lower_bound)
            rounded = x >= 1.0 - near
        elif support is constraints.simplex:  # whose last entry is what the others leave
            rounded = x[..., -1] <= near
        else:
            continue
        share = float(rounded.double().mean(0).max())
        if share > 0.002:
            warnings.warn(
                f"{100.0 * share:.1f} % of the draws of {name!r} are rounded to the end of their "
                f"support, where the density of the model is flat: neither the guide nor k-hat knows "
                f"the posterior beyond. Use float64, or the other end: the probability that is near 0 "
                f"in place of the one near 1, for a simplex another entry as the last.",
                RuntimeWarning,
                stacklevel=3,
            )


def run_batched(
    program: Program,
    values: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_samples: int,
    batch_size: int | None = None,
) -> BatchedTrace:
    """``batched_trace``; where the program can not run under vmap, the same by a loop."""
    with torch.no_grad(), warnings.catch_warnings():
        # torch.binomial under vmap resizes its own output, correctly, and warns about it.
        warnings.filterwarnings("ignore", "An output with one or more elements was resized")
        try:
            return batched_trace(
                program, values, args, kwargs, num_particles=num_samples, chunk_size=batch_size
            )
        except RuntimeError:
            # A program that is wrong rather than unbatchable shows its own error in the loop.
            return _run_in_loop(program, values, args, kwargs, num_samples)


def _run_in_loop(
    program: Program,
    values: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_samples: int,
) -> BatchedTrace:
    runs: list[Sites] = []
    for s in range(num_samples):
        at_draw = {name: x[s] for name, x in values.items()}
        runs.append(_without_plates(run_plainly(program, at_draw, args, kwargs, Minibatches())))
        if changed := runs[0].keys() ^ runs[-1].keys():
            raise ValueError(
                f"The sites {sorted(changed)} are there in some draws and not in others, so they "
                "can not be stored as arrays. Write the model with the same sites in every run."
            )
    return BatchedTrace({name: _stack([run[name] for run in runs]) for name in runs[0]})


def _stack(sites: list[Site]) -> BatchedSite:
    log_probs = [site_log_prob(site) for site in sites]
    first = sites[0]
    tensors = {
        key: torch.stack([site[key] for site in sites])
        for key in ("scale", "mask")
        if isinstance(first[key], Tensor)
    }
    return BatchedSite(
        kind=site_kind(first),
        value=torch.stack([site["value"] for site in sites]),
        log_prob=torch.stack([log_prob for _, log_prob in log_probs]),
        unscaled_log_prob=torch.stack([unscaled for unscaled, _ in log_probs]),
        event_dim=first["fn"].event_dim,
        plates=first["cond_indep_stack"],
        **{"scale": first["scale"], "mask": first["mask"], **tensors},
    )


def _expanded(fn: Any, shape: torch.Size) -> Any:
    """``fn`` with draws of this shape, which it broadcasts to."""
    if isinstance(fn, Independent):
        return _expanded(fn.base_dist, shape).to_event(fn.reinterpreted_batch_ndims)
    return fn.expand(shape[: len(shape) - fn.event_dim])


class SampleObserved(Messenger):
    """Draws the named observed sites from the model instead of taking their data.

    A draw has the shape of the data, where these are more than the site itself says (no plate around
    many data of one distribution).
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = names

    def _pyro_sample(self, msg: Site) -> None:
        if msg["name"] in self.names:
            fn, data = msg["fn"], msg["value"]
            if isinstance(data, torch.Tensor):
                shape = torch.broadcast_shapes(data.shape, fn.shape())
                if shape != fn.shape():
                    msg["fn"] = _expanded(fn, shape)
            msg["is_observed"], msg["value"], msg["done"] = False, None, False
