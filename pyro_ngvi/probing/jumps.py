"""Where a log density itself jumps, as at a switch ``torch.where(t < x, a, b)``: no gradient sees that.

From one draw of a guide to another, one latent site at a time, the log density is compared with the
integral of its slope as :mod:`.kinks` compares slopes with that of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..linalg.hessian import gradient
from ..runtime.model_density import ModelDensity
from .kinks import jump_of

#: pairs of draws between which a site is moved, and the most sites
PAIRS, SITES = 3, 20
#: nats, below which a jump may be one between two numbers of a model that rounds to float32, and
#: points on each side of one that say how far apart numbers are there
NOTICED, BESIDE = 0.01, 8


def jumping_sites(density: ModelDensity, theta: Tensor) -> Iterator[str]:
    """Latent sites along which the log density jumps, between draws theta (S, d), S at least 6."""
    start = 0
    for name, shape in list(density.layout.unconstrained_shapes.items())[:SITES]:
        here = torch.zeros_like(theta[0])
        here[start : start + shape.numel()] = 1.0
        start += shape.numel()

        def point(x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            value = density(x.unsqueeze(0))[0]
            return value, (gradient(value, x) * u).sum()

        def jumps(a: Tensor, u: Tensor) -> bool:
            found = jump_of(point, a, u)
            if found is None:
                return False
            low, high = found
            apart = 4.0 * torch.finfo(a.dtype).eps * float(a.abs().amax() / u.abs().amax())
            beside = torch.arange(BESIDE).to(a) * max(high - low, apart)
            at = torch.stack([low - beside, high + beside]).unsqueeze(-1)
            with torch.no_grad():
                left, right = density((a + at * u).flatten(0, 1)).reshape(2, BESIDE)
            # of rounding numbers on each side are as far apart
            noise = (left.amax() - left.amin()) + (right.amax() - right.amin())
            return bool((right[0] - left[0]).abs() > NOTICED + noise)

        pairs = zip(theta[:PAIRS], theta[PAIRS : 2 * PAIRS], strict=True)
        if any(jumps(a, here * (b - a)) for a, b in pairs):
            yield name
