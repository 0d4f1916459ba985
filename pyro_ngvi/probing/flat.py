"""Latent sites along which no density but their own has a gradient.

Where the others do not change with such a site at all, its posterior is its prior.  Where they do, the
model cuts it off the graph, or switches by it.
"""

from __future__ import annotations

from typing import Any

import pyro
import torch
from torch import Tensor

from ..linalg.host import own_random_state
from ..runtime.density import is_latent, site_log_prob, with_density
from ..runtime.run import Minibatches, Program, Values, at_particle, look, run_plainly

#: draws of the prior at which a site that matters has a gradient
PRIOR = 4


def flat_sites(model: Program, values: Values, args: Any, kwargs: Any) -> dict[str, bool]:
    """Those among the latent sites of ``values`` (S, *shape), of S two or more draws, by name; and
    whether other densities change where the site alone goes from the first draw to another."""
    names = [name for name, x in values.items() if x.is_floating_point()]
    count = len(next(iter(values.values()))) if names else 0
    draws = [at_particle(s, values, None) for s in range(count)]
    for at in draws:
        names = _flat_at(model, at, names, args, kwargs) if names else []
    # where a guide lies a sigmoid may be flat, or the other sites so large that this is rounded away
    for seed in range(2 * PRIOR if names else 0):
        with own_random_state(seed % PRIOR), torch.no_grad(), pyro.validation_enabled(False):
            drawn = look(model, {}, args, kwargs)
        moved = names if seed < PRIOR else values.keys() & drawn.keys()
        at = draws[0] | {name: drawn[name]["value"] for name in moved}
        names = _flat_at(model, at, names, args, kwargs) if names else []
    found = {}
    for name in names:
        first, *others = there = [
            _others(model, draws[0] | {name: at[name]}, name, args, kwargs) for at in draws
        ]
        # where there is no density there is no gradient of it, and nothing is known
        if any(all(x.isfinite().all() for x in at.values()) for at in there):
            found[name] = not all(_same(first, other) for other in others)
    return found


def _flat_at(model: Program, at: Values, names: list[str], args: Any, kwargs: Any) -> list[str]:
    leaves = {name: at[name].detach().clone().requires_grad_() for name in names}
    with torch.enable_grad(), own_random_state(0):
        moving = {name: x.clone() for name, x in leaves.items()}  # the model may write into it
        sites = run_plainly(model, {**at, **moving}, args, kwargs, Minibatches())
        terms = []
        for site in with_density(sites).values():
            # a latent site moves its own density by its value, and others by their parameters
            own = {**site, "value": site["value"].detach()} if is_latent(site) else site
            terms.append(site_log_prob(own)[1].sum())
        total = torch.stack(terms).sum()
        if not total.requires_grad:
            return names
        slopes = torch.autograd.grad(total, [*leaves.values()], allow_unused=True)
    return [n for n, g in zip(leaves, slopes, strict=True) if g is None or not bool(g.any())]


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def _others(model: Program, at: Values, name: str, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """The log densities of other sites than this, by name."""
    with own_random_state(0):
        sites = look(model, at, args, kwargs)
    return {n: site_log_prob(s)[1] for n, s in with_density(sites).items() if n != name}
