r"""SPRING: the natural gradient solved in the space of the draws, with the past as a prior.

Draws z_s ~ q, s = 1 ... S, have scores phi_s, the rows of Phi, and residuals
r_s = log q(z_s) - log p(y, z_s), in nats; both are centred over the draws and divided by sqrt(S).  Then
Phi' r is the gradient of the negative ELBO and Phi' Phi the Fisher matrix, so that the natural gradient
is the regression of the residuals on the scores (Salimans & Knowles 2013).  With fewer draws than
parameters the S x S side of it is the one to solve:

    G = m G_old + Phi' (Phi Phi' + c I)^-1 (r - m Phi G_old)
    lambda <- retract(lambda, -b G),   b = a min(1, R / (a |Phi G|)),

where c is ``damping`` times the mean of the diagonal of Phi Phi'.  m < 1 keeps what earlier draws said
of the directions that these draws do not see (a Kaczmarz method).  Residuals vanish as q approaches the
posterior, so that noise does too.  It asks for values of log p alone.

The guide holds an average of about the last two fifths of the run.  The draws compare the two at every
step, and where KL(q || q_average) > 1 nat (a fit that jumps between modes) the average begins anew.

Not for: more than some twenty latent variables (benchmarks/flows/README.md); targets that are zero in
places, since a step with a draw of log p = -inf is skipped; minibatches of a plate, whose noise is in
every residual.

Sources: Goldshlager, Abrahamsen & Lin (2024, J. Comput. Phys. 516:113351); Chen & Heyl (2024, Nature
Physics 20:1476) for m = 0; Salimans & Knowles (2013, Bayesian Analysis 8:837).  The damping relative to
the diagonal, the radius and the average are this project's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from pyro.optim import PyroOptim
from torch import Tensor

from ..families.base import Family, Tensors
from ..fisher.scores import packed_scores
from .host import NaturalGradientOptim
from .rule import Averaging, Rate, Rule, State, Step, as_averaging, rate_at, require, require_rate
from .state import ADAM

#: an average further than this from the iterate, in nats, averages fits that have nothing in common
FAR = 1.0


@dataclass(frozen=True)
class SpringRule(Rule):
    """The mathematics, as pure functions of the "draws" (S, d) and their "residuals" (S,)."""

    learns_fisher: ClassVar[bool] = True

    family: Family
    lr: Rate
    momentum: float = 0.9
    damping: float = 1e-3
    trust_radius: float = 0.25
    averaging: Averaging | None = None

    def __post_init__(self) -> None:
        require_rate("lr", self.lr)
        require(0.0 <= self.momentum < 1.0, "momentum", "lie in [0, 1)", self.momentum)
        for name in ("damping", "trust_radius"):
            value = getattr(self, name)
            require(0.0 < value < torch.inf, name, "be a positive number", value)

    def start(self, params: Tensors) -> State:
        # the clock of the rate; "count" is that of the average, which may start again
        increment = torch.zeros_like(self.family.pack(params))
        return {"step": increment.new_zeros(()), "increment": increment}

    def step(self, params: Tensors, grads: Tensors, state: State, curvature: Any = None) -> Step:
        draws, residuals = curvature["draws"], curvature["residuals"]
        if len(draws) < 2:
            raise ValueError(
                "SPRING compares the draws of a step with each other, and the loss makes one. Take "
                'BatchedELBO(num_particles=128, curvature="scores").'
            )
        a = rate_at(self.lr, state["step"])
        phi = packed_scores(self.family, params, self.family.score(params, draws))
        past = self.momentum * state["increment"]
        # centred and divided by sqrt(S) on their S x S side: fewer passes over them
        count = len(draws)
        kernel = _centred(_centred(phi @ phi.mT / count).mT)
        predicted = _centred(phi @ past) / count**0.5
        unexplained = _centred(residuals) / count**0.5 - predicted
        ridge = self.damping * kernel.diagonal().mean()
        identity = torch.eye(count, dtype=phi.dtype, device=phi.device)
        factor, _ = torch.linalg.cholesky_ex(kernel + ridge * identity)
        x = torch.cholesky_solve(unexplained.unsqueeze(-1), factor).squeeze(-1)
        increment = past + phi.mT @ (_centred(x) / count**0.5)
        tiny = torch.finfo(phi.dtype).tiny
        length = torch.linalg.vector_norm(predicted + kernel @ x).clamp_min(tiny)
        shrink = (self.trust_radius / (a * length)).clamp_max(1.0)
        # a shortened move is also what the next step remembers
        increment = shrink * increment
        new = self.family.retract(params, self.family.unpack(increment, params), -a)
        gap = None
        if self.averaging is not None:
            average = state["average"]
            gap = self.family.log_prob(params, draws) - self.family.log_prob(average, draws)
        return Step(
            new,
            a * shrink * length,
            gain=a,
            state={"step": state["step"] + 1.0, "increment": increment},
            radius=torch.full_like(a, self.trust_radius),
            damped=shrink < 1.0,
            finite=torch.isfinite(length),
            keep_average=None if gap is None else gap.mean() < FAR,
        )

    def bad_entries(self, grads: Tensors, curvature: Any) -> Tensor:
        return ~torch.isfinite(curvature["draws"]).all(0)


def _centred(x: Tensor) -> Tensor:
    """x without its mean over the first dimension, the draws."""
    return x - x.mean(0)


class SPRING(NaturalGradientOptim):
    """Natural gradients of any guide of ours by regression on its scores; made for flows.

    Equations and sources: :mod:`pyro_ngvi.optim.spring`.  The loss must be
    ``BatchedELBO(S, curvature="scores")``; S of 64 to 256 draws, more for more latent variables.

    Args:
        guide: a guide of ours (:class:`~pyro_ngvi.AutoCouplingFlow`, :class:`~pyro_ngvi.AutoFlow`,
            :class:`~pyro_ngvi.AutoOrthogonalFlow`, or one with a Gaussian family).
        lr: rate a in (0, 1], or a function of the step count k = 0, 1, ... (a 0-dim tensor).
        momentum: m in [0, 1), how much of the increment before stays.
        damping: ridge of the S x S system, as a share of the mean of its diagonal.
        trust_radius: largest length of a step in the Fisher norm of the draws, nats^(1/2).
        averaging: as in :class:`~pyro_ngvi.NGVB`; by default of about the last two fifths.
        others: a ``PyroOptim`` for parameters of the model; see :class:`~pyro_ngvi.NGVB`.

    Raises:
        ValueError: for a guide that is not ours, or arguments out of range.
        RuntimeError: at a step, for a loss without ``curvature="scores"``; a ValueError with S = 1.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> from pyro.infer import SVI
        >>> def model():
        ...     v = pyro.sample("v", dist.Normal(0.0, 3.0))
        ...     pyro.sample("x", dist.Normal(torch.zeros(2), (v / 2).exp()).to_event(1))
        >>> guide = ngvi.AutoCouplingFlow(model)
        >>> loss = ngvi.BatchedELBO(num_particles=128, curvature="scores")
        >>> svi = SVI(model, guide, ngvi.optim.SPRING(guide), loss)
        >>> for _ in range(100):
        ...     _ = svi.step()
        >>> svi.evaluate_loss() < 0.3  # log Z = 0; the best Gaussian is 1.1 nats below
        True
    """

    suits = "pyro_ngvi.AutoCouplingFlow(model)"
    accepts: ClassVar[tuple[str | None, ...]] = ("scores",)
    needs_gradients: ClassVar[bool] = False

    def __init__(
        self,
        guide: Any,
        lr: Rate = 0.3,
        momentum: float = 0.9,
        damping: float = 1e-3,
        trust_radius: float = 0.25,
        averaging: Averaging | float | bool = True,
        others: PyroOptim | None = ADAM,
    ) -> None:
        settings = {"damping": damping, "trust_radius": trust_radius}
        average = as_averaging(averaging)
        rule = partial(SpringRule, lr=lr, momentum=momentum, averaging=average, **settings)
        super().__init__(guide, others, rule)
