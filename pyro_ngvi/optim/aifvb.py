"""AIFVB: IFVB whose iterates are averaged, and whose scores are drawn at the average.

    lambda_bar_k = sum_j w_j lambda_j / sum_j w_j,   phi ~ scores at lambda_bar.

The paper has w_j = (log j)^2 (0/0 at the first step; here (log(j + 1))^2), which weighs the way to the
optimum almost like the stay there; the default is the average over about the last two fifths.

Source: Godichon-Baggioni, Nguyen & Tran (2024, JASA), Algorithm 2.  Not where gradients are exact:
there averaging only delays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from ..families.base import Tensors
from ..fisher.scores import family_scores
from .block import GuideBlock
from .ifvb import IFVB
from .rule import Averaging, UsingAverage, part
from .uncertainty import AsymptoticCovariance, measure_covariance, widened_draws, without_lag

__all__ = ["AIFVB"]


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

    def asymptotic_covariance(
        self, svi: Any, *args: Any, num_gradients: int = 256, num_hessians: int = 16, **kwargs: Any
    ) -> AsymptoticCovariance:
        """Covariance of the averaged parameters around the optimum (theorem 5.3, remark 5.2).

        Args:
            svi: the ``SVI`` object of the run; its loss and number of particles are used.
            args, kwargs: those of ``svi.step``.
            num_gradients: gradients that the covariance of the noise is estimated from.
            num_hessians: repetitions of the Hessian by differences, 2 D gradients each.

        Raises:
            RuntimeError: before the first step.
            ValueError: if the loss is not at a minimum.
        """
        blocks, leaves = self._averaged_leaves()
        weight = next(iter(self._states.values()))["average_square"]
        with self.use_average(), without_lag([b for _, b in blocks if b.holds_average]):
            scores = torch.cat([self._stored_scores(block, 64) for _, block in blocks], 1)
            square = scores.square().mean(0)
            scale = torch.where(square > 0, square, torch.inf).rsqrt()
            gradient = _packed_gradient(svi, leaves, args, kwargs)
            return measure_covariance(gradient, leaves, scale, weight, num_gradients, num_hessians)

    def posterior_with_algorithmic_uncertainty(
        self, svi: Any, *args: Any, num_samples: int = 1000, **kwargs: Any
    ) -> Tensors:
        """Draws (num_samples, ...) of the latent sites from the posterior widened by C (5.4).

        Arguments: those of :meth:`asymptotic_covariance`.  Close to draws of the guide when the run was
        long enough; wider where more steps would still change the answer.
        """
        how = {k: kwargs.pop(k) for k in ("num_gradients", "num_hessians") if k in kwargs}
        covariance = self.asymptotic_covariance(svi, *args, **how, **kwargs)
        blocks, leaves = self._averaged_leaves()
        with self.use_average(), without_lag([b for _, b in blocks if b.holds_average]):
            return widened_draws(
                lambda: svi.guide(*args, **kwargs), leaves, covariance, num_samples
            )

    def _averaged_leaves(self) -> tuple[list[tuple[str, Any]], Tensors]:
        blocks = [(path, block) for path, block in self._blocks() if path in self._states]
        if not blocks:
            raise RuntimeError("There is no average before the first step.")
        single = len(blocks) == 1
        return blocks, {
            name if single else f"{path}.{name}": p
            for path, block in blocks
            for name, p in block.natural_params().items()
        }

    def _stored_scores(self, block: Any, n: int) -> Tensor:
        if isinstance(block, GuideBlock):
            return block.draw_scores(n)
        params = {name: p.detach() for name, p in block.natural_params().items()}
        return family_scores(block.family, params, n, stored=True)

    def _draw(self, path: str, block: Any, values: Tensors, n: int) -> Tensor:
        """n scores of a block at the average of its iterates."""
        held = block.natural_params()
        if block.holds_average:
            return super()._draw(path, block, {k: p.detach() for k, p in held.items()}, n)
        average = part(self._states.get(path, {}), "average.")
        with UsingAverage([(held, average)] if average else []):
            return super()._draw(path, block, values, n)


def _packed_gradient(svi: Any, leaves: Tensors, args: Any, kwargs: Any) -> Callable[[], Tensor]:
    """One gradient of the loss of ``svi`` in ``leaves``, (D,), without a step."""

    def gradient() -> Tensor:
        with poutine.trace(param_only=True) as seen:
            svi.loss_and_grads(svi.model, svi.guide, *args, **kwargs)
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in leaves.values()]
        result = torch.cat([g.detach().reshape(-1) for g in found])
        nodes: Any = seen.trace.nodes
        touched = [site["value"].unconstrained() for site in nodes.values()]
        for p in (*touched, *leaves.values()):
            p.grad = None
        return result

    return gradient
