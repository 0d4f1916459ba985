r"""Vadam: Adam read as variational inference, the published baseline.

For a diagonal Gaussian with precision P = N s + delta, delta the curvature of the prior, N the
number of data, and the gradient G + grad(prior) of the loss (a sum over data, estimated by a
minibatch),

    s  <- (1 - b) s + b E[(G / N)^2]
    m  <- beta m + (1 - beta) (gradient / N)
    mu <- mu - lr  m^ / (sqrt(s^) + delta / N),   m^ = m / (1 - beta^k),  s^ = s / (1 - (1 - b)^k)

The square of the gradient of a minibatch of M data is about M times smaller than the sum of their
squares (for independent terms of mean 0), so s underestimates the curvature and q is too wide; and
the square root makes lr a length in the units of the parameters. VOGN has neither; Vadam is here to
compare with.

Sources: Khan et al. (2018, arXiv:1806.04854), section 3.3; as in their code q takes s without the
correction for bias.

Not for use where an answer matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pyro.optim import PyroOptim
from torch import Tensor

from ..families.base import Tensors
from .others_state import ADAM
from .schedules import Rate, rate_at
from .von import VON, VONRule

__all__ = ["Vadam", "VadamRule"]


@dataclass(frozen=True)
class VadamRule(VONRule):
    """VON with the square root of Adam in the step of the mean."""

    diagonal: ClassVar[bool] = True

    def _move(
        self, params: Tensors, m: Tensor, a: Tensor, grads: Tensors, k: Tensor
    ) -> tuple[Tensor, Tensor]:
        prior, count = grads["curvature.prior"], grads["curvature.count"]
        P = (-2.0 * params["log_scale"]).exp()
        s = ((P - prior) / count).clamp_min(0.0)
        unbiased = s / (1.0 - (1.0 - rate_at(self.curvature_lr, k)) ** (k + 1.0))
        move = a * (m / count) / (unbiased.sqrt() + prior / count)
        return move, (P * move.square()).sum().clamp_min(torch.finfo(P.dtype).tiny).sqrt()


class Vadam(VON):
    """Variational Adam, for ``AutoMeanFieldNormal``.

    ``loss=BatchedELBO(num_particles, curvature="squared_gradient")``; the data must lie in a plate,
    which tells their number.

    Args:
        guide: an ``AutoMeanFieldNormal``.
        lr: learning rate, in the units of the parameters, or a function of the step count.
        curvature_lr: 1 - beta_2, weight of a new squared gradient.
        momentum: beta_1.
        others: a ``PyroOptim`` for parameters that are not the guide's; see :class:`~pyro_ngvi.NGVB`.

    Example:
        >>> import pyro_ngvi as ngvi
        >>> def model():
        ...     pass
        >>> optim = ngvi.optim.Vadam(ngvi.AutoMeanFieldNormal(model), lr=0.01)
    """

    accepts: ClassVar[tuple[str | None, ...]] = ("squared_gradient",)
    rule_type: ClassVar[type[VONRule]] = VadamRule

    def __init__(
        self,
        guide: Any,
        lr: Rate = 0.001,
        curvature_lr: Rate = 0.001,
        momentum: float = 0.9,
        others: PyroOptim | None = ADAM,
    ) -> None:
        super().__init__(
            guide, lr, curvature_lr, momentum, safe=False, trust_radius=None, others=others
        )
