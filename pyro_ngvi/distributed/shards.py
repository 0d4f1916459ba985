"""Which terms of the log joint a rank has alone, found by looking at what all ranks have.

    log p(y, z) = sum_r log p(y_r | z) + log p(z)  =  1/R sum_r [R log p(y_r | z) + log p(z)]

so that with a factor R on the terms of the shards, and on no others, the *mean* over ranks of a loss,
of its gradients and of what is linear in log p is that of all data, with prior and entropy once.  A
term is of the shards if it differs between the ranks at the same draw; where all have the same data,
nothing does, and the ranks are more particles of one estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyro.poutine.messenger import Messenger

from ..runtime.density import Sites, is_latent, scale_and_mask, site_kind, site_log_prob

#: relative difference up to which sums of log probabilities are those of the same data
SAME = 1e-5


@dataclass(frozen=True)
class Term:
    """What one rank knows of a site: its plates, whether it is scaled, and numbers made of its data."""

    plates: tuple[str, ...]
    observed: bool
    enumerated: bool
    scaled: bool
    size: int
    numbers: tuple[float, ...]


def terms_of(sites: Sites) -> dict[str, Term]:
    """The terms of a model's sites; the draw of its latent sites has to be the same on all ranks."""
    found = {}
    for name, site in sites.items():
        latent = is_latent(site)
        if not latent and site_kind(site) not in ("observed", "factor"):
            continue
        size, numbers = 0, ()
        if not latent:
            log_prob = site_log_prob(site)[0]
            log_prob = scale_and_mask(log_prob, 1.0, site["mask"]).detach().double().reshape(-1)
            size = log_prob.numel()
            weights = torch.linspace(1.0, 2.0, size, dtype=torch.float64, device=log_prob.device)
            numbers = (float(log_prob.sum()), float(log_prob @ weights))
        scale = site["scale"]
        found[name] = Term(
            plates=tuple(f.name for f in site["cond_indep_stack"]),
            observed=not latent,
            enumerated=latent and (site["infer"] or {}).get("enumerate") == "parallel",
            scaled=not (isinstance(scale, int | float) and scale == 1.0),
            size=size,
            numbers=numbers,
        )
    return found


def shards_among(
    ranks: Sequence[Mapping[str, Term]],
    plates: Sequence[str] | None = None,
    scaled_to: str | None = None,
) -> tuple[set[str], bool]:
    """The sites that get the factor R, and whether the ranks have different data.

    Args:
        ranks: the terms that each rank found.
        plates: names of the plates that hold shards; ``None``: what differs is of the shards.
        scaled_to: what a scale leads to that sites have already, "shard" or "whole".
    """
    first = ranks[0]
    for r, terms in enumerate(ranks):
        if terms.keys() != first.keys():
            odd = sorted(terms.keys() ^ first.keys())[0]
            raise ValueError(
                f"Ranks 0 and {r} have different models: only one has the site {odd!r}."
            )
    known = {p for term in first.values() for p in term.plates}
    unknown = sorted(set(plates or ()) - known)
    if unknown:
        raise ValueError(
            f"distributed: plates={unknown} are no plates of observed or latent sites of the model, "
            f"which has {sorted(known)}."
        )
    unclear = [
        n for terms in ranks for n, t in terms.items() if not all(map(math.isfinite, t.numbers))
    ]
    if unclear and plates is None and len(ranks) > 1:
        raise ValueError(
            f"distributed: log p of {unclear[0]!r} is not finite at the start: it is not seen whether "
            f"ranks have the same data. Name the plates of the shards, for instance plates=['data']."
        )
    differ = {n for n, t in first.items() if t.observed and not _same([r[n] for r in ranks])}
    if plates is None:
        holding = {p for name in differ for p in first[name].plates}
        mine = differ | {
            n for n, t in first.items() if t.enumerated and not holding.isdisjoint(t.plates)
        }
    else:
        holding = set(plates)
        mine = {
            n
            for n, t in first.items()
            if (t.observed or t.enumerated) and not holding.isdisjoint(t.plates)
        }
    for name, term in first.items():
        inside = sorted(holding.intersection(term.plates))
        if inside and not (term.observed or term.enumerated):
            if plates is None:
                raise ValueError(
                    f"distributed: {name!r} is latent in the plate {inside[0]!r} of data that differ "
                    f"between ranks. Name the plates of the shards, e.g. plates=['data']; latent sites "
                    f"in them stay on one process."
                )
            raise ValueError(
                f"distributed: {name!r} is latent in the plate {inside[0]!r} of the shards: each rank "
                f"would have others. Such models run on one process."
            )
    scaled = sorted(name for name in mine if first[name].scaled)
    if scaled and scaled_to is None:
        raise ValueError(
            f"distributed: {scaled[0]!r} is scaled (a minibatch, poutine.scale). Say up to what: "
            f"scaled_to='whole' if plates have the size of all data, 'shard' if of what a rank has."
        )
    if scaled_to == "whole":
        mine = mine.difference(scaled)
    return mine, bool(differ)


def _same(terms: list[Term]) -> bool:
    first = terms[0]
    return all(
        t.size == first.size
        and all(
            math.isfinite(a - b) and abs(a - b) <= SAME * max(abs(a), abs(b))
            for a, b in zip(t.numbers, first.numbers, strict=True)
        )
        for t in terms
    )


class Multiplied(Messenger):
    """The log probability of some sites times a factor."""

    def __init__(self, names: set[str], factor: int) -> None:
        super().__init__()
        self.names, self.factor = names, factor

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.names:
            msg["scale"] = msg["scale"] * self.factor
