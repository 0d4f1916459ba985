"""The rows of a rank, and which terms of the log joint it has alone: those in plates of the shards.

With a factor R on these, and on no others, the *mean* over ranks of what is linear in log p is that of
all data (:func:`.wrap`).  All other terms, and the draws of the guide, have to be the same on all
ranks, which is looked at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from ..runtime.density import Sites, is_latent, scale_and_mask, site_kind, site_log_prob
from ..runtime.pyro_adapter import is_marked
from .processes import from_all, is_alone, mean_over_ranks, rank, world_size

#: relative difference up to which numbers are those of the same data
SAME = 1e-5


def shard(*arrays: Any) -> Any:
    """The rows of this rank: contiguous, the first ranks one more where they do not divide evenly.

    Args:
        arrays: tensors or NumPy arrays (memory maps too: only the rank's rows are read later), all with
            the same first dimension N.

    Returns:
        Views of rows r N // R to (r + 1) N // R, about; one array alone, several as a tuple.

    Raises:
        ValueError: for arrays of different lengths, or fewer rows than ranks.

    Example (one process has all rows):
        >>> import torch, pyro_ngvi as ngvi
        >>> X, y = ngvi.distributed.shard(torch.zeros(5, 3), torch.zeros(5))
        >>> X.shape
        torch.Size([5, 3])
    """
    lengths, r, R = {len(a) for a in arrays}, rank(), world_size()
    if len(lengths) != 1:
        raise ValueError(f"shard: the arrays have {sorted(lengths)} rows; give them equally many.")
    n = lengths.pop()
    if n < R:
        raise ValueError(f"shard: {n} rows are too few for {R} ranks; start fewer processes.")
    size, more = divmod(n, R)
    start = r * size + min(r, more)
    rows = slice(start, start + size + (r < more))
    return arrays[0][rows] if len(arrays) == 1 else tuple(a[rows] for a in arrays)


@dataclass(frozen=True)
class Term:
    """What one rank knows of a site: its plates, whether it is scaled, and numbers made of its value
    and log probability; none where it is to be summed out, or of data of the rank alone."""

    plates: tuple[str, ...]
    latent: bool
    scaled: bool
    numbers: tuple[float, ...]


def terms_of(sites: Sites, plates: Collection[str]) -> dict[str, Term]:
    """The terms of a model's sites, for the same random numbers on all ranks; none of the data in
    ``plates`` leaves its rank."""
    found = {}
    for name, site in sites.items():
        latent = is_latent(site)
        if not latent and site_kind(site) not in ("observed", "factor"):
            continue
        numbers: list[float] = []
        if not is_marked(site) and (latent or not is_inside(site, plates)):
            log_prob = scale_and_mask(site_log_prob(site)[0], 1.0, site["mask"])
            for x in (torch.as_tensor(site["value"]), log_prob):
                x = x.detach().double().reshape(-1)
                weights = torch.linspace(1.0, 2.0, len(x), dtype=x.dtype, device=x.device)
                numbers += [float(len(x)), float(x @ weights)]
        scale = site["scale"]
        found[name] = Term(
            plates=tuple(f.name for f in site["cond_indep_stack"]),
            latent=latent,
            scaled=not (isinstance(scale, int | float) and scale == 1.0),
            numbers=tuple(numbers),
        )
    return found


def check_terms(
    ranks: Sequence[Mapping[str, Term]], plates: Collection[str], scaled_to: str | None
) -> None:
    """Refuse models of which it is not known what to sum, by the terms that each of ``ranks`` found."""
    first = ranks[0]
    for r, terms in enumerate(ranks):
        odd = sorted(terms.keys() ^ first.keys())
        if odd:
            raise ValueError(
                f"distributed: ranks 0 and {r} have different models: only one has the site {odd[0]!r}."
            )
    known = {p for term in first.values() for p in term.plates}
    unknown = sorted(set(plates) - known)
    if unknown:
        raise ValueError(
            f"distributed: plates={unknown} are no plates of the model, which has {sorted(known)}."
        )
    for name, term in first.items():
        inside = [p for p in term.plates if p in plates]
        if inside and term.latent and term.numbers:
            raise ValueError(
                f"distributed: {name!r} is latent in the plate {inside[0]!r} of the shards: each rank "
                f"would have others. Such models run on one process."
            )
        other = [r for r, terms in enumerate(ranks) if not _same(terms[name], term)]
        if other and not inside:
            what = "prior, or the draw of the guide," if term.latent else "data or parameters"
            raise ValueError(
                f"distributed: the {what} of {name!r} are not the same on ranks 0 and {other[0]}. Name "
                f"the plates that hold shards, plates=['data']; all else must not depend on the rank."
            )
        scaled = inside and not term.latent and term.scaled
        if scaled and scaled_to is None:
            raise ValueError(
                f"distributed: {name!r} is scaled (minibatch, poutine.scale). Say up to what: "
                f"scaled_to='whole' for all data of all ranks, 'shard' for those of a rank."
            )
        if inside and not term.latent and not scaled and scaled_to is not None:
            raise ValueError(
                f"distributed: {name!r} is not scaled, as minibatches are. Leave scaled_to out."
            )


def _same(a: Term, b: Term) -> bool:
    """Up to rounding; what is infinite or NaN on both says nothing, and will be found elsewhere."""
    return len(a.numbers) == len(b.numbers) and all(
        math.isclose(x, y, rel_tol=SAME, abs_tol=SAME) or not (math.isfinite(x) or math.isfinite(y))
        for x, y in zip(a.numbers, b.numbers, strict=True)
    )


class Multiplied(Messenger):
    """The log probability of all sites in some plates times a factor."""

    def __init__(self, plates: Collection[str], factor: int) -> None:
        super().__init__()
        self.plates, self.factor = plates, factor

    def _pyro_sample(self, msg: Any) -> None:
        if is_inside(msg, self.plates):
            msg["scale"] = msg["scale"] * self.factor


def is_inside(site: Any, plates: Collection[str]) -> bool:
    """Whether a site stands in one of the plates."""
    return any(f.name in plates for f in site["cond_indep_stack"])


class Whole:
    """A model whose log density, averaged over ranks at the same draws, is that of all data.

    What evaluates it (k-hat, leave-one-out) finds in it how to make one number of those of ranks.
    """

    def __init__(self, model: Callable[..., Any], plates: Collection[str], factor: int) -> None:
        self.model, self.plates, self.factor = model, plates, factor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with Multiplied(self.plates, self.factor):
            return self.model(*args, **kwargs)

    def over_ranks(self, x: Tensor) -> Tensor:
        """The mean of ``x`` over ranks."""
        return x if is_alone() else mean_over_ranks(x.clone())

    def of_all(self, x: Any, site: Any = None) -> list[Any]:
        """``x`` of each rank; of this one alone, where it is of a site that all ranks have."""
        return from_all(x) if site is None or is_inside(site, self.plates) else [x]
