r"""Expected curvature of -log p(y, z) at the draws of a guide, for rules that build on it.

With z = z(theta), theta (d,) unconstrained, and one term per datum,

    -log p~(theta) = - sum_i s_i log p(y_i | theta) - rest(theta),

s_i the scale (and mask) of datum i, rest the prior, the log-Jacobian, factors and what is observed
outside a plate.  Averages over the draws theta ~ q of

    "hessian"            grad^2 (-log p~), by forward over reverse mode
    "gauss_newton"       sum_i s_i g_i g_i' + grad^2 (-rest),   g_i = grad log p(y_i | theta)
    "squared_gradient"   diag(G o G / N) + grad^2 (-rest),      G = sum_i s_i g_i,  N = sum_i s_i
    "price"              nothing: the gradients of the scales carry it (Price's theorem)
    "kronecker"          two factors for each matrix of a matrix-normal guide, and diag grad^2 (-rest)
    "scores"             no curvature: the draws, and log q - log p at each

The outer products g_i g_i' (Khan et al. 2018, Mishkin et al. 2018) are positive semi-definite, and
right in expectation at parameters that fit the data.

Cost, for S draws: "hessian" d gradients, "gauss_newton" min(d, number of data) directional derivatives;
in a network its diagonal comes from the loss's own backward pass, from the second step on
(:mod:`pyro_ngvi.curvature.taps.taps`).  Not for d above some thousands with "hessian", nor with many
data and many parameters at once with "gauss_newton", nor where gradients jump (Laplace distributions,
ReLU), which second derivatives miss: the first step looks for that and warns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from ..families.base import Tensors
from ..linalg.host import outside_autocast, own_random_state
from ..probing.kinks import kinked_sites
from ..runtime.density import LatentLayout, Sites, sum_log_prob
from ..runtime.run import run_particles
from ..runtime.told_in import told_in
from .derivatives import BUDGET, data_of, hessian, hessian_product, is_datum, is_diagonal, products
from .taps.check import search
from .taps.kronecker import kronecker
from .taps.taps import LayerTaps

#: gradients through the model that are computed at a time, for all draws together
COLUMNS = 1024
#: the diagonal of a Hessian that is not diagonal takes so many passes at the most
MOST_COLUMNS = 20_000


@dataclass(frozen=True)
class Curvature:
    """The expected Hessian of -log p(y, z), in nats, in the parts of ``Family.pull_curvature``."""

    kind: str
    parts: Tensors


@told_in("steps.md#no-optimizer-took-what-the-loss-last-left")
def leave_curvature(block: Any, curvature: Any) -> None:
    """Leave on ``block`` what the loss has for its optimizer; refused where nobody took the last."""
    if block.curvature is not None and curvature.kind != "price":  # which is in the gradients
        block.curvature = None
        kind = curvature.kind
        taker = {"scores": "SPRING", "kronecker": "NoisyKFAC", "sites": "CVI"}.get(kind, "NGVB")
        raise RuntimeError(
            f"No optimizer took what the loss last left on {type(block).__name__} ({kind}). Take one "
            f"step for each loss_and_grads, by an optimizer that uses it: pyro_ngvi.{taker}(guide)."
        )
    block.curvature = curvature


class Drawn:
    """The draws of a step and the model at them: all that an estimator of curvature may use.

    A *datum* is an entry of the log probability of an observed site in a plate, or in nested ones.

    Attributes:
        guide: the guide that was drawn from.
        draws: theta (S, d), unconstrained, without a graph.
        losses: log q - log p (S,) at the draws, in nats.

    Example:
        >>> import torch, pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> ngvi.curvature.ESTIMATORS["prior"] = lambda drawn: {"diagonal": drawn.rest_curvature()}
        >>> model = lambda: pyro.sample("x", dist.Normal(torch.zeros(2), 0.5).to_event(1))
        >>> guide, loss = ngvi.AutoMeanFieldNormal(model), ngvi.BatchedELBO(4, curvature="prior")
        >>> _ = loss.loss_and_grads(model, guide), ngvi.curvature.ESTIMATORS.pop("prior")
        >>> guide.take_curvature().parts  # 1 / 0.5^2
        {'diagonal': tensor([4., 4.])}
    """

    def __init__(self, kind: str, guide: Any, layout: LatentLayout) -> None:
        self.kind, self.guide, self.layout = kind, guide, layout
        self.taps: LayerTaps | None = None
        self.reasons: dict[str, str] = {}
        self.searched = self._looked_for_kinks = False
        self._rest_is_diagonal: bool | None = None
        self._forget()

    @property
    def form(self) -> str:
        """What the family takes: "dense" (d, d), "diagonal" (d,), "low_rank" or "kronecker"."""
        return self.guide.family.curvature_form

    def run(self, t: Tensor, reduce: Callable[[Sites], Any]) -> Any:
        """``reduce`` of the sites at one draw t (d,), with a leading 1; the log-Jacobian, 0-dim."""
        values, log_det = self.layout.unpack_with_log_det(t[None])
        given: Any = self.model, reduce, values, 1, self.args, self.kwargs
        return run_particles(*given, minibatches=self.minibatches), log_det[0]

    def at_a_time(self, columns: int | None = None) -> int:
        """How many draws fit together, each with ``columns`` passes through the model, by default d."""
        return max(1, min(len(self.draws), COLUMNS // (columns or self.draws.shape[1])))

    def each(self, function: Callable[[Tensor], Tensor], columns: int | None = None) -> Tensor:
        """(S, ...), ``function`` of each draw (d,), which makes ``columns`` runs of the model, or d."""
        return vmap(function, chunk_size=self.at_a_time(columns), randomness="same")(self.draws)

    def average(self, function: Callable[[Tensor], Tensor], columns: int | None = None) -> Tensor:
        """The mean over the draws of ``function`` of one draw (d,); ``columns`` as in :meth:`each`."""
        return self.each(function, columns).mean(0)

    def potential(self, t: Tensor) -> Tensor:
        """-log p(y, z(t)) at one draw t (d,), less the log-Jacobian: 0-dim, in nats."""
        total, log_det = self.run(t, sum_log_prob)
        return -(total[0] + log_det)

    def gradients(self) -> Tensor:
        """The gradients of :meth:`potential` at all draws, (S, d)."""
        return self.each(grad(self.potential), columns=1)

    def rest(self, t: Tensor) -> Tensor:
        """The part of :meth:`potential` that belongs to no datum, 0-dim, in nats."""

        def reduce(sites: Sites) -> Tensor:
            return sum_log_prob({k: site for k, site in sites.items() if not is_datum(site)})

        total, log_det = self.run(t, reduce)
        return -(total[0] + log_det)

    def data(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Log probability (nats) and weight, scale times mask, of each datum, (N,); at least 1."""
        (log_prob, weight), _ = self.run(t, data_of)
        return log_prob[0], weight[0]

    def has_several_data(self) -> bool:
        """Whether more than one datum counts: of a single one it is not seen whether data mix."""
        return int((self.data(self.draws[0])[1] != 0).sum()) > 1

    def curvature(self) -> Tensor:
        """Average Hessian (d, d) of :meth:`potential`; its diagonal (d,) if the form is not dense."""
        self.warn_of_kinks(whole=True)
        return self.average(lambda t: hessian(self.potential, t, self.form != "dense"))

    def rest_curvature(self) -> Tensor:
        """The same of :meth:`rest`; a ValueError where a diagonal would take too many passes."""
        self.warn_of_kinks()
        if self.form == "dense":
            return self.average(lambda t: hessian(self.rest, t))
        if self.rest_is_diagonal():
            ones = torch.ones_like(self.draws[0])
            return self.average(lambda t: hessian_product(self.rest, t, ones), columns=1)
        d = self.draws.shape[1]
        if d > MOST_COLUMNS:
            raise ValueError(
                "The Hessian of the log prior is not diagonal (one latent site in the prior of "
                f"another), and its diagonal would take {d:,} passes through the model. Use "
                "independent priors, or curvature='price' with pyro_ngvi.optim.IVON."
            )
        return self.average(lambda t: hessian(self.rest, t, diagonal=True))

    def rest_is_diagonal(self) -> bool:
        """Whether the Hessian of the rest is diagonal, probed once, around a draw."""
        if self._rest_is_diagonal is None:
            self._rest_is_diagonal = is_diagonal(self.rest, self.draws[0])
        return self._rest_is_diagonal

    def warn_of_kinks(self, whole: bool = False) -> None:
        """At the first step, where second derivatives of rest or ``whole`` miss something."""
        t = self.draws[0]
        if self._looked_for_kinks or t.is_meta:
            return
        self._looked_for_kinks = True

        def repeatable(t: Tensor, reduce: Any) -> Any:
            with own_random_state(seed=0):
                return self.run(t, reduce)

        names = kinked_sites(repeatable, t, self.layout, lambda site: whole or not is_datum(site))
        if names:
            warnings.warn(
                f"BatchedELBO(curvature={self.kind!r}): the gradient of the log probability of "
                f"{', '.join(map(repr, names))} jumps, as that of Laplace and |x| does, which "
                "second derivatives miss: sds come out wrong. Take NGVB without curvature, IVON, "
                "or curvature='price'.",
                RuntimeWarning,
                stacklevel=2,
            )

    # What follows is called by the loss, in this order.

    def start(self, theta: Tensor, log_det: Tensor) -> None:
        """At each step: theta (S, d) as drawn, with its graph, and the log-Jacobians (S,)."""
        self._theta, self._log_det, self.draws = theta, log_det, theta.detach()
        if self.taps is not None:
            self.taps.clear()

    def log_joint(self, data: Tensor, rest: Tensor) -> Tensor:
        """With taps: the log joint (S,) from that of the site that they see, and of the rest."""
        self._rest = -(rest + self._log_det)
        return data + rest

    @outside_autocast
    def before_backward(self) -> None:
        """With taps: H 1 of the rest, while its graph is there."""
        if self.taps is None or not self._rest_is_diagonal:
            return
        self.rest_row_sums = torch.zeros_like(self.draws[0])
        how: Any = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
        if self._rest.requires_grad:
            (g,) = torch.autograd.grad(self._rest.sum(), self._theta, create_graph=True, **how)
            if g.requires_grad:
                (product,) = torch.autograd.grad(g.sum(), self._theta, **how)
                self.rest_row_sums = product.mean(0).detach()

    @outside_autocast
    def leave(self, model: Any, minibatches: Any, args: Any, kwargs: Any) -> None:
        """Leave the curvature at the draws of this step on the guide."""
        self.model, self.minibatches, self.args, self.kwargs = model, minibatches, args, kwargs
        kind, parts = self.kind if self.kind in KINDS else "hessian", ESTIMATORS[self.kind](self)
        self._forget()
        leave_curvature(self.guide, Curvature(kind, parts))

    def _forget(self) -> None:
        self.draws = self.losses = self.rest_row_sums = torch.empty(0)
        self._theta = self._log_det = self._rest = torch.empty(0)
        nothing: Any = None
        self.model = self.minibatches = self.args = self.kwargs = nothing


def gauss_newton(drawn: Drawn) -> Tensors:
    """Products of the gradients of single data, and the Hessian of the rest."""
    if drawn.form == "diagonal":
        squares = {} if drawn.taps is None else drawn.taps.squared_gradients(len(drawn.draws))
        if not drawn.searched and drawn.has_several_data():
            search(drawn)
        if squares:
            return {"diagonal": _completed(drawn, squares) + drawn.rest_row_sums}
    rest, data = drawn.rest_curvature(), _products(drawn)
    if drawn.form == "low_rank":
        return {"rows": data, "diagonal": rest}
    return {drawn.form: data + rest}


def _completed(drawn: Drawn, squares: Tensors) -> Tensor:
    """The squares of all sites (d,): those of the taps, and by the general route the others."""
    shapes, zeros = drawn.layout.unconstrained_shapes, drawn.draws.new_zeros
    pieces = [
        squares[k].reshape(-1) if k in squares else zeros(s.numel()) for k, s in shapes.items()
    ]
    diagonal = torch.cat(pieces)
    if len(squares) == len(shapes):
        return diagonal
    numbers = torch.arange(len(diagonal), device=diagonal.device).split([len(p) for p in pieces])
    entries = torch.cat([n for k, n in zip(shapes, numbers, strict=True) if k not in squares])
    return diagonal.index_copy(0, entries, _products(drawn, entries))


def _products(drawn: Drawn, entries: Tensor | None = None) -> Tensor:
    """The average over draws of sum_i s_i g_i g_i' in the form asked for, of some ``entries`` only."""
    theta = drawn.draws
    entries = torch.arange(theta.shape[1], device=theta.device) if entries is None else entries
    _, weights = drawn.data(theta[0])  # the same for all draws, as the minibatch is
    budget = BUDGET // drawn.at_a_time(len(entries))

    def of_one(t: Tensor) -> Tensor:
        def log_probs(part: Tensor) -> Tensor:
            return drawn.data(t.index_copy(0, entries, part))[0]

        return products(log_probs, t[entries], weights, drawn.form, budget)

    rows = drawn.each(of_one, len(entries))
    return rows.flatten(0, 1) / len(rows) ** 0.5 if drawn.form == "low_rank" else rows.mean(0)


def squared_gradient(drawn: Drawn) -> Tensors:
    """Squares of the gradient of the minibatch; also the Hessian of the rest alone, and N."""
    rest = drawn.rest_curvature()
    _, weights = drawn.data(drawn.draws[0])
    count = weights.sum()

    def weighted(t: Tensor) -> Tensor:
        log_prob, weight = drawn.data(t)
        return (log_prob * weight).sum()

    squares = drawn.average(lambda t: grad(weighted)(t).square(), columns=1)
    return {"diagonal": squares / count + rest, "prior": rest, "count": count}


ESTIMATORS: dict[str, Callable[[Drawn], Tensors]] = {
    "price": lambda drawn: {},
    "hessian": lambda drawn: {drawn.form: drawn.curvature()},
    "gauss_newton": gauss_newton,
    "squared_gradient": squared_gradient,
    "kronecker": kronecker,
    # scores of q at the draws give the Fisher matrix, their regression on these the natural gradient
    "scores": lambda drawn: {"draws": drawn.draws, "residuals": drawn.losses},
}
"""What ``BatchedELBO(curvature=...)`` may be; register one of your own by its name.

Its parts estimate the expected Hessian of -log p(y, z), as "dense" (d, d), as "diagonal" (d,), or as
"rows" (n, d), which stand for their products, beside a "diagonal"; rules take it as "hessian".
"""

#: those of this package, which rules know by name; any other counts as "hessian"
KINDS = tuple(ESTIMATORS)

#: estimators that run the model no second time, so that it may run once for each particle
READ_OFF = ("price", "scores")

#: by the form of curvature that a family takes, the kinds that it does not
_NO_USE = {
    "diagonal": ("kronecker",),
    "dense": ("kronecker", "squared_gradient"),
    "low_rank": ("kronecker", "squared_gradient", "hessian"),
}


def check_takes_curvature(guide: Any, kind: str, ours: bool) -> None:
    """At the first step: refuse a guide that a curvature would train wrongly or not at all."""
    form = guide.family.curvature_form if ours else None
    takes = kind not in _NO_USE[form] if form in _NO_USE else form == kind
    if not ours or not (takes or kind == "scores"):
        taker = "AutoMatrixNormal, for NoisyKFAC," if kind == "kronecker" else "AutoMeanFieldNormal"
        raise ValueError(
            f"{type(guide).__name__} has no use for BatchedELBO(curvature={kind!r}). Take {taker} "
            f"itself (not within an AutoGuideList), or leave curvature out."
        )
    own = {id(p) for p in guide.natural_params().values()}
    rest = [k for k, p in guide.named_parameters() if p.requires_grad and id(p) not in own]
    if kind == "scores" and rest:
        raise ValueError(
            f'BatchedELBO(curvature="scores") would not train {", ".join(rest)}, which are not of '
            f"the family of {type(guide).__name__}. Take pyro_ngvi.NGVB or pyro_ngvi.IFVB without it."
        )
