"""Guides that draw one flat vector, all particles of which come from one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

from pyro.infer.autoguide import AutoContinuous
from pyro.nn.module import pyro_method

from ..guides.base import AutoFamily

__all__ = ["is_joint", "posterior_of"]


@pyro_method
def posterior_of(guide: AutoContinuous, *args: Any, **kwargs: Any) -> Any:
    # As a method of the module, so that its parameters are registered as in a call of the guide.
    if isinstance(guide, AutoFamily):
        return guide.sampling_posterior()
    return guide.get_posterior(*args, **kwargs)


def is_joint(guide: Callable[..., Any]) -> TypeGuard[AutoContinuous]:
    """Whether a guide samples one flat vector in Pyro's own way, and can do so in a batch."""
    return (
        isinstance(guide, AutoContinuous)
        and type(guide).forward in (AutoContinuous.forward, AutoFamily.forward)
        and type(guide).sample_latent in (AutoContinuous.sample_latent, AutoFamily.sample_latent)
    )
