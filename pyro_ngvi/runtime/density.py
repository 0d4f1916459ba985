"""Sample sites that a run of a Pyro program recorded: what they are, their log probabilities, whether
they fit the guide, and the latent ones as one flat unconstrained vector."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from math import prod
from typing import Any, Literal, TypeAlias
from weakref import ref

import pyro.distributions as dist
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to, constraints, transform_to
from torch.distributions.transforms import StickBreakingTransform

from ..linalg.host import outside_autocast
from .told_in import told_in

# Pyro's Message of a sample site, as Any: to a type checker each of its keys may be absent.
Site: TypeAlias = Any
Sites: TypeAlias = dict[str, Site]
Kind = Literal["latent", "observed", "deterministic", "factor"]


def is_minibatch(site: Site) -> bool:
    """Whether a recorded site is the index of a plate, of fewer examples than there are."""
    return site_is_subsample(site) and len(site["value"]) < site["fn"].size


def minibatch_scale(site: Site) -> float:
    """How many examples one of the site stands for: N / n of its subsampled plates, the product."""
    frames = (f for f in site["cond_indep_stack"] if f.full_size not in (None, f.size))
    return prod((f.full_size / f.size for f in frames), start=1.0)


def is_latent(site: Site) -> bool:
    """Whether a recorded site is a latent variable, and not the index of a plate."""
    return not site["is_observed"] and not site_is_subsample(site)


def is_auxiliary(site: Site) -> bool:
    """Whether a guide draws the site only on the way to those of the model."""
    return bool((site["infer"] or {}).get("is_auxiliary"))


def layers_of(fn: Any) -> list[Any]:
    """A distribution, and those within its ``to_event`` and ``mask``; the innermost is the last."""
    layers = [fn]
    while isinstance(layers[-1], dist.Independent | dist.MaskedDistribution):
        layers.append(layers[-1].base_dist)
    return layers


def innermost(fn: Any) -> Any:
    """The distribution within ``to_event`` and ``mask``."""
    return layers_of(fn)[-1]


def site_kind(site: Site) -> Kind:
    """What a recorded sample site is: latent, observed, deterministic or factor."""
    if not site["is_observed"]:
        return "latent"
    *outer, base = layers_of(site["fn"])
    hidden = any(isinstance(f, dist.MaskedDistribution) and f._mask is False for f in outer)
    # what Pyro's reparametrisations leave of a site is a point, masked out
    if (site["infer"] or {}).get("_deterministic") or (hidden and isinstance(base, dist.Delta)):
        return "deterministic"
    return "factor" if isinstance(base, dist.Unit) else "observed"


class Tempered(Messenger):
    """Divides the log probability of observed sites (not factors) by ``kl_weight``."""

    def __init__(self, kl_weight: float) -> None:
        super().__init__()
        self.kl_weight = kl_weight

    def _pyro_sample(self, msg: Any) -> None:
        if self.kl_weight != 1.0 and msg["is_observed"] and site_kind(msg) == "observed":
            msg["scale"] = msg["scale"] / self.kl_weight


def with_density(sites: Sites) -> Sites:
    """The sites that have a term in the log joint: no index of a plate, nothing deterministic."""
    return {
        name: site
        for name, site in sites.items()
        if not site_is_subsample(site) and site_kind(site) != "deterministic"
    }


def free_dim(sites: Sites) -> int:
    """The first batch dimension to the left of all plates: where a plate of particles goes."""
    frames = (frame for site in sites.values() for frame in site["cond_indep_stack"])
    return min((frame.dim for frame in frames if frame.dim is not None), default=0) - 1


def site_log_prob(site: Site) -> tuple[Tensor, Tensor]:
    """The log probability of a recorded site in nats: unscaled, and with scale and mask."""
    fn = site["fn"]
    try:
        log_prob = fn.log_prob(site["value"], *site["args"], **site["kwargs"])
        return log_prob, scale_and_mask(log_prob, site["scale"], site["mask"])
    except RuntimeError as error:
        error.add_note(f"in the log_prob of the site {site['name']!r}")
        raise


def sum_log_prob(sites: Sites) -> Tensor:
    """The log probability of all sites of one particle, a scalar; each has the shape of its plates."""
    total: Any = None
    for site in with_density(sites).values():
        log_prob = site_log_prob(site)[1]
        check_log_prob_shape(site, log_prob)
        total = log_prob.sum() if total is None else total + log_prob.sum()
    return torch.zeros(()) if total is None else total


def sum_per_particle(x: Tensor) -> Tensor:
    """Sum over every dimension but the first, (S, ...) to (S,)."""
    return x.flatten(1).sum(1) if x.dim() > 1 else x


def identity(value: Tensor) -> tuple[ref[Tensor], int]:
    """A reference to a tensor, and how often it was written to: for :func:`is_same`."""
    return ref(value), -1 if value.is_inference() else value._version


def is_same(known: tuple[ref[Tensor], int] | None, value: Any) -> bool:
    """Whether ``value`` is the tensor of this reference, and has not been written to since."""
    if known is None or known[0]() is not value:
        return False
    return not value.is_inference() and value._version == known[1]


# --- what is refused at every run ---------------------------------------------------------------


@told_in("models.md#shapes-were-broadcast")
def check_log_prob_shape(site: Site, log_prob: Tensor) -> None:
    """Refuse a site whose ``log_prob`` was broadcast to a shape that nothing asks for.

    Inside plates, each dimension larger than 1 must be that of a plate. Outside plates, the shape
    must be that of the value, unless the value is a single event.
    """
    shape, frames = log_prob.shape, site["cond_indep_stack"]
    sizes = {frame.dim: frame.size for frame in frames if frame.dim is not None}
    batch_shape = site["value"].shape[: site["value"].dim() - site["fn"].event_dim]
    if sizes:
        good = all(n == 1 or sizes.get(i - len(shape)) == n for i, n in enumerate(shape))
    else:
        good = not shape or shape == batch_shape or batch_shape.numel() == 1
    if not good:
        plates = [f"{f.name!r} ({f.size} at dim {f.dim})" for f in frames]
        raise ValueError(
            f"The site {site['name']!r} has a log_prob of shape {tuple(shape)}, but batch shape "
            f"{tuple(batch_shape)} and plates {', '.join(plates) or 'none'}: shapes were broadcast. "
            f"Give distribution and mask its shape (mean.squeeze(-1)?), events by .to_event(...)."
        )


def check_model(sites: Sites, values: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
    """Refuse latent sites without one of a guide's ``values``, or of another shape, and plates with
    another minibatch than the ``shared`` one."""
    for name, site in sites.items():
        if site_is_subsample(site):
            index, expected = site["value"], shared.get(name, site["value"])
            if index is not expected and not torch.equal(torch.as_tensor(index), expected):
                raise ValueError(
                    f"The plate {name!r} has another minibatch in the model ({len(index)} examples) "
                    f"than in the guide ({len(expected)}). Give both one index: pass "
                    f"create_plates=... to the autoguide, with the plate of the model."
                )
        elif not site["is_observed"]:
            if name not in values:
                raise ValueError(
                    f"The latent site {name!r} of the model is not sampled by the guide. Add it to the "
                    f"guide, give it obs=..., or use pyro.infer.TraceEnum_ELBO to sum it out."
                )
            shape, given = site["fn"].shape(), site["value"].shape
            if any(n != m for n, m in zip_longest(shape[::-1], given[::-1], fillvalue=1)):
                raise ValueError(
                    f"The latent site {name!r} has shape {tuple(shape)} in the model, but the guide "
                    f"gives it shape {tuple(given)}. Is the guide made for another model or other data?"
                )


def check_guide_of_this_model(names: Iterable[str], model_sites: Sites) -> None:
    """Refuse a guide with latent sites, ``names``, that a run of the model does not have."""
    for name in names:
        if name not in model_sites:
            raise ValueError(
                f"The guide samples {name!r}, which is no site of the model, or not of this run of it. "
                f"Is it the guide of another model? What it draws on the way to other sites needs "
                f"infer={{'is_auxiliary': True}}."
            )


# --- the latent sites as one vector -------------------------------------------------------------


class LatentLayout:
    """Where each latent site lies in a flat unconstrained vector: that of ``AutoContinuous``.

    Args:
        prototype: a trace of the model, whose order and supports the sites keep; each is flattened row
            by row.

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
            self.transforms[name] = transform = biject_to(site["fn"].support)
            self.constrained_shapes[name] = site["value"].shape
            self.unconstrained_shapes[name] = transform.inv(site["value"]).shape
        if not self.transforms:
            raise ValueError("The model has no latent site: every sample site is observed.")
        self.dim = sum(prod(shape) for shape in self.unconstrained_shapes.values())

    def unconstrained(self, theta: Tensor) -> Iterator[tuple[str, Any, Tensor]]:
        """Name, transform and part (S, *shape) of theta (S, d) of each site."""
        if theta.dim() != 2 or theta.shape[1] != self.dim:
            raise ValueError(f"theta has shape {tuple(theta.shape)}; it must be (S, {self.dim}).")
        shapes = self.unconstrained_shapes
        parts = theta.split([prod(shape) for shape in shapes.values()], dim=1)
        for (name, shape), part in zip(shapes.items(), parts, strict=True):
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
                log_det = log_det + sum_per_particle(transform.log_abs_det_jacobian(x, z))
        return values, log_det

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Constrained values (S, *shape) by site to flat unconstrained (S, d)."""
        parts = [to_unconstrained(t, values[name]) for name, t in self.transforms.items()]
        return torch.cat([x.reshape(len(x), -1) for x in parts], dim=1)


def to_unconstrained(transform: Any, value: Tensor) -> Tensor:
    """The inverse of a transform; of a simplex by sums of the shares that are left, which PyTorch takes
    from 1: nothing is left of small ones then, and 1e-20 becomes 700."""
    if not isinstance(transform, StickBreakingTransform):
        return transform.inv(value)
    least = torch.finfo(value.dtype).tiny
    parts = torch.arange(value.shape[-1] - 1, 0, -1, device=value.device).to(value)
    rest = value.flip(-1).cumsum(-1).flip(-1)[..., 1:].clamp_min(least)
    return value[..., :-1].clamp_min(least).log() - rest.log() + parts.log()


def plain_support(support: Any) -> Any:
    """A support without ``independent`` around it; of a mixture that of its components."""
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support


def _where_components_are(registry: Any) -> Callable[[Any], Any]:
    """The support of a mixture is that of its components, if it is one."""

    def transform(support: Any) -> Any:
        base = support.base_constraint
        if any(isinstance(x, Tensor) and x.dim() > 0 for x in vars(plain_support(base)).values()):
            raise NotImplementedError(
                "A latent MixtureSameFamily has components with bounds of their own, as those of "
                "Uniform. Sample the site within the bounds of all, and add the difference of the two "
                "log densities by pyro.factor."
            )
        return registry(base)

    return transform


if hasattr(constraints, "MixtureSameFamilyConstraint"):  # PyTorch has no transforms to it
    for _registry in (biject_to, transform_to):
        _registry.register(
            constraints.MixtureSameFamilyConstraint, _where_components_are(_registry)
        )


def _refuse_discrete(site: Site) -> None:
    if site["fn"].support.is_discrete:
        raise ValueError(
            f"The latent site {site['name']!r} is discrete, so the model has no density over a "
            f'real space. Mark it infer={{"enumerate": "parallel"}}, by which it is summed out.'
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
