r"""SLANG: a precision U U' + diag(s) that averages outer products of gradients, U of rank L.

:mod:`pyro_ngvi.optim.von` with the best that rank L can do for beta P + b H.  With b = b_k,
beta = 1 - b, rows G (n, d) and the diagonal delta of the expected curvature H = G'G + diag(delta) of
-log p(y, z):

    U_new U_new' = the L leading eigenpairs of   A'A = beta U U' + b G'G
    Delta = diag(A'A) - diag(U_new U_new'), negative entries set to 0
    s_new = beta s + b delta + Delta
    mu <- mu - a (P_new + damping I)^-1 m,   m the average of gradients, momentum 0.9, bias-corrected,

so the diagonal of the precision is that of the full average, beta P + b H: what is left out are the
correlations beyond rank L.  The eigenpairs come from :mod:`pyro_ngvi.linalg.spectral`: exact for up to
128 rows or dimensions on a CPU, else by a range finder that starts at the old U.

**Other than published.**  The gradient holds that of the prior, and momentum averages it too;
published, momentum is on the likelihood alone.  Under sticking the landing the gradient also holds that
of log q, which has mean zero and takes out noise.  The published range finder starts at random numbers.
Where delta is negative (a prior that is not log-concave, a Jacobian), s falls at most 4-fold a step.

G'G stands for the Hessian ("gauss_newton"): right where the model fits, and never indefinite.
Published rates, a and b alike: 0.05 / (1 + k^0.51) for logistic regression, 0.02 for small networks.

Not for: d so small that :class:`~pyro_ngvi.optim.VON` with a full-rank guide, which drops nothing,
costs no more; models without a plate over the data; runs without rates to tune
(:class:`~pyro_ngvi.NGVB` trains the same guide).

Source: Mishkin, Kunstner, Nielsen, Schmidt & Khan (2018, NeurIPS; arXiv:1811.04504), algorithm 1.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..families import FactorPrecisionNormal
from .rule import Averaging
from .schedules import Rate
from .von import VON

__all__ = ["SLANG"]


class SLANG(VON):
    """Stochastic, low-rank, approximate natural gradients: VON for a factor precision.

    ``loss=BatchedELBO(num_particles, curvature="gauss_newton")``; the data must lie in a plate.  The
    step of the precision is ``FactorPrecisionNormal.precision_step``.

    Args:
        guide: an ``AutoFactorPrecision``.
        lr: rate a of the mean: a number in (0, 1], or a function of the step count k = 0, 1, ... (a
            0-dim tensor), for instance ``PowerDecay(0.05, 0.51)``.
        curvature_lr: rate b of the precision, likewise; ``None`` for ``lr``.  At a constant b the
            precision averages over the last 1/b steps or so.
        momentum: weight in [0, 1) of the past in the average of the gradients.
        trust_radius, averaging: as in :class:`~pyro_ngvi.optim.VON`; none by default.
        further: ``damping`` and ``others`` of :class:`~pyro_ngvi.optim.VON`.

    Raises:
        ValueError: for another guide, or arguments out of range.
        RuntimeError: at a step whose loss left no gradients of single data; the message names the
            loss to pass.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> import pyro_ngvi as ngvi
        >>> X, y = torch.eye(3).repeat(4, 1), torch.ones(12)
        >>> def model(X, y):
        ...     w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)
        >>> guide = ngvi.AutoFactorPrecision(model, rank=1)
        >>> loss = ngvi.BatchedELBO(8, curvature="gauss_newton")
        >>> svi = SVI(model, guide, ngvi.optim.SLANG(guide, lr=ngvi.optim.PowerDecay(0.2, 0.51)), loss)
        >>> for _ in range(200):
        ...     _ = svi.step(X, y)
        >>> bool((guide.median()["w"] > 0.5).all())
        True
    """

    accepts: ClassVar[tuple[str | None, ...]] = ("gauss_newton",)

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
        super().__init__(
            guide,
            lr,
            lr if curvature_lr is None else curvature_lr,
            momentum,
            safe=True,
            trust_radius=trust_radius,
            averaging=averaging,
            **further,
        )

    def _wrong_guide(self, found: str) -> str:
        return (
            f"SLANG is an algorithm for pyro_ngvi.AutoFactorPrecision(model, rank), and got {found}. "
            f"Use that guide, or for another one pyro_ngvi.NGVB."
        )

    def _fits(self, family: Any) -> bool:
        return isinstance(family, FactorPrecisionNormal)
