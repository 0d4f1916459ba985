r"""VON: variational online Newton, the Bayesian learning rule for Gaussians with curvature.

With H_k the expected Hessian of the loss -log p(y, z) (prior included) and g_k its expected gradient,
both estimated at draws from q_k = N(mu_k, P_k^-1):

    S_k     = H_k - P_k
    P_{k+1} = P_k + b_k S_k                                    as printed (``safe=False``)
    P_{k+1} = P_k + b_k S_k + b_k^2 / 2 S_k P_k^-1 S_k         positive definite for every b, S
    m_k     = beta m_{k-1} + (1 - beta) g_k
    mu_{k+1} = mu_k - a_k (P_{k+1} + damping I)^-1 m_k / (1 - beta^{k+1}).

P is its own moving average of curvature; the mean uses the new P.  In the symbols of the papers
P = N s + delta, H = N h + delta, and our g is N g + delta mu: sums over data, with the model's prior.

*Bounds on a step.*  As printed, P_{k+1} is kept at P_k / 4 or more in every direction: full rank by
halving b, diagonal entry by entry.  In the safe form the eigenvalues of b S P^-1 are kept within
[-1, 1]: full rank by shortening b, diagonal by cutting entries.

*Curvature* is the loss's affair, ``BatchedELBO(curvature=...)``.  Without it, or with "price", H_k is
read off the gradient of the scales, E[P (z - mu) o grad(-log p)] (Price's theorem): noisy and
indefinite, which the safe form survives.

Sources: Khan & Nielsen (2018, arXiv:1807.04489), Khan et al. (2018, arXiv:1806.04854), the safe
form Lin, Schmidt & Khan (2020, arXiv:2002.10060).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from pyro.optim import PyroOptim
from torch import Tensor

from ..families.base import Tensors
from .host import NaturalGradientOptim
from .rule import Averaging, Rate, Rule, State, Step, as_averaging, rate_at, require, require_rate
from .schedules import PowerDecay
from .state import ADAM

#: 1 at the start, then the average of all that has been seen with a bias to what is new
NEWTON_RATE = PowerDecay(1.0, 0.51)


def slowing_rate(k: Tensor) -> Tensor:
    """max(0.01, 1 / (10 + k^0.75)): an average over all, later over the last hundred steps."""
    return (1.0 / (10.0 + k**0.75)).clamp_min(0.01)


@dataclass(frozen=True)
class VONRule(Rule):
    """The mathematics of :class:`VON`, whose example takes it, as pure functions of tensors."""

    family: Any
    lr: Rate
    curvature_lr: Rate
    momentum: float = 0.0
    safe: bool = True
    damping: float = 0.0
    trust_radius: float = torch.inf
    averaging: Averaging | None = None
    unused: ClassVar[tuple[str, ...]] = ()  # fields that a preset has no place for

    def __post_init__(self) -> None:
        for name in self.unused:
            value, only = getattr(self, name), getattr(VONRule, name)
            require(value == only, name, f"be {only} for {type(self).__name__[:-4]}", value)
        require_rate("lr", self.lr)
        require_rate("curvature_lr", self.curvature_lr)
        require(0.0 <= self.momentum < 1.0, "momentum", "lie in [0, 1)", self.momentum)
        require(0.0 <= self.damping < torch.inf, "damping", "not be negative", self.damping)
        require(self.trust_radius > 0.0, "trust_radius", "be positive or None", self.trust_radius)

    def refuses(self, family: Any) -> str | None:
        if "improved" in family.coordinates and family.curvature_form is not None:
            return None
        return (
            "it trains Gaussians through their precision. Use pyro_ngvi.AutoMeanFieldNormal(model) or "
            "AutoFullRankNormal(model); for other guides there are pyro_ngvi.NGVB and pyro_ngvi.IFVB."
        )

    def start(self, params: Tensors) -> State:
        # the clock of the rates; "count" is that of the average, which may start again
        loc = params["loc"]
        return {"step": loc.new_zeros(()), "gradient": torch.zeros_like(loc)}

    def step(self, params: Tensors, grads: Tensors, state: State, curvature: Any = None) -> Step:
        k, parts = state["step"], curvature or {}
        a, b = rate_at(self.lr, k), rate_at(self.curvature_lr, k)
        still = self.family.precision_step(params, grads, parts, b, self.safe)
        m, move, length, damped = self._mean_step(still, grads["loc"], state, a, parts)
        sums = torch.stack([v.sum() for v in (grads["loc"], *parts.values())])
        return Step(
            still | {"loc": still["loc"] - move},
            length,
            gain=a,
            state={"step": k + 1.0, "gradient": m},
            radius=torch.full_like(a, self._radius(params)),
            damped=damped,
            finite=torch.isfinite(sums).all(),
        )

    def _radius(self, params: Tensors) -> float:
        # in sds, root mean square: the bound then means the same in any dimension
        return self.trust_radius * params["loc"].shape[-1] ** 0.5

    def _mean_step(
        self, params: Tensors, gradient: Tensor, state: State, a: Tensor, curvature: Tensors
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """m, the move of the mean (to be subtracted), its length, and whether it was shortened."""
        k = state["step"]
        m = torch.lerp(gradient, state["gradient"], self.momentum)
        unbiased = m / (1.0 - self.momentum ** (k + 1.0))
        move, length = self._move(params, unbiased, a, k, curvature)
        shrink = (self._radius(params) / length).clamp_max(1.0)
        return m, shrink * move, shrink * length, shrink < 1.0

    def _move(
        self, params: Tensors, m: Tensor, a: Tensor, k: Tensor, curvature: Tensors
    ) -> tuple[Tensor, Tensor]:
        """The move of the mean, and its Fisher length at ``params``: with damping a little longer."""
        move = a * self.family.covariance_product(params, m, self.damping)
        tiny = torch.finfo(m.dtype).tiny
        return move, (a * torch.dot(m, move)).clamp_min(tiny).sqrt()


class VON(NaturalGradientOptim):
    """Variational online Newton for mean-field and full-rank Gaussian guides.

    The equations are in :mod:`pyro_ngvi.optim.von`.  Pass the curvature with the loss:
    ``BatchedELBO(num_particles, curvature="hessian")``, ``"gauss_newton"``, or ``"price"``.

    Args:
        guide: an ``AutoMeanFieldNormal`` or ``AutoFullRankNormal``.
        lr: rate a of the mean, in (0, 1], or a function of the step count k = 0, 1, ... (a 0-dim
            tensor), for instance ``PowerDecay(1.0, 0.51)``.
        curvature_lr: rate b of the precision, likewise.
        momentum: weight beta in [0, 1) of the past in the average of the gradients.
        safe: keep the precision positive definite by the second-order term.  ``False``: the printed
            update, shortened where a variance would grow more than 4-fold.
        damping: added to the precision in the step of the mean, never in the posterior.
        trust_radius: largest move of the mean in sds of q, root mean square over the entries (its
            Fisher length over sqrt(d)), or ``None``.
        averaging: as in :class:`~pyro_ngvi.NGVB`; by default the average of about the last two fifths.
        others: a ``PyroOptim`` for parameters that are not the guide's; see :class:`~pyro_ngvi.NGVB`.

    Not for runs without rates to tune: :class:`~pyro_ngvi.NGVB` takes the same curvature.

    Raises:
        ValueError: for another guide, or arguments out of range.
        RuntimeError: at a step whose loss left no curvature; the message names the loss to pass.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> from pyro.infer import SVI
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> guide = ngvi.AutoFullRankNormal(model, init_loc_fn=ngvi.guides.init_to_center)  # at 0
        >>> loss = ngvi.BatchedELBO(8, curvature="hessian")
        >>> svi = SVI(model, guide, ngvi.optim.VON(guide), loss)
        >>> for _ in range(60):
        ...     _ = svi.step(torch.tensor([1.0, 2.0, 3.0]))
        >>> round(guide.median()["mu"].item(), 2)  # exactly 6 / 3.01
        1.99
    """

    suits = "pyro_ngvi.AutoMeanFieldNormal(model)"
    accepts: ClassVar[tuple[str | None, ...]] = ("hessian", "gauss_newton", "price")
    rule_type: ClassVar[type[VONRule]] = VONRule

    def __init__(
        self,
        guide: Any,
        lr: Rate = NEWTON_RATE,
        curvature_lr: Rate = NEWTON_RATE,
        momentum: float = 0.0,
        safe: bool = True,
        damping: float = 0.0,
        trust_radius: float | None = 1.0,
        averaging: Averaging | float | bool = True,
        others: PyroOptim | None = ADAM,
    ) -> None:
        settings = {
            "momentum": momentum,
            "safe": safe,
            "damping": damping,
            "trust_radius": torch.inf if trust_radius is None else trust_radius,
            "averaging": as_averaging(averaging),
        }
        rule = partial(self.rule_type, lr=lr, curvature_lr=curvature_lr, **settings)
        super().__init__(guide, others, rule)
