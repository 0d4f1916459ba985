r"""From a Gaussian at a mode to the best of a family: steps on expectations under q.

With q the member of the family that is nearest to N(m, P^-1), and f = -log p(y, theta) in nats,

    P <- |(1 - r) P + r E_q hess f|,   m <- m - r P^-1 E_q grad f,   r = min(1, 2 / (k + 1.5))

at step k, by a few draws of q for the Hessian, d for the gradient.  By Bonnet's and Price's theorems
dELBO/dm = -E_q grad f and dELBO/dSigma = (P - E_q hess f) / 2, so that its fixed points are the
stationary points of the ELBO in the family (Opper & Archambeau 2009; with a learning rate it is VON,
Khan & Lin 2017).  Averages so weighted forget where they began, and keep 4 / (3 (k + 1)) of the energy

    |P^-1/2 E_q grad f|^2 / 2 + |P^-1/2 (E_q hess f - P) P^-1/2|^2 / 4   nats

of one step, that near the end is all noise: they go on until that is little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..linalg.hessian import ROWS, absolute, values_and_gradients
from .deadline import is_late
from .found import Gaussian

if TYPE_CHECKING:
    from .laplace import Search

#: draws behind an expected Hessian
DRAWS = 8
#: steps at most, and at least, if evaluations of the log density are many; after which q is to be near
MOST, LEAST, MANY, SOME = 40, 4, 16_000, 6
#: nats that may be left, and a gain that may be that of the few draws behind an ELBO
LEFT, GAIN = 0.03, 0.1


def smoothed(search: Search, q: Gaussian, family: Any) -> tuple[Tensor, Tensor]:
    """The best mean (d,) and precision (d, d) of the steps from q on, of the density of a search."""
    best = loc, precision = q.loc, q.precision
    first = highest = search.elbo(family, family.matched(*best))
    before, d = search.evaluations, search.d
    for k in range(MOST):
        params = family.matched(loc, precision)
        _, g, H = search.derivatives(loc, search.draws(family, params, DRAWS, False) - loc)
        if d > DRAWS:  # squared, the noise of a step's length is that of d gradients over the draws
            z = search.draws(family, params, d, False).split(ROWS)
            g = torch.cat([values_and_gradients(search.f, part)[1] for part in z]).mean(0)
        if not bool(torch.isfinite(g.sum() + H.sum())):
            break
        share = min(1.0, 2.0 / (k + 1.5))
        away = H - precision
        precision, h, Q = absolute(torch.lerp(precision, H, share))
        along = Q.mT @ g
        length = float((along.square() / h).sum().sqrt())
        loc = loc - Q @ (along / h) * min(share, d**0.5 / max(length, 1e-30))
        now = search.elbo(family, family.matched(loc, precision))
        # of few draws: the last is better than it looks
        if now > max(first, highest - GAIN):
            best, highest = (loc, precision), max(highest, now)
        units = (Q / h) @ Q.mT @ away
        energy = 0.5 * length**2 + 0.25 * float((units * units.mT).sum())
        spent = k + 1 >= LEAST and search.evaluations - before > MANY
        spent |= k + 1 >= SOME and energy > d  # other points may lead to more
        if energy * 4.0 / (3.0 * (k + 1)) < LEFT or spent or is_late():
            break
    return best
