r"""One step along a natural gradient: a trust region in nats, and no step size to tune.

For a family with Fisher matrix F, from the Euclidean gradient g of the loss, with |.| the Fisher norm:

    G = F^-1 g                                            natural gradient
    b = lr b_k min(1, 3 max(|G|_typical, 1) / |G|)        gain, outliers shortened
    move = b G + beta move                                momentum beta, of a Gaussian on its location
    move <- move min(1, R_k / |move|)                     trust radius
    lambda <- retract(lambda, -move)                      never leaves the domain

**Blocks.**  All but the last line is done for each block of the Fisher matrix by itself: the location
of a Gaussian and its scales, between which F has no entries, or everything at once where F is not so.

**Gain.**  For families whose Fisher matrix is the Hessian of the loss at a Gaussian posterior (full
rank) b_k is the Kalman gain of :class:`NoiseClock`, and beta is 0.  For the others (mean field, factor)
the Hessian in the Fisher metric has eigenvalues from near 0 to about d, so no single gain suits all
directions: there b_k = (1 + k/20)^(-1/2) / 6, where k waits while signal dominates, with
beta = 0.9, and iterates are averaged.

**Radius.**  KL between successive q is about R^2 / 2, hence one radius serves every model of which
nothing is known yet.  For each of B blocks

    R_k = r_k min(trust_radius, 3 sqrt(b_k)) / sqrt(B).

The second bound keeps the energy that the noise of one step injects in proportion to what the following
steps take out.  The *reach* r_k, 1 at first, learns how far the metric at one q holds for the next.
With c the cosine, in the Fisher metric, between this natural gradient and the one before,

    r_k = 1.4 r_{k-1}  if c > 0.6, now and a step ago, and the radius shortened the last move,
          0.6 r_{k-1}  if c < 0.2,

and never below 1; of scales, whose metric changes faster, 0.95 and 0.55 are asked, of independent ones
0.7 and 0.3.  It goes up to d for a location, to sqrt(d) for scales, where every sd changes e-fold, and
to sqrt(D) for one block of all D coordinates: d latent variables that are one sd off each are sqrt(d)
away together.

**Outliers.**  |G|_typical is the geometric mean of the last ten or so lengths, at least 1 nat^(1/2).

**Noise of the scales.**  The gradient of E[log q] is that of the path z(eps), or that of minus the
entropy, which is free of noise.  A share c of the one and 1 - c of the other leave in the gradient of
the scales, in units of q, the noise (L' H L - c I)(eps eps' - I), H the Hessian of -log p.  So c = 1
(sticking the landing) is best at the posterior, where L' H L = I, and c = 0 where q is far too narrow.
The next step takes c = tr(L' H L) / d, or 1 from 0.8 on, from this gradient along a dilation of q.

With **averaging** (Polyak & Juditsky 1992) the *guide holds the average*, which is the answer, and
draws from the iterate whenever gradients are recorded.

Coordinates: "local" retracts along Cholesky factors or logarithms; "natural" is the update printed in
the papers, precision and mean (Khan & Nielsen 2018, eq. 14; Tan 2021), kept inside the cone of
positive-definite matrices by backtracking.  Both follow the same direction and differ in second order.

Pyro's loss is the whole negative ELBO in nats (a sum over data, not a mean), so no data count enters.

Sources: Amari (1998); Khan & Nielsen (2018, arXiv:1807.04489); Tan (2021, arXiv:2109.00375).  The noise
clock, the radius and the symmetrised gradients are this project's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..families.base import Family, Tensors, dot
from ..families.vectors import pack
from ..linalg.host import host_bool
from .rule import Averaging, Rule, State, Step, Tail

#: steps in the memory of the typical length of a gradient
MEMORY = 10.0
#: gradients longer than this many typical lengths are shortened to it
OUTLIER = 3.0
#: a run of skipped steps longer than this halves the radius at each further one
PATIENCE = 3.0
#: curvatures in units of q above which the path is all of the gradient of log q
NARROW = 0.8
#: cosines of successive gradients above which the reach grows, below which it shrinks, and factors
AGREE, DISAGREE, GROW, SHRINK = 0.6, 0.2, 1.4, 0.6
#: by so much higher cosines are asked of scales, of matrices from a few draws, whose few large entries
#: may agree by chance, and of independent ones
STRICTER = 0.35, 0.1


class Schedule(Protocol):
    r"""How long a step is: the gain b_k that multiplies the natural gradient, and how it decays.

    A schedule is a pair of pure functions of tensors, called as in the example of :class:`NoiseClock`.
    ``like`` and ``signal`` are (B,), a number for each block, b_k > 0 too or ().  ``signal``, in
    [-1, 1], is what the step before says about this one: the estimate

        snr_k = (<G_k, G_{k-1}> + <G_{k-1}, move_{k-1}>) / |G_k|^2                                   (1)

    of the share of signal in the energy of the natural gradient G_k, in the Fisher metric.  Near the
    optimum its expectation x moves by x_k = x_{k-1} - move_{k-1} (the Fisher metric makes every
    curvature 1), and noises of different steps are independent; so the numerator estimates |x_{k-1}|^2.
    """

    def init(self, like: Tensor) -> Tensors:
        """The state before the first step, a dict of tensors."""
        ...

    def gain(self, signal: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """The gain of the next step, and the state after it."""
        ...


@dataclass(frozen=True)
class NoiseClock:
    r"""The default: a Kalman gain whose clock runs on the noise that the gradients show.

    In an isotropic linear model the best step is the Kalman gain, the share of signal in the energy of
    the gradient.  Once noise dominates, it is 1 / c_k with c growing by a constant per step: c + 1 is
    the plain average of all noise, c + 1/2 forgets the past twice as fast.  Whenever the measured share
    of signal is *significantly* larger than 1/c, the clock is set back:

        c <- min(c + 1/2, 1 / max(0, mean(snr) - 2 se(snr))),   b = 1 / c,

    where mean and standard error come from (1) over the last max(10, c / 2) steps, and 1 / (4 n) is
    added to the variance after n, which few steps do not show.  It begins late: a start may be near.

    Multiplicative noise (few particles for many dimensions) keeps the gain small but *constant*, about
    S / (S + d + 1) for S particles.  Additive noise shows only near the optimum; it then falls as 2/k.

    Not for: losses that change between steps (annealing); use :class:`RobbinsMonro` there.

    Args:
        increment, standard_errors, min_window: the 1/2, the 2 and the 10 above.
        start: c at the first step.

    Example:
        >>> clock = NoiseClock()
        >>> state, gains = clock.init(torch.zeros(1)), []
        >>> for signal in (0.0, 0.0, 1.0, 1.0, 1.0):
        ...     b, state = clock.gain(torch.tensor([signal]), state)
        ...     gains.append(round(b.item(), 3))
        >>> gains  # 1 / 40, 1 / 40.5, 1 / 41, and then two gradients have been mostly signal
        [0.025, 0.025, 0.024, 0.146, 0.34]
    """

    increment: float = 0.5
    standard_errors: float = 2.0
    start: float = 40.0
    min_window: float = 10.0

    def init(self, like: Tensor) -> Tensors:
        """The clock, the moments of the signal and the count, (B,) each, as ``like`` is."""
        names = ("mean", "variance", "weight", "count")
        zero = torch.zeros_like(like)
        return {"clock": zero + self.start, **{n: zero.clone() for n in names}}

    def gain(self, signal: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """The gain b (B,) after a ``signal`` (B,), and the new state."""
        clock, count = state["clock"], state["count"]
        first = count == 0  # nothing came before the first step: no signal to read
        window = torch.clamp(0.5 * clock, min=self.min_window)
        a = torch.where(first, 0.0, torch.maximum(1.0 / window, 1.0 / count.clamp_min(1.0)))
        mean = torch.lerp(state["mean"], signal, a)
        variance = torch.lerp(state["variance"], (signal - mean).square(), a)
        weight = (1 - a).square() * state["weight"] + a.square()  # sum of squared weights
        error = ((variance + 0.25 / count.clamp_min(1.0)) * weight).sqrt()
        certain = (mean - self.standard_errors * error).clamp(1e-12, 1.0)
        advanced = torch.minimum(clock + self.increment, 1.0 / certain).clamp_min(1.0)
        clock = torch.where(first, clock, advanced)
        moments = {"mean": mean, "variance": variance, "weight": weight}
        return 1.0 / clock, {"clock": clock, **moments, "count": count + 1}


@dataclass(frozen=True)
class NaturalGradientRule(Rule):
    """The mathematics, as pure functions of tensors."""

    family: Any  # a Family, or an EstimatedGeometry around one
    lr: float = 1.0
    trust_radius: float = 1.0
    noise_radius: float = 3.0
    outlier: float = OUTLIER
    clip_norm: float | None = None
    schedule: Schedule = NoiseClock()
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

    def _blocks(self, params: Tensors) -> tuple[tuple[str, ...], ...]:
        """Names of the tensors of each block of F: those of the location come first."""
        if isinstance(self.family, Family) or self.family.has_blocks:
            location = self.family.location
            rest = tuple(name for name in params if name not in location)
            if location and rest:
                return location, rest
        return (tuple(params),)

    def start(self, params: Tensors) -> State:
        like = next(iter(params.values()))
        zeros = like.new_zeros(len(self._blocks(params)))
        state: State = {n: zeros.clone() for n in ("length", "log_typical", "descent", "trend")}
        state |= {"reach": zeros + 1.0, "growth": zeros + 1.0}
        state["skipped_in_a_row"] = like.new_zeros(())
        state["direction"] = {name: torch.zeros_like(v) for name, v in params.items()}
        state["schedule"] = self.schedule.init(zeros)
        if self.family.dilation(params):
            state["path_share"] = like.new_ones(())
        if self.momentum:
            state["move_energy"] = like.new_zeros(())
            state["move"] = {name: torch.zeros_like(params[name]) for name in self.family.location}
        return state

    def step(self, params: Tensors, grads: Tensors, state: State, curvature: Any = None) -> Step:
        blocks = self._blocks(params)
        direction, gradient, length, finite = self._natural_direction(
            blocks, params, grads, curvature
        )
        cosine = block_dots(blocks, gradient, state["direction"])
        signal = ((state["length"] * cosine + state["descent"] / length) / length).clamp(-1.0, 1.0)
        gain, schedule_state = self.schedule.gain(signal, state["schedule"])
        trend, tail = torch.lerp(state["trend"], signal, 1.0 / MEMORY), self.averaging
        keep = ~tail.lags(trend, state["count"]) if isinstance(tail, Tail) else None
        gain = gain.expand_as(length)

        log_typical = torch.where(state["count"] == 0, length.log(), state["log_typical"])
        # below one nat^(1/2) no gradient can throw q away, however unusual its length
        kept_length = torch.minimum(length, self.outlier * log_typical.exp().clamp_min(1.0))
        if self.clip_norm is not None:
            euclidean = torch.linalg.vector_norm(pack(direction))
            kept_length = torch.minimum(kept_length, self.clip_norm / euclidean)
        reach, agrees = self._reach(blocks, cosine, state, direction)
        shares = len(blocks) ** 0.5  # the moves of the blocks are orthogonal
        radius = (self.noise_radius / shares * gain.sqrt()).clamp_max(self.trust_radius / shares)
        radius = reach * radius
        in_a_row = state["skipped_in_a_row"]
        if not host_bool(in_a_row <= PATIENCE):
            radius = radius * torch.exp2((PATIENCE - in_a_row).clamp_max(0.0))

        wanted = torch.minimum(self.lr * gain * kept_length, radius)
        damped = wanted < 0.999 * self.lr * gain * length
        # along the gradient: <g, move> / |G|, as <g, direction> = 1
        move_norm, along, factor = wanted, wanted, wanted
        past: Tensors = {}
        changed: State = {}
        if self.momentum and self.family.location:
            # |b G + beta m|^2 for a past move m of a Gaussian's location, say, the first block; in the
            # local frame its length stays what it was when it was made
            names = self.family.location
            past = {name: self.momentum * state["move"][name] for name in names}
            own_gradient = {name: gradient[name] for name in names}
            past_along = dot(own_gradient, past)
            # an estimate of F is another one now; Cauchy-Schwarz holds for each
            past_energy = (self.momentum**2 * state["move_energy"]).maximum(past_along.square())
            # zero for other blocks
            both = torch.stack([past_along, past_energy]).unsqueeze(1)
            past_along, past_energy = pad(both, (0, len(blocks) - 1)).unbind()
            added = 2.0 * wanted * past_along + past_energy
            square = wanted.square()
            full_norm = (square + added).clamp_min(torch.finfo(added.dtype).tiny).sqrt()
            move_norm = torch.minimum(full_norm, radius)
            shrink = move_norm / full_norm
            damped = damped | (full_norm > radius)
            past = {name: shrink[0] * v for name, v in past.items()}
            factor = shrink * wanted
            along = shrink * (wanted + past_along)
            energy = square[0] * dot(own_gradient, direction) + added[0]
            changed["move_energy"] = shrink[0].square() * energy.clamp_min(0.0)
        move = block_products(blocks, factor, direction)
        move |= {name: move[name] + v for name, v in past.items()}
        if self.momentum:
            changed["move"] = {name: move[name] for name in self.family.location}
        dilation = self.family.dilation(params)
        if dilation:
            trace = 1.0 + dot(dilation, grads) / self.family.dim(params)
            changed["path_share"] = torch.where(trace < NARROW, trace.clamp_min(0.0), 1.0)

        new = self.family.retract(params, move, -1.0, self.coordinates)
        memory = (1.0 / (state["count"] + 1.0)).clamp_min(1.0 / MEMORY)
        changed |= {
            "skipped_in_a_row": torch.zeros_like(in_a_row),
            "length": length,
            "log_typical": torch.lerp(log_typical, kept_length.log(), memory),
            "descent": length * along,
            "trend": trend,
            "direction": direction,
            "schedule": schedule_state,
            "reach": reach,
            "growth": 1.0 + (GROW - 1.0) * (damped & agrees).to(length),
        }
        whole = torch.linalg.vector_norm(torch.stack([move_norm, radius]), dim=1)
        taken = new, whole[0], gain[0], changed, whole[1], damped.any(), finite
        return Step(*taken, keep_average=keep, if_refused={"skipped_in_a_row": in_a_row + 1.0})

    def _reach(
        self, blocks: Any, cosine: Tensor, state: State, direction: Tensors
    ) -> tuple[Tensor, Tensor]:
        """r_k of each block, and whether its cosine is high."""
        reach, first = state["reach"], cosine.clone()
        entries = [float(sum(direction[name].numel() for name in names)) for names in blocks]
        if len(blocks) > 1:
            first[1:] -= STRICTER[0] if entries[1] > entries[0] else STRICTER[1]
        agrees = first > AGREE
        longer = torch.where(agrees, state["growth"] * reach, reach)
        reach = torch.where(first < DISAGREE, SHRINK * reach, longer).clamp_min(1.0)
        first_reach = reach[:1].clamp(max=entries[0] if len(blocks) > 1 else entries[0] ** 0.5)
        return torch.cat([first_reach, reach[1:].clamp(max=entries[0] ** 0.5)]), agrees

    def _natural_direction(
        self, blocks: Any, params: Tensors, grads: Tensors, curvature: Any
    ) -> tuple[Tensors, Tensors, Tensor, Tensor]:
        """Unit direction, its dual gradient, lengths by block (1 if not finite), whether finite."""
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
        energy = block_dots(blocks, gradient, tangent)
        norm = energy.clamp_min(torch.finfo(unit.dtype).tiny).sqrt()
        finite = finite & (norm < torch.inf).all()
        direction = block_products(blocks, 1.0 / norm, tangent)
        gradient = block_products(blocks, 1.0 / norm, gradient)
        length = norm * unit
        if not host_bool(finite):
            length = torch.where(finite, length, torch.ones_like(length))
        return direction, gradient, length, finite


def block_dots(blocks: Any, a: Tensors, b: Tensors) -> Tensor:
    """<a, b> of each block, (B,)."""
    return torch.stack([dot({name: a[name] for name in names}, b) for names in blocks])


def block_products(blocks: Any, factors: Tensor, tensors: Tensors) -> Tensors:
    """``tensors``, each times the factor of its block; ``factors`` (B,)."""
    by_name = {n: f for names, f in zip(blocks, factors.unbind(), strict=True) for n in names}
    return {name: by_name[name] * v for name, v in tensors.items()}
