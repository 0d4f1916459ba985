"""NGVB: natural-gradient variational Bayes for families whose Fisher matrix is known.

The step, its equations and their sources: :mod:`pyro_ngvi.rules.natural_gradient`.

Not for: losses that are not an ELBO (RenyiELBO, ReweightedWakeSleep, EnergyDistance: the first left
the posterior of a linear regression by thousands of nats), losses scaled by ``poutine.scale(...,
1 / N)`` (natural gradients need no such scale, and the gain, at most 1, cannot make up for it), and
guides of other packages, whose Fisher matrix is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from pyro.optim import PyroOptim
from torch import Tensor

from ..families.base import Family
from ..rules.averaging import Averaging
from ..rules.natural_gradient import NaturalGradientRule, make_rule, rule_arguments
from ..rules.schedules import Schedule
from .base import NaturalGradientOptim, describe
from .others_state import ADAM

__all__ = ["NGVB"]


class NGVB(NaturalGradientOptim):
    """Natural-gradient variational Bayes: an optimizer for ``pyro.infer.SVI``.

    It trains our guides (or those parts of an ``AutoGuideList`` that are ours) by natural gradient
    and hands every other parameter, in the same backward pass, to ``others``.  The defaults need no
    tuning; the equations are in :mod:`pyro_ngvi.rules.natural_gradient`.

    Args:
        guide: the guide that SVI trains, or a list that contains guides of ours.
        lr: factor in (0, 1] on the gain of the schedule, for careful runs; 1 is right.
        trust_radius: largest Fisher length of a step, nats^(1/2); KL between successive q is
            trust_radius^2 / 2 to second order, and at radius 1 up to 2 nats in factor families,
            whose metric changes fast.  ``None``: no bound (for exact gradients only).
        schedule: "noise" (:class:`NoiseClock`), "constant", a :class:`RobbinsMonro`, or a function
            from the step count (0-dim tensor, 0, 1, ...) to the gain.
        momentum: heavy-ball coefficient in [0, 1) for the location of a Gaussian, and for all of an
            exponential family.
        averaging: ``False``; ``True`` for the average of about the last two fifths of the run
            (:class:`Tail`); or a number w for weights (log k)^w.  The guide then holds the average.
        coordinates: "local" (default) or "natural".
        others: a ``PyroOptim`` for parameters that are not natural, for instance
            ``pyro.optim.Adam({"lr": 1e-3})``.  By default Adam with a learning rate of 0.01, which a
            UserWarning says at the first step that has some; ``None`` refuses them.  Where the best
            q moves with them (diagonals of
            Walsh-Hadamard layers, length-scales) pass ``averaging=False`` for a mean-field or factor
            guide: its average lags behind, and they do not.

    ``None`` for schedule, momentum or averaging takes what suits the family, see there:
    the noise clock alone for full rank; a slow decay with momentum and averaging for the others.

    Raises:
        ValueError: for a guide that is not ours, arguments out of range, coordinates that a family
            does not have, or (at a step) parameters that nobody trains.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> import pyro_ngvi as ngvi
        >>> def model():
        ...     pyro.sample("x", dist.Normal(3.0, 2.0))
        >>> guide = ngvi.AutoMeanFieldNormal(model)
        >>> optim = ngvi.NGVB(guide)
        >>> svi = SVI(model, guide, optim, Trace_ELBO(4, vectorize_particles=True))
        >>> for _ in range(300):
        ...     loss = svi.step()
        >>> print(f"{guide.loc.item():.2f} {guide.log_scale.exp().item():.2f}")
        3.00 2.00
        >>> optim.report().skipped
        0
    """

    #: curvature in the loss takes the place of the gradient of the scales
    accepts: ClassVar[tuple[str | None, ...]] = (None, "price", "hessian", "gauss_newton")

    def __init__(
        self,
        guide: Any,
        lr: float = 1.0,
        trust_radius: float | None = 1.0,
        schedule: Schedule | Callable[[Tensor], Tensor] | str | None = None,
        momentum: float | None = None,
        averaging: Averaging | float | bool | None = None,
        coordinates: str = "local",
        others: PyroOptim | None = ADAM,
    ) -> None:
        self._rule_arguments = rule_arguments(
            lr, trust_radius, schedule, momentum, averaging, coordinates=coordinates
        )
        super().__init__(guide, others)
        if not self._rules:
            raise ValueError(
                f"NGVB trains guides whose Fisher matrix it knows, and found none in "
                f"{describe(guide)}. Use for instance pyro_ngvi.AutoFullRankNormal(model); for other "
                f"guides there is pyro_ngvi.IFVB, which learns the Fisher matrix."
            )

    def make_rule(self, family: Family) -> NaturalGradientRule:
        return make_rule(family, self._rule_arguments)
