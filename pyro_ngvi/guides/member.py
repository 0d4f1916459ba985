"""A start in a family that is not Gaussian: the member with the mode and curvature of the posterior.

In the coordinates of an exponential family a conjugate posterior is a member, so that one with its mode
and its curvature there is the posterior, which gradients at a few draws tell.  Others have the best of
what the Newton steps and the steps on expectations of :mod:`.laplace` go through, by the ELBO of the
member itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ..families.base import Tensors
from ..linalg.hessian import values_and_gradients
from ..linalg.host import apart, own_random_state
from .deadline import is_late
from .found import Found, Gaussian
from .laplace import FINAL, Search

#: nats: a promised decrease that ends the steps to the mode itself
EXACT = 1e-12
#: Newton steps to the mode of a posterior of independent entries, and the longest
STEPS, LONGEST = 40, 3.0
#: draws of a member at which it has the gradients of the posterior, to this share of their sds
DRAWS, SHARE = 8, 1e-2


class MemberSearch(Search):
    """A search whose Gaussians stand for the members of ``family`` with their mode and curvature."""

    def __init__(self, density: Callable[[Tensor], Tensor], like: Tensor, family: Any) -> None:
        super().__init__(density, like)
        self.compared = family

    def draws(self, family: Any, params: Tensors, n: int, common: bool = True) -> Tensor:
        # their noise is not normal
        return family.fixed_draws(params, n)

    def member(self, q: Gaussian, family: Any) -> Tensors:
        """That of q, or of the mode near it."""
        to_mode = [*takewhile(lambda _: not is_late(), self.newton(q.loc, EXACT))]
        found = [family.matched(*at) for at in [(q.loc, q.precision), *to_mode[-1:]]]
        elbos = [self.elbo(family, p, FINAL, 2.0) for p in found]
        return found[elbos.index(max(elbos))]


def conjugate(density: Callable[[Tensor], Tensor], family: Any, theta: Tensor) -> Tensors | None:
    """The member of a ``family`` of independent entries that the posterior is, if it is one.

    Newton steps for all entries at once, whose second derivatives come from one difference of gradients
    along random signs, lead from theta (d,) to the mode of any such member.  It is the posterior if at
    draws its score is that of ``density``, to a share of the root of the curvature, the score's sd.
    A density whose slopes move with other entries than their own has none, and costs two gradients.
    """
    width = 1e-4 if theta.dtype == torch.float64 else 1e-2
    with own_random_state(apart(1)), torch.no_grad():
        signs = 2.0 * torch.randint(2, (2, len(theta))).to(theta) - 1.0
        slopes = values_and_gradients(density, theta + signs)[1]
        moved = (slopes[0] - slopes[1]).abs() > SHARE * slopes.abs().amax()
        if bool((moved & (signs[0] == signs[1])).any()):
            return None
        for _ in range(STEPS):
            away = width * (2.0 * torch.randint_like(theta, 2) - 1.0)
            ends = torch.stack([theta - away, theta + away])
            before, after = values_and_gradients(density, ends)[1]
            curvature = (before - after) / (2.0 * away)
            step = 0.5 * (before + after) / curvature
            if not bool(step.isfinite().all() & (curvature > 0.0).all()):
                return None
            theta = theta + step.clamp(-LONGEST, LONGEST)
            if bool((step.abs() < 1e-3 * SHARE * curvature.rsqrt()).all()):
                break
        params = family.matched(theta, curvature.diag())
        draws = family.fixed_draws(params, DRAWS)
        score = values_and_gradients(density, draws)[1]
        own = values_and_gradients(lambda z: family.log_prob(params, z), draws)[1]
        same = (score - own).abs() <= SHARE * curvature.sqrt()
        return params if bool(same.all()) else None


def best_member(
    density: Callable[[Tensor], Tensor], family: Any, given: Tensors, points: Iterable[Tensor]
) -> Found:
    """The member of ``family`` with the largest ELBO among those to which the ``points`` (d,) lead."""
    with own_random_state(apart(0)), torch.no_grad():
        search = MemberSearch(density, family.mean(given), family)
        if exact := conjugate(density, family, family.mean(given)):
            elbos = [search.elbo(family, q) for q in (exact, given)]
            return Found(exact, (elbos[0],), elbos[1], search.evaluations, concave=True)
        return search.run(family, given, points)
