"""A start in a family that is not Gaussian: the member with the mode and curvature of the posterior.

In the coordinates of an exponential family a conjugate posterior is a member, so that one with its mode
and its curvature there is the posterior.  Others have the best of what the Newton steps and the steps
on expectations of :mod:`.laplace` go through, by the ELBO of the member itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ..families.base import Tensors
from ..linalg.host import apart, own_random_state
from .deadline import is_late
from .found import Found, Gaussian
from .laplace import FINAL, Search

#: nats: a promised decrease that ends the steps to the mode itself
EXACT = 1e-12


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


def best_member(
    density: Callable[[Tensor], Tensor], family: Any, given: Tensors, points: Iterable[Tensor]
) -> Found:
    """The member of ``family`` with the largest ELBO among those to which the ``points`` (d,) lead."""
    with own_random_state(apart(0)), torch.no_grad():
        return MemberSearch(density, family.mean(given), family).run(family, given, points)
