"""Units as sample sites of a guide."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pyro
from torch import Tensor

from ..guides.marginals import SiteValue
from .given import Drawn
from .units import Units


def sample_units(
    units: Units, drawn: Drawn, nodes: Mapping[str, Any], plates: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Sample the units' latent sites at one draw; ``nodes`` are those of the prototype, ``plates`` the
    guide's."""
    seen, values = drawn.seen, {}
    share = drawn.log_q[0] / len(units.sites)
    unit_plate = pyro.plate(units.plate, seen.size, dim=units.dim, subsample=seen.given)
    for site in units.sites:
        node, value = nodes[site.name], drawn.values[site.name][0]
        batch = value.shape[: value.dim() - node["fn"].event_dim]
        # in other plates too: each entry of a unit has an equal part
        equal = share * len(share) / max(batch.numel(), 1)
        log_q: Any = equal.reshape(-1, *[1] * (-units.dim - 1)).expand(batch)
        with ExitStack() as stack:
            for frame in node["cond_indep_stack"]:
                of_units = frame.name == units.plate
                stack.enter_context(unit_plate if of_units else plates[frame.name])
            values[site.name] = pyro.sample(
                site.name, SiteValue(value, log_q, node["fn"].event_dim)
            )
    return values
