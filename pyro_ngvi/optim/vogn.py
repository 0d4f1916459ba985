"""VOGN, IVON, SLANG and Vadam: :class:`~pyro_ngvi.optim.VON` with other settings or a part changed.

For a network start at ``init_loc_fn=model.init_to_module`` (see ``pyro_ngvi.nn.bayesianize``) with a
small ``init_scale``, 0.01 to 0.03: from the default 0.1 the sds of some thousand weights can grow to
the prior's before the means have learnt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pyro.optim import PyroOptim
from torch import Tensor

from ..families import FactorPrecisionNormal, MeanFieldNormal
from ..families.base import Tensors
from .natural_gradient import OUTLIER
from .rule import Averaging, State
from .schedules import Rate, rate_at, slowing_rate
from .state import ADAM
from .von import VON, VONRule


@dataclass(frozen=True)
class DiagonalRule(VONRule):
    """VON for a diagonal precision alone."""

    def refuses(self, family: Any) -> str | None:
        if isinstance(family, MeanFieldNormal):
            return None
        return (
            "its precision must be diagonal. Use pyro_ngvi.AutoMeanFieldNormal(model), or "
            "pyro_ngvi.optim.VON for a full precision."
        )


@dataclass(frozen=True)
class IVONRule(DiagonalRule):
    """VON with a trust region in the step of the mean, entry by entry."""

    def _mean_step(
        self, params: Tensors, gradient: Tensor, state: State, a: Tensor, curvature: Tensors
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # few passes over memory, which is what a step costs with a network's weights
        radius, sd = self.trust_radius, params["log_scale"].exp()
        bound = (OUTLIER * radius / a) / sd
        m = torch.lerp(gradient.clamp(-bound, bound), state["gradient"], self.momentum)
        wanted = (m * sd).mul_(a / (1.0 - self.momentum ** (state["step"] + 1.0)))
        kept = wanted.clamp(-radius, radius)
        damped = torch.linalg.vector_norm(wanted, torch.inf) > radius
        return m, sd.mul_(kept), torch.linalg.vector_norm(kept), damped


@dataclass(frozen=True)
class VadamRule(DiagonalRule):
    """VON with the square root of Adam in the step of the mean."""

    def _move(
        self, params: Tensors, m: Tensor, a: Tensor, k: Tensor, curvature: Tensors
    ) -> tuple[Tensor, Tensor]:
        prior, count = curvature["prior"], curvature["count"]
        P = (-2.0 * params["log_scale"]).exp()
        s = ((P - prior) / count).clamp_min(0.0)
        unbiased = s / (1.0 - (1.0 - rate_at(self.curvature_lr, k)) ** (k + 1.0))
        move = a * (m / count) / (unbiased.sqrt() + prior / count)
        return move, (P * move.square()).sum().clamp_min(torch.finfo(P.dtype).tiny).sqrt()


@dataclass(frozen=True)
class SLANGRule(VONRule):
    """VON for a factor precision, whose step keeps what rank L can hold."""

    def refuses(self, family: Any) -> str | None:
        if isinstance(family, FactorPrecisionNormal):
            return None
        return (
            "it steps a factor precision. Use pyro_ngvi.AutoFactorPrecision(model, rank=2), or for this "
            "guide pyro_ngvi.NGVB."
        )


class VOGN(VON):
    """Variational online Gauss-Newton: :class:`~pyro_ngvi.optim.VON` with the settings for networks.

    ``loss=BatchedELBO(num_particles, curvature="gauss_newton")``; the data must lie in a plate.  Its
    H = sum_i s_i g_i g_i' + prior, g_i the gradient of a single datum, is positive semi-definite, so
    the printed update needs no correction.

    Args:
        guide: an ``AutoMeanFieldNormal`` (or ``AutoFullRankNormal``).
        lr: rate a of the mean, in (0, 1], or a function of the step count; by default
            max(0.01, 1 / (10 + k^0.75)).
        curvature_lr: rate b of the precision, likewise; small enough to average over the data.
        momentum: weight of the past in the average of the gradients, bias-corrected.
        averaging: as in :class:`~pyro_ngvi.optim.VON`; none by default.
        further: ``damping``, ``trust_radius`` and ``others`` of :class:`~pyro_ngvi.optim.VON`.

    Other than published, damping is not in the standard deviations: the posterior stays the model's.
    The published prior precision delta is the curvature of the model's prior, 1 - beta_2 is b.  For
    a warm-up of the KL term see ``kl_weight`` of :class:`~pyro_ngvi.BatchedELBO`.

    Not for small models: :class:`~pyro_ngvi.NGVB` needs no rates there, and the exact Hessian is cheap.

    Source: Khan et al. (2018, arXiv:1806.04854); momentum and damping as in Osawa et al. (2019,
    arXiv:1906.02506).

    Example:
        >>> import pyro_ngvi as ngvi
        >>> def model():
        ...     pass
        >>> optim = ngvi.optim.VOGN(ngvi.AutoMeanFieldNormal(model), lr=0.1, curvature_lr=0.05)
    """

    accepts: ClassVar[tuple[str | None, ...]] = ("gauss_newton",)

    def __init__(
        self,
        guide: Any,
        lr: Rate = slowing_rate,
        curvature_lr: Rate = slowing_rate,
        momentum: float = 0.9,
        *,
        averaging: Averaging | float | bool = False,
        **further: Any,
    ) -> None:
        settings = {"safe": False, "averaging": averaging, **further}
        super().__init__(guide, lr, curvature_lr, momentum, **settings)


class SLANG(VON):
    r"""VON for a precision U U' + diag(s), U of rank L, that averages outer products of gradients.

    ``loss=BatchedELBO(num_particles, curvature="gauss_newton")``; the data must lie in a plate.  With
    b = b_k, beta = 1 - b, rows G (n, d) and the diagonal delta of the curvature G'G + diag(delta):

        U_new U_new' = the L leading eigenpairs of   A'A = beta U U' + b G'G
        Delta = diag(A'A) - diag(U_new U_new'), negative entries set to 0
        s_new = beta s + b delta + Delta

    so the diagonal of the precision is that of the full average, beta P + b H: what is left out are the
    correlations beyond rank L.  The eigenpairs come from :mod:`pyro_ngvi.linalg.spectral`.

    Args:
        guide: an ``AutoFactorPrecision``.
        lr: rate a of the mean: a number in (0, 1], or a function of the step count k = 0, 1, ... (a
            0-dim tensor).  Published, a and b alike: ``PowerDecay(0.05, 0.51)`` for logistic
            regression, 0.02 for small networks.
        curvature_lr: rate b of the precision, likewise; ``None`` for ``lr``.  At a constant b the
            precision averages over the last 1/b steps or so.
        momentum: weight in [0, 1) of the past in the average of the gradients.
        trust_radius, averaging: as in :class:`~pyro_ngvi.optim.VON`; none by default.
        further: ``damping`` and ``others`` of :class:`~pyro_ngvi.optim.VON`.

    Other than published, the gradient holds that of the prior, and momentum averages it too.  Where
    delta is negative (a prior that is not log-concave, a Jacobian), s falls at most 4-fold a step.

    Not for: d so small that :class:`~pyro_ngvi.optim.VON` with a full-rank guide costs no more; models
    without a plate over the data; runs without rates to tune (:class:`~pyro_ngvi.NGVB`).

    Source: Mishkin, Kunstner, Nielsen, Schmidt & Khan (2018, arXiv:1811.04504), algorithm 1.

    Example:
        >>> import pyro_ngvi as ngvi
        >>> def model():
        ...     pass
        >>> optim = ngvi.optim.SLANG(ngvi.AutoFactorPrecision(model, rank=1), lr=0.1)
    """

    suits = "pyro_ngvi.AutoFactorPrecision(model, rank=2)"
    accepts: ClassVar[tuple[str | None, ...]] = ("gauss_newton",)
    rule_type: ClassVar[type[VONRule]] = SLANGRule

    def __init__(
        self,
        guide: Any,
        lr: Rate,
        curvature_lr: Rate | None = None,
        momentum: float = 0.9,
        *,
        trust_radius: float | None = None,
        averaging: Averaging | float | bool = False,
        **further: Any,
    ) -> None:
        settings = {"trust_radius": trust_radius, "averaging": averaging, **further}
        b = lr if curvature_lr is None else curvature_lr
        super().__init__(guide, lr, b, momentum, safe=True, **settings)


class IVON(VON):
    """Improved variational online Newton, for ``AutoMeanFieldNormal``, with any reparameterised ELBO.

    The safe form, with the curvature from the reparameterised gradient alone ("price"), and a trust
    region entry by entry, with r = ``trust_radius``:

        |move_i| <= r sigma_i,        and |g_i| <= 3 r / (a sigma_i) before g enters m,

    so that q gains at most r^2 / 2 nats an entry in a step, and no one gradient asks for more than 3 r
    sds.  A bound on the root mean square lets a single stiff entry move by sqrt(d) sds, to where the
    likelihood has no curvature.

    Args:
        guide: an ``AutoMeanFieldNormal``.
        lr: rate a of the mean, in (0, 1], or a function of the step count: a factor on the natural
            step, without units; by default max(0.01, 1 / (10 + k^0.75)).
        curvature_lr: rate b of the precision, likewise.  The published 1e-5 never learns a variance on
            a small problem: after k steps a share (1 - b)^k of the initial precision is left.
        momentum: weight of the past in the average of the gradients.
        trust_radius: largest move of each entry of the mean in its sds, or ``None``.
        averaging, others: as in :class:`~pyro_ngvi.optim.VON`.

    In the paper's symbols P = ess (h + weight_decay), and the weight decay is the prior of the model.

    Not for guides with correlations (:class:`~pyro_ngvi.optim.VON`, :class:`~pyro_ngvi.NGVB`).

    Source: Shen et al. (2024, arXiv:2402.17641), written from the equations.

    Example:
        >>> import pyro_ngvi as ngvi
        >>> def model():
        ...     pass
        >>> optim = ngvi.optim.IVON(ngvi.AutoMeanFieldNormal(model))
    """

    accepts: ClassVar[tuple[str | None, ...]] = ("price", None)
    rule_type: ClassVar[type[VONRule]] = IVONRule

    def __init__(
        self,
        guide: Any,
        lr: Rate = slowing_rate,
        curvature_lr: Rate = slowing_rate,
        momentum: float = 0.9,
        trust_radius: float | None = 1.0,
        averaging: Averaging | float | bool = False,
        others: PyroOptim | None = ADAM,
    ) -> None:
        settings = {"trust_radius": trust_radius, "averaging": averaging, "others": others}
        super().__init__(guide, lr, curvature_lr, momentum, **settings)


class Vadam(VON):
    """Adam read as variational inference: a published baseline, not for use where an answer matters.

    ``loss=BatchedELBO(num_particles, curvature="squared_gradient")``; the data must lie in a plate,
    which tells their number N.  With P = N s + delta, delta the curvature of the prior, and G the
    gradient of the likelihood (a sum over data, estimated by a minibatch),

        s  <- (1 - b) s + b E[(G / N)^2]
        m  <- beta m + (1 - beta) (gradient / N)
        mu <- mu - lr  m^ / (sqrt(s^) + delta / N),   m^ and s^ corrected for their bias.

    The square of the gradient of a minibatch of M data is about M times smaller than the sum of their
    squares, so q is too wide; and the square root makes lr a length in the units of the parameters.

    Args:
        guide: an ``AutoMeanFieldNormal``.
        lr: learning rate, in the units of the parameters, or a function of the step count.
        curvature_lr: 1 - beta_2, weight of a new squared gradient.
        momentum: beta_1.
        others: a ``PyroOptim`` for parameters that are not the guide's; see :class:`~pyro_ngvi.NGVB`.

    Source: Khan et al. (2018, arXiv:1806.04854), section 3.3; as in their code q takes s without the
    correction for bias.

    Example:
        >>> import pyro_ngvi as ngvi
        >>> def model():
        ...     pass
        >>> optim = ngvi.optim.Vadam(ngvi.AutoMeanFieldNormal(model), lr=0.01)
    """

    accepts: ClassVar[tuple[str | None, ...]] = ("squared_gradient",)
    rule_type: ClassVar[type[VONRule]] = VadamRule

    def __init__(
        self,
        guide: Any,
        lr: Rate = 0.001,
        curvature_lr: Rate = 0.001,
        momentum: float = 0.9,
        others: PyroOptim | None = ADAM,
    ) -> None:
        settings: dict[str, Any] = {"safe": False, "trust_radius": None, "others": others}
        super().__init__(guide, lr, curvature_lr, momentum, **settings)
