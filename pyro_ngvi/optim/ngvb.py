r"""NGVB: natural-gradient variational Bayes with a trust region in nats and no step size to tune.

For a family with Fisher matrix F, from the Euclidean gradient g of the loss, with |.| the Fisher norm:

    G = F^-1 g                                            natural gradient
    b = min(lr b_k, 3 b_k |G|_typical / |G|)              gain, outliers shortened
    move = b G + beta move                                momentum beta, on the location alone
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
in a while).

**Averaging** (Polyak & Juditsky 1992).  With averaging the *guide holds the average*, which is the
answer, and adds the lag of the iterate behind it whenever gradients are recorded.

Coordinates: "local" retracts along Cholesky factors or logarithms; "natural" is the update printed in
the papers, precision and mean (Khan & Nielsen 2018, eq. 14; Tan 2021), kept inside the cone of
positive-definite matrices by backtracking.  Both follow the same direction and differ in second order.

Loss convention: Pyro's loss is the whole negative ELBO in nats (a sum over data, not a mean), so no
data count enters.  GPyTorch's ``NGD(num_data=N, lr=b)`` corresponds to a gain of b here.

Not for: losses that are not an ELBO (RenyiELBO with sticking the landing, EnergyDistance), losses
scaled by ``poutine.scale(..., 1 / N)`` (natural gradients need no such scale, and the gain, at most 1,
can not make up for it), and guides of other packages, whose Fisher matrix is not known here.

Sources: Amari (1998); Khan & Nielsen (2018, arXiv:1807.04489); Tan (2021, arXiv:2109.00375).  The noise
clock, the radius and the symmetrised gradients are this project's; benchmarks/README.md measures them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.optim import PyroOptim
from torch import Tensor

from ..families.base import Family, Tensors, dot
from .averaging import Averaging, Tail, as_averaging, update_average
from .base import NaturalGradientOptim, Report, part
from .schedules import NoiseClock, RobbinsMonro, Schedule, as_schedule

__all__ = ["NGVB", "NGVBRule"]

#: steps in the memory of the typical length of a gradient
MEMORY = 10.0
#: gradients longer than this many typical lengths are shortened to it
OUTLIER = 3.0
#: a run of skipped steps longer than this halves the radius at each further one
PATIENCE = 3.0
#: gains for families whose Fisher matrix is not the Hessian of the loss
SLOW_DECAY = RobbinsMonro(scale=1.0 / 6.0, offset=20.0, power=0.5, patience=0.5)


@dataclass(frozen=True)
class NGVBRule:
    """The mathematics: ``init(params) -> state``, ``update(params, grads, state)``.  Pure functions."""

    family: Family
    lr: float = 1.0
    trust_radius: float = 1.0
    noise_radius: float = 3.0
    schedule: Schedule = field(default_factory=NoiseClock)
    momentum: float = 0.0
    averaging: Averaging | None = None
    coordinates: str = "local"

    def init(self, params: Tensors) -> Tensors:
        like = params["loc"]
        zero = torch.zeros((), dtype=like.dtype, device=like.device)
        scalars = ("count", "skipped", "skipped_in_a_row", "length", "log_typical", "descent")
        state = {name: zero.clone() for name in scalars}
        state["bad_entries"] = torch.zeros_like(like, dtype=torch.bool)
        state |= {"direction." + name: torch.zeros_like(v) for name, v in params.items()}
        state |= {"schedule." + name: v for name, v in self.schedule.init(like).items()}
        if self.momentum:
            state |= {"move": torch.zeros_like(like), "move_energy": zero.clone()}
        if self.averaging is not None:
            state["average_total"] = zero.clone()
            state |= {"average." + name: v.clone() for name, v in params.items()}
        return state

    def update(
        self, params: Tensors, grads: Tensors, state: Tensors
    ) -> tuple[Tensors, Tensors, Report]:
        """One step from ``params`` (the iterate); nothing in it waits for the device."""
        direction, gradient, length, finite = self._natural_direction(params, grads)
        previous = part(state, "direction.")
        shared = state["length"] / length * dot(gradient, previous)
        signal = shared + state["descent"] / length.square()
        gain, schedule_state = self.schedule.gain(signal.clamp(-1.0, 1.0), part(state, "schedule."))

        first = state["count"] == 0
        log_typical = torch.where(first, length.log(), state["log_typical"])
        # below one nat^(1/2) no gradient can throw q away, however unusual its length
        kept_length = torch.minimum(length, OUTLIER * log_typical.exp().clamp_min(1.0))
        radius = torch.clamp(self.noise_radius * gain.sqrt(), max=self.trust_radius)
        radius = radius * torch.exp2(-(state["skipped_in_a_row"] - PATIENCE).clamp_min(0.0))

        wanted = torch.minimum(self.lr * gain * kept_length, radius)
        move = {name: wanted * v for name, v in direction.items()}
        move_norm, move_energy = wanted, wanted
        tiny = torch.finfo(wanted.dtype).tiny
        damped = wanted < 0.999 * self.lr * gain * length
        if self.momentum:
            # |b G + beta m|^2 for a past move m of the location; in the local frame its own length
            # stays what it was when it was made, and F has no block between location and shape
            past, past_energy = (
                self.momentum * state["move"],
                self.momentum**2 * state["move_energy"],
            )
            added = 2.0 * wanted * (gradient["loc"] * past).sum() + past_energy
            own = wanted.square() * (gradient["loc"] * direction["loc"]).sum()
            move["loc"] = move["loc"] + past
            move_norm = (wanted.square() + added).clamp_min(tiny).sqrt()
            shrink = (radius / move_norm).clamp_max(1.0)
            damped = damped | (shrink < 1.0)
            move = {name: shrink * v for name, v in move.items()}
            move_norm = shrink * move_norm
            move_energy = shrink.square() * (own + added).clamp_min(0.0)

        new = self.family.retract(params, move, -1.0, self.coordinates)
        for value in new.values():
            finite = finite & torch.isfinite(value.sum())
        new = {name: torch.where(finite, new[name], params[name]) for name in params}

        memory = torch.clamp(1.0 / (state["count"] + 1.0), min=1.0 / MEMORY)
        accepted = {
            "count": state["count"] + 1.0,
            "skipped_in_a_row": torch.zeros_like(state["count"]),
            "length": length,
            "log_typical": log_typical + memory * (kept_length.log() - log_typical),
            "descent": length * dot(gradient, move),
        }
        accepted |= {"direction." + name: v for name, v in direction.items()}
        accepted |= {"schedule." + name: v for name, v in schedule_state.items()}
        if self.momentum:
            accepted |= {"move": move["loc"], "move_energy": move_energy}
        if self.averaging is not None:
            rate, total = self.averaging.rate(accepted["count"], state["average_total"])
            average = update_average(part(state, "average."), new, rate)
            accepted |= {"average." + name: v for name, v in average.items()}
            accepted["average_total"] = total
        bad = torch.where(finite, state["bad_entries"], ~torch.isfinite(grads["loc"]))
        refused = state | {
            "skipped": state["skipped"] + 1.0,
            "skipped_in_a_row": state["skipped_in_a_row"] + 1.0,
        }
        accepted = state | accepted
        new_state = {k: torch.where(finite, accepted[k], refused[k]) for k in state}
        new_state["bad_entries"] = bad
        report = Report(
            finite=finite,
            step_norm=torch.where(finite, move_norm, torch.zeros_like(move_norm)),
            gain=gain,
            radius=radius,
            damped=damped,
            skipped=new_state["skipped"],
            bad_entries=bad,
        )
        return new, new_state, report

    def _natural_direction(
        self, params: Tensors, grads: Tensors
    ) -> tuple[Tensors, Tensors, Tensor, Tensor]:
        """The natural gradient as a unit direction, its dual, and its length; zero if not finite."""
        gradient = self.family.pull(params, grads)
        # Lengths by way of a unit largest entry: squares of float32 gradients may overflow.
        largest = torch.stack([g.abs().amax() for g in gradient.values()]).amax()
        finite = torch.isfinite(largest)  # amax hands on a NaN
        zero = torch.zeros_like(largest)
        unit = torch.where(finite & (largest > 0), largest, zero + 1.0)
        gradient = {name: torch.where(finite, g / unit, zero) for name, g in gradient.items()}
        tangent = self.family.natural_gradient(params, gradient)
        norm = dot(gradient, tangent).clamp_min(torch.finfo(unit.dtype).tiny).sqrt()
        finite = finite & torch.isfinite(norm)
        direction = {name: t / norm for name, t in tangent.items()}
        gradient = {name: g / norm for name, g in gradient.items()}
        return direction, gradient, torch.where(finite, norm * unit, torch.ones_like(unit)), finite


class NGVB(NaturalGradientOptim):
    """Natural-gradient variational Bayes: an optimizer for ``pyro.infer.SVI``.

    It trains our guides (or those parts of an ``AutoGuideList`` that are ours) by natural gradient
    and hands every other parameter, in the same backward pass, to ``others``.  The defaults need no
    tuning; the equations are at the head of this file.

    Args:
        guide: the guide that SVI trains, or a list that contains guides of ours.
        lr: factor in (0, 1] on the gain of the schedule, for careful runs; 1 is right.
        trust_radius: largest Fisher length of a step, nats^(1/2); KL between successive q is at most
            about trust_radius^2 / 2.  ``None``: no bound (for exact gradients only).
        schedule: "noise" (:class:`NoiseClock`), "constant", a :class:`RobbinsMonro`, or a function
            from the step count (0-dim tensor, 0, 1, ...) to the gain.
        momentum: heavy-ball coefficient in [0, 1) for the location.
        averaging: ``False``; ``True`` for the average of about the last quarter of the run
            (:class:`Tail`); or a number w for weights (log k)^w.  The guide then holds the average.
        coordinates: "local" (default) or "natural".
        others: a ``PyroOptim`` for parameters that are not natural, for instance
            ``pyro.optim.Adam({"lr": 1e-3})``.

    ``None`` for schedule, momentum or averaging takes what suits the family, see the head of this file:
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

    def __init__(
        self,
        guide: Any,
        lr: float = 1.0,
        trust_radius: float | None = 1.0,
        schedule: Schedule | Callable[[Tensor], Tensor] | str | None = None,
        momentum: float | None = None,
        averaging: Averaging | float | bool | None = None,
        coordinates: str = "local",
        others: PyroOptim | None = None,
    ) -> None:
        if not isinstance(lr, int | float) or not 0.0 < lr <= 1.0:
            raise ValueError(
                f"lr multiplies the gain of a natural gradient and must lie in (0, 1], got {lr!r}."
            )
        if trust_radius is not None and not 0.0 < trust_radius:
            raise ValueError(f"trust_radius must be positive or None, got {trust_radius!r}.")
        if momentum is not None and not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum!r}.")
        bounded = trust_radius is not None
        self._rule_arguments: dict[str, Any] = {
            "lr": float(lr),
            "trust_radius": float(trust_radius) if bounded else float("inf"),
            "noise_radius": 3.0 if bounded else float("inf"),
            "schedule": None if schedule is None else as_schedule(schedule),
            "momentum": momentum,
            "averaging": None if averaging is None else as_averaging(averaging),
            "coordinates": coordinates,
        }
        super().__init__(guide, others)

    def make_rule(self, family: Family) -> NGVBRule:
        coordinates = self._rule_arguments["coordinates"]
        if coordinates not in family.coordinates:
            raise ValueError(
                f"coordinates={coordinates!r} is not available for {type(family).__name__}, which has "
                f'{", ".join(map(repr, family.coordinates))}. Leave coordinates at "local".'
            )
        # a schedule of the user's own comes without momentum and averaging unless asked for
        smooth = self._rule_arguments["schedule"] is None and not family.newton_like
        suited: dict[str, Any] = {
            "schedule": SLOW_DECAY if smooth else NoiseClock(),
            "momentum": 0.9 if smooth else 0.0,
            "averaging": Tail() if smooth else None,
        }
        chosen = {name: v for name, v in self._rule_arguments.items() if v is not None}
        if chosen.get("averaging") is False:
            chosen["averaging"] = None
        return NGVBRule(family, **{**suited, **chosen})
