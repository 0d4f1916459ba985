"""AIFVB: IFVB whose iterates are averaged, and whose scores are drawn at the average.

    lambda_bar_k = sum_j w_j lambda_j / sum_j w_j,   phi ~ scores at lambda_bar.

The paper has w_j = (log j)^2 (0/0 at the first step; here (log(j + 1))^2), which weighs the way to the
optimum almost like the stay there; the default is the average over about the last quarter of the run.

Source: Godichon-Baggioni, Nguyen & Tran (2024, JASA), Algorithm 2.  Not where gradients are exact:
there averaging only delays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..families.base import Tensors
from ..fisher.geometry import Coordinates
from .averaging import Averaging, UsingAverage
from .base import part
from .ifvb import IFVB, IFVBRule
from .schedules import RobbinsMonro

__all__ = ["AIFVB"]

#: for guides that are not ours: above k^-1, as averages need it, and waiting for the signal
SLOW = RobbinsMonro(scale=0.3, offset=20.0, power=2.0 / 3.0, patience=0.3)


class AIFVB(IFVB):
    """IFVB with weighted averages of the iterates, and scores drawn at the average (Algorithm 2).

    ``averaging``: ``True`` (default, :class:`Tail`), or a number w for the weights (log(k + 1))^w; the
    paper's is 2.  Guides that are ours hold the average.  Other guides hold the iterate: read them
    inside ``with optim.use_average():``, or call ``optim.use_average()`` when the run is over.

    Use it when gradients are noisy and many steps are affordable.  Where gradients are exact,
    averaging only delays (the paper's example 1).  Arguments: :class:`IFVB`.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> from pyro.infer.autoguide import AutoNormal
        >>> import pyro_ngvi as ngvi
        >>> def model():
        ...     pyro.sample("x", dist.Normal(3.0, 2.0))
        >>> guide = AutoNormal(model)
        >>> optim = ngvi.AIFVB(guide)
        >>> svi = SVI(model, guide, optim, Trace_ELBO(4, vectorize_particles=True))
        >>> for _ in range(300):
        ...     loss = svi.step()
        >>> with optim.use_average():
        ...     bool((guide.median()["x"] - 3.0).abs() < 0.5)
        True
    """

    def __init__(
        self, guide: Any, *args: Any, averaging: Averaging | float | bool = True, **kwargs: Any
    ) -> None:
        if averaging is False:
            raise ValueError("AIFVB averages; without averaging use IFVB.")
        super().__init__(guide, *args, averaging=averaging, **kwargs)

    @classmethod
    def paper(
        cls, guide: Any, *, averaging: Averaging | float | bool = 2.0, **arguments: Any
    ) -> Any:
        """Algorithm 2 as printed, with weights (log(k + 1))^2; arguments as for IFVB.paper."""
        return super().paper(guide, averaging=averaging, **arguments)

    def make_rule(self, family: Any) -> IFVBRule:
        rule = super().make_rule(family)
        if self._rule_arguments["schedule"] is None and isinstance(rule.step.family, Coordinates):
            return replace(rule, step=replace(rule.step, schedule=SLOW))
        return rule

    def _draw(self, path: str, block: Any, values: Tensors, n: int) -> Tensor:
        """n scores of a block at the average of its iterates."""
        held = block.natural_params()
        if block.holds_average:
            return super()._draw(path, block, {k: p.detach() for k, p in held.items()}, n)
        average = part(self._states.get(path, {}), "average.")
        with UsingAverage([(held, average)] if average else []):
            return super()._draw(path, block, values, n)
