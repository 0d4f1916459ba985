r"""Marginals of a density in a few dimensions by slices through a Gaussian, and a copula of them.

For log p(v), known up to a constant, and mean m and covariance C of a Gaussian near it,

    log f_j(x) = log p(m + x C_j / sd_j) + const,        C_j the j-th column of C, sd_j^2 = C_jj,

is p along the line on which all other entries are at their means given entry j, in sds of it.  Were p
that Gaussian, f_j would be the marginal density of (v_j - m_j) / sd_j; it is nearly so where the
covariance of the others hardly depends on v_j (Martins, Simpson, Lindgren & Rue 2013, section 3.2).
Skewness and tails are in it, as those of a log scale, which no Gaussian sees.

log f_j is straight between few points.  The copula has these marginals and the correlations R of C,

    v_j = m_j + sd_j F_j^-1(Phi(z_j)),        z = chol(R) e,

where e has independent Student-t entries, so that importance weights p / r are bounded in more
directions than with Gaussian ones.  Each entry costs a share of their worth which goes as the inverse
square of its degrees of freedom, so these go as sqrt(d).
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, pi
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.transforms import AffineTransform, LowerCholeskyAffine
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.transforms import Transform
from torch.special import erfc, ndtri

#: points, in sds: all within 5, and further ones while the density is within 10 nats of its maximum
NEAR, FAR, DEPTH = 5.0, (6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 17.0, 20.0, 24.0, 32.0), 10.0
STEP = 0.5
#: degrees of freedom of the noise, for a square root of an entry, and at least; and the slowest decay
#: beyond the last point, in nats a sd
DEGREES, FEWEST_DEGREES, DECAY = 3.5, 5.0, 0.3
#: nats from which a piece is no longer flat
FLAT = 1e-6


def copula(
    log_density: Callable[[Tensor], Tensor], mean: Tensor, covariance: Tensor
) -> dist.TransformedDistribution:
    """The distribution over vectors (d,) that has the marginals of slices through a Gaussian;
    ``log_density``, (N, d) to (N,), may be NaN or infinite away from the mean."""
    sd = covariance.diagonal().sqrt()
    x, logs = _slices(log_density, mean, covariance / sd)
    root = torch.linalg.cholesky(covariance / sd / sd.unsqueeze(-1))
    zero = torch.zeros_like(mean)
    degrees = max(FEWEST_DEGREES, DEGREES * len(mean) ** 0.5)
    noise = dist.StudentT(degrees, zero, torch.ones_like(mean)).to_event(1)
    moves = [LowerCholeskyAffine(zero, root), Quantiles(x, logs), AffineTransform(mean, sd, 1)]
    return dist.TransformedDistribution(noise, moves)


def _slices(log_density: Any, mean: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Points x (P,) in sds, and log f_j there (d, P), straight on where nothing is known."""
    d = len(mean)
    near = torch.arange(-NEAR, NEAR + STEP, STEP).to(mean)
    far = torch.tensor(FAR).to(mean)
    x = torch.cat([-far.flip(0), near, far])
    logs = mean.new_full((d, len(x)), torch.nan)
    middle = len(x) // 2

    def put(entries: Tensor, places: Tensor) -> None:
        at = mean + x[places].unsqueeze(-1) * columns.mT[entries]
        logs[entries, places] = log_density(at).to(logs)

    places = torch.arange(len(far), len(far) + len(near), device=mean.device)
    put(*(i.reshape(-1) for i in torch.meshgrid(torch.arange(d).to(places), places, indexing="ij")))
    for ring in range(1, 1 + len(far)):
        top = logs.nan_to_num(-torch.inf).amax(1)
        ends = [(len(far) - ring, 1), (len(far) + len(near) - 1 + ring, -1)]
        each = [((logs[:, i + step] > top - DEPTH).nonzero().reshape(-1), i) for i, step in ends]
        entries = torch.cat([j for j, _ in each])
        if not len(entries):
            break
        put(entries, torch.cat([torch.full_like(j, i) for j, i in each]))
    for step in (-1, 1):  # outwards
        places = range(middle + step, len(x) if step > 0 else -1, step)
        slope = torch.full_like(mean, -DECAY)
        for i in places:
            width = (x[i] - x[i - step]).abs()
            new = (logs[:, i] - logs[:, i - step]) / width
            known = new.isfinite()
            slope = torch.where(known, new, slope.clamp_max(-DECAY))
            logs[:, i] = torch.where(known, logs[:, i], logs[:, i - step] + slope * width)
    return x, logs


class Pieces:
    """Densities whose logarithms are ``logs`` (d, P) at points x (P,), straight between these and on;
    the pieces (d, P + 1) are the one below x_0, those between, the last."""

    def __init__(self, x: Tensor, logs: Tensor) -> None:
        width, logs = x.diff(), logs - logs.amax(-1, keepdim=True)
        inner = logs.diff() / width
        first, last = inner[:, :1].clamp_min(DECAY), inner[:, -1:].clamp_max(-DECAY)
        rise = (inner * width).abs()
        share = torch.where(rise < FLAT, 1.0 - 0.5 * rise, -torch.expm1(-rise) / rise)
        mass = torch.maximum(logs[:, 1:], logs[:, :-1]) + (width * share).log()
        tails = logs[:, :1] - first.log(), logs[:, -1:] - (-last).log()
        mass = torch.cat([tails[0], mass, tails[1]], -1)
        total = mass.logsumexp(-1, keepdim=True)
        self.x, self.logs, self.slope = x, logs - total, torch.cat([first, inner, last], -1)
        self.width = torch.cat([width[:1], width, width[-1:]])
        self.mass = (mass - total).exp()
        self.below = torch.nn.functional.pad(self.mass.cumsum(-1), (1, 0))[:, :-1]

    def _at(self, piece: Tensor, *tables: Tensor) -> list[Tensor]:
        """Entries (..., d) of tables (d, pieces)."""
        index = piece.unsqueeze(-1)
        return [t.expand(*piece.shape, -1).gather(-1, index).squeeze(-1) for t in tables]

    def _piece(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """The piece of t (..., d), and the point that it is measured from."""
        piece = (t.unsqueeze(-1) > self.x).sum(-1)
        return piece, self.x[(piece - 1).clamp_min(0)]

    def quantile(self, p: Tensor) -> Tensor:
        """Where so much mass (..., d) is below; to relative precision for small p."""
        piece = (p.unsqueeze(-1) > self.below[:, 1:]).sum(-1)
        below, mass, slope = self._at(piece, self.below, self.mass, self.slope)
        part = ((p - below) / mass).clamp(1e-300, 1.0 - 1e-15)
        width = self.width[piece]
        flat = (slope * width).abs() < FLAT
        slope = torch.where(flat, 1.0, slope)
        last = piece == len(self.x)
        grown = torch.where(last, -1.0, torch.expm1(torch.where(last | flat, 0.0, slope * width)))
        along = torch.where(flat, part * width, torch.log1p(part * grown) / slope)
        along = torch.where(piece == 0, part.log() / slope, along)
        return self.x[(piece - 1).clamp_min(0)] + along

    def cdf(self, t: Tensor) -> Tensor:
        """The mass below t (..., d)."""
        piece, begin = self._piece(t)
        below, mass, slope = self._at(piece, self.below, self.mass, self.slope)
        rise, all_of_it = slope * (t - begin), slope * self.width[piece]
        flat = all_of_it.abs() < FLAT
        part = torch.expm1(rise) / torch.where(flat, 1.0, torch.expm1(all_of_it))
        part = torch.where(flat, (t - begin) / self.width[piece], part)
        part = torch.where(piece == len(self.x), -torch.expm1(rise), part)
        return below + mass * torch.where(piece == 0, rise.exp(), part)

    def log_prob(self, t: Tensor) -> Tensor:
        """The log density at t (..., d)."""
        piece, begin = self._piece(t)
        logs = torch.cat([self.logs[:, :1], self.logs], -1)
        height, slope = self._at(piece, logs, self.slope)
        return height + slope * (t - begin)


class Quantiles(Transform):
    """From z (..., d), each a standard normal, to F_j^-1(Phi(z_j)), F_j of :class:`Pieces`."""

    domain = codomain = constraints.independent(constraints.real, 1)
    bijective = True

    def __init__(self, x: Tensor, logs: Tensor) -> None:
        super().__init__(cache_size=1)
        x, logs = x.double(), logs.double()
        # each tail by its own mass, of which no digits are lost
        self._left, self._right = Pieces(x, logs), Pieces(-x.flip(0), logs.flip(-1))

    def __eq__(self, other: object) -> bool:
        return self is other

    def _call(self, z: Tensor) -> Tensor:
        # torch's ndtr rounds to 0 below -8.3
        p = (0.5 * erfc(z.double().abs() / 2.0**0.5)).clamp_min(1e-300)
        return torch.where(z < 0.0, self._left.quantile(p), -self._right.quantile(p)).to(z)

    def _inverse(self, y: Tensor) -> Tensor:
        t = y.double()
        low, high = self._left.cdf(t).clamp_min(1e-300), self._right.cdf(-t).clamp_min(1e-300)
        return torch.where(low < high, ndtri(low), -ndtri(high)).to(y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """log |dy / dz|, summed over entries, (...)."""
        normal = -0.5 * (x.double().square() + log(2.0 * pi))
        return (normal - self._left.log_prob(y.double())).sum(-1).to(y)
