r"""Whether probability integral transforms are uniform, and what is wrong where they are not.

Where PIT is the share of a guide's draws below the truth, z = Phi^-1(PIT) has over many fits the mean
by which the truth lies above the draws, in sds of theirs, and the sd that they should have over theirs
(up to about 3 sds, where a thousand draws end).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

#: probability of an alarm, over all tests of a site together, where nothing is wrong
ALPHA = 0.01


@dataclass(frozen=True)
class Uniformity:
    r"""What the PITs of a site say, entry by entry: arrays of the shape of the site.

    Attributes:
        bias: by how many sds of the guide the truth lies above its draws: positive, they are too low.
        ratio: sd that the draws should have, over theirs: above 1, theirs is too small.
        uniform: p-value of Kolmogorov and Smirnov's test of the PITs.
        symmetric: p-value of :math:`\sup_x |F(x) + F(1 - x) - 1|`, the distance of PITs and 1 - PITs,
            which is zero, but for noise, where the guide is not biased (Yao et al., section 3).  The
            paper takes them for two independent samples, which they are not: at its 5 % about 10 % of
            guides without bias fail.  From the ends inwards, the signs of PIT - 1/2 are a random walk:
            here the p-value is that of its limit, the maximum of a Brownian motion on [0, 1].
        spread: p-value of :math:`\sum (z - \bar z)^2`, which has :math:`\chi^2_{N-1}`.
    """

    bias: np.ndarray
    ratio: np.ndarray
    uniform: np.ndarray
    symmetric: np.ndarray
    spread: np.ndarray

    @property
    def p_value(self) -> float:
        """The smallest of all p-values, times how many there are."""
        of_all = np.stack([self.uniform, self.symmetric, self.spread])
        return float(min(1.0, of_all.size * of_all.min()))

    def findings(self, alpha: float = ALPHA) -> list[str]:
        """What is wrong, in words, by p-values below ``alpha`` over their number."""
        level = alpha / (3 * self.bias.size)
        skewed, spread = self.symmetric < level, self.spread < level
        bias, ratio, n = self.bias, self.ratio, self.bias.size
        by_sd = "by {:.2g} sd".format
        by_factor = "by a factor of {:.2g}".format
        kinds = (
            ("biased low", skewed & (bias > 0.0), bias, by_sd),
            ("biased high", skewed & (bias <= 0.0), -bias, by_sd),
            ("sds too small", spread & (ratio > 1.0), ratio, by_factor),
            ("sds too large", spread & (ratio <= 1.0), 1.0 / ratio, by_factor),
        )
        found = [
            f"{what} {by(x[at].max())}" + f" at most, in {at.sum()} of {n} entries" * (n > 1)
            for what, at, x, by in kinds
            if at.any()
        ]
        shape = (self.uniform < level).any() and not found
        return [*found, *["another shape than the posterior's"] * bool(shape)]


def uniformity(pit: np.ndarray) -> Uniformity:
    """The tests of PITs (N, ...), entry by entry."""
    x, n, root = torch.from_numpy(pit), len(pit), len(pit) ** 0.5
    z = torch.special.ndtri(x)
    counts = torch.arange(max(n, 100) + 1, dtype=x.dtype).reshape(-1, *[1] * (x.dim() - 1))
    steps, j = counts[: n + 1] / n, counts[1:100]
    sign = 1.0 - 2.0 * ((j - 1.0) % 2.0)
    ends = x.sort(0).values
    gap = torch.maximum(steps[1:] - ends, ends - steps[:-1]).amax(0)
    gap = gap * (root + 0.12 + 0.11 / root)  # Stephens' correction for finite N
    uniform = 2.0 * (sign * (-2.0 * (j * gap).square()).exp()).sum(0)
    inwards = (x - 0.5).abs().argsort(0, descending=True)
    walk = (x - 0.5).sign().gather(0, inwards).cumsum(0).abs().amax(0) / root
    symmetric = 4.0 * (sign * torch.special.ndtr((1.0 - 2.0 * j) * walk)).sum(0)
    ratio, half = z.std(0), x.new_tensor(0.5 * (n - 1))
    below = torch.special.gammainc(half, half * ratio.square())
    spread = 2.0 * torch.minimum(below, 1.0 - below)
    ps = (p.clamp(0.0, 1.0) for p in (uniform, symmetric, spread))
    return Uniformity(*(t.numpy() for t in (z.mean(0), ratio, *ps)))
