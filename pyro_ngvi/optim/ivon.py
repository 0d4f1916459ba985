r"""IVON: improved variational online Newton, curvature at the price of the gradient.

:mod:`pyro_ngvi.optim.von` in its safe form for a diagonal precision, with the curvature from the
reparameterised gradient alone (Price's theorem), for draws z_s = mu + sigma eps_s:

    H = E[ P (z - mu) o grad(-log p(y, z)) ]
    P <- P + b (H - P) + b^2 / 2 (H - P)^2 / P          stays positive, whatever the noise in H
    mu <- mu - a P_new^-1 m,   m the average of gradients, bias-corrected.

Source: Shen et al. (2024, arXiv:2402.17641), after Lin, Schmidt & Khan (2020); written from the
equations. In their symbols P = ess (h + weight_decay), and the weight decay is the prior of the
model here: its precision is ess * weight_decay. Their ``rescale_lr`` makes lr the factor on m / ((h
+ delta) / (h_0 + delta)), which is our a: a factor on the natural step, without units. beta_1 =
momentum, 1 - beta_2 = b.

*Sticking the landing* (on in our guides) evaluates H - P from grad(log q - log p), whose noise vanishes
as q approaches the posterior.

**Rates.**  b = 1e-5, as published for ImageNet, never learns a variance on a small problem: after k
steps a share (1 - b)^k of the initial precision is left.  The default b = max(0.01, 1 / (10 + k^0.75))
is an average over all that has been seen, later over the last hundred steps.

**Trust region.**  Entry by entry, as the precision is diagonal, with r = ``trust_radius``:

    |move_i| <= r sigma_i,        and |g_i| <= 3 r / (a sigma_i) before g enters m,

so that q gains at most r^2 / 2 nats an entry in a step, and no one gradient asks for more than 3 r sds.
A bound on the root mean square over d entries lets a single stiff one move by sqrt(d) sds: the log of
a noise sd among the weights of a network has curvature 2 N, which a start at sd 0.1 does not know.
It is then thrown to where the likelihood has no curvature, its sd grows, and the gradients it met
on the way stay in m.

For a network start at ``init_loc_fn=model.init_to_module`` (see ``pyro_ngvi.nn.bayesianize``) with
a small ``init_scale``, 0.01 to 0.03: from the default 0.1 the sds can grow to the prior's before
the means learn.

Not for guides with correlations (:class:`~pyro_ngvi.optim.VON`, :class:`~pyro_ngvi.NGVB`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pyro.optim import PyroOptim
from torch import Tensor

from ..families.base import Tensors
from .natural_gradient import OUTLIER
from .others_state import ADAM
from .rule import Averaging
from .schedules import DEFAULT_RATE, Rate
from .von import VON, VONRule

__all__ = ["IVON", "IVONRule"]


@dataclass(frozen=True)
class IVONRule(VONRule):
    """VON with a trust region in the step of the mean, entry by entry."""

    diagonal: ClassVar[bool] = True

    def _mean_step(
        self, params: Tensors, grads: Tensors, state: Tensors, a: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # few passes over memory, which is what a step costs with a network's weights
        radius, sd = self.trust_radius, params["log_scale"].exp()
        bound = (OUTLIER * radius / a) / sd
        gradient = grads["loc"].clamp(-bound, bound)
        m = torch.lerp(gradient, state["gradient"], self.momentum)
        wanted = (m * sd).mul_(a / (1.0 - self.momentum ** (state["step"] + 1.0)))
        kept = wanted.clamp(-radius, radius)
        damped = torch.linalg.vector_norm(wanted, torch.inf) > radius
        return m, sd.mul_(kept), torch.linalg.vector_norm(kept), damped


class IVON(VON):
    """Improved variational online Newton, for ``AutoMeanFieldNormal``, with any reparameterised ELBO.

    Args:
        guide: an ``AutoMeanFieldNormal``.
        lr: rate a of the mean, in (0, 1], or a function of the step count.
        curvature_lr: rate b of the precision, likewise.
        momentum: weight of the past in the average of the gradients.
        trust_radius: largest move of each entry of the mean in its sds, or ``None``.
        averaging, others: as in :class:`~pyro_ngvi.optim.VON`.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> import pyro_ngvi as ngvi
        >>> def model():
        ...     pyro.sample("x", dist.Normal(torch.tensor([3.0, -1.0]), 2.0).to_event(1))
        >>> guide = ngvi.AutoMeanFieldNormal(model)
        >>> svi = SVI(model, guide, ngvi.optim.IVON(guide), Trace_ELBO())
        >>> for _ in range(500):
        ...     _ = svi.step()
        >>> guide.median()["x"].round(decimals=1), guide.log_scale.exp().round(decimals=1)
        (tensor([ 3., -1.]), tensor([2., 2.], grad_fn=<RoundBackward1>))
    """

    accepts: ClassVar[tuple[str | None, ...]] = ("price", None)
    rule_type: ClassVar[type[VONRule]] = IVONRule

    def __init__(
        self,
        guide: Any,
        lr: Rate = DEFAULT_RATE,
        curvature_lr: Rate = DEFAULT_RATE,
        momentum: float = 0.9,
        trust_radius: float | None = 1.0,
        averaging: Averaging | float | bool = False,
        others: PyroOptim | None = ADAM,
    ) -> None:
        super().__init__(
            guide,
            lr,
            curvature_lr,
            momentum,
            trust_radius=trust_radius,
            averaging=averaging,
            others=others,
        )
