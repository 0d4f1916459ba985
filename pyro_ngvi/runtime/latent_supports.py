"""Whether the latent sites still have the supports that a guide maps to.

An autoguide takes the transforms to the supports from its first call.  A support that is made of the
model's arguments, Uniform(y.max(), 10), is another one with other data, and the guide would go on to
draw from the old one.
"""

from __future__ import annotations

from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn

from ..linalg.host_bool import host_bool
from .support import bounds, kept_bounds
from .vmap import Sites

__all__ = ["LatentSupports"]


class LatentSupports:
    """The supports of the latent sites at the first call of ``guide``, those with bounds of tensors.

    >>> import pyro, torch, pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model(low):
    ...     pyro.sample("x", dist.Uniform(low, 10.0))
    >>> guide = AutoNormal(model)
    >>> _ = guide(torch.tensor(1.0))
    >>> LatentSupports(guide).check({"x": {"name": "x", "fn": dist.Uniform(2.0, 10.0)}})
    Traceback (most recent call last):
    ValueError: The support of the latent site 'x' is another one than at the guide's first call ...
    """

    def __init__(self, guide: Any) -> None:
        self._bounds: dict[str, list[Any]] = {}
        for part in guide.modules() if isinstance(guide, nn.Module) else ():
            trace: Any = getattr(part, "prototype_trace", None)
            if not isinstance(part, AutoGuide) or trace is None:
                continue
            for name, site in trace.nodes.items():
                # some guides of Pyro keep no more of a site than they need, which is not its type
                fn = site.get("fn")
                if site.get("is_observed") or not hasattr(fn, "support"):
                    continue
                found = kept_bounds(fn.support)
                if any(isinstance(v, Tensor) for v in found):
                    self._bounds[name] = found

    def check(self, sites: Sites) -> None:
        """Refuse a support that has moved, where that can be told without waiting for a device.

        :raises ValueError: with the name of the site.
        """
        for name, before in self._bounds.items():
            if name in sites and _moved(before, bounds(sites[name]["fn"].support)):
                raise ValueError(
                    f"The support of the latent site {name!r} is another one than at the guide's first "
                    f"call ({sites[name]['fn'].support!r}). Make a guide for these data, or instead of "
                    f'x ~ Uniform(a, b) write x = a + (b - a) * pyro.sample("u", Uniform(0, 1)).'
                )


def _moved(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and any(map(_differ, before, now))


def _differ(a: Any, b: Any) -> bool:
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    if host_bool((a == b).all()) is not False:
        return False
    # bounds that are sums over the data change by their rounding when the data come in another order
    eps = max((torch.finfo(x.dtype).eps for x in (a, b) if x.is_floating_point()), default=0.0)
    return not torch.isclose(a.double(), b.double(), rtol=1e3 * eps, atol=0.0).all()
