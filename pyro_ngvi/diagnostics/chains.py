"""Short Hamiltonian Monte Carlo chains, all at once, from draws of a guide."""

import math
from collections.abc import Callable

import pyro
import torch
from torch import Tensor

from ..linalg.hessian import values_and_gradients
from ..runtime.model_density import NaNWhereSingular
from ..runtime.waiting import waiting
from .draws import MOST_DOUBLES

#: mean acceptance that leaps aim at, steps that adapt them, and the first leap times d^(1/4)
ACCEPTED, ADAPTING, LEAP = 0.8, 4, 1.2
#: leapfrog steps of a trajectory, at most, and its length in sds of the guide: a quarter of a period
MOST_LEAPS, LENGTH = 16, 0.5 * math.pi
#: last states of a chain that are kept, if so many follow the adaptation and memory allows
KEPT = 4


def run_chains(
    log_prob: Callable[[Tensor], Tensor], start: Tensor, num_steps: int
) -> tuple[Tensor, float]:
    """The last states (K, S, d) of all chains at once on ``log_prob``, (S, d) to (S,), and the share
    accepted."""
    S, d = start.shape
    center = start.mean(0)
    factor, info = torch.linalg.cholesky_ex(torch.cov(start.mT).reshape(d, d))
    if 4 * d > S or bool(info):  # the covariance is known on its diagonal alone
        factor = torch.diag_embed(start.std(0).clamp_min(torch.finfo(start.dtype).tiny))

    def gradient(u: Tensor) -> tuple[Tensor, Tensor]:
        # far out parameters leave their support: no density there, and no error
        with pyro.validation_enabled(False), NaNWhereSingular():
            return values_and_gradients(lambda v: log_prob(center + v @ factor.mT), u)

    u = torch.linalg.solve_triangular(factor, (start - center).mT, upper=False).mT
    value, grad = gradient(u)
    leap, rates, kept = LEAP / d**0.25, [], []
    most = max(1, min(KEPT, MOST_DOUBLES // start.numel()))
    for step in waiting("chains that judge the guide", range(num_steps), "step"):
        momentum = torch.randn_like(u)
        length = LENGTH * (0.5 + float(torch.rand(())))
        leaps = min(MOST_LEAPS, max(1, math.ceil(length / leap)))
        at, p, slope, new = u, momentum, grad, value
        for _ in range(leaps):
            p = p + 0.5 * leap * slope
            at = at + leap * p
            new, slope = gradient(at)
            p = p + 0.5 * leap * slope
        energy = new - value + 0.5 * (momentum.square().sum(1) - p.square().sum(1))
        chance = energy.nan_to_num(-math.inf, -math.inf, -math.inf).clamp_max(0.0).exp()
        taken = torch.rand_like(chance) < chance
        u = torch.where(taken[:, None], at, u)
        grad, value = torch.where(taken[:, None], slope, grad), torch.where(taken, new, value)
        rate = float(chance.mean())
        if step < ADAPTING:
            leap = min(leap * math.exp(rate - ACCEPTED), LENGTH)
        else:
            rates.append(rate)
            kept = [*kept, u][-most:]
    return center + torch.stack(kept) @ factor.mT, sum(rates) / len(rates)
