"""All particles of a model in one run inside a vectorised plate, as Pyro's own losses have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from torch import Tensor

from ..runtime.density import free_dim, site_log_prob, sum_per_particle, with_density
from ..runtime.run import Conditioned, Minibatches, at_particle, look

__all__ = ["InPlate", "alike"]


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether log probabilities agree but for rounding; it waits for the device."""
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    return a.shape == b.shape and torch.allclose(a, b.to(a), rtol=tolerance, atol=tolerance)


class InPlate:
    """The log density of a model at S particles in one run.

    Not every model is right there: one that is written for a single draw may broadcast wrongly.  So
    its answers have to be compared with those of plain runs.

    Args:
        values: constrained value (S, ...) of each latent site.
        shared: further values by site, without a particle dimension.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        values: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        minibatches: Minibatches,
        shared: Mapping[str, Tensor] | None,
    ) -> None:
        sites = look(model, at_particle(0, values, shared), args, kwargs, minibatches)
        self.model, self.dim = model, free_dim(sites)
        #: how many dimensions are missing between the particles and the plates of each site
        self.gaps = {n: -1 - self.dim - len(sites[n]["fn"].batch_shape) for n in values}

    def __call__(
        self,
        values: Mapping[str, Tensor],
        num_particles: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        minibatches: Minibatches,
        shared: Mapping[str, Tensor] | None,
    ) -> Tensor:
        """log p (S,); fails in any way where the model does not run so."""
        at = {
            name: value.reshape(num_particles, *[1] * self.gaps[name], *value.shape[1:])
            for name, value in values.items()
        }
        plate = pyro.plate("_particles", num_particles, dim=self.dim)
        handler = Conditioned(at | dict(shared or {}), minibatches)
        with pyro.validation_enabled(False), handler, plate:
            self.model(*args, **kwargs)
        terms = [site_log_prob(site)[1] for site in with_density(handler.sites).values()]
        return torch.stack([sum_per_particle(x.movedim(self.dim, 0)) for x in terms]).sum(0)
