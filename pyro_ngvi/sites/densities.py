r"""Densities of single numbers: Gaussians that are tilted, their mixtures, and what is asked of them.

    p(x) propto N(x; m, s^2) exp(c(t)),   t = (x - m) / s,   |t| <= REACH,

c, the logarithm of what makes the difference from the Gaussian, is known at even steps of t, and cubic
between: the natural spline; or, where that swings, as at the edge of what a likelihood allows, a curve
that rises and falls as its nodes do (Fritsch & Butland 1984, "A method for constructing local monotone
piecewise cubic interpolants", SIAM J. Sci. Comput. 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: standard deviations to either side, points at which the tilt is known, and points of a table
REACH, NODES, TABLE = 7.0, 29, 801
STEP = 2.0 * REACH / (NODES - 1)
#: nats below the largest density that count as nothing, and the total variation between the densities
#: of both curves above which the spline swings
NOTHING, SWING = 200.0, 0.02
#: standard deviation of the kernel of weighted points, in theirs
KERNEL = 0.05


def nodes(like: Tensor) -> Tensor:
    """The standardised points t (NODES,) at which a tilt is asked for."""
    return torch.linspace(-REACH, REACH, NODES, dtype=like.dtype, device=like.device)


class Tilted(NamedTuple):
    """D such densities: means and sds (D,) of the Gaussians, c and c' (NODES, D) of the tilts."""

    mean: Tensor
    sd: Tensor
    tilt: Tensor
    slope: Tensor

    @classmethod
    def of(cls, mean: Tensor, sd: Tensor, log_ratio: Tensor) -> Tilted:
        """From the tilt c (D, NODES) at :func:`nodes`, each up to a constant."""
        from scipy.interpolate import CubicSpline, PchipInterpolator  # slow to import

        square = 0.5 * nodes(log_ratio).square()
        log_p = log_ratio - square
        log_p = (log_p - log_p.amax(-1, keepdim=True)).clamp_min(-NOTHING)
        tilt = (log_p + square).mT.contiguous()
        t = torch.linspace(-REACH, REACH, TABLE, dtype=mean.dtype, device=mean.device)
        at, y = (x.detach().cpu().double().numpy() for x in (nodes(tilt), tilt))
        both, found = [], []
        for curve in (CubicSpline(at, y, bc_type="natural"), PchipInterpolator(at, y)):
            both.append(cls(mean, sd, tilt, torch.from_numpy(curve(at, 1)).to(tilt)))
            found.append(both[-1].relative(t.unsqueeze(-1).expand(-1, len(mean))))
        mass = [torch.trapezoid(p, t, dim=0) for p in found]
        apart = 0.5 * torch.trapezoid((found[0] / mass[0] - found[1] / mass[1]).abs(), t, dim=0)
        swings = ~(apart <= SWING)
        slope = torch.where(swings, both[1].slope, both[0].slope)
        return cls(mean, sd, tilt - torch.where(swings, mass[1], mass[0]).log(), slope)

    def relative(self, t: Tensor) -> Tensor:
        """The density (P, D) of t (P, D)."""
        place = ((t + REACH) / STEP).clamp(0.0, NODES - 1.0)
        left = place.long().clamp_max(NODES - 2)
        b = place - left
        a = 1.0 - b
        (y, z), (u, v) = (
            (x.gather(0, left), x.gather(0, left + 1)) for x in (self.tilt, self.slope)
        )
        c = a * y + b * z + a * b * (a * (STEP * u - (z - y)) - b * (STEP * v - (z - y)))
        return torch.where(t.abs() <= REACH, (c - 0.5 * t.square()).exp(), 0.0)

    def density(self, x: Tensor) -> Tensor:
        """The density (P, D) at x (P, D)."""
        return self.relative((x - self.mean) / self.sd) / self.sd

    @property
    def at_edge(self) -> Tensor:
        """The larger of both densities (D,) at the ends, as a share of the Gaussian's largest."""
        ends = torch.tensor([[-REACH], [REACH]], dtype=self.mean.dtype, device=self.mean.device)
        return self.relative(ends.expand(-1, len(self.mean))).amax(0) * (2.0 * torch.pi) ** 0.5


@dataclass(frozen=True)
class Densities:
    """D densities p (P, D) at ascending points x (P, D), linear in between."""

    x: Tensor
    p: Tensor

    @classmethod
    def of(cls, x: Tensor, p: Tensor) -> Densities:
        """Normalised."""
        return cls(x, p / torch.trapezoid(p, x, dim=0))

    @property
    def mean(self) -> Tensor:
        """(D,)."""
        return torch.trapezoid(self.x * self.p, self.x, dim=0)

    @property
    def sd(self) -> Tensor:
        """(D,)."""
        return torch.trapezoid((self.x - self.mean).square() * self.p, self.x, dim=0).sqrt()

    @property
    def from_gaussian(self) -> Tensor:
        """Total variation (D,) between each and the Gaussian of its mean and sd."""
        z = (self.x - self.mean) / self.sd
        normal = torch.exp(-0.5 * z.square()) / (self.sd * (2.0 * torch.pi) ** 0.5)
        return 0.5 * torch.trapezoid((self.p - normal).abs(), self.x, dim=0)

    @classmethod
    def of_points(cls, values: Tensor, weights: Tensor) -> Densities:
        """Of weighted points (S, D), by a narrow kernel that leaves mean and sd as they are."""
        mean = weights @ values
        sd = (weights @ (values - mean).square()).sqrt()
        width = KERNEL * sd
        points = mean + (values - mean) / (1.0 + KERNEL**2) ** 0.5
        low, high = points.amin(0) - 5.0 * width, points.amax(0) + 5.0 * width
        steps = torch.linspace(0.0, 1.0, TABLE // 2, dtype=sd.dtype, device=sd.device).unsqueeze(-1)
        x = low + steps * (high - low)
        rows = [torch.exp(-0.5 * ((a - points) / width).square()) for a in x.unsqueeze(1)]
        return cls.of(x, torch.stack([weights @ row for row in rows]))

    def quantiles(self, levels: Tensor) -> Tensor:
        """(Q, D) at levels (Q,) or (Q, D)."""
        mass = torch.cumulative_trapezoid(self.p, self.x, dim=0)
        cdf = torch.cat([torch.zeros_like(mass[:1]), mass]) / mass[-1]
        levels = (levels if levels.dim() > 1 else levels.unsqueeze(-1)).to(cdf)
        levels = levels.expand(-1, cdf.shape[1])
        right = torch.searchsorted(cdf.mT.contiguous(), levels.mT.contiguous()).mT
        right = right.clamp(1, len(cdf) - 1)
        (a, b), (low, high) = ((z.gather(0, right - 1), z.gather(0, right)) for z in (cdf, self.x))
        share = (levels - a) / (b - a).clamp_min(torch.finfo(a.dtype).tiny)
        return low + (high - low) * share.clamp(0.0, 1.0)


def mixture(parts: Sequence[Tilted], weights: Any) -> Densities:
    """The mixture of K sets of D densities, with weights (K,) that sum to 1."""
    w = torch.as_tensor(weights).to(parts[0].mean)
    means, sds = (torch.stack([p[i] for p in parts]) for i in (0, 1))
    mean = w @ means
    sd = (w @ (sds.square() + (means - mean).square())).sqrt()
    # as far as any part goes, but for those that are far out and weigh nothing
    low = torch.maximum((means - REACH * sds).amin(0), mean - 2.0 * REACH * sd)
    high = torch.minimum((means + REACH * sds).amax(0), mean + 2.0 * REACH * sd)
    steps = torch.linspace(0.0, 1.0, TABLE, dtype=w.dtype, device=w.device).unsqueeze(-1)
    x = low + steps * (high - low)
    p: Any = sum(share * part.density(x) for share, part in zip(w, parts, strict=True))
    return Densities.of(x, p)
