"""Draws from any Pyro guide, with the model and the guide evaluated at them."""

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor
from torch.distributions import Independent, constraints

from ..linalg.random import own_random_state
from ..runtime.density import Kind, site_kind, site_log_prob
from ..runtime.latent_supports import LatentSupports
from ..runtime.map_draws import Parts, Program, map_draws, without_plates
from ..runtime.marked import is_marked
from ..runtime.support import check_data, plain_support
from ..runtime.vmap import Minibatches, Site, Sites, run_plainly

MOST_DOUBLES = 10_000_000  # in an array that is stored in float64


@dataclass(frozen=True)
class Draws:
    """S draws from a guide.

    ``values`` are the model's latent sites, each (S, *shape); ``log_q`` (S,) is the guide's log
    density there and ``log_joint`` (S,) the model's, log p(data, latents) with scales and masks, both
    in nats, in float64 and over the sites as the model writes them.  ``rounding`` bounds, in nats,
    what rounding may do to their difference.  ``sites`` are values of the model's sites,
    ``log_likelihood`` their log probabilities, those that were asked for.
    """

    values: dict[str, Tensor]
    log_q: Tensor
    log_joint: Tensor
    rounding: float
    sites: dict[str, Tensor]
    log_likelihood: dict[str, Tensor]

    @property
    def point_masses(self) -> list[str]:
        """Latent sites of which all draws are one point, as from an AutoDelta for a part."""
        drawn = {n: x for n, x in self.values.items() if x.numel() and x.is_floating_point()}
        return [name for name, x in drawn.items() if bool((x == x[0]).all())]


@contextmanager
def random_state(seed: int | None, stream: int = 0) -> Iterator[None]:
    """Seeds every generator that Pyro uses, and puts their states back at the end.

    Without a seed it does nothing.  Streams of one seed share no random numbers.
    """
    if seed is not None and stream:
        seed = int(np.random.SeedSequence([seed, stream]).generate_state(1)[0])
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
        drawn = _of_guide(without_plates(in_guide))
        in_model = run_plainly(model, drawn, args, kwargs, minibatches)
    for name, site in in_model.items():
        if site_is_subsample(site) and len(site["value"]) != site["fn"].size:
            raise ValueError(
                f"The plate {name!r} takes {len(site['value'])} of {site['fn'].size} examples. "
                "Figures from a minibatch would not describe the posterior of all data: make the "
                "size of the minibatch an argument of the model, and pass the full size here, with "
                "the full data."
            )
    sites = without_plates(in_model)
    for name in drawn.keys() & sites.keys():  # what the guide samples is not summed out
        sites[name]["infer"] = {**(sites[name]["infer"] or {}), "enumerate": None}
    latent = set(sites_of_kind(sites, "latent"))
    if missing := sorted(latent - drawn.keys()):
        raise ValueError(
            f"The guide does not sample the model's latent sites {missing}. If they stand for "
            "data, pass these (new data: pyro_ngvi.predict); else give a guide of every latent "
            f"site, and mark discrete ones infer={{'enumerate': 'parallel'}}."
        )
    if unknown := sorted(drawn.keys() - latent):
        raise ValueError(
            f"The guide samples the sites {unknown}, which are not latent in the model. Is it a "
            "guide of another model? Only a variable of which other sites are functions (Delta "
            f"with log_density) may be infer={{'is_auxiliary': True}}."
        )

    LatentSupports(guide).check(sites)

    def unchecked() -> Sites:
        with pyro.validation_enabled(False), own_random_state():
            return run_plainly(model, drawn, args, kwargs, minibatches)

    with torch.no_grad():
        check_data(sites, unchecked)
    return sites


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
    values_of: Collection[str] = (),
    log_likelihood_of: Collection[str] = (),
) -> Draws:
    """Draws from the guide and the model there; ``latent`` names the model's latent sites.

    :raises ValueError: when the guide is a point mass, or fewer than 2 draws are asked for.
    """
    if num_samples < 2:
        raise ValueError(f"num_samples is {num_samples}; give at least 2, better 1000.")
    drawn, of_guide = guide_draws(guide, args, kwargs, num_samples)
    values = {name: drawn[name] for name in latent}
    if all((x == x[0]).all() for x in values.values()):
        raise ValueError(
            "All draws from the guide are the same point (AutoDelta?), so it has no density to "
            "compare with the posterior. Use guide.median(), or pyro_ngvi.predict with it."
        )

    def evaluated(sites: Sites) -> Parts:
        terms = {name: site_log_prob(site) for name, site in sites.items()}
        likelihood = {
            name: _seen(terms[name][0], sites[name]["mask"]) for name in log_likelihood_of
        }
        return {
            "density": _density(sites, terms),
            "values": {name: sites[name]["value"] for name in values_of},
            "log_likelihood": {n: compact(x, num_samples) for n, x in likelihood.items()},
        }

    found = map_draws(model, evaluated, values, args, kwargs, num_samples, batch_size)
    rounding = _rounding(found["density"]) + _rounding(of_guide)
    return Draws(
        values,
        of_guide["log"],
        found["density"]["log"],
        rounding,
        found["values"],
        found["log_likelihood"],
    )


def guide_draws(
    guide: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_samples: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Draws of the guide's latent sites by name, (S, *shape), and what ``_density`` says there.

    :raises ValueError: when an autoguide was never called.
    """
    if getattr(guide, "prototype_trace", guide) is None:
        raise ValueError(f"{type(guide).__name__} has never been called. Train it first.")

    def drawn(sites: Sites) -> Parts:
        terms = {name: site_log_prob(site) for name, site in sites.items()}
        return {"values": _of_guide(sites), "density": _density(sites, terms)}

    found = map_draws(guide, drawn, {}, args, kwargs, num_samples, batch_size=num_samples)
    return found["values"], found["density"]


def _of_guide(sites: Sites) -> dict[str, Tensor]:
    """Values of the latent sites of the model; the guide may draw from others to get there."""
    latent = {name: site for name, site in sites.items() if site_kind(site) == "latent"}
    auxiliary = {name for name, site in latent.items() if (site["infer"] or {}).get("is_auxiliary")}
    return {name: site["value"] for name, site in latent.items() if name not in auxiliary}


def sites_of_sum(
    joint: Program, prototype: Sites, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Sites:
    """The sites of ``joint``, the model with its enumerated sites summed out, in one plain run."""
    if not any(map(is_marked, prototype.values())):
        return prototype
    values = {name: prototype[name]["value"] for name in sites_of_kind(prototype, "latent")}
    with torch.no_grad(), own_random_state():
        return without_plates(run_plainly(joint, values, args, kwargs, Minibatches()))


def shown_sites(prototype: Sites, in_sum: Sites) -> list[str]:
    """The latent and deterministic sites whose values the sum leaves as they are.

    A function of an enumerated site has the shape of all its values there.
    """
    names = [*sites_of_kind(prototype, "latent"), *sites_of_kind(prototype, "deterministic")]
    shape = {name: prototype[name]["value"].shape for name in names}
    return [n for n in names if n in in_sum and in_sum[n]["value"].shape == shape[n]]


def _density(sites: Sites, terms: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The log density of one draw, summed in float64, and the sum of squares of terms' roundings.

    Each term is rounded relative to its own size, and independently, so the squares add up.
    """
    logs, squares = [], []
    for name, site in sites.items():
        # Improper priors put their log_prob on the CPU, whatever their value lies on.
        term = terms[name][1].to(site["value"].device)
        eps = torch.finfo(term.dtype).eps if term.is_floating_point() else 0.0
        logs.append(term.double().sum())
        squares.append((eps * term.double().nan_to_num(0.0, 0.0, 0.0)).square().sum())
    return {"log": torch.stack(logs).sum(), "squares": torch.stack(squares).sum()}


def _rounding(density: Mapping[str, Tensor]) -> float:
    """Nats by which rounding may move a log density."""
    return 64.0 * float(density["squares"].max()) ** 0.5


def _seen(log_prob: Tensor, mask: bool | Tensor | None) -> Tensor:
    """Zero where the mask hides an entry."""
    if mask is None or mask is True:
        return log_prob
    return torch.where(torch.as_tensor(mask, device=log_prob.device), log_prob, 0.0)


def compact(x: Tensor, num_samples: int) -> Tensor:
    """In float32 where that many of them would make a large array."""
    large = x.dtype is torch.float64 and x.numel() * num_samples > MOST_DOUBLES
    return x.float() if large else x


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
                f"support: neither the guide nor k-hat knows the posterior beyond. Use float64, or the "
                f"other end: the probability near 0, for a simplex another last entry.",
                RuntimeWarning,
                stacklevel=3,
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
