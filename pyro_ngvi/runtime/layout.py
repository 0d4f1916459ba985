"""Latent sites of a model, packed into one flat unconstrained vector."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to

from ..linalg.host import outside_autocast
from .vmap import Site, sum_per_particle


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
