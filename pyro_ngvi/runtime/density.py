"""A Pyro model as a pure batched function.

:func:`batched_trace` runs a model once under ``torch.func.vmap``, with the latent sites of S
particles fixed.  The model is written for one draw (``X @ w``) and needs no plate for the particles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import zip_longest
from math import prod
from typing import Any, Literal, TypeAlias

import pyro.distributions as dist
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to
from torch.overrides import TorchFunctionMode

from ..linalg.host import outside_autocast
from .pyro_adapter import layers_of


def sum_per_particle(x: Tensor) -> Tensor:
    """Sum over every dimension but the first, (S, ...) to (S,)."""
    return x.flatten(1).sum(1) if x.dim() > 1 else x


def is_minibatch(site: Site) -> bool:
    """Whether a recorded site is the index of a plate, of fewer examples than there are."""
    return site_is_subsample(site) and len(site["value"]) < site["fn"].size


def is_latent(site: Site) -> bool:
    """Whether a recorded site is a latent variable, and not the index of a plate."""
    return not site["is_observed"] and not site_is_subsample(site)


def free_dim(sites: Sites) -> int:
    """The first batch dimension to the left of all plates: where a plate of particles goes."""
    frames = (frame for site in sites.values() for frame in site["cond_indep_stack"])
    return min((frame.dim for frame in frames if frame.dim is not None), default=0) - 1


def is_auxiliary(site: Site) -> bool:
    """Whether a guide draws the site only on the way to those of the model."""
    return bool((site["infer"] or {}).get("is_auxiliary"))


# Pyro's Message of a sample site, as Any: to a type checker each of its keys may be absent.
Site: TypeAlias = Any
Sites: TypeAlias = dict[str, Site]
Kind = Literal["latent", "observed", "deterministic", "factor"]


def site_kind(site: Site) -> Kind:
    """What a recorded sample site is: latent, observed, deterministic or factor."""
    if not site["is_observed"]:
        return "latent"
    if (site["infer"] or {}).get("_deterministic") or _is_function(site["fn"]):
        return "deterministic"
    return "factor" if isinstance(innermost(site["fn"]), dist.Unit) else "observed"


def with_density(sites: Sites) -> Sites:
    """The sites that have a term in the log joint: no index of a plate, nothing deterministic."""
    return {
        name: site
        for name, site in sites.items()
        if not site_is_subsample(site) and site_kind(site) != "deterministic"
    }


def _is_function(fn: Any) -> bool:
    """Whether a distribution is what Pyro's reparametrisations leave of a site: a point, masked out."""
    *outer, base = layers_of(fn)
    masked = any(isinstance(f, dist.MaskedDistribution) and f._mask is False for f in outer)
    return masked and isinstance(base, dist.Delta)


def innermost(fn: Any) -> Any:
    """The distribution within ``to_event`` and ``mask``."""
    return layers_of(fn)[-1]


class _MaskedWrites(TorchFunctionMode):
    """Writes ``x[mask] = number``, which has no rule under ``vmap``, as ``masked_fill_``."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__setitem__:
            x, mask, value = args
            if getattr(mask, "dtype", None) is torch.bool and isinstance(value, int | float):
                return x.masked_fill_(mask, value)
        return func(*args, **(kwargs or {}))


def _evaluated(site: Site) -> Tensor:
    fn = site["fn"]
    # torch's Multinomial writes by a mask; only there, because a mode makes every call slower
    with _MaskedWrites() if isinstance(innermost(fn), dist.Multinomial) else nullcontext():
        return fn.log_prob(site["value"], *site["args"], **site["kwargs"])


def site_log_prob(site: Site) -> tuple[Tensor, Tensor]:
    """The log probability of a recorded site in nats: unscaled, and with scale and mask."""
    try:
        log_prob = _evaluated(site)
        return log_prob, scale_and_mask(log_prob, site["scale"], site["mask"])
    except RuntimeError as error:
        error.add_note(f"in the log_prob of the site {site['name']!r}")
        raise


def check_log_prob_shape(site: Site, log_prob: Tensor) -> None:
    """Refuse a site whose ``log_prob`` was broadcast to a shape that nothing asks for.

    Inside plates, each dimension larger than 1 must be that of a plate. Outside plates, the shape
    must be that of the value, unless the value is a single event.
    """
    shape = log_prob.shape
    if not shape:
        return
    value, fn = site["value"], site["fn"]
    sizes = {frame.dim: frame.size for frame in site["cond_indep_stack"] if frame.dim is not None}
    batch_shape = value.shape[: value.dim() - fn.event_dim]
    if sizes:
        good = all(n == 1 or sizes.get(i - len(shape)) == n for i, n in enumerate(shape))
        plates = [f"{f.name!r} ({f.size} at dim {f.dim})" for f in site["cond_indep_stack"]]
        given = f"its plates are {', '.join(plates)}"
    else:
        good = shape == batch_shape or batch_shape.numel() == 1
        given = "it is in no plate"
    if not good:
        raise ValueError(
            f"The site {site['name']!r} has a log_prob of shape {tuple(shape)}, but {given} and "
            f"its value has batch shape {tuple(batch_shape)}: shapes were broadcast. Give "
            f"distribution ({tuple(fn.batch_shape)}) and mask its shape (mean.squeeze(-1)?), "
            "events by .to_event(...)."
        )


def sum_log_prob(sites: Sites) -> Tensor:
    """The log probability of all sites of one particle, a scalar; each has the shape of its plates."""
    total: Any = None
    for site in with_density(sites).values():
        log_prob = site_log_prob(site)[1]
        check_log_prob_shape(site, log_prob)
        total = log_prob.sum() if total is None else total + log_prob.sum()
    return torch.zeros(()) if total is None else total


class LatentLayout:
    """Where each latent site lies in a flat unconstrained vector: that of ``AutoContinuous``.


    The supports are those of the prototype: one that depends on another latent site is not
    followed (neither does ``AutoContinuous``).

    Args:
        prototype: a trace of the model. Sites keep its order; each is flattened row by row.

    Raises:
        ValueError: when there is no latent site, or one is discrete.
    """

    def __init__(self, prototype: Trace) -> None:
        self.constrained_shapes: dict[str, torch.Size] = {}
        self.unconstrained_shapes: dict[str, torch.Size] = {}
        self.transforms: dict[str, Any] = {}
        site: Site
        for name, site in prototype.iter_stochastic_nodes():
            if site_is_subsample(site):
                continue
            _refuse_discrete(site)
            transform = biject_to(site["fn"].support)
            self.constrained_shapes[name] = site["value"].shape
            self.unconstrained_shapes[name] = transform.inv(site["value"]).shape
            self.transforms[name] = transform
        if not self.transforms:
            raise ValueError("The model has no latent site: every sample site is observed.")
        self.dim = sum(prod(shape) for shape in self.unconstrained_shapes.values())

    def unconstrained(self, theta: Tensor) -> Iterator[tuple[str, Any, Tensor]]:
        if theta.dim() != 2 or theta.shape[1] != self.dim:
            raise ValueError(
                f"theta has shape {tuple(theta.shape)}; it must be (S, {self.dim}), a row for "
                f"each particle."
            )
        sizes = [prod(shape) for shape in self.unconstrained_shapes.values()]
        parts = theta.split(sizes, dim=1)
        for (name, shape), part in zip(self.unconstrained_shapes.items(), parts, strict=True):
            yield name, self.transforms[name], part.reshape(part.shape[:1] + shape)

    def unpack(self, theta: Tensor) -> dict[str, Tensor]:
        """Flat unconstrained (S, d) to constrained values (S, *shape) by site."""
        return {name: transform(x) for name, transform, x in self.unconstrained(theta)}

    @outside_autocast
    def unpack_with_log_det(self, theta: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """As :meth:`unpack`, and log |det dz/dtheta|, (S,)."""
        values: dict[str, Tensor] = {}
        log_det = theta.new_zeros(len(theta))
        for name, transform, x in self.unconstrained(theta):
            values[name] = z = transform(x)
            if z is not x:  # the identity returns its argument, and its log det is zero
                terms = transform.log_abs_det_jacobian(x, z)
                log_det = log_det + sum_per_particle(terms)
        return values, log_det

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Constrained values (S, *shape) by site to flat unconstrained (S, d)."""
        return torch.cat(
            [
                transform.inv(values[name]).reshape(len(values[name]), -1)
                for name, transform in self.transforms.items()
            ],
            dim=1,
        )


def _refuse_discrete(site: Site) -> None:
    fn = site["fn"]
    if fn.support.is_discrete:
        raise ValueError(
            f"The latent site {site['name']!r} is discrete, so the model has no density over a "
            f"real space. Sum it out, or use pyro.infer.TraceEnum_ELBO."
        )


def feasible_value(site: Site) -> Tensor:
    """A point inside the support of a site; an improper prior, which cannot sample, has one too.

    It is the image of zero, so that no prior, however wide, starts far away.
    """
    _refuse_discrete(site)
    fn = site["fn"]
    transform = biject_to(fn.support)
    try:
        return transform(torch.zeros_like(transform.inv(fn.sample())))
    except NotImplementedError:
        return transform(torch.zeros(transform.inverse_shape(fn.shape())))


def check_model_site(site: Site, values: Mapping[str, Any]) -> None:
    """Refuse a latent site of a model to which the guide gives no value, or one of other shape."""
    if site["name"] not in values:
        _check_enumerated(site)
        raise ValueError(
            f"The latent site {site['name']!r} of the model is not sampled by the guide. Add it "
            f"to the guide, give it obs=..., or use pyro.infer.TraceEnum_ELBO to sum it out."
        )
    shape, value_shape = site["fn"].shape(), site["value"].shape
    sizes = zip_longest(reversed(shape), reversed(value_shape), fillvalue=1)
    if any(n != m for n, m in sizes):
        raise ValueError(
            f"The latent site {site['name']!r} has shape {tuple(shape)} in the model, but the "
            f"guide gives it shape {tuple(value_shape)}. Is the guide made for another model, or "
            f"for data of another size?"
        )


def check_guide_of_this_model(names: Iterable[str], model_sites: Sites) -> None:
    """Refuse a guide with latent sites, ``names``, that a run of the model does not have."""
    for name in names:
        if name not in model_sites:
            raise ValueError(
                f"The guide samples {name!r}, which is no site of the model, or not of this run of it. "
                f"Is it the guide of another model? Only a variable without a prior that other sites "
                f"are functions of may be infer={{'is_auxiliary': True}}."
            )


def _check_enumerated(site: Site) -> None:
    if site["infer"].get("enumerate"):
        raise ValueError(
            f"The site {site['name']!r} asks for enumeration, which BatchedELBO does not do; use "
            f"pyro.infer.TraceEnum_ELBO, or pyro.infer.Trace_ELBO to sample the site."
        )


def check_minibatch(site: Site, shared: Mapping[str, Tensor]) -> None:
    """Refuse a plate of a model whose minibatch is not that of the guide."""
    index, expected = site["value"], shared.get(site["name"])
    if expected is None or index is expected:
        return
    if len(index) != len(expected) or not torch.equal(torch.as_tensor(index), expected):
        raise ValueError(
            f"The plate {site['name']!r} has another minibatch in the model ({len(index)} "
            f"examples) than in the guide ({len(expected)}). Use one subsample_size, or give both "
            "one index: pass create_plates=... to the autoguide, with the plate of the model."
        )


def check_model(sites: Sites, values: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
    """Refuse a model one of whose sites does not fit the guide's ``values`` and ``shared`` ones."""
    for site in sites.values():
        if site_is_subsample(site):
            check_minibatch(site, shared)
        elif not site["is_observed"]:
            check_model_site(site, values)
