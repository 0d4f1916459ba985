"""What a model computes at a few values of its latent block: where predictors are looked for.

Four runs, at the corners e, e + u, e + v, e + u + v of a parallelogram of noises, show which results
change with the noise, and which of them bend.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from .._particles import Sites
from .._random import fixed_normal
from .run import Place, Runner
from .terms import data_terms

__all__ = ["OTHER_COURSE", "Record", "corners", "record", "same"]

OTHER_COURSE = (
    "AutoSites: the model does not run the same operations at every value of its latent sites (an if "
    "or a loop that depends on them), so no predictor can be found. Name it: "
    'f = pyro.deterministic("f", ...) and AutoSites(model, latent="f").'
)
#: how often the corners are drawn towards 0
SHRINKS = 12


@dataclass
class Record:
    """What a run at a noise (D,) has shown: its sites, tensors by place, and names for these."""

    noise: Tensor
    sites: Sites
    values: dict[Place, Tensor]
    names: dict[Place, str]

    def only(self, places: Collection[Place]) -> Record:
        """Without the other tensors."""
        values = {place: value for place, value in self.values.items() if place in places}
        return Record(self.noise, self.sites, values, self.names)


def record(runner: Runner, noise: Tensor, only: Collection[Place] | None = None) -> Record:
    """A run, with the results of its operations, and the values of sites before them."""
    results: dict[Place, Tensor] = {}
    names: dict[Place, str] = {}

    def keep(place: Place, result: Tensor) -> None:
        if only is None or place in only:
            results[place] = result.detach().clone()  # the model may write into it later
            names[place] = place.name

    run = runner(noise, on_operation=keep)
    values: dict[Place, Tensor] = {}
    for name, site in run.sites.items():
        made = name in run.own or (site["infer"] or {}).get("_deterministic")
        place = Place(site=name)
        if made and (only is None or place in only):
            values[place] = site["value"].detach()
            names[place] = f"the site {name!r}"
    return Record(noise, run.sites, values | results, names)


def corners(runner: Runner, dim: int, name: str) -> list[Record]:
    """The four runs, where the likelihood of ``name`` is finite wherever it is at 0.

    All have the tensors that are not the same in the first and in the last.

    Raises:
        ValueError: where these two do not run the same operations, or the second writes into tensors of
            the first.
    """
    e, u, v = fixed_normal(3, dim, seed=20_170_615)
    at_zero = torch.isfinite(data_terms(runner.sites(torch.zeros_like(e))[name]))
    found: list[Record] = []
    for k in range(SHRINKS + 1):
        share = 0.25**k
        first = record(runner, share * e)
        terms = data_terms(first.sites[name])
        last = record(runner, share * (e + u + v))
        if not same(data_terms(first.sites[name]), terms):
            raise ValueError(
                f"AutoSites: the model keeps the tensor that the observed site {name!r} is made of "
                f"and writes into it at every call (a buffer of a module, say), so that each run "
                f"overwrites the one before. Write into a new tensor: start with "
                f"f = self.f.clone() or torch.zeros(...), or use torch.cat."
            )
        if first.values.keys() != last.values.keys():
            raise ValueError(OTHER_COURSE)
        moving = {
            place
            for place, value in last.values.items()
            if value.shape == first.values[place].shape and not same(value, first.values[place])
        }
        between = [record(runner, share * (e + x), moving) for x in (u, v)]
        found = [first.only(moving), *between, last.only(moving)]
        terms = [data_terms(corner.sites[name]) for corner in found]
        if all(bool((torch.isfinite(t) == at_zero).all()) for t in terms):
            break
    return found


def same(a: Tensor, b: Tensor, tolerance: float = 0.0) -> bool:
    """Whether two tensors agree, bit for bit or within a ``tolerance``; NaN agrees with NaN."""
    if a.shape != b.shape:
        return False
    if tolerance == 0.0:
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    finite = torch.isfinite(a) & torch.isfinite(b)
    close = (a - b).abs() <= tolerance * (1.0 + b.abs())
    return bool(torch.where(finite, close, (a == b) | (a.isnan() & b.isnan())).all())
