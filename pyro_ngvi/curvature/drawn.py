"""The draws of a step, as an estimator of curvature gets them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.func import grad, vmap

from ..linalg.host import own_random_state
from ..probing.kinks import kinked_sites
from ..runtime.density import Site, Sites, sum_log_prob
from ..runtime.run import Minibatches, run_particles
from .data import data_of, is_data, log_prob_of_rest
from .derivatives import at_a_time, average, hessian, hessian_diagonal, is_diagonal, row_sums

if TYPE_CHECKING:
    from .estimator import CurvatureEstimator

__all__ = ["Drawn"]

#: the diagonal of a Hessian that is not diagonal takes so many passes at the most
MOST_COLUMNS = 20_000


@dataclass(frozen=True)
class Drawn:
    """The draws of a step and the model at them: all that an estimator of curvature may use.

    A *datum* is an entry of the log probability of an observed site in a plate; with nested plates,
    subjects by times, each entry is one.  The *rest* is the prior, the log-Jacobian, factors and what
    is observed outside a plate.

    Attributes:
        guide: the guide that was drawn from.
        draws: theta (S, d), unconstrained, without a graph.
        losses: log q - log p (S,) at the draws, in nats.
        pair: what lasts from step to step, and what the loss's own backward pass has left.
        model, minibatches, args, kwargs: the model, and how to run it again.
    """

    guide: Any
    draws: Tensor
    losses: Tensor
    pair: CurvatureEstimator
    model: Callable[..., Any]
    minibatches: Minibatches
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def form(self) -> str:
        """What the family takes: "dense" (d, d), "diagonal" (d,), "low_rank" or "kronecker"."""
        return self.guide.family.curvature_form

    def run(self, t: Tensor, reduce: Callable[[Sites], Any]) -> Any:
        """``reduce`` of the sites at one draw t (d,), with a leading 1; and the log-Jacobian."""
        values, log_det = self.pair.layout.unpack_with_log_det(t[None])
        given: Any = self.model, reduce, values, 1, self.args, self.kwargs
        return run_particles(*given, minibatches=self.minibatches), log_det[0]

    def average(self, function: Callable[[Tensor], Tensor], columns: int | None = None) -> Tensor:
        """The mean over the draws of ``function`` of one draw (d,).

        ``columns`` is how many passes through the model one value holds at a time; by default d.
        """
        return average(function, self.draws, columns)

    def potential(self, t: Tensor) -> Tensor:
        """-log p(y, z(t)) with the log-Jacobian, a number."""
        total, log_det = self.run(t, sum_log_prob)
        return -(total[0] + log_det)

    def gradients(self) -> Tensor:
        """The gradients of :meth:`potential` at all draws, (S, d)."""
        chunk = at_a_time(self.draws, columns=1)
        return vmap(grad(self.potential), chunk_size=chunk, randomness="same")(self.draws)

    def rest(self, t: Tensor) -> Tensor:
        """The part of :meth:`potential` that belongs to no datum."""
        total, log_det = self.run(t, log_prob_of_rest)
        return -(total[0] + log_det)

    def data(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """The log probability of each datum, and its weight (scale times mask), both (N,)."""
        (log_prob, weight), _ = self.run(t, data_of)
        return log_prob[0], weight[0]

    def curvature(self) -> Tensor:
        """The average Hessian of :meth:`potential`: (d, d) if the form is dense, else the diagonal."""
        self.warn_of_kinks(whole=True)
        by = hessian if self.form == "dense" else hessian_diagonal
        return self.average(lambda t: by(self.potential, t))

    def rest_curvature(self) -> Tensor:
        """The average Hessian of :meth:`rest`: (d, d) if the form is dense, else the diagonal."""
        self.warn_of_kinks()
        if self.form == "dense":
            return self.average(lambda t: hessian(self.rest, t))
        if self.rest_is_diagonal():
            return self.average(lambda t: row_sums(self.rest, t), columns=1)
        self._check_affordable()
        return self.average(lambda t: hessian_diagonal(self.rest, t))

    def rest_is_diagonal(self) -> bool:
        """Whether the Hessian of the rest is diagonal, probed once, around a draw."""
        if self.pair.rest_is_diagonal is None:
            self.pair.rest_is_diagonal = is_diagonal(self.rest, self.draws[0])
        return self.pair.rest_is_diagonal

    def warn_of_kinks(self, whole: bool = False) -> None:
        """At the first step: where second derivatives are taken of what has none.

        Of the rest, or of the ``whole`` potential.
        """
        t = self.draws[0]
        if self.pair.looked_for_kinks or t.is_meta:
            return
        self.pair.looked_for_kinks = True

        def repeatable(t: Tensor, reduce: Any) -> Any:
            with own_random_state(seed=0):
                return self.run(t, reduce)

        def differentiated(site: Site) -> bool:
            return whole or not is_data(site)

        names = kinked_sites(repeatable, t, self.pair.layout, differentiated)
        if names:
            warnings.warn(
                f"BatchedELBO(curvature={self.pair.kind!r}): the gradient of the log probability of "
                f"{', '.join(map(repr, names))} jumps, as that of Laplace and |x| does, which "
                "second derivatives miss: sds come out wrong. Take NGVB without curvature, IVON, "
                "or curvature='price'.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _check_affordable(self) -> None:
        """Refuse the diagonal of a dense Hessian, a pass for each of so many columns."""
        d = self.draws.shape[1]
        if d > MOST_COLUMNS:
            raise ValueError(
                "The Hessian of the log prior is not diagonal (one latent site in the prior of "
                f"another), and its diagonal would take {d:,} passes through the model. Use "
                "independent priors, or curvature='price' with pyro_ngvi.optim.IVON."
            )
