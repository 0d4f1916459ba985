"""The optimizer around a rule of your own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyro.optim import PyroOptim

from ..families.base import Family
from ..rules.rule import Rule
from .base import NaturalGradientOptim, describe
from .others_state import ADAM

__all__ = ["NaturalGradient"]


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

    def __init__(
        self, guide: Any, rule: Callable[[Family], Rule], others: PyroOptim | None = ADAM
    ) -> None:
        self.rule = rule
        super().__init__(guide, others)
        if not self._rules:
            raise ValueError(
                f"NaturalGradient steps guides whose Fisher matrix it knows, and found none in "
                f"{describe(guide)}. Use for instance pyro_ngvi.AutoFullRankNormal(model)."
            )

    def make_rule(self, family: Family) -> Rule:
        made = self.rule(family)
        self.accepts = made.accepts
        return made
