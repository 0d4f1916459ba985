"""Finds the predictor of every observed site: what its data see of the latent block.

A predictor f (N, k) of a site with N data must be

* *affine* in the noise: f(e + a u + b v) - f(e) = a (f(e + u) - f(e)) + b (f(e + v) - f(e)),
* *sufficient*: with f held, the log likelihood does not change with the noise,
* *local*: the term of datum n changes with f_n only.

All three are tried in runs of the model at a few points, not read from its text: any operation of
torch that happens to be affine counts, whatever its name.  Data are told apart by the binary digits
of their numbers, so locality takes 2 log2(N) runs, batched.  Of the predictors that pass, the one
with the fewest entries per datum is taken, and of these the first; where none passes alone, pairs are
tried, such as the location and the log scale of a Normal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from .conditioned_model import ConditionedModel, TensorRef, for_each
from .log_likelihood import data_shape, data_terms
from .probe_points import TOLERANCE, Plane, Record, corners, digit_masks, record, same

__all__ = ["Predictor", "find_predictor"]

#: most entries of a predictor for one datum, and candidates among which pairs are tried
MOST_ENTRIES, MOST_CANDIDATES = 64, 12


@dataclass(frozen=True)
class Predictor:
    """The places whose values, side by side, are the predictor (N, k) of some data.

    ``trailing`` are the shapes of what there is for one datum at each place.
    """

    places: tuple[TensorRef, ...]
    trailing: tuple[torch.Size, ...]

    @property
    def width(self) -> int:
        return sum(shape.numel() for shape in self.trailing)

    def join(self, seen: dict[TensorRef, Tensor], batch: torch.Size) -> Tensor:
        """Values at the places, each (*batch, ...), as one tensor (N, k)."""
        parts = []
        for place in self.places:
            value = seen[place]
            parts.append((value if value.dim() else value.expand(batch)).reshape(batch.numel(), -1))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def split(self, f: Tensor, batch: torch.Size) -> dict[TensorRef, Tensor]:
        """The other way round: f (N, k) as the value at each place."""
        if f.shape[-2] != batch.numel():
            raise ValueError(
                f"AutoSites: {' and '.join(map(str, self.places))} was the predictor at the "
                f"guide's first call and has {f.shape[-2]} rows; the data of this call have shape "
                f"{tuple(batch)}. Where minibatches are to come, make the first call with one."
            )
        parts = f.split([shape.numel() for shape in self.trailing], -1)
        return {
            place: part.reshape(batch + shape)
            for place, part, shape in zip(self.places, parts, self.trailing, strict=True)
        }


@dataclass
class _Candidate:
    place: TensorRef
    first: Tensor  # at the first and the last point, with the shape (*batch, *trailing)
    last: Tensor
    trailing: torch.Size
    shared: bool


def find_predictor(
    runner: ConditionedModel,
    dim: int,
    name: str,
    other: ConditionedModel | None = None,
    declared: str | None = None,
) -> Predictor | None:
    """The predictor of the observed site ``name``; ``None`` if it does not depend on the noise.

    ``other`` is a runner with other values of the latent sites outside of the block, of which the
    predictor must be free.  ``declared`` names a site to take as the predictor.
    """
    return _Search(runner, name, other, declared, corners(runner, dim, name)).find()


@dataclass
class _Search:
    runner: ConditionedModel
    name: str
    other: ConditionedModel | None
    declared: str | None
    corners: list[Record]
    #: what was wrong with the places that were tried, for the refusal
    first_nonlinear: str | None = None
    nonlocal_place: TensorRef | None = None
    other_moves: bool = False

    def __post_init__(self) -> None:
        e, eu, ev = (corner.noise for corner in self.corners[:3])
        self.plane = Plane(e, eu - e, ev - e)
        site = self.corners[0].sites[self.name]
        self.batch, self.observed = data_shape(site), data_terms(site)
        if self.batch != self.observed.shape:
            raise ValueError(
                f"AutoSites: the observed site {self.name!r} has data of shape "
                f"{tuple(site['value'].shape)} and batch shape {tuple(self.batch)}: what is one "
                "datum? Put it into a plate of its data: with pyro.plate('data', "
                f"{self.observed.shape[-1]}): pyro.sample({self.name!r}, ...)."
            )
        self.tolerance = TOLERANCE * torch.finfo(self.observed.dtype).eps

    def _terms(self, noise: Tensor, replace: dict[TensorRef, Tensor] | None = None) -> Tensor:
        return data_terms(self.runner.sites(noise, replace=replace)[self.name])

    def find(self) -> Predictor | None:
        after = data_terms(self.corners[3].sites[self.name])
        if same(after, self.observed) and self._stays(self._terms):
            return None
        candidates = self._candidates()
        # stable: the first of each width leads, and a number that all data share comes last
        candidates.sort(key=lambda c: (c.shared, c.trailing.numel()))
        for candidate in candidates:
            if self._passes((candidate,)):
                return self._predictor((candidate,))
        pairs = list(combinations(candidates[:MOST_CANDIDATES], 2))
        for pair in sorted(pairs, key=lambda p: sum(c.trailing.numel() for c in p)):
            if self._passes(pair):
                return self._predictor(pair)
        raise ValueError(self._refusal(candidates))

    def _predictor(self, chosen: tuple[_Candidate, ...]) -> Predictor:
        return Predictor(tuple(c.place for c in chosen), tuple(c.trailing for c in chosen))

    def _candidates(self) -> list[_Candidate]:
        """Values of the right shape that depend on the noise, and are affine in it."""
        first, last = self.corners[0].values, self.corners[3].values
        affine = self.plane.affine(self.runner, [corner.values for corner in self.corners])
        others = None
        if self.other is not None:
            others = record(self.other, self.corners[0].noise, first.keys()).values
        candidates = []
        for place, a in first.items():
            if not affine[place]:
                self.first_nonlinear = self.first_nonlinear or place.label
                continue
            trailing = self._trailing(a.shape)
            if trailing is None:
                continue
            if others is not None and not same(others[place], a):
                self.other_moves = True
                continue
            if self.declared is None or place.site == self.declared:
                shared = a.shape[: len(self.batch)] != self.batch
                b = last[place]
                if shared:
                    a, b = a.expand(self.batch), b.expand(self.batch)
                candidates.append(_Candidate(place, a, b, trailing, shared))
        return candidates

    def _trailing(self, shape: torch.Size) -> torch.Size | None:
        """What is left of ``shape`` after the batch of the data; ``None`` where it does not fit."""
        rank = len(self.batch)
        if not shape and self.batch:
            return shape  # one number that all data share, such as an intercept alone
        if shape[:rank] != self.batch or shape[rank:].numel() > MOST_ENTRIES:
            return None
        return torch.Size(shape[rank:])

    def _passes(self, chosen: tuple[_Candidate, ...]) -> bool:
        held = {c.place: c.first for c in chosen}
        try:
            # bit for bit: nothing else may change with the noise, however little
            before, after = (self._terms(self.corners[k].noise, held) for k in (0, 3))
            if not (same(after, before) and self._stays(lambda x: self._terms(x, held))):
                return False
            local = self._is_local(chosen)
        except (RuntimeError, ValueError):
            if any(c.shared for c in chosen):  # the model wants one number there
                return False
            raise
        if not local:
            self.nonlocal_place = self.nonlocal_place or chosen[0].place
        return local

    def _stays(self, terms: Callable[[Tensor], Tensor]) -> bool:
        """Whether terms, the same at two corners, are the same further off too."""
        far = self.plane.on_circles(terms)
        return same(far, far[:1].expand_as(far))

    def _is_local(self, chosen: tuple[_Candidate, ...]) -> bool:
        """Move f at the data whose number has a certain binary digit; the others' terms must stay."""
        count = self.batch.numel()
        if count < 2:
            return True
        moved = digit_masks(count, self.observed.device)

        def terms(moved: Tensor) -> Tensor:
            held = {}
            for c in chosen:
                where = moved.reshape(self.batch + (1,) * len(c.trailing))
                held[c.place] = torch.where(where, c.last, c.first)
            return self._terms(self.corners[0].noise, held).reshape(-1)

        after = for_each(terms, moved, 8)
        before = self.observed.reshape(-1).expand_as(after)
        return same(after[~moved], before[~moved], self.tolerance)

    def _refusal(self, candidates: list[_Candidate]) -> str:
        start = f"AutoSites: no predictor was found for the observed site {self.name!r}"
        shape = tuple(self.batch)
        if self.declared is not None and not candidates:
            return (
                f"{start}: {self.declared!r} is no site whose value is linear in the latent block and "
                f"has the shape {shape} of the data, or that and a last dimension."
            )
        if self.nonlocal_place is not None:
            return (
                f"{start}: its data depend on {self.nonlocal_place} not one by one, so the likelihood "
                f"of one datum changes with the linear predictor of another. One site per datum needs "
                f"a likelihood that is local; use AutoFullRankNormal and NGVB."
            )
        if self.other_moves:
            return (
                f"{start}: every linear predictor of it also depends on a latent site outside of the "
                f'block. Write the Gaussian part as f = pyro.deterministic("f", ...), free of the '
                f"others; for a latent scale z ~ Normal(0, 1), and scale * z in the likelihood."
            )
        nonlinear = self.first_nonlinear or "an operation"
        return (
            f"{start}: it does not depend on the latent block through at most {MOST_ENTRIES} linear "
            f"combinations a datum (the first result that is not linear is that of {nonlinear}; the "
            f"data have the shape {shape}). Use AutoFullRankNormal and NGVB for this model."
        )
