"""What a model computes at a few values of its latent block: where predictors are looked for.

Four runs, at the corners e, e + u, e + v, e + u + v of a parallelogram of noises, show which results
change with the noise, and which of them bend; two circles around it, in the plane of u and v, what
happens further off.  Where nothing may change, two points far beyond are tried too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..linalg.host import fixed_normal
from .conditioned_model import ConditionedModel, OtherCourse, WhitenedRun, for_each
from .structure import TensorRef, data_terms

#: a difference of so many roundings of the largest value is none
TOLERANCE = 1e3
#: share of its own size by which an entry may bend for rounding's sake
OWN = 1e-3
#: how often the corners are drawn towards 0
SHRINKS = 12
#: the circles around e, in units of u and v, and the points on each of them
RADII, ANGLES = (4.0, 16.0), 8
#: the points beyond, e + BEYOND u and e - BEYOND u
BEYOND = 1e3
#: runs at once
CHUNK = 8

OTHER_COURSE = (
    "AutoSites: the model does not run the same operations at every value of its latent sites (an if "
    "or a loop that depends on them), so no predictor can be found. Name it: "
    'f = pyro.deterministic("f", ...) and AutoSites(model, latent="f").'
)


def corners(runner: ConditionedModel, dim: int, name: str) -> tuple[list[WhitenedRun], Plane]:
    """The four runs, where the likelihood of ``name`` is finite wherever it is at 0, and their plane;
    ``seen`` are the values that are not the same in the first and in the last."""
    plane, runs = Plane.of(dim, seed=20_170_615), []
    at_zero = torch.isfinite(data_terms(runner.sites(torch.zeros_like(plane.e))[name]))
    for k in range(SHRINKS + 1):
        runs, terms = [], []
        for noise in plane.corners():
            runs.append(runner(0.25**k * noise, look_at=None))
            terms.append(data_terms(runs[-1].sites[name]))
        first, last = runs[0].seen, runs[3].seen
        if not same(data_terms(runs[0].sites[name]), terms[0]):
            raise ValueError(
                f"AutoSites: the model keeps the tensor that the observed site {name!r} is made of "
                "and writes into it at every call (a module's buffer, say). Write into a new "
                "tensor: start with f = self.f.clone() or torch.zeros(...), or use torch.cat."
            )
        if any(run.seen.keys() != first.keys() for run in runs):
            raise ValueError(OTHER_COURSE)
        fitting = [place for place, value in first.items() if value.shape == last[place].shape]
        moving = [place for place in fitting if not same(last[place], first[place])]
        for run in runs:
            run.seen = {place: run.seen[place] for place in moving}
        if all(bool((t.isfinite() == at_zero).all()) for t in terms):
            break
    e, eu, ev = (0.25**k * noise for noise in plane.corners()[:3])
    return runs, Plane(e, eu - e, ev - e)


@dataclass
class Plane:
    """The noises e + alpha u + beta v, all (D,)."""

    e: Tensor
    u: Tensor
    v: Tensor

    @classmethod
    def of(cls, dim: int, seed: int) -> Plane:
        return cls(*fixed_normal(3, dim, seed=seed))

    def corners(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.e, self.e + self.u, self.e + self.v, self.e + self.u + self.v

    @property
    def circles(self) -> dict[str, Tensor]:
        """alpha and beta (K,) of points on the circles, and their noises (K, D)."""
        angles = torch.arange(ANGLES).to(self.e) * (2.0 * torch.pi / ANGLES)
        radii = torch.tensor(RADII).to(self.e).unsqueeze(-1)
        alpha, beta = ((radii * f(angles)).reshape(-1, 1) for f in (torch.cos, torch.sin))
        noise = self.e + alpha * self.u + beta * self.v
        return {"noise": noise, "alpha": alpha.squeeze(-1), "beta": beta.squeeze(-1)}

    def stays(self, result: Callable[[Tensor], Tensor], value: Tensor | None = None) -> bool:
        """Whether ``result`` (of a noise) is ``value`` on the circles, and beyond if it runs."""
        far = for_each(result, self.circles["noise"], CHUNK)
        value = far[0] if value is None else value
        if not same(far, value.expand_as(far)):
            return False
        with suppress(RuntimeError, ValueError):  # a Cholesky of what overflows, say
            beyond = torch.stack([self.e + BEYOND * self.u, self.e - BEYOND * self.u])
            far = for_each(result, beyond)
        return same(far, value.expand_as(far))

    def affine(
        self, runner: ConditionedModel, corners: Sequence[Mapping[TensorRef, Tensor]]
    ) -> dict[TensorRef, bool]:
        """Which values are affine in the noise, from those at the ``corners`` and on the circles."""
        at_e, at_eu, at_ev, at_both = corners
        places = tuple(at_e)
        if not places:
            return {}
        size = {p: torch.stack([c[p].abs() for c in corners]).amax(0) for p in places}

        def straight(value: Tensor, place: TensorRef, alpha: Any, beta: Any, length: Any) -> Tensor:
            a, b, c = at_e[place], at_eu[place], at_ev[place]
            bend = (value - a - alpha * (b - a) - beta * (c - a)).abs() / length
            tolerance = TOLERANCE * torch.finfo(a.dtype).eps
            # rounding is that of the largest entry, but no entry may bend by much of its own size
            return ((bend <= tolerance * size[place].max()) & (bend <= OWN * size[place])).all()

        def on_circle(point: dict[str, Tensor]) -> Tensor:
            seen = runner(point["noise"], look_at=places).seen
            alpha, beta = point["alpha"], point["beta"]
            length = 1.0 + alpha.abs() + beta.abs()
            like = {p: [x.to(seen[p].dtype) for x in (alpha, beta, length)] for p in places}
            return torch.stack([straight(seen[p], p, *like[p]) for p in places])

        near = torch.stack([straight(at_both[p], p, 1.0, 1.0, 1.0) for p in places])
        try:
            far = for_each(on_circle, self.circles, CHUNK).all(0)
        except OtherCourse as error:
            raise ValueError(OTHER_COURSE) from error
        return dict(zip(places, (near & far).tolist(), strict=True))


def same(a: Tensor, b: Tensor, tolerance: float = 0.0) -> bool:
    """Whether two tensors agree, bit for bit or within a ``tolerance``; NaN agrees with NaN."""
    alike = (a.shape, a.dtype) == (b.shape, b.dtype)
    return alike and torch.allclose(a, b, tolerance, tolerance, equal_nan=True)


def digit_masks(count: int, device: torch.device) -> Tensor:
    """Bool (2 b, count): which of 0, 1, ... have a 1 as a binary digit, for all b of them; and a 0."""
    bits = torch.arange(max(count - 1, 1).bit_length(), device=device).unsqueeze(-1)
    ones = ((torch.arange(count, device=device) >> bits) & 1).bool()
    return torch.cat([ones, ~ones])


def by_halves(
    predictors: Callable[[Tensor], dict[str, Tensor]], values: Tensor
) -> Callable[[str, Tensor], bool]:
    """Runs the predictors at ``values`` (n, S) for one half of the n and 0 for the other, in turn:
    whether those of a group stay as at 0 where the numbers (N,) that they depend on are of the other.
    """
    moved = digit_masks(len(values), values.device)

    def at(mask: Tensor) -> dict[str, Tensor]:
        return predictors(torch.where(mask.unsqueeze(-1), values, torch.zeros_like(values)))

    still, after = at(torch.zeros_like(moved[0])), for_each(at, moved, CHUNK)

    def stay(group: str, numbers: Tensor) -> bool:
        f, held = after[group], ~moved[:, numbers]
        return torch.equal(f[held], still[group].expand_as(f)[held])

    return stay
