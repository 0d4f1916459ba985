r"""Monte-Carlo uncertainty of averaged variational parameters, and the posterior widened by it.

A run ends at lambda_bar = sum_k w_k lambda_k (sum_k w_k = 1), which differs from the optimum lambda*
because the gradients were noisy.  With slowly decaying steps (Polyak & Juditsky 1992; theorem 5.3 of
Godichon-Baggioni, Nguyen & Tran 2024), whatever matrix preconditions the steps,

    lambda_bar - lambda*  ~  N(0, C),   C = H^-1 Sigma H^-1 sum_k w_k^2,

with H the Hessian of the expected loss at lambda* and Sigma the covariance of one step's gradient.  For
equal weights sum_k w_k^2 = 1 / n.  The widened posterior (5.4) is q_lambda averaged over
lambda ~ N(lambda_bar, C): each draw has a lambda of its own.

Both matrices are measured at lambda_bar with the user's own loss: Sigma from repeated gradients, H from
central differences of gradients with common random numbers, which is right for every gradient
estimator, sticking the landing included.  Coordinates: the stored, unconstrained ones.  In runs that
are short beside the memory of the steps, 1 / (b_k times curvature), C is too large: the error of an
average needs that long to build up.

Directions in which the loss is flat to within ``FLAT`` of the largest curvature, in units of the
Fisher matrix (redundant parameters, as in AutoMultivariateNormal), are left out: they do not change q.

Not for: runs that have not converged (C knows nothing of bias), steps that decay like 1/k or faster,
many parameters (2 D gradients per repetition).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from ..families.base import Tensors, entry_name, pack, unpack
from ..linalg.host import own_random_state

__all__ = ["AsymptoticCovariance", "measure_covariance", "widened_draws", "without_lag"]

#: relative curvature below which a direction counts as flat
FLAT = 1e-4
#: half width of the differences, in Fisher standard deviations
WIDTH = 1e-3


@dataclass(frozen=True)
class AsymptoticCovariance:
    """Covariance C (D, D) of the averaged parameters around the optimum.

    Attributes:
        matrix: C, in the order of ``average``, each parameter flattened.
        average: the averaged parameters by name, unconstrained.
    """

    matrix: Tensor
    average: Tensors

    @property
    def stddev(self) -> Tensors:
        """Standard errors by parameter name, in the shapes of the parameters."""
        return unpack(self.matrix.diagonal().clamp_min(0.0).sqrt(), self.average)

    def sample(self, n: int) -> list[Tensors]:
        """n draws of all parameters from N(average, C)."""
        values, vectors = torch.linalg.eigh(self.matrix)
        noise = torch.randn(n, len(values), dtype=values.dtype, device=values.device)
        moved = pack(self.average) + (noise * values.clamp_min(0.0).sqrt()) @ vectors.mT
        return [unpack(row, self.average) for row in moved]


def measure_covariance(
    gradient: Callable[[], Tensor],
    leaves: Tensors,
    scale: Tensor,
    weight: Tensor,
    num_gradients: int,
    num_hessians: int,
) -> AsymptoticCovariance:
    """C at the present values of ``leaves``.

    ``gradient()`` is one stochastic gradient of the loss, packed (D,); ``scale`` (D,) the unit of each
    coordinate; ``weight`` is sum_k w_k^2.
    """
    average = {name: p.detach().clone() for name, p in leaves.items()}
    center = pack(average)
    gradients = torch.stack([gradient() for _ in range(num_gradients)]) * scale
    noise = torch.cov(gradients.mT).reshape(len(center), len(center))
    hessian = torch.zeros_like(noise)
    try:
        for _ in range(num_hessians):
            seed = int(torch.randint(2**31, ()))
            rows = []
            for i in range(len(center)):
                ends = []
                for sign in (1.0, -1.0):
                    moved = center.clone()
                    moved[i] += sign * WIDTH * scale[i]
                    _install(leaves, unpack(moved, average))
                    with own_random_state(seed):  # common random numbers
                        ends.append(gradient() * scale)
                rows.append((ends[0] - ends[1]) / (2.0 * WIDTH))
            hessian += torch.stack(rows) / num_hessians
    finally:
        _install(leaves, average)
    values, vectors = torch.linalg.eigh(0.5 * (hessian + hessian.mT))
    if bool(values[0] < -0.05 * values[-1]):
        worst = int(vectors[:, 0].abs().argmax())
        raise ValueError(
            f"The loss curves downwards at the average (least eigenvalue {float(values[0]):.2g}, "
            f"largest {float(values[-1]):.2g}, foremost parameter {entry_name(worst, average)!r}): "
            "the run has not converged, so there is no asymptotic covariance. Take more steps, or "
            "raise num_hessians."
        )
    inverse = torch.where(values > FLAT * values[-1], 1.0 / values, 0.0)
    solved = (vectors * inverse) @ vectors.mT
    matrix = weight * (solved @ noise @ solved) * scale[:, None] * scale
    return AsymptoticCovariance(matrix, average)


def widened_draws(
    guide: Callable[[], Any], leaves: Tensors, covariance: AsymptoticCovariance, num_samples: int
) -> Tensors:
    """Draws (num_samples, ...) of the guide's latent sites, each at a lambda of its own."""
    draws: dict[str, list[Tensor]] = {}
    try:
        for sample in covariance.sample(num_samples):
            _install(leaves, sample)
            with torch.no_grad(), poutine.block():
                trace: Any = poutine.trace(guide).get_trace()
            for name, site in trace.iter_stochastic_nodes():
                if not site["infer"].get("is_auxiliary"):
                    draws.setdefault(name, []).append(site["value"])
    finally:
        _install(leaves, covariance.average)
    return {name: torch.stack(values) for name, values in draws.items()}


@contextmanager
def without_lag(blocks: list[Any]) -> Iterator[None]:
    """Let guides that hold an average draw from it while gradients are recorded, too."""
    kept = []
    for block in blocks:
        answer = {name: p.detach().clone() for name, p in block.natural_params().items()}
        kept.append((block, block.iterate_offset() or None, answer))
        block.set_iterate_offset(None)
    try:
        yield
    finally:
        for block, lag, answer in kept:
            block.set_iterate_offset(lag, answer)


@torch.no_grad()
def _install(leaves: Tensors, values: Tensors) -> None:
    for name, p in leaves.items():
        p.copy_(values[name])
