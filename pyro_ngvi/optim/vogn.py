r"""VOGN: variational online Gauss-Newton, for networks and other models with many parameters.

:mod:`pyro_ngvi.optim.von` with the Gauss-Newton curvature H = sum_i s_i g_i g_i' + prior, g_i the
gradient of a single datum, which is positive semi-definite: the printed update needs no correction,

    P <- (1 - b) P + b H,   mu <- mu - a (P + damping)^-1 m,   m the average of gradients, momentum 0.9.

Source: Khan et al. (2018, arXiv:1806.04854), algorithm VOGN; momentum and damping as in Osawa et al.
(2019, arXiv:1906.02506).  In their symbols P = N s + delta with the prior precision delta, which is
here the curvature of the model's own prior, whatever it is; the published 1 - beta_2 is b.  Their
damping enters the standard deviations too; here it does not, so that the posterior stays the
model's.

For a network start at ``init_loc_fn=model.init_to_module`` (see ``pyro_ngvi.nn.bayesianize``) with
a small ``init_scale``, 0.01 to 0.03: from the default 0.1 the sds of a network of some thousand
weights can grow to the prior's before the means have learnt.

Not for small models: :class:`~pyro_ngvi.NGVB` needs no rates there, and the exact Hessian is cheap.
"""

from __future__ import annotations

from typing import Any, ClassVar

from .rule import Averaging
from .schedules import DEFAULT_RATE, Rate
from .von import VON

__all__ = ["VOGN"]


class VOGN(VON):
    """Variational online Gauss-Newton: :class:`~pyro_ngvi.optim.VON` with the settings for networks.

    ``loss=BatchedELBO(num_particles, curvature="gauss_newton")``; the data must lie in a plate.

    Args:
        guide: an ``AutoMeanFieldNormal`` (or ``AutoFullRankNormal``).
        lr: rate a of the mean, in (0, 1], or a function of the step count; by default
            max(0.01, 1 / (10 + k^0.75)).
        curvature_lr: rate b of the precision, likewise; small enough to average over the data.
        momentum: weight of the past in the average of the gradients, bias-corrected.
        averaging: as in :class:`~pyro_ngvi.optim.VON`; none by default.
        further: ``damping``, ``trust_radius`` and ``others`` of :class:`~pyro_ngvi.optim.VON`.

    A warm-up of the KL term is the loss's affair: ``loss.kl_weight``, see
    :class:`~pyro_ngvi.BatchedELBO`.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> import pyro_ngvi as ngvi
        >>> _ = torch.manual_seed(0)
        >>> X = torch.randn(100, 2)
        >>> y = (X[:, 0] + 0.5 * torch.randn(100) > 0).float()
        >>> def model(X, y):
        ...     w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)
        >>> guide = ngvi.AutoMeanFieldNormal(model)
        >>> loss = ngvi.BatchedELBO(4, curvature="gauss_newton")
        >>> svi = SVI(model, guide, ngvi.optim.VOGN(guide), loss)
        >>> for _ in range(200):
        ...     _ = svi.step(X, y)
        >>> bool(guide.median()["w"][0] > 1.0)
        True
    """

    accepts: ClassVar[tuple[str | None, ...]] = ("gauss_newton",)

    def __init__(
        self,
        guide: Any,
        lr: Rate = DEFAULT_RATE,
        curvature_lr: Rate = DEFAULT_RATE,
        momentum: float = 0.9,
        *,
        averaging: Averaging | float | bool = False,
        **further: Any,
    ) -> None:
        super().__init__(
            guide, lr, curvature_lr, momentum, safe=False, averaging=averaging, **further
        )
