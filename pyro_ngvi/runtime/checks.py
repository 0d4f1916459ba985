"""What is refused of models, guides and data before training, and of data that change later.

``log_prob`` checks data against their support while Pyro's validation is on, which has no answer under
``vmap``.  So training checks the first data in a plain run, and later ones by :class:`LaterData`, on a
CPU and against supports without latent variables.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions.constraints import Constraint

from ..linalg.host import at_hand, host_bool
from .density import (
    Site,
    Sites,
    check_log_prob_shape,
    innermost,
    is_latent,
    is_minibatch,
    plain_support,
    site_kind,
    site_log_prob,
    with_density,
)
from .pyro_adapter import unmasked
from .run import Program, Values, look
from .told_in import told_in


def check_guide(sites: Sites) -> None:
    """Refuse a guide with a site that is not reparameterised."""
    for name, site in sites.items():
        if not site_is_subsample(site) and not site["fn"].has_rsample:
            raise ValueError(
                f"The site {name!r} of the guide samples {type(site['fn']).__name__}, which is not "
                f"reparameterised, so no gradient passes through its draws. Use pyro.infer.Trace_ELBO, "
                f"or pyro.infer.TraceEnum_ELBO to sum it out."
            )


def check_replaced_priors(names: Collection[str], guide_sites: Sites, model_sites: Sites) -> None:
    """Refuse another scale or mask in the model for a site whose prior the guide takes back."""
    for name in names:
        if name not in model_sites or name not in guide_sites:
            continue
        ours, theirs = guide_sites[name], model_sites[name]
        scales = torch.as_tensor(ours["scale"]), torch.as_tensor(theirs["scale"])
        masked = any(not (s["mask"] is None or s["mask"] is True) for s in (ours, theirs))
        if masked or not bool((scales[0] == scales[1]).all()):
            raise ValueError(
                f"Model and guide differ in scale or mask at the site {name!r}, whose prior the guide "
                f"takes back: a share of it would stay. Scale both alike, or use "
                f"BatchedELBO(kl_weight=...) to weigh the KL term."
            )


def check_tempers(guide: Any, kl_weight: float) -> None:
    """Refuse a ``kl_weight`` to guides whose covariance is made of the model as it stands."""
    if kl_weight != 1.0 and not getattr(guide, "tempers", True):
        raise ValueError(
            f"{type(guide).__name__} follows the likelihood as the model writes it, not kl_weight="
            f"{kl_weight:g}. Put poutine.scale(scale={1.0 / kl_weight:g}) around the data."
        )


@told_in("guides.md#lies-in-the-subsampled-plate")
def check_whole_plates(guide: str, sites: Sites) -> None:
    """Refuse latent sites in a subsampled plate to a guide that has one flat vector of them all."""
    for name, site in sites.items():
        for frame in site["cond_indep_stack"]:
            if frame.full_size not in (None, frame.size):
                raise ValueError(
                    f"{guide}: latent site {name!r} lies in the subsampled plate {frame.name!r} "
                    f"({frame.size} of {frame.full_size}). Use the whole plate, or "
                    "AutoGuideList(model, create_plates=f), f the plate, with "
                    f"AutoNormal(poutine.block(model, expose=[{name!r}]))."
                )


@told_in("steps.md#takes-100-of-1000-examples")
def refuse_minibatches(sites: Sites, plates: Collection[str]) -> None:
    """Refuse ``plates`` of fewer examples than there are: no figure of theirs is one of all data."""
    for name in plates:
        raise ValueError(
            f"The plate {name!r} takes {len(sites[name]['value'])} of {sites[name]['fn'].size} "
            "examples. Make the size of the minibatch an argument of the model, and pass the full "
            "size here, with the full data."
        )


def check_values(sites: Sites) -> None:
    """Refuse a value outside the support of its site, as far as Pyro's validation is on."""
    for site in with_density(sites).values():
        check_log_prob_shape(site, _validated_log_prob(site))


def _validated_log_prob(site: Site) -> Tensor:
    try:
        return site_log_prob(site)[1]
    except ValueError as error:
        words = _of_nan(site["value"]) or _of_bounds(site) or error
        raise ValueError(f"The site {site['name']!r} cannot be evaluated: {words}") from error


def _of_nan(value: Any) -> str:
    """How many values are NaN, in words; empty where none is."""
    if not isinstance(value, Tensor) or not bool(value.isnan().any()):
        return ""
    return (
        f"{int(value.isnan().sum())} of its {value.numel()} values are NaN. Mask them, and observe "
        f"numbers under the mask, whose gradients count: poutine.mask(mask=~y.isnan()), "
        f"obs=torch.nan_to_num(y)."
    )


def _of_bounds(site: Site) -> str:
    """How many data are beyond bounds that may move, in words; empty where none is."""
    support, value = plain_support(site["fn"].support), site["value"]
    bounds = [getattr(support, name, None) for name in ("lower_bound", "upper_bound")]
    if not site["is_observed"] or not any(isinstance(b, Tensor) for b in bounds):
        return ""
    outside = value[~support.check(value).expand(value.shape)]
    if not outside.numel():
        return ""
    return (
        f"{outside.numel()} of its {value.numel()} values, as {float(outside.flatten()[0]):.4g}, are "
        f"outside of its support here. If that moves with a latent site, give this a prior that keeps "
        f"all data inside, as Uniform(y.max(), 10.0)."
    )


def check_missing(sites: Sites, again: Callable[[Values], Sites]) -> None:
    """Refuse NaN among the data, which steps of ``AutoSites`` take and what comes after them does not,
    and infinite data whose density is zero wherever a guide may go.

    Data are the same at another draw of the prior, which ``again`` gives; residuals that a model
    observes are not, and may overflow at some.
    """
    for name, site in sites.items():
        words = _of_missing(site) if site_kind(site) == "observed" else ""
        if words:
            now, then = (s["value"].nan_to_num() for s in (site, again({}).get(name, site)))
            if torch.equal(now, then):
                raise ValueError(f"The site {name!r} cannot be evaluated: {words}")


def _of_missing(site: Site) -> str:
    """What is wrong with the data of a site, in words; empty where nothing is."""
    value = site["value"]
    if words := _of_nan(value):
        return words
    infinite = value.isinf() if isinstance(value, Tensor) else torch.zeros(1)
    if not bool(infinite.any()) or math.isfinite(float(site_log_prob(site)[1].sum())):
        return ""
    return (
        f"{int(infinite.sum())} of its {value.numel()} values are infinite. Mask them, and observe "
        f"numbers under the mask: poutine.mask(mask=torch.isfinite(y)), "
        f"obs=torch.where(torch.isfinite(y), y, 0.0)."
    )


def warn_of_noise(sites: Sites, again: Callable[[Values], Sites]) -> None:
    """Warn where data have another log p in a run ``again`` at the same latent values and minibatches.

    Data that differ themselves are a minibatch of the model's own.
    """
    other = again({name: site["value"] for name, site in sites.items() if is_latent(site)})
    pairs = {name: (site, other[name]) for name, site in sites.items() if name in other}
    same = [n for n, ab in pairs.items() if torch.equal(*(torch.as_tensor(s["value"]) for s in ab))]
    if any(is_minibatch(sites[name]) for name in pairs.keys() - same):
        return
    for name in (n for n in same if site_kind(sites[n]) == "observed"):
        a, b = (site_log_prob(site)[1] for site in pairs[name])
        if not torch.allclose(a, b, rtol=1e-3, atol=1e-3, equal_nan=True):
            warnings.warn(
                f"log p of {name!r} changes when the model runs again at the same latent values, as by "
                f"dropout in training: ELBO and verdict are off by that noise. Call module.eval(), or "
                f"draw what is random at a site of the model.",
                stacklevel=2,
            )
            return


def check_data(checked: Sites, program: Program, values: Values) -> None:
    """Refuse observed values outside the support, for the sites of a run of ``program`` at ``values``.

    Where it depends on latent sites, Uniform(0, z), and a run without validation has density zero, the
    draw is merely impossible.  What a mask hides may be anything.
    """
    for name, site in checked.items():
        if site_kind(site) != "observed":
            continue
        try:
            _validated_log_prob(site)
        except ValueError:
            # distributions ask whether to validate when they are used, not when they are made
            with pyro.validation_enabled(False):
                unchecked = look(program, values).get(name)
                if unchecked is None:
                    raise
                impossible = float(site_log_prob(unchecked)[1].sum()) == -torch.inf
            bad = ~site["fn"].support.check(site["value"])
            if not impossible and (not bad.any() or (bad & unmasked(site, torch.all)).any()):
                raise


class LaterData:
    """The observed values of later runs, against the supports of their sites.

    Only sites that validate and whose support holds the data of the first, plain run take part.
    """

    def __init__(self, sites: Sites) -> None:
        told = {name: site["fn"].support for name, site in sites.items() if _is_told(site)}
        # a support that moves, with a parameter say, is no fault of the data
        self._bounds = {name: _kept_bounds(support) for name, support in told.items()}

    def check(self, sites: Sites) -> None:
        """Refuse values outside the support, under ``vmap`` too; NaN is left to the optimizer."""
        for name, before in list(self._bounds.items()):
            site = sites.get(name)
            if site is None or not site["is_observed"] or not isinstance(site["value"], Tensor):
                continue
            value, fn = site["value"], site["fn"]
            if not at_hand(value):
                continue
            # made of latent variables itself, it has no answer: ask it before slower checks do
            of_latents = host_bool(value.isfinite().any()) is None
            good = None if of_latents else _within(fn.support, value)
            answer = None if good is None else host_bool(good.all())
            if answer:
                continue
            if answer is None or moved(before, bounds(fn.support)):
                del self._bounds[name]  # the support depends on latent sites, say
            else:
                nan = value.isnan()
                bad = ~(good | (nan.flatten(-fn.event_dim).any(-1) if fn.event_dim else nan))
                if host_bool((bad & unmasked(site, torch.all)).any()):
                    raise ValueError(
                        f"The site {name!r} cannot be evaluated: its value in this step, of shape "
                        f"{tuple(value.shape)}, is not within the support ({fn.support!r}) of "
                        f"{type(fn).__name__}. Invalid values:\n{value}"
                    )


def _within(support: Any, value: Tensor) -> Tensor | None:
    """Which entries lie in a support; ``None`` where that has no answer."""
    try:
        return support.check(value)
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return None


def _is_told(site: Site) -> bool:
    """Whether a site of the first run says by its support which values it takes."""
    value = site["value"]
    if site_kind(site) != "observed" or not isinstance(value, Tensor) or not at_hand(value):
        return False
    if not getattr(innermost(site["fn"]), "_validate_args", False):
        return False
    good = _within(site["fn"].support, value)
    return good is not None and host_bool(good.all()) is True


class LatentSupports:
    """The supports of the latent sites at the first call of ``guide``, those with bounds of tensors.

    With other data Uniform(y.max(), 10) has another, and an autoguide goes on to draw from the old one.
    """

    def __init__(self, guide: Any) -> None:
        self.bounds: dict[str, list[Any]] = {}
        for part in guide.modules() if isinstance(guide, nn.Module) else ():
            trace: Any = getattr(part, "prototype_trace", None)
            if trace is None or not isinstance(part, AutoGuide):
                continue
            for name, site in trace.nodes.items():
                # some guides of Pyro keep no more of a site than they need, which is not its type
                if site.get("is_observed") or not hasattr(site.get("fn"), "support"):
                    continue
                found = _kept_bounds(site["fn"].support)
                if any(isinstance(v, Tensor) for v in found):
                    self.bounds[name] = found

    def check(self, sites: Sites) -> None:
        """Refuse a support that has moved, where that can be told without waiting for a device."""
        for name, before in self.bounds.items():
            if name in sites and moved(before, bounds(sites[name]["fn"].support)):
                raise ValueError(
                    f"The support of the latent site {name!r} is another one than at the guide's first "
                    f"call ({sites[name]['fn'].support!r}). Make a guide for these data, or instead of "
                    f'x ~ Uniform(a, b) write x = a + (b - a) * pyro.sample("u", Uniform(0, 1)).'
                )


def bounds(support: Any) -> list[Any]:
    """The numbers that a support is made of, and those within it: tensors as they are, or numbers."""
    if isinstance(support, Tensor | int | float):
        return [support]
    if isinstance(support, Constraint):
        support = list(vars(support).values())
    return [v for x in support for v in bounds(x)] if isinstance(support, list | tuple) else []


def _kept_bounds(support: Any) -> list[Any]:
    """To be compared with later: without a graph, whoever writes into them."""
    return [v.detach().clone() if isinstance(v, Tensor) else v for v in bounds(support)]


def moved(before: list[Any], now: list[Any], ask: Any = host_bool) -> bool:
    """Whether bounds are known to differ; by ``ask=bool`` a device is waited for."""
    if len(before) != len(now):
        return True
    for a, b in zip(map(torch.as_tensor, before), map(torch.as_tensor, now), strict=True):
        if ask((a == b).all()) is False:
            # sums over the data move by their rounding when the data come in another order
            eps = max(
                (torch.finfo(x.dtype).eps for x in (a, b) if x.is_floating_point()), default=0.0
            )
            if not torch.isclose(a.double(), b.double(), rtol=1e3 * eps, atol=0.0).all():
                return True
    return False


def tensor_of(name: str, x: Any) -> str:
    """The call that makes a tensor of numbers of an array, or of a table."""
    # a copy of a table's values, which may not be written to
    call = f"tensor({name}.to_numpy()" if hasattr(x, "to_numpy") else f"as_tensor({name}"
    return f"torch.{call}, dtype=torch.get_default_dtype())"
