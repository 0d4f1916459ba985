"""Algorithms 1 and 2 as pure rules, on one vector in the coordinates of the paper.

What ``benchmarks.baselines`` does within SVI, without Pyro: the gradient and the scores are functions
of the vector.  Step k = 1, 2, ... has the length c_a / (c_a' + k)^alpha.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_ngvi.optim.blocks import Coordinates
from pyro_ngvi.optim.ifvb_rule import IFVBRule
from pyro_ngvi.optim.ngvb import make_rule
from pyro_ngvi.optim.schedules import Custom

from ..baselines import PaperDense

__all__ = ["Problem", "Run", "inversion_free", "paper_rule"]


@dataclass(frozen=True)
class Problem:
    """A variational problem on one vector lambda (D,), with exact gradients.

    ``gradient(lambda) -> (D,)`` is that of the loss; ``scores(lambda, n) -> (n, D)`` draws from q;
    ``valid(lambda)`` says whether there is a q with these numbers.
    """

    gradient: Callable[[Tensor], Tensor]
    scores: Callable[[Tensor, int], Tensor]
    valid: Callable[[Tensor], bool]


@dataclass(frozen=True)
class Run:
    """Iterates (n + 1, D) and their averages (equal to them without averaging), the start first.

    ``left`` is the step after which lambda was no longer that of a distribution; the run ends there.
    """

    iterates: Tensor
    averages: Tensor
    left: int | None


def paper_rule(
    c_a: float,
    c_a_prime: float,
    alpha: float,
    *,
    averaging: bool = False,
    eps: float = 1.0,
    c_beta: float = 0.0,
    beta: float = 0.25,
    frame: Any = None,
) -> IFVBRule:
    """Algorithm 1, or 2 with ``averaging``, for params {"lambda": (D,)}; H^-1 is D x D.

    ``frame`` may move lambda otherwise than along a straight line.
    """
    frame = Coordinates(("lambda",)) if frame is None else frame
    return IFVBRule(
        make_rule(
            frame,
            1.0,
            None,
            Custom(lambda k: c_a * (c_a_prime + 1.0 + k) ** -alpha),
            0.0,
            2.0 if averaging else False,
            clip_norm=None,
        ),
        PaperDense(eps, c_beta, beta),
    )


def inversion_free(
    problem: Problem,
    start: Tensor,
    n: int,
    rule: IFVBRule,
    *,
    num_scores: int = 1,
    scores_before: int = 0,
    seed: int = 0,
) -> Run:
    """``n`` steps from ``start``; scores are drawn at the average where there is one.

    ``scores_before`` scores, drawn at the start, enter H before the first step.
    """
    torch.manual_seed(seed)
    params = {"lambda": start.clone()}
    before = problem.scores(start, scores_before) if scores_before else None
    state = rule.init(params, before)
    iterates, averages, left = [start], [start], None
    for k in range(1, n + 1):
        at = averages[-1] if rule.averaging else params["lambda"]
        grads = {"lambda": problem.gradient(params["lambda"])}
        scores = {"scores": problem.scores(at, num_scores)}
        params, state, _ = rule.update(params, grads, state, scores)
        iterates.append(params["lambda"])
        averages.append(state["average"]["lambda"] if rule.averaging else params["lambda"])
        if not problem.valid(iterates[-1]):
            left = k
            break
    return Run(torch.stack(iterates), torch.stack(averages), left)
