"""By how much the mean and the sd of a latent site are off, and whether that is too much."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor

from ..runtime.density import LatentLayout, Sites, to_unconstrained
from ..runtime.model_density import NaNWhereSingular, map_draws
from ..runtime.run import Program, Values
from .shifts import COARSE_END, COARSE_MEAN, COARSE_SD, Shift, shift_of

#: correlation with the start above which a chain has not told much
STUCK = 0.7


@dataclass(frozen=True)
class Moved(Shift):
    """What short chains, or weights, say of the entries of a latent site, or its unconstrained ones:
    tensors of the site's shape.

    Attributes:
        mean: the posterior's mean less the guide's, in sds of the chains' ends, by (1) of
            :mod:`pyro_ngvi.diagnostics.by_chains`, and ``mean_error`` its standard error.
        log_sd: logarithm of the posterior's sd over the guide's, and ``log_sd_error``.
        ends: those (2, ...) of the 95 % intervals of the chains' ends less the guide's, in sds of the
            former, and ``ends_error``; 0 of unconstrained entries.
        rho: correlation of the ends of the chains with their starts, 0 of weights.

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> model, guide = (lambda s=s: pyro.sample("z", dist.Normal(0.0, s)) for s in (1.0, 0.5))
        >>> moved = ngvi.diagnose(model, guide).sites["z"]
        >>> moved.is_off, moved.log_sd.exp().round(), moved.exceeds(mean=0.3, log_sd=0.3)
        (True, tensor(2...), True)
    """

    rho: Tensor
    ends: Any = field(default_factory=lambda: torch.zeros(2), kw_only=True)
    ends_error: Any = field(default_factory=lambda: torch.zeros(2), kw_only=True)

    @classmethod
    def of_modes(cls, each: list[Moved]) -> Moved:
        """One, or all those of several modes, (modes, ...)."""
        stacked = {name: torch.stack([vars(m)[name] for m in each]) for name in vars(each[0])}
        return each[0] if len(each) == 1 else cls(**stacked)

    @property
    def is_off(self) -> bool:
        """Whether a mean is off by more than 0.3 sds, an sd by more than 30 %, or an end of a 95 %
        interval by more than 0.5 sds, at three errors."""
        return self.has_moments_off or self.end(-3.0) > COARSE_END

    @property
    def has_moments_off(self) -> bool:
        """Whether a mean or an sd is."""
        mean, log_sd = self.errors(-3.0)
        return bool(((mean > COARSE_MEAN) | (log_sd > COARSE_SD)).any())

    @property
    def is_good(self) -> bool:
        """Whether no mean and no sd is, two standard errors included, no end by more than its noise,
        and all chains have left their starts (rho <= 0.7)."""
        mean, log_sd = self.errors(2.0)
        good = (mean <= COARSE_MEAN) & (log_sd <= COARSE_SD) & (self.rho <= STUCK)
        return bool(good.all()) and self.end() <= COARSE_END

    @property
    def is_sure(self) -> bool:
        """Whether it is good or off, and the errors of ends leave no doubt of that."""
        return self.is_off or (self.is_good and self.end(1.0) <= COARSE_END)

    @property
    def is_known(self) -> bool:
        """Whether two standard errors of means and sds are within the bounds."""
        known = (2.0 * self.mean_error <= COARSE_MEAN) & (2.0 * self.log_sd_error <= COARSE_SD)
        return bool(known.all())

    def is_far_from(self, other: Shift, less: float = 0.0) -> bool:
        """Whether another estimate is off by this one, where chains have left their starts and this is
        known to the bounds; ``less`` standard errors of the difference taken off."""

        def far(name: str, bound: float) -> Tensor:
            one, error = getattr(self, name), getattr(self, f"{name}_error")
            two, noise = (
                torch.as_tensor(getattr(other, n)).to(self.mean) for n in (name, f"{name}_error")
            )
            away = (one - two).abs() - less * torch.hypot(error, noise) > bound
            return away & (2.0 * error <= bound) & (self.rho <= STUCK)

        bounds = {"mean": COARSE_MEAN, "log_sd": COARSE_SD, "ends": COARSE_END}
        return any(bool(far(*each).any()) for each in bounds.items())

    def __str__(self) -> str:
        mean, sd, end = (float(abs(x).max()) for x in (self.mean, self.log_sd, self.ends))
        stuck = f", chains stuck (correlation {float(self.rho.max()):.2f})"
        return (
            f"means off by up to {mean:.2g} sd, sds by up to {100.0 * math.expm1(sd):.0f} %"
            + f", ends of 95 % intervals by up to {end:.2g} sd" * (end > COARSE_END)
            + stuck * bool((self.rho > STUCK).any())
        )


def by_site(
    layout: LatentLayout, before: Tensor, after: Tensor, how: Callable[[Tensor, Tensor], Moved]
) -> tuple[dict[str, Moved], dict[str, Moved]]:
    """``how`` of points (S, d) and (T, d) by site: as it is, and unconstrained where that differs."""
    sites, unconstrained = {}, {}
    both = zip(layout.unconstrained(before), layout.unconstrained(after), strict=True)
    for (name, transform, a), (_, _, b) in both:
        x, y = transform(a), transform(b)
        sites[name] = how(x, y)
        if x is not a:  # the identity returns its argument
            found = how(_rounded(transform, a, x), _rounded(transform, b, y))
            none = torch.zeros_like(found.ends)  # an end is that of the number people read
            unconstrained[name] = replace(found, ends=none, ends_error=none)
            sites[name] = _where(_varies(x), sites[name])
    return sites, unconstrained


def derived(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    how: Callable[[Tensor, Tensor], Moved],
) -> dict[str, Moved]:
    """``how`` of values (S, *shape) and (T, *shape) of deterministic sites, where these are finite."""
    found = {}
    for name, x in before.items():
        finite = x.isfinite().all(0) & after[name].isfinite().all(0)
        found[name] = how(*(torch.where(finite, at, 0.0) for at in (x, after[name])))
    return found


def values_at(program: Program, names: list[str], at: Values) -> dict[str, Tensor]:
    """Values (S, *shape) of the sites ``names`` of a program at those of latent sites."""

    def chosen(sites: Sites) -> dict[str, Tensor]:
        return {name: sites[name]["value"] for name in names}

    with pyro.validation_enabled(False), NaNWhereSingular():
        return map_draws(program, chosen, at, len(next(iter(at.values()))))


def _rounded(transform: Any, u: Tensor, x: Tensor) -> Tensor:
    """Unconstrained u as x, its number in the support, gives it back: roundings near the boundary end
    the tails of draws and of chains at the same place."""
    back = to_unconstrained(transform, x)
    return torch.where(back.isfinite(), back, u)


def _varies(x: Tensor) -> Tensor:
    """Which entries of constrained draws (S, ...) do, but for roundings: no upper triangle's."""
    return x.double().std(0) > 64.0 * torch.finfo(x.dtype).eps * x.double().abs().amax(0)


def _where(varies: Tensor, found: Moved) -> Moved:
    """0 where nothing varies."""
    return Moved(**{name: torch.where(varies, x, 0.0) for name, x in vars(found).items()})


def moved(before: Tensor, after: Tensor, chains: int | None = None) -> Moved:
    """Solutions of (1) of :mod:`.by_chains` from draws (T, ...) of a site, of which S ``chains`` begin
    at the first, and their last states (K S, ...), one after the other."""
    S, varies = len(before) if chains is None else chains, (before != before[0]).any(0)
    own, new = (x.double().numpy(force=True) for x in (before, after))
    shift = shift_of(new, np.full(len(new), -np.log(len(new))), own)
    before, after = before[:S].double(), after.double().unflatten(0, (-1, S))
    K, a, b = len(after), before - before.mean(0), after - after.mean((0, 1))
    va, vb, middle = a.square().mean(0), b.square().mean((0, 1)), b.mean(0)
    rho = (a * middle).mean(0) / (va * vb).sqrt()
    left = 1.0 - rho.clamp(0.0, STUCK)
    mean = (after.mean((0, 1)) - before.mean(0)) / vb.sqrt() / left
    mean_error = (middle - a).std(0) / vb.sqrt() / left / S**0.5
    # Var by (1), kept positive where it extrapolates; the error by the influence of each chain
    share = 1.0 - rho.clamp(0.0, STUCK).square()
    ratio = (1.0 + (vb / va - 1.0) / share).clamp_min(1e-3)
    influence = (b.square().mean(0) - a.square() * (vb / va)) / va
    log_sd_error = 0.5 * influence.std(0) / share / ratio / S**0.5
    # states of a chain are worth fewer draws
    worth = (K * middle.square().mean(0) / vb).clamp(1.0, K)
    wider = ((worth / len(new) + 1.0 / len(own)) / (1.0 / len(new) + 1.0 / len(own))).sqrt()
    ends, ends_error = (torch.as_tensor(x).to(rho) for x in (shift.ends, shift.ends_error))
    known = {"ends": ends, "ends_error": ends_error * wider}
    return _where(varies, Moved(mean, mean_error, 0.5 * ratio.log(), log_sd_error, rho, **known))
