"""NGVB, the default optimizer: the rule of :mod:`.natural_gradient` with what suits each family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from pyro.optim import PyroOptim
from torch import Tensor

from ..families import MixtureNormal
from ..families.base import Family
from .host import NaturalGradientOptim
from .mixture import MixtureRule
from .natural_gradient import NaturalGradientRule, Schedule
from .rule import Averaging, Rule, Tail, as_averaging, require
from .schedules import RobbinsMonro, as_schedule
from .state import ADAM

#: gains for families whose Fisher matrix is not the Hessian of the loss
SLOW_DECAY = RobbinsMonro(scale=1.0 / 6.0, offset=20.0, power=0.5, patience=0.5)


def make_rule(
    family: Any,
    lr: float = 1.0,
    trust_radius: float | None = 1.0,
    schedule: Schedule | Callable[[Tensor], Tensor] | str | None = None,
    momentum: float | None = None,
    averaging: Averaging | float | bool | None = None,
    **further: Any,
) -> NaturalGradientRule:
    """The rule for a family; ``None`` for the last three stands for what suits the family."""
    require(isinstance(lr, int | float) and 0.0 < lr <= 1.0, "lr", "lie in (0, 1]", lr)
    positive = trust_radius is None or trust_radius > 0.0
    require(positive, "trust_radius", "be positive or None", trust_radius)
    require(momentum is None or 0.0 <= momentum < 1.0, "momentum", "lie in [0, 1)", momentum)
    given: dict[str, Any] = {"noise_radius": family.noise_radius, "trust_radius": trust_radius}
    if trust_radius is None:
        given = dict.fromkeys(("noise_radius", "trust_radius", "outlier"), torch.inf)
    # a schedule of the user's own comes without momentum and averaging unless asked for
    if schedule is None and not family.newton_like:
        given |= {"schedule": SLOW_DECAY, "momentum": 0.9, "averaging": Tail()}
    if schedule is not None:
        given["schedule"] = as_schedule(schedule)
    if momentum is not None:
        given["momentum"] = momentum
    if averaging is not None:
        given["averaging"] = as_averaging(averaging)
    return NaturalGradientRule(family, lr, **given, **further)


def rule_for(family: Any, **arguments: Any) -> Rule:
    """:func:`make_rule`, or for a mixture one for its components and one for their weights."""
    if not isinstance(family, MixtureNormal):
        return make_rule(family, **arguments)
    component = make_rule(family.component, **arguments)
    arguments |= {"momentum": None, "averaging": None}
    weights = make_rule(family.weights, **arguments)
    return MixtureRule(family, component, weights, component.averaging)


class NGVB(NaturalGradientOptim):
    """Natural-gradient variational Bayes: an optimizer for ``pyro.infer.SVI``.

    It trains our guides (or those parts of an ``AutoGuideList`` that are ours) by natural gradient
    and hands every other parameter, in the same backward pass, to ``others``.  The defaults need no
    tuning; the equations are in :mod:`pyro_ngvi.optim.natural_gradient`.

    Args:
        guide: the guide that SVI trains, or a list that contains guides of ours.
        lr: factor in (0, 1] on the gain of the schedule, for careful runs; 1 is right.
        trust_radius: largest Fisher length of a step, nats^(1/2), until steps that agree show that
            they may be longer; at radius 1 KL between successive q is about 1/2 nat, up to 2 in
            factor families.  ``None``: no bound (exact gradients only).
        schedule: "noise" (:class:`NoiseClock`), "constant", a :class:`RobbinsMonro`, or a function
            from the step count (0-dim tensor, 0, 1, ...) to the gain.
        momentum: heavy-ball coefficient in [0, 1) for the location of a Gaussian, and for all of an
            exponential family.
        averaging: ``False``; ``True`` for the average of about the last two fifths of the run
            (:class:`Tail`); or a number w for weights (log k)^w.  The guide then holds the average.
        coordinates: "local" (default) or "natural".
        others: a ``PyroOptim`` for parameters that are not natural, for instance
            ``pyro.optim.Adam({"lr": 1e-3})``.  By default Adam with a learning rate of 0.01, which a
            UserWarning says at the first step that has some; ``None`` refuses them.  Where the best q
            moves with them (length-scales) pass ``averaging=False``: an average would lag behind.

    ``None`` for schedule, momentum or averaging takes what suits the family.

    Not for: losses that are not an ELBO (RenyiELBO, ReweightedWakeSleep, EnergyDistance), losses scaled
    by ``poutine.scale(..., 1 / N)``, for which the gain, at most 1, cannot make up, and guides of other
    packages.

    Raises:
        ValueError: for a guide that is not ours, arguments out of range, coordinates that a family
            does not have, or (at a step) parameters that nobody trains.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> model = lambda: pyro.sample("x", dist.Normal(3.0, 2.0))
        >>> guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=ngvi.guides.init_to_center)  # sd 0.1
        >>> optim = ngvi.NGVB(guide)
        >>> svi = SVI(model, guide, optim, Trace_ELBO(4, vectorize_particles=True))
        >>> for _ in range(300):
        ...     loss = svi.step()
        >>> print(f"{guide.loc.item():.2f} {guide.log_scale.exp().item():.2f}")
        3.00 2.00
        >>> optim.report().skipped
        0
    """

    suits = "pyro_ngvi.AutoFullRankNormal(model)"
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
        arguments: dict[str, Any] = {"lr": lr, "trust_radius": trust_radius, "schedule": schedule}
        arguments |= {"momentum": momentum, "averaging": averaging, "coordinates": coordinates}
        super().__init__(guide, others, partial(rule_for, **arguments))


class NaturalGradient(NaturalGradientOptim):
    """Steps the guides of this package by a rule of your own.

    The rule says where to go; finiteness, counts, averaging, reports, saving and what becomes of other
    parameters are as for every optimizer of this package.

    Args:
        guide: the guide that SVI trains, or a list that contains guides of ours.
        rule: a function of the family that gives its :class:`~pyro_ngvi.optim.Rule`; the class of a
            rule whose other fields have defaults is one.  :class:`~pyro_ngvi.optim.Rule` writes one.
        others: a ``PyroOptim`` for parameters that are not natural; see :class:`NGVB`.

    Raises:
        ValueError: for a guide that is not ours, or that the rule refuses.

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> from pyro_ngvi.optim.natural_gradient import NaturalGradientRule
        >>> model = lambda: pyro.sample("x", dist.Normal(3.0, 2.0))
        >>> guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=ngvi.guides.init_to_center)
        >>> optim = ngvi.optim.NaturalGradient(guide, NaturalGradientRule)
        >>> svi = pyro.infer.SVI(model, guide, optim, ngvi.BatchedELBO(8))
        >>> losses = [svi.step() for _ in range(50)]
        >>> optim.report().outcome, round(guide.log_scale.exp().item(), 2)  # the sd was 0.1
        ('accepted', 2.0)
    """

    suits = "pyro_ngvi.AutoFullRankNormal(model)"

    def __init__(
        self, guide: Any, rule: Callable[[Family], Rule], others: PyroOptim | None = ADAM
    ) -> None:
        super().__init__(guide, others, rule)

    def make_rule(self, family: Family) -> Rule:
        made = super().make_rule(family)
        self.accepts = made.accepts
        return made
