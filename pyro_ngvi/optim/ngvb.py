r"""NGVB: natural-gradient variational Bayes with a trust region in nats and no step size to tune.

For a family with Fisher matrix F, from the Euclidean gradient g of the loss:

    G = F^-1 g                                            natural gradient, in closed form
    n = sqrt(G' F G)                                      its length in nats^(1/2)
    b = min(lr b_k, R_k / n, 3 n_typical / n)             gain, trust radius, outliers
    lambda <- retract(lambda, -b G)                       never leaves the domain

b_k comes from the schedule (:class:`~pyro_ngvi.optim.schedules.NoiseClock`): about 1 / c_k.  KL between
successive q is about R^2 / 2, hence one radius serves every model: R_k = min(trust_radius, 3
sqrt(b_k)).  The bound 3 sqrt(b_k) keeps the noise that a step injects, of energy b^2 n^2 <= 9 b_k,
proportional to what the following steps take out.  n_typical is the geometric mean of the last ten
or so lengths; a gradient of more than three times that length is treated as one of three times
(heavy-tailed scores would else throw q away once in a while).

Coordinates: "local" retracts along Cholesky factors or logarithms; "natural" is the update printed in
the papers, precision and mean (Khan & Nielsen 2018, eq. 14; Tan 2021), kept inside the cone of
positive-definite matrices by backtracking.  Both follow the same direction and differ in second order.

Loss convention: Pyro's loss is the whole negative ELBO in nats (a sum over data, not a mean), so no
data count enters.  GPyTorch's ``NGD(num_data=N, lr=b)`` corresponds to a gain of b here.

Not for: losses that are not an expectation under q of a fixed function plus the entropy, and not for
guides of other packages, whose Fisher matrix is not known here.

Sources: Amari (1998); Khan & Nielsen (2018, arXiv:1807.04489); Tan (2021, arXiv:2109.00375).  The noise
clock, the radius and the symmetrised gradients are this project's; benchmarks/README.md measures them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pyro.optim import PyroOptim
from torch import Tensor

from ..families.base import Family, Tensors, dot
from .averaging import Averaging, as_averaging, update_average
from .base import NaturalGradientOptim, Report
from .schedules import NoiseClock, Schedule, as_schedule

__all__ = ["NGVB", "NGVBRule"]

#: steps in the memory of the typical length of a gradient
MEMORY = 10.0
#: gradients longer than this many typical lengths are shortened to it
OUTLIER = 3.0
#: a run of skipped steps longer than this halves the radius at each further one
PATIENCE = 3.0


@dataclass(frozen=True)
class NGVBRule:
    """The mathematics: ``init(params) -> state``, ``update(params, grads, state)``.  Pure functions."""

    family: Family
    lr: float = 1.0
    trust_radius: float = 1.0
    noise_radius: float = 3.0
    schedule: Schedule = NoiseClock()
    averaging: Averaging | None = None
    coordinates: str = "local"

    def init(self, params: Tensors) -> Tensors:
        like = params["loc"]
        zero = torch.zeros((), dtype=like.dtype, device=like.device)
        state = {
            "count": zero.clone(),
            "skipped": zero.clone(),
            "skipped_in_a_row": zero.clone(),
            "bad_entries": torch.zeros_like(like, dtype=torch.bool),
            "step": zero.clone(),
            "length": zero.clone(),
            "log_typical": zero.clone(),
        }
        for name, value in params.items():
            state["direction." + name] = torch.zeros_like(value)
            if self.averaging is not None:
                state["average." + name] = value.clone()
        if self.averaging is not None:
            state["average_total"] = zero.clone()
        for name, value in self.schedule.init(like).items():
            state["schedule." + name] = value
        return state

    def update(
        self, params: Tensors, grads: Tensors, state: Tensors
    ) -> tuple[Tensors, Tensors, Report]:
        family = self.family
        bad_entries = ~torch.isfinite(grads["loc"])
        finite = torch.stack([torch.isfinite(g).all() for g in grads.values()]).all()
        grads = {name: torch.where(finite, g, torch.zeros_like(g)) for name, g in grads.items()}

        # Lengths by way of a unit largest entry: squares of float32 gradients may overflow.
        gradient = family.pull(params, grads)
        largest = torch.stack([g.abs().amax() for g in gradient.values()]).amax()
        finite = finite & torch.isfinite(largest)
        unit = torch.where(finite & (largest > 0), largest, torch.ones_like(largest))
        gradient = {
            name: torch.where(finite, g / unit, torch.zeros_like(g)) for name, g in gradient.items()
        }
        tangent = family.natural_gradient(params, gradient)
        norm = dot(gradient, tangent).clamp_min(0.0).sqrt()
        finite = finite & torch.isfinite(norm)
        tiny = torch.finfo(norm.dtype).tiny
        length = (norm * unit).clamp_min(tiny)
        direction = {name: t / norm.clamp_min(tiny) for name, t in tangent.items()}

        # share of signal, eq. (1) of schedules.py, in terms of directions and lengths
        previous = {name: state["direction." + name] for name in params}
        cosine = dot(gradient, previous) / norm.clamp_min(tiny)
        ratio = state["length"] / length
        signal = ratio * (cosine + state["step"] * ratio)
        schedule_state = _part(state, "schedule.")
        gain, new_schedule_state = self.schedule.gain(signal.clamp(-1.0, 1.0), schedule_state)

        # trust region
        first = state["count"] == 0
        log_typical = torch.where(first, length.log(), state["log_typical"])
        radius = torch.clamp(self.noise_radius * gain.sqrt(), max=self.trust_radius)
        radius = radius * torch.exp2(-(state["skipped_in_a_row"] - PATIENCE).clamp_min(0.0))
        kept_length = torch.minimum(length, OUTLIER * log_typical.exp())
        step = torch.minimum(self.lr * gain, radius / length) * (kept_length / length)

        new = family.retract(params, direction, -step * length, self.coordinates)
        for value in new.values():
            finite = finite & torch.isfinite(value).all()
        new = {name: torch.where(finite, new[name], params[name]) for name in params}

        memory = torch.clamp(1.0 / (state["count"] + 1.0), min=1.0 / MEMORY)
        accepted: Tensors = {
            "count": state["count"] + 1.0,
            "skipped_in_a_row": torch.zeros_like(state["count"]),
            "step": step,
            "length": length,
            "log_typical": log_typical + memory * (kept_length.log() - log_typical),
        }
        accepted |= {"direction." + name: value for name, value in direction.items()}
        accepted |= {"schedule." + name: value for name, value in new_schedule_state.items()}
        if self.averaging is not None:
            rate, total = self.averaging.rate(accepted["count"], state["average_total"])
            average = update_average(_part(state, "average."), new, rate)
            accepted |= {"average." + name: value for name, value in average.items()}
            accepted["average_total"] = total
        new_state = {
            name: torch.where(finite, accepted[name], value) if name in accepted else value
            for name, value in state.items()
        }
        new_state["skipped"] = state["skipped"] + (~finite).to(state["skipped"])
        new_state["skipped_in_a_row"] = torch.where(
            finite, accepted["skipped_in_a_row"], state["skipped_in_a_row"] + 1.0
        )
        new_state["bad_entries"] = torch.where(finite, state["bad_entries"], bad_entries)
        report = Report(
            finite=finite,
            step=torch.where(finite, step, torch.zeros_like(step)),
            step_norm=torch.where(finite, step * length, torch.zeros_like(step)),
            gain=gain,
            radius=radius,
            damped=step < self.lr * gain,
            skipped=new_state["skipped"],
            bad_entries=new_state["bad_entries"],
        )
        return new, new_state, report


def _part(state: Tensors, prefix: str) -> Tensors:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


class NGVB(NaturalGradientOptim):
    """Natural-gradient variational Bayes: an optimizer for ``pyro.infer.SVI``.

    It trains our guides (or those parts of an ``AutoGuideList`` that are ours) by natural gradient
    and hands every other parameter, in the same backward pass, to ``others``.  The defaults need no
    tuning; the equations are at the head of this file.

    Args:
        guide: the guide that SVI trains, or a list that contains guides of ours.
        lr: upper bound of the gain in (0, 1]; 1 leaves the choice to the schedule.
        trust_radius: largest Fisher length of a step, nats^(1/2); KL between successive q is at most
            about trust_radius^2 / 2.  ``None``: no bound (for exact gradients only).
        schedule: "noise" (:class:`NoiseClock`, default), "constant", a :class:`RobbinsMonro`, or a
            function from the step count (0-dim tensor, 0, 1, ...) to the gain.
        averaging: ``None`` (default); a number w for iterate averages with weights (log k)^w; ``True``
            for the average of about the last eighth of the run.  :meth:`use_average` installs it.
        coordinates: "local" (default) or "natural".
        others: a ``PyroOptim`` for parameters that are not natural, for instance
            ``pyro.optim.Adam({"lr": 1e-3})``.

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
        >>> for _ in range(150):
        ...     loss = svi.step()
        >>> print(f"{guide.loc.item():.3f} {guide.log_scale.exp().item():.3f}")
        3.000 2.000
        >>> optim.report().skipped
        0
    """

    def __init__(
        self,
        guide: Any,
        lr: float = 1.0,
        trust_radius: float | None = 1.0,
        schedule: Schedule | Callable[[Tensor], Tensor] | str = "noise",
        averaging: Averaging | float | bool | None = None,
        coordinates: str = "local",
        others: PyroOptim | None = None,
    ) -> None:
        if not isinstance(lr, int | float) or not 0.0 < lr <= 1.0:
            raise ValueError(
                f"lr bounds the gain of a natural gradient and must lie in (0, 1], got {lr!r}."
            )
        if trust_radius is not None and not 0.0 < trust_radius:
            raise ValueError(f"trust_radius must be positive or None, got {trust_radius!r}.")
        bounded = trust_radius is not None
        self._rule_arguments: dict[str, Any] = {
            "lr": float(lr),
            "trust_radius": float(trust_radius) if bounded else float("inf"),
            "noise_radius": 3.0 if bounded else float("inf"),
            "schedule": as_schedule(schedule),
            "averaging": as_averaging(averaging),
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
        return NGVBRule(family, **self._rule_arguments)
