"""AIFVB: IFVB whose iterates are averaged, and whose scores are drawn at the average.

    lambda_bar_k = sum_j w_j lambda_j / sum_j w_j,   w_j = (log(j + 1))^2,   phi ~ scores at lambda_bar.

Source: Godichon-Baggioni, Nguyen & Tran (2024, JASA), Algorithm 2.  Not where gradients are exact:
there averaging only delays.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..families.base import Tensors
from .averaging import Averaging, UsingAverage
from .base import part
from .ifvb import IFVB

__all__ = ["AIFVB"]


class AIFVB(IFVB):
    """IFVB with weighted averages of the iterates, and scores drawn at the average (Algorithm 2).

    The weights are (log(k + 1))^2 unless ``averaging`` says otherwise.  Guides that are ours hold the
    average.  Other guides hold the iterate: read them inside ``with optim.use_average():``, or call
    ``optim.use_average()`` when the run is over.

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
        self, guide: Any, *args: Any, averaging: Averaging | float | bool = 2.0, **kwargs: Any
    ) -> None:
        if averaging is False:
            raise ValueError("AIFVB averages; without averaging use IFVB.")
        super().__init__(guide, *args, averaging=averaging, **kwargs)

    def _draw(self, path: str, block: Any, values: Tensors, n: int) -> Tensor:
        """n scores of a block at the average of its iterates."""
        held = block.natural_params()
        if block.holds_average:
            return super()._draw(path, block, {k: p.detach() for k, p in held.items()}, n)
        average = part(self._states.get(path, {}), "average.")
        with UsingAverage([(held, average)] if average else []):
            return super()._draw(path, block, values, n)
