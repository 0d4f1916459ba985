"""A start in a family that is not Gaussian: the member with the mode and curvature of the posterior.

In the coordinates of an exponential family a conjugate posterior is a member, so that one with its mode
and its curvature there is the posterior.  Others have the best of what the Newton steps and the steps
on expectations of :mod:`.laplace` go through, by the ELBO of the member itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..families.base import Tensors
from ..linalg.hessian import derivatives, eigen_abs
from ..linalg.host import own_random_state
from .found import Found, Gaussian
from .laplace import FINAL, Search, is_late, lower

#: Newton steps to the mode itself at most, and the decrease of -log p in nats that ends them
NEWTON, EXACT = 8, 1e-12


class MemberSearch(Search):
    """A search whose Gaussians stand for the members of ``family`` with their mode and curvature."""

    def __init__(self, density: Callable[[Tensor], Tensor], like: Tensor, family: Any) -> None:
        super().__init__(density, like)
        self.compared = family

    def draws(self, family: Any, params: Tensors, n: int, part: int = 0) -> Tensor:
        # their noise is not normal
        return family.fixed_draws(params, n)

    def member(self, q: Gaussian, family: Any) -> Tensors:
        """That of q, or of the mode near it."""
        found, loc = [family.matched(q.loc, q.precision)], q.loc
        for _ in range(NEWTON):
            value, g, H = derivatives(lambda x: self.f(x.unsqueeze(0), self.d)[0], loc)
            if is_late() or not bool(torch.isfinite(g.sum() + H.sum() + value)):
                break
            h, Q = eigen_abs(H)
            along = (Q.mT @ g) / h
            last = family.matched(loc, (Q * h) @ Q.mT)
            if bool(0.5 * (along.square() * h).sum() < EXACT):
                found.append(last)
                break
            loc = loc - Q @ along
        elbos = [lower(self.log_ratio(family, p, FINAL), 2.0) for p in found]
        return found[elbos.index(max(elbos))]


def best_member(
    density: Callable[[Tensor], Tensor], family: Any, given: Tensors, points: Iterable[Tensor]
) -> Found:
    """The member of ``family`` with the largest ELBO among those to which the ``points`` (d,) lead."""
    with own_random_state(0), torch.no_grad():
        return MemberSearch(density, family.mean(given), family).run(family, given, points)
