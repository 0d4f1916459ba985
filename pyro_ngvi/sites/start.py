r"""First targets of all: every datum for itself, from its own prior.

At the prior, expectations tell nothing of where the data are: under a wide one they are flat or
overflow, and the first Newton step of a count of 1,000 goes to f = 600.  So each site starts as the one
that its datum would have alone, under N(m_n, C_n) with C_n made narrower than 1:

    a <- V (C_n^-1 m_n + nu),  nu = g + Lambda a,  Lambda = -H >= 0,  V = (C_n^-1 + Lambda)^-1,

g and H the expectations under N(a, V), with steps of at most 2 in every entry: the scale of the usual
links.  Quadratic terms come out as they are, whatever the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from .._known import known
from ..linalg.eigen import positive_part
from ..linalg.products import matvec
from .expectation import Expected, Points, expectations

__all__ = ["first_targets"]

#: rounds at most, the longest step of one, and steps so short that they end them
ROUNDS, LONGEST, SHORT = 8, 2.0, 0.2


@torch.no_grad()
def first_targets(
    log_likelihood: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    marginals: Mapping[str, tuple[Tensor, Tensor]],
    points: Mapping[str, Points],
) -> dict[str, Expected]:
    """Expectations whose targets, at the mean of ``marginals``, are the sites of data alone."""
    prior = {name: _narrowed(*pair) for name, pair in marginals.items()}
    inverse = {name: torch.linalg.inv_ex(C)[0] for name, (_, C) in prior.items()}
    state = dict(prior)
    expected = expectations(log_likelihood, state, points)
    settled = torch.zeros((), dtype=torch.bool, device=next(iter(points.values())).x.device)
    for _ in range(ROUNDS):
        moved, longest = {}, []
        for name, (a, V) in state.items():
            mean, S = prior[name][0], inverse[name]
            e = expected[name]
            Lambda = positive_part(-e.hessian)
            new = torch.linalg.inv_ex(S + Lambda)[0]
            natural = matvec(S, mean) + e.gradient
            natural = natural + matvec(Lambda, a)
            step = matvec(new, natural) - a
            step = step.clamp(-LONGEST, LONGEST)
            longest.append(step.abs().nan_to_num(0.0).max() if step.numel() else step.sum())
            usable = (
                torch.isfinite(step).all(-1) & torch.isfinite(new).flatten(1).all(-1) & ~settled
            )
            moved[name] = (
                torch.where(usable.unsqueeze(-1), a + step, a),
                torch.where(usable.reshape(-1, 1, 1), new, V),
            )
        state = moved
        expected = expectations(log_likelihood, state, points)
        settled = settled | (torch.stack(longest).max() < SHORT)
        if known(settled):  # elsewhere the rounds left change nothing
            break
    targets = {}
    for name, e in expected.items():
        # as a function of f at the mean of q, from which CVI takes its targets
        Lambda = torch.where(e.quadratic.reshape(-1, 1, 1), -e.hessian, positive_part(-e.hessian))
        shift = state[name][0] - marginals[name][0]
        gradient = e.gradient + matvec(Lambda, shift)
        targets[name] = replace(e, gradient=gradient, hessian=-Lambda)
    return targets


def _narrowed(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """The marginals (n, k), (n, k, k) with variances of at most about 1."""
    size = torch.diagonal(covariance, dim1=-2, dim2=-1).mean(-1).clamp_min(1.0)
    floor = torch.finfo(mean.dtype).eps * torch.ones_like(mean)
    return mean, covariance / size.reshape(-1, 1, 1) + torch.diag_embed(floor)
