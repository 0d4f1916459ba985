r"""One step along a natural gradient: a trust region in nats, and no step size to tune.

For a family with Fisher matrix F, from the Euclidean gradient g of the loss, with |.| the Fisher norm:

    G = F^-1 g                                            natural gradient
    b = lr b_k min(1, 3 max(|G|_typical, 1) / |G|)        gain, outliers shortened
    move = b G + beta move                                momentum beta, of a Gaussian on its location
    move <- move min(1, R_k / |move|)                     trust radius
    lambda <- retract(lambda, -move)                      never leaves the domain

**Gain.**  b_k comes from the schedule.  For families whose Fisher matrix is the Hessian of the loss at
a Gaussian posterior (full rank) it is the Kalman gain of
:class:`~pyro_ngvi.optim.schedules.NoiseClock`, and beta is 0.  For the others (mean field, factor) the
Hessian in the Fisher metric has eigenvalues from near 0 to about d, so no single gain suits all
directions: there b_k = (1 + k/20)^(-1/2) / 6, where k waits while signal dominates, with momentum
beta = 0.9, and iterates are averaged.

**Radius.**  KL between successive q is about R^2 / 2, hence one radius serves every model: R_k =
min(trust_radius, 3 sqrt(b_k)).  The second bound keeps the energy that the noise of one step injects in
proportion to what the following steps take out.

**Outliers.**  |G|_typical is the geometric mean of the last ten or so lengths; a gradient of more than
three times that length counts as one of three times (heavy-tailed scores would else throw q away once
in a while).  A length below 1 nat^(1/2) is never unusual.

**Averaging** (Polyak & Juditsky 1992).  With averaging the *guide holds the average*, which is the
answer, and adds the lag of the iterate behind it whenever gradients are recorded.

Clipping by ``clip_norm`` c, off by default, is the device of older papers: b <- b min(1, c / |G|_2)
with the Euclidean norm.

Coordinates: "local" retracts along Cholesky factors or logarithms; "natural" is the update printed in
the papers, precision and mean (Khan & Nielsen 2018, eq. 14; Tan 2021), kept inside the cone of
positive-definite matrices by backtracking.  Both follow the same direction and differ in second order.

Pyro's loss is the whole negative ELBO in nats (a sum over data, not a mean), so no data count enters.
GPyTorch's ``NGD(num_data=N, lr=b)`` corresponds to a gain of b here.

Sources: Amari (1998); Khan & Nielsen (2018, arXiv:1807.04489); Tan (2021, arXiv:2109.00375).  The noise
clock, the radius and the symmetrised gradients are this project's; benchmarks/README.md measures them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch
from pyro.optim import PyroOptim
from torch import Tensor

from ..families.base import Family, Tensors, dot, pack
from ..linalg.host import host_bool
from .host import NaturalGradientOptim
from .rule import Averaging, Rule, State, Step, Tail, as_averaging
from .schedules import NoiseClock, RobbinsMonro, Schedule, as_schedule, require
from .state import ADAM

#: steps in the memory of the typical length of a gradient
MEMORY = 10.0
#: gradients longer than this many typical lengths are shortened to it
OUTLIER = 3.0
#: a run of skipped steps longer than this halves the radius at each further one
PATIENCE = 3.0
#: gains for families whose Fisher matrix is not the Hessian of the loss
SLOW_DECAY = RobbinsMonro(scale=1.0 / 6.0, offset=20.0, power=0.5, patience=0.5)


@dataclass(frozen=True)
class NaturalGradientRule(Rule):
    """The mathematics, as pure functions of tensors."""

    family: Any  # a Family, or an EstimatedGeometry around one
    lr: float = 1.0
    trust_radius: float = 1.0
    noise_radius: float = 3.0
    outlier: float = OUTLIER
    clip_norm: float | None = None
    schedule: Schedule = NoiseClock()  # noqa: RUF009
    momentum: float = 0.0
    averaging: Averaging | None = None
    coordinates: str = "local"

    def refuses(self, family: Any) -> str | None:
        if self.coordinates not in family.coordinates:
            known = ", ".join(map(repr, family.coordinates))
            return (
                f"coordinates={self.coordinates!r} is not available for {type(family).__name__}, "
                f'which has {known}. Leave coordinates at "local".'
            )
        return super().refuses(family)

    def start(self, params: Tensors) -> State:
        like = next(iter(params.values()))
        scalars = ("skipped_in_a_row", "length", "log_typical", "descent")
        state: State = {name: like.new_zeros(()) for name in scalars}
        state["direction"] = {name: torch.zeros_like(v) for name, v in params.items()}
        state["schedule"] = self.schedule.init(like)
        if self.momentum:
            state["move_energy"] = like.new_zeros(())
            state["move"] = {name: torch.zeros_like(params[name]) for name in self.family.location}
        return state

    def step(
        self,
        params: Tensors,
        grads: Tensors,
        state: State,
        curvature: Mapping[str, Any] | None = None,
    ) -> Step:
        direction, gradient, length, finite = self._natural_direction(params, grads, curvature)
        shared = state["length"] * dot(gradient, state["direction"])
        signal = (shared + state["descent"] / length) / length
        gain, schedule_state = self.schedule.gain(signal.clamp(-1.0, 1.0), state["schedule"])

        log_typical = torch.where(state["count"] == 0, length.log(), state["log_typical"])
        # below one nat^(1/2) no gradient can throw q away, however unusual its length
        kept_length = torch.minimum(length, self.outlier * log_typical.exp().clamp_min(1.0))
        if self.clip_norm is not None:
            euclidean = torch.linalg.vector_norm(pack(direction))
            kept_length = torch.minimum(kept_length, self.clip_norm / euclidean)
        radius = torch.clamp(self.noise_radius * gain.sqrt(), max=self.trust_radius)
        in_a_row = state["skipped_in_a_row"]
        if not host_bool(in_a_row <= PATIENCE):
            radius = radius * torch.exp2((PATIENCE - in_a_row).clamp_max(0.0))

        wanted = torch.minimum(self.lr * gain * kept_length, radius)
        damped = wanted < 0.999 * self.lr * gain * length
        # along the gradient: <g, move> / |G|, as <g, direction> = 1
        move_norm, move_energy, along, own_length = wanted, wanted, wanted, wanted
        past: Tensors = {}
        if self.momentum and self.family.location:
            # |b G + beta m|^2 for a past move m of a Gaussian's location, say; in the local frame its
            # length stays what it was when it was made, and F has no block between it and the rest
            names = self.family.location
            past = {name: self.momentum * state["move"][name] for name in names}
            past_along = dot({name: gradient[name] for name in names}, past)
            square = wanted.square()
            # an estimate of F is another one now; Cauchy-Schwarz holds for each
            past_energy = (self.momentum**2 * state["move_energy"]).maximum(past_along.square())
            added = 2.0 * wanted * past_along + past_energy
            own = square * dot({name: gradient[name] for name in names}, direction)
            full_norm = (square + added).clamp_min(torch.finfo(wanted.dtype).tiny).sqrt()
            move_norm = torch.minimum(full_norm, radius)
            shrink = move_norm / full_norm
            damped = damped | (full_norm > radius)
            past = {name: shrink * v for name, v in past.items()}
            own_length = shrink * wanted
            along = shrink * (wanted + past_along)
            move_energy = shrink.square() * (own + added).clamp_min(0.0)
        move = {name: own_length * v for name, v in direction.items()}
        move |= {name: move[name] + v for name, v in past.items()}

        new = self.family.retract(params, move, -1.0, self.coordinates)
        memory = (1.0 / (state["count"] + 1.0)).clamp_min(1.0 / MEMORY)
        changed = {
            "skipped_in_a_row": torch.zeros_like(length),
            "length": length,
            "log_typical": torch.lerp(log_typical, kept_length.log(), memory),
            "descent": length * along,
            "direction": direction,
            "schedule": schedule_state,
        }
        if self.momentum:
            changed["move"] = {name: move[name] for name in self.family.location}
            changed["move_energy"] = move_energy
        refused = {"skipped_in_a_row": in_a_row + 1.0}
        return Step(new, move_norm, gain, changed, radius, damped, finite, None, if_refused=refused)

    def _natural_direction(
        self, params: Tensors, grads: Tensors, curvature: Mapping[str, Any] | None
    ) -> tuple[Tensors, Tensors, Tensor, Tensor]:
        """(direction, its dual gradient, length, whether finite): zero, of length 1, if not finite.

        The natural gradient is length * direction, and <gradient, direction> = 1.
        """
        gradient = self.family.pull(params, grads)
        if curvature:
            gradient = self.family.pull_curvature(params, gradient, curvature)
        # Lengths by way of a unit largest entry: squares of float32 gradients may overflow.
        sizes = (torch.linalg.vector_norm(g, torch.inf) for g in gradient.values())
        largest = reduce(torch.maximum, sizes)
        finite = largest < torch.inf  # false for a NaN too
        unit = torch.where(finite & (largest > 0), largest, 1.0)
        gradient = {name: g / unit for name, g in gradient.items()}
        if not host_bool(finite):
            gradient = {name: torch.where(finite, g, 0.0) for name, g in gradient.items()}
        tangent = self.family.natural_gradient(params, gradient)
        norm = dot(gradient, tangent).clamp_min(torch.finfo(unit.dtype).tiny).sqrt()
        finite = finite & (norm < torch.inf)
        direction = {name: t / norm for name, t in tangent.items()}
        gradient = {name: g / norm for name, g in gradient.items()}
        length = norm * unit
        if not host_bool(finite):
            length = torch.where(finite, length, torch.ones_like(length))
        return direction, gradient, length, finite


def rule_arguments(
    lr: float,
    trust_radius: float | None,
    schedule: Schedule | Callable[[Tensor], Tensor] | str | None,
    momentum: float | None,
    averaging: Averaging | float | bool | None,
    **further: Any,
) -> dict[str, Any]:
    """Checked arguments for :func:`make_rule`, without those that are left to the family (``None``)."""
    require(isinstance(lr, int | float) and 0.0 < lr <= 1.0, "lr", "lie in (0, 1]", lr)
    positive = trust_radius is None or trust_radius > 0.0
    require(positive, "trust_radius", "be positive or None", trust_radius)
    require(momentum is None or 0.0 <= momentum < 1.0, "momentum", "lie in [0, 1)", momentum)
    given = {"lr": float(lr), **further}
    if trust_radius is None:
        given |= dict.fromkeys(("trust_radius", "noise_radius", "outlier"), torch.inf)
    else:
        given["trust_radius"] = float(trust_radius)
    if schedule is not None:
        given["schedule"] = as_schedule(schedule)
    if momentum is not None:
        given["momentum"] = momentum
    if averaging is not None:
        given["averaging"] = as_averaging(averaging)
    return given


def make_rule(family: Any, arguments: dict[str, Any]) -> NaturalGradientRule:
    """The rule for a family: ``arguments``, and what suits the family."""
    # a schedule of the user's own comes without momentum and averaging unless asked for
    if "schedule" not in arguments and not family.newton_like:
        suited = {"schedule": SLOW_DECAY, "momentum": 0.9, "averaging": Tail()}
        arguments = suited | arguments
    return NaturalGradientRule(family, **({"noise_radius": family.noise_radius} | arguments))


class NGVB(NaturalGradientOptim):
    """Natural-gradient variational Bayes: an optimizer for ``pyro.infer.SVI``.

    It trains our guides (or those parts of an ``AutoGuideList`` that are ours) by natural gradient
    and hands every other parameter, in the same backward pass, to ``others``.  The defaults need no
    tuning; the equations are in :mod:`pyro_ngvi.optim.natural_gradient`.

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
        self._rule_arguments = rule_arguments(
            lr, trust_radius, schedule, momentum, averaging, coordinates=coordinates
        )
        super().__init__(guide, others)

    def make_rule(self, family: Family) -> NaturalGradientRule:
        return make_rule(family, self._rule_arguments)


class NaturalGradient(NaturalGradientOptim):
    """Steps the guides of this package by a rule of your own.

    The rule says where to go; finiteness, counts, averaging, reports, saving and what becomes of other
    parameters are as for every optimizer of this package.

    Args:
        guide: the guide that SVI trains, or a list that contains guides of ours.
        rule: a function of the family that gives its :class:`~pyro_ngvi.optim.Rule`; the class of a
            rule whose other fields have defaults is one.
        others: a ``PyroOptim`` for parameters that are not natural; see :class:`NGVB`.

    Raises:
        ValueError: for a guide without a part of ours.

    Example:
        The fixed gain of the papers; docs/extending.md has another rule.

        >>> from dataclasses import dataclass
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> import pyro_ngvi as ngvi
        >>> @dataclass(frozen=True)
        ... class FixedGain(ngvi.optim.Rule):
        ...     family: ngvi.families.Family
        ...     gain: float = 0.2
        ...     def step(self, params, grads, state):
        ...         G = self.family.natural_gradient(params, self.family.pull(params, grads))
        ...         length = self.gain * self.family.fisher_norm(params, G)
        ...         gain = torch.full_like(length, self.gain)
        ...         return ngvi.optim.Step(self.family.retract(params, G, -self.gain), length, gain)
        >>> def model():
        ...     pyro.sample("x", dist.Normal(3.0, 2.0))
        >>> guide = ngvi.AutoMeanFieldNormal(model)
        >>> optim = ngvi.optim.NaturalGradient(guide, FixedGain)
        >>> svi = SVI(model, guide, optim, Trace_ELBO(4, vectorize_particles=True))
        >>> for _ in range(200):
        ...     loss = svi.step()
        >>> print(f"{guide.loc.item():.2f} {guide.log_scale.exp().item():.2f}")
        3.00 2.00
    """

    suits = "pyro_ngvi.AutoFullRankNormal(model)"

    def __init__(
        self, guide: Any, rule: Callable[[Family], Rule], others: PyroOptim | None = ADAM
    ) -> None:
        self.rule = rule
        super().__init__(guide, others)

    def make_rule(self, family: Family) -> Rule:
        made = self.rule(family)
        self.accepts = made.accepts
        return made
