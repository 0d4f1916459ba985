"""VOGN, IVON, SLANG and Vadam: :class:`~pyro_ngvi.optim.VON` with other settings or a part changed.

For a network start at ``init_loc_fn=model.init_to_module`` with an ``init_scale`` of 0.01 to 0.03: from
the default 0.1 the sds of some thousand weights can grow to the prior's before the means have learnt.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..families import FactorPrecisionNormal, MeanFieldNormal
from ..families.base import Tensors
from .natural_gradient import OUTLIER
from .rule import Rate, State, rate_at
from .von import VON, VONRule, slowing_rate


class DiagonalRule(VONRule):
    """VON for a diagonal precision alone."""

    def refuses(self, family: Any) -> str | None:
        if isinstance(family, MeanFieldNormal):
            return None
        return (
            "its precision must be diagonal. Use pyro_ngvi.AutoMeanFieldNormal(model), or "
            "pyro_ngvi.optim.VON for a full precision."
        )


class IVONRule(DiagonalRule):
    """VON with a trust region in the step of the mean, entry by entry; see the example of ``IVON``."""

    unused = ("damping",)

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


class VadamRule(DiagonalRule):
    """VON with the square root of Adam in the step of the mean; see the example of ``Vadam``."""

    unused = ("damping",)

    def _move(
        self, params: Tensors, m: Tensor, a: Tensor, k: Tensor, curvature: Tensors
    ) -> tuple[Tensor, Tensor]:
        prior, count = curvature["prior"], curvature["count"]
        P = (-2.0 * params["log_scale"]).exp()
        s = ((P - prior) / count).clamp_min(0.0)
        unbiased = s / (1.0 - (1.0 - rate_at(self.curvature_lr, k)) ** (k + 1.0))
        move = a * (m / count) / (unbiased.sqrt() + prior / count)
        return move, (P * move.square()).sum().clamp_min(torch.finfo(P.dtype).tiny).sqrt()


class SLANGRule(VONRule):
    """VON for a factor precision, whose step keeps what rank L can hold; see ``SLANG``'s example."""

    unused = ("safe",)

    def refuses(self, family: Any) -> str | None:
        if isinstance(family, FactorPrecisionNormal):
            return None
        return (
            "it steps a factor precision. Use pyro_ngvi.AutoFactorPrecision(model, rank=2), or for "
            "this guide pyro_ngvi.NGVB."
        )


class _Preset(VON):
    """VON with slowing rates, momentum, and other ``defaults``."""

    defaults: ClassVar[dict[str, Any]] = {"averaging": False}

    def __init__(
        self,
        guide: Any,
        lr: Rate = slowing_rate,
        curvature_lr: Rate = slowing_rate,
        momentum: float = 0.9,
        **further: Any,
    ) -> None:
        super().__init__(guide, lr, curvature_lr, momentum, **{**self.defaults, **further})


class VOGN(_Preset):
    """Variational online Gauss-Newton: :class:`~pyro_ngvi.optim.VON` with the settings for networks.

    ``loss=BatchedELBO(num_particles, curvature="gauss_newton")``; the data must lie in a plate.  It is
    positive, so the printed update needs no correction.  Arguments and errors are those of ``VON``; by
    default both rates are max(0.01, 1 / (10 + k^0.75)), and there is no averaging.

    Not for small models: :class:`~pyro_ngvi.NGVB` needs no rates there, and the exact Hessian is cheap.

    Source: Khan et al. (2018, arXiv:1806.04854); momentum and damping, which is not in the sds here, as
    in Osawa et al. (2019, arXiv:1906.02506).

    Example:
        >>> import torch, pyro_ngvi as ngvi
        >>> from pyro.infer import SVI
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> model = ngvi.nn.bayesianize(net, "normal", num_data=3, noise=1.0)
        >>> guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=model.init_to_module)
        >>> optim = ngvi.optim.VOGN(guide, lr=0.3, curvature_lr=0.3, momentum=0.0)
        >>> svi = SVI(model, guide, optim, ngvi.BatchedELBO(8, curvature="gauss_newton"))
        >>> x, y = torch.ones(3, 1), torch.tensor([1.0, 2.0, 3.0])
        >>> losses = [svi.step(x, y) for _ in range(60)]
        >>> round(guide.median()["weight"].item(), 1)  # exactly 6 / 4
        1.5
    """

    accepts: ClassVar[tuple[str | None, ...]] = ("gauss_newton",)
    defaults: ClassVar[dict[str, Any]] = {"safe": False, "averaging": False}


class SLANG(_Preset):
    r"""VON for a precision U U' + diag(s), U of rank L, that averages outer products of gradients.

    ``loss=BatchedELBO(num_particles, curvature="gauss_newton")``; the data must lie in a plate.  With
    b = b_k, beta = 1 - b, rows G (n, d) and the diagonal delta of the curvature G'G + diag(delta):

        U_new U_new' = the L leading eigenpairs of   A'A = beta U U' + b G'G
        Delta = diag(A'A) - diag(U_new U_new'), negative entries set to 0
        s_new = beta s + b delta + Delta

    so the diagonal of the precision is that of the full average, beta P + b H.

    Args:
        guide: an ``AutoFactorPrecision``.
        lr: rate a of the mean, in (0, 1], or a function of the step count k = 0, 1, ...  Published, a
            and b alike: ``PowerDecay(0.05, 0.51)`` for logistic regression, 0.02 for small networks.
        curvature_lr: rate b of the precision, likewise; ``None`` for ``lr``.
        momentum, further: as in ``VON``, refusals too; by default no trust radius and no averaging.

    Other than published, the gradient holds that of the prior, and momentum averages it too.  Where
    delta is negative (a prior that is not log-concave, a Jacobian), s falls at most 4-fold a step.

    Not for: d so small that :class:`~pyro_ngvi.optim.VON` with a full-rank guide costs no more, where
    cutting the rank in each step also leaves sds up to twice too large (d = 4, L = 3: 1.7 to 1.9 times,
    where NGVB in the same family is exact); models without a plate over the data; runs without rates to
    tune (:class:`~pyro_ngvi.NGVB`).

    Source: Mishkin, Kunstner, Nielsen, Schmidt & Khan (2018, arXiv:1811.04504), algorithm 1.

    Example:
        >>> import pyro_ngvi as ngvi
        >>> guide = ngvi.AutoFactorPrecision(lambda: None, rank=1)
        >>> optim = ngvi.optim.SLANG(guide, lr=0.1)  # the rest as with VOGN
    """

    suits = "pyro_ngvi.AutoFactorPrecision(model, rank=2)"
    accepts: ClassVar[tuple[str | None, ...]] = ("gauss_newton",)
    rule_type: ClassVar[type[VONRule]] = SLANGRule
    defaults: ClassVar[dict[str, Any]] = {"trust_radius": None, "averaging": False}

    def __init__(
        self,
        guide: Any,
        lr: Rate,
        curvature_lr: Rate | None = None,
        momentum: float = 0.9,
        **further: Any,
    ) -> None:
        curvature_lr = lr if curvature_lr is None else curvature_lr
        super().__init__(guide, lr, curvature_lr, momentum, **further)


class IVON(_Preset):
    """Improved variational online Newton, for ``AutoMeanFieldNormal``, with any reparameterised ELBO.

    The safe form of :class:`~pyro_ngvi.optim.VON`, with the curvature of the gradient alone ("price")
    and a trust region entry by entry, with r = ``trust_radius``:

        |move_i| <= r sigma_i,        and |g_i| <= 3 r / (a sigma_i) before g enters m,

    so that q gains at most r^2 / 2 nats an entry in a step.

    Other arguments and errors are those of ``VON``; by default as in :class:`VOGN`, with a
    ``trust_radius`` r of 1 (sds), and no ``damping``.  The published b = 1e-5 never learns a variance
    on a small problem.

    Not for guides with correlations (:class:`~pyro_ngvi.optim.VON`, :class:`~pyro_ngvi.NGVB`).

    Source: Shen et al. (2024, arXiv:2402.17641), written from the equations.

    Example:
        >>> import pyro_ngvi as ngvi
        >>> guide = ngvi.AutoMeanFieldNormal(lambda: None)
        >>> optim = ngvi.optim.IVON(guide, lr=0.2)  # the rest as with VOGN, and any loss
    """

    accepts: ClassVar[tuple[str | None, ...]] = ("price", None)
    rule_type: ClassVar[type[VONRule]] = IVONRule


class Vadam(_Preset):
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
        further: those of :class:`~pyro_ngvi.optim.VON`, refusals too, but ``damping``; by default not
            ``safe`` and without ``trust_radius``, neither of which is the paper's.

    Source: Khan et al. (2018, arXiv:1806.04854), section 3.3; as in their code q takes s uncorrected.

    Example:
        >>> import pyro_ngvi as ngvi
        >>> guide = ngvi.AutoMeanFieldNormal(lambda: None)
        >>> optim = ngvi.optim.Vadam(guide, lr=0.01)  # the rest as with VOGN
    """

    accepts: ClassVar[tuple[str | None, ...]] = ("squared_gradient",)
    rule_type: ClassVar[type[VONRule]] = VadamRule
    defaults: ClassVar[dict[str, Any]] = {"safe": False, "trust_radius": None}

    def __init__(
        self,
        guide: Any,
        lr: Rate = 0.001,
        curvature_lr: Rate = 0.001,
        momentum: float = 0.9,
        **further: Any,
    ) -> None:
        super().__init__(guide, lr, curvature_lr, momentum, **further)
