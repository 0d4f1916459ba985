"""What a search for Gaussians of a posterior finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..families.base import Tensors
from ..runtime.in_double import in_double

#: nats within which two ELBOs are those of one mode
SAME = 1.0
#: nats below the best from which a mode has less than a twentieth of its mass
COMPARABLE = math.log(20.0)
#: and less than a thousandth, which is nothing
FAINT = math.log(1000.0)
#: latent variables up to which a file keeps where paths ended, of a matrix each
KEPT = 64
#: nats: a fall of log p between two modes, less of which is a bend
BARRIER = 2.0
#: of draws that are in a mode, where more than the far tail of a guide is there
SHARE = 0.01


def held(modes: Tensor) -> int:
    """How many modes have a share of points, by the number of the mode of each (S,)."""
    return int((torch.bincount(modes.long()) > SHARE * len(modes)).sum())


@dataclass(frozen=True)
class Found:
    """What a search saw.

    Attributes:
        params: of the best member of the family; ``None`` if none beats the one to replace.
        elbos: nats, the largest ELBO from each point, then by natural-gradient steps; -inf for none.
        given: nats, the ELBO of the member to replace.
        evaluations: of the log density at a point; a gradient, or a row of a Hessian, counts as one.
        apart: Gaussians of comparable mass that are apart, among those that the paths ended at, where
            there are several.
        concave: whether log p is, as far as was seen, and one point was enough.
        gaussians: at whose means paths ended.
    """

    params: Tensors | None
    elbos: tuple[float, ...]
    given: float
    evaluations: int
    apart: tuple[Gaussian, ...] = ()
    concave: bool = False
    gaussians: tuple[Gaussian, ...] = ()

    def plain(self) -> dict[str, Any]:
        """What a file keeps of it, for :meth:`of_plain`."""
        ends = [asdict(q) for q in self.ends if len(q.loc) <= KEPT]
        params = None if self.params is None else {}
        return asdict(replace(self, gaussians=(), params=params)) | {"gaussians": ends}

    @classmethod
    def of_plain(cls, kept: dict[str, Any]) -> Found:
        """The same from a file."""
        gaussians = {n: tuple(Gaussian(**q) for q in kept[n]) for n in ("apart", "gaussians")}
        return cls(**{**kept, **gaussians})

    @property
    def ends(self) -> list[Gaussian]:
        """Where paths ended, with a thousandth of the largest mass or more, each outside of those
        before, the best first; several may be parts of one mode that is bent."""
        return modes_of(self.gaussians, FAINT)

    @property
    def modes(self) -> int:
        """How many modes of comparable mass there are."""
        return max(1, len(self.apart))

    def seen_from(self, theta: Tensor) -> int:
        """How many of the modes have a share of points theta (S, d)."""
        if not self.apart:
            return 1
        log_mass = torch.stack([q.log_mass(theta.to(q.loc)) for q in self.apart])
        return held(log_mass.argmax(0))

    def __str__(self) -> str:
        found = sorted((e for e in self.elbos if e > -torch.inf), reverse=True)
        if self.params is None:
            return f"no better start from {len(self.elbos)} points, {self.evaluations} evaluations"
        if self.concave:
            return (
                f"log p is concave as far as was seen: one point leads to all there is, an ELBO of "
                f"{found[0]:.1f}; {self.evaluations} evaluations"
            )
        near = sum(e > found[0] - SAME for e in found)
        others = ", ".join(f"{found[0] - e:.1f}" for e in found[near:])
        return (
            f"{near} of {len(self.elbos)} points lead to an ELBO within {SAME:g} nat of the best, "
            f"{found[0]:.1f}{f', others to {others} nats less' if others else ''}; "
            f"{self.evaluations} evaluations"
        )


@dataclass(frozen=True, eq=False)
class Gaussian:
    """N(loc, precision^-1) with loc (d,), precision (d, d).

    Attributes:
        elbo: in nats, by a few draws.
        spread: variance of log p - log q over them: about twice the KL divergence, if that is small.
        off: nats by which rounding had put the ELBO too high.
    """

    loc: Tensor
    precision: Tensor
    elbo: float
    spread: float
    off: float = 0.0

    def log_mass(self, theta: Tensor) -> Tensor:
        """Log density at theta (..., d) times the mass of the mode, up to a constant: (...)."""
        return self.elbo + 0.5 * (torch.logdet(self.precision) - self.squared_distance(theta))

    def holds(self, theta: Tensor) -> bool:
        """Whether theta (d,) is no further from the mean than draws are."""
        return bool(self.squared_distance(theta) < len(theta))

    def squared_distance(self, theta: Tensor) -> Tensor:
        """Of points (..., d) from the mean, in variances, (...)."""
        x = theta - self.loc
        return (x @ self.precision * x).sum(-1)


def lower(ratio: Tensor, errors: float = 0.0) -> float:
    """Mean (S,) less standard errors; -inf where it is not a number."""
    value = float(ratio.mean() - errors * ratio.std() / len(ratio) ** 0.5)
    return value if value == value else -torch.inf


def rounding(f: Callable[[Tensor], Tensor], theta: Tensor) -> float:
    """Nats by which the mean of f at points (S, d) is too small for its dtype, as where a dispersion is
    1e7; 0 where float64 gives no other number, or none."""
    right = in_double(f, theta)
    off = 0.0 if right is None else float((right - f(theta)).mean())
    return off if abs(off) > SAME else 0.0  # also of what is not finite


def holder(known: Iterable[Gaussian], theta: Tensor) -> Gaussian | None:
    """The first that holds theta (d,)."""
    return next((q for q in known if q.holds(theta)), None)


def modes_of(ends: Iterable[Gaussian], nats: float = COMPARABLE) -> list[Gaussian]:
    """Those that are apart, and no more ``nats`` below the one with the largest ELBO, the first."""
    modes: list[Gaussian] = []
    for q in sorted(ends, key=lambda q: -q.elbo):
        least = modes[0].elbo - nats if modes else -torch.inf
        if q.elbo > least and not any(m.holds(q.loc) for m in modes):
            modes.append(q)
    return modes
