"""Finds the predictor of every observed site: what its data see of the latent block.

A predictor f (N, k) of a site with N data must be

* *affine* in the noise: f(e + u + v) - f(e + u) - f(e + v) + f(e) = 0,
* *sufficient*: with f held, the log likelihood does not change with the noise,
* *local*: the term of datum n changes with f_n only.

All three are tried in runs of the model at a few points, not read from its text: any operation of
torch that happens to be affine counts, whatever its name.  Data are told apart by the binary digits
of their numbers, so locality takes 2 log2(N) runs, batched.  Of the predictors that pass, the one
with the fewest entries per datum is taken, and of these the first; where none passes alone, pairs are
tried, such as the location and the log scale of a Normal.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from .corners import OTHER_COURSE, corners, record, same
from .run import Place, Runner, for_each
from .terms import data_shape, data_terms

__all__ = ["TOLERANCE", "Predictor", "digit_masks", "find_predictor"]

#: a difference of so many roundings of the largest value is none
TOLERANCE = 1e3
#: share of its own size by which an entry may bend for rounding's sake
OWN = 1e-3
#: most entries of a predictor for one datum, and candidates among which pairs are tried
MOST_ENTRIES, MOST_CANDIDATES = 64, 12


@dataclass(frozen=True)
class Predictor:
    """The places whose values, side by side, are the predictor (N, k) of some data.

    ``trailing`` are the shapes of what there is for one datum at each place.
    """

    places: tuple[Place, ...]
    trailing: tuple[torch.Size, ...]

    @property
    def width(self) -> int:
        return sum(shape.numel() for shape in self.trailing)

    def join(self, seen: dict[Place, Tensor], batch: torch.Size) -> Tensor:
        """Values at the places, each (*batch, ...), as one tensor (N, k)."""
        parts = []
        for place in self.places:
            value = seen[place]
            parts.append((value if value.dim() else value.expand(batch)).reshape(batch.numel(), -1))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def split(self, f: Tensor, batch: torch.Size) -> dict[Place, Tensor]:
        """The other way round: f (N, k) as the value at each place."""
        if f.shape[-2] != batch.numel():
            raise ValueError(
                f"AutoSites: {' and '.join(map(str, self.places))}, the predictor since the guide's "
                f"first call, has {f.shape[-2]} rows, and the data of this call have the shape "
                f"{tuple(batch)}. With all data a latent site and a selection of its entries look the "
                f"same: where minibatches are to come, make the guide's first call with one."
            )
        parts = f.split([shape.numel() for shape in self.trailing], -1)
        return {
            place: part.reshape(batch + shape)
            for place, part, shape in zip(self.places, parts, self.trailing, strict=True)
        }


@dataclass
class _Candidate:
    place: Place
    first: Tensor  # at the first and the last point, with the shape (*batch, *trailing)
    last: Tensor
    trailing: torch.Size
    shared: bool


def find_predictor(
    runner: Runner, dim: int, name: str, other: Runner | None = None, declared: str | None = None
) -> Predictor | None:
    """The predictor of the observed site ``name``; ``None`` if it does not depend on the noise.

    ``other`` is a runner with other values of the latent sites outside of the block, of which the
    predictor must be free.  ``declared`` names a site to take as the predictor.
    """
    return _Search(runner, dim, name, other, declared).find()


class _Search:
    def __init__(
        self, runner: Runner, dim: int, name: str, other: Runner | None, declared: str | None
    ) -> None:
        self.runner, self.name, self.other, self.declared = runner, name, other, declared
        self.corners = corners(runner, dim, name)
        site = self.corners[0].sites[name]
        self.batch, self.observed = data_shape(site), data_terms(site)
        self.tolerance = TOLERANCE * torch.finfo(self.observed.dtype).eps
        self.first_nonlinear: str | None = None
        self.nonlocal_place: Place | None = None
        self.other_moves = False

    def _terms(self, noise: Tensor, replace: dict[Place, Tensor] | None = None) -> Tensor:
        return data_terms(self.runner.sites(noise, replace=replace)[self.name])

    def find(self) -> Predictor | None:
        if same(data_terms(self.corners[3].sites[self.name]), self.observed):
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
        e, eu, ev = (corner.noise for corner in self.corners[:3])
        at_e, at_eu, at_ev, at_both = (corner.values for corner in self.corners)
        # the other side of 0, where a hinge or a branch on a sign shows
        far = record(self.runner, e - 4.0 * (eu - e) - 4.0 * (ev - e), at_e.keys()).values
        if far.keys() != at_e.keys():
            raise ValueError(OTHER_COURSE)
        others = None
        if self.other is not None:
            others = record(self.other, e, at_e.keys()).values
        candidates = []
        for place, a in at_e.items():
            b, c, d = at_eu[place], at_ev[place], at_both[place]
            size = torch.stack([x.abs() for x in (a, b, c, d)]).amax(0)
            bend = (d - b - c + a).abs()
            bend = torch.maximum(bend, (far[place] - 9.0 * a + 4.0 * (b + c)).abs() / 9.0)
            # rounding is that of the largest entry, but no entry may bend by much of its own size
            affine = bool(((bend <= self.tolerance * size.max()) & (bend <= OWN * size)).all())
            if not affine:
                self.first_nonlinear = self.first_nonlinear or self.corners[0].names[place]
                continue
            trailing = self._trailing(a.shape)
            if trailing is None:
                continue
            if others is not None and not same(others[place], a):
                self.other_moves = True
                continue
            if self.declared is None or place.site == self.declared:
                shared = a.shape[: len(self.batch)] != self.batch
                first, last = (x.expand(self.batch) if shared else x for x in (a, d))
                candidates.append(_Candidate(place, first, last, trailing, shared))
        return candidates

    def _trailing(self, shape: torch.Size) -> torch.Size | None:
        """What is left of ``shape`` after the batch of the data; ``None`` where it does not fit."""
        rank = len(self.batch)
        if not shape and self.batch.numel() > 1:
            return shape  # one number that all data share, such as an intercept alone
        if shape[:rank] != self.batch or shape[rank:].numel() > MOST_ENTRIES:
            return None
        return torch.Size(shape[rank:])

    def _passes(self, chosen: tuple[_Candidate, ...]) -> bool:
        held = {c.place: c.first for c in chosen}
        try:
            # bit for bit: nothing else may change with the noise, however little
            if not same(
                self._terms(self.corners[3].noise, held), self._terms(self.corners[0].noise, held)
            ):
                return False
            local = self._is_local(chosen)
        except (RuntimeError, ValueError):
            if any(c.shared for c in chosen):  # the model wants one number there
                return False
            raise
        if not local:
            self.nonlocal_place = self.nonlocal_place or chosen[0].place
        return local

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
                f"block. Write the Gaussian part as a site of its own, free of the others: "
                f'f = pyro.deterministic("f", ...). Where the prior itself depends on such a site (a '
                f"latent scale), write it noncentred: z ~ Normal(0, 1), scale * z in the likelihood."
            )
        nonlinear = self.first_nonlinear or "an operation"
        return (
            f"{start}: it does not depend on the latent block through at most {MOST_ENTRIES} linear "
            f"combinations a datum (the first result that is not linear is that of {nonlinear}; the "
            f"data have the shape {shape}). Use AutoFullRankNormal and NGVB for this model."
        )


def digit_masks(count: int, device: torch.device) -> Tensor:
    """Bool (2 b, count): which of 0, 1, ... have a 1 as a binary digit, for all b of them; and a 0.

    Any two numbers are told apart by some row.
    """
    bits = torch.arange(max(count - 1, 1).bit_length(), device=device).unsqueeze(-1)
    ones = ((torch.arange(count, device=device) >> bits) & 1).bool()
    return torch.cat([ones, ~ones])
