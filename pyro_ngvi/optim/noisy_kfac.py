r"""Noisy K-FAC: matrix-normal posteriors from Kronecker-factored curvature.

For a layer y = W x, W (n, m), the Gauss-Newton matrix (or the Fisher matrix of the likelihood) of vec W
is approximated by S kron A, where over data i with layer inputs x_i and g_i = d log p(y_i) / d(W x_i)

    A = mean_i E[x_i x_i'] (m, m),       S = sum_i E[g_i g_i'] (n, n),

a sum in S, so that no data count enters below; the y_i are those observed.  With moving averages of
both, prior precision tau, and G the gradient of the loss in M, prior included:

    A <- (1 - b) A + b A_k,    S <- (1 - b) S + b S_k
    pi   = sqrt( (tr A / m) / (tr S / n) )
    A_t  = A + sqrt(t) pi I,   S_t = S + sqrt(t) / pi I                  damped factors
    q(W) = N(M, S_t^-1 kron A_t^-1)              with t = tau
    M    <- M - a S_t^-1 G A_t^-1                with t = tau + damping

In the paper's symbols A = A-bar, S = N S-bar, tau = 1 / eta, lambda = 1, and gamma_in = tau / N.

**Damping comes from the prior.**  The damped factors multiply out to S kron A + tau I + sqrt(tau) (pi S
kron I + I kron A / pi): sds are too small, by 12 % where the likelihood's precision is 50 tau and by
29 % where it is tau (A and S multiples of I).  ``damping`` acts on the mean alone.

The averages start with the first step's statistics (b is at least 1 / (k + 1)).  Sites that are no
matrices take natural-gradient steps of length a.

Source: Zhang, Sun, Duvenaud & Grosse (2018, arXiv:1712.02390), Algorithm 2; the factors are those of
Martens & Grosse (2015, arXiv:1503.05671).  Not for posteriors far from S kron A: few data, shared
weights; nor for a start far from the data, where S grows with the squares of the residuals and steps
get short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, ClassVar

import torch
from pyro.optim import PyroOptim
from torch import Tensor
from torch.linalg import solve_triangular

from ..families import MatrixNormal, ProductFamily
from ..families.base import Tensors, dot
from ..linalg.cholesky import inverse_cholesky
from .host import NaturalGradientOptim
from .rule import Rate, Rule, State, Step, rate_at, require, require_rate
from .state import ADAM

#: the published rate of the mean (for sums over data: of a full natural step) and of the averages
LEARNING_RATE = 0.01
CURVATURE_RATE = 0.001


def covariance_factors(
    rows: Tensor, columns: Tensor, precision: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Lower triangular (A (n, n), B (m, m)) with A A' = S_t^-1 and B B' = A_t^-1.

    For S = ``rows`` (n, n), A = ``columns`` (m, m) and t = ``precision`` > 0.
    """
    precision = torch.as_tensor(precision, dtype=rows.dtype, device=rows.device)
    tiny = torch.finfo(rows.dtype).tiny
    # of a layer without input or gradient the prior remains, to which every pi leads
    root_columns = columns.diagonal().mean().clamp_min(tiny).sqrt()
    root_rows = rows.diagonal().mean().clamp_min(tiny).sqrt()
    by_rows, by_columns = root_rows / root_columns, root_columns / root_rows
    shifts = (rows, by_rows), (columns, by_columns)
    S, A = (torch.diagonal_scatter(K, K.diagonal() + precision.sqrt() * by) for K, by in shifts)
    return inverse_cholesky(S), inverse_cholesky(A)


@dataclass(frozen=True)
class NoisyKFACRule(Rule):
    """The mathematics, on "kron_rows" and "kron_columns" of each matrix, and "prior" (d,)."""

    family: ProductFamily
    lr: Rate = LEARNING_RATE
    curvature_lr: Rate = CURVATURE_RATE
    damping: float = 0.0
    prior_precision: float | None = None
    trust_radius: float = 1.0

    def __post_init__(self) -> None:
        require_rate("lr", self.lr)
        require_rate("curvature_lr", self.curvature_lr)
        require(0.0 <= self.damping < torch.inf, "damping", "not be negative", self.damping)
        require(self.trust_radius > 0.0, "trust_radius", "be positive or None", self.trust_radius)
        tau = self.prior_precision
        valid = tau is None or 0.0 < tau < torch.inf
        require(valid, "prior_precision", "be a positive number or None", tau)

    def refuses(self, family: Any) -> str | None:
        if family.curvature_form == "kronecker":
            return None
        return (
            "it steps matrix normals. Use pyro_ngvi.AutoMatrixNormal(model); for other guides there "
            "are pyro_ngvi.NGVB and pyro_ngvi.IFVB."
        )

    def _matrices(self) -> dict[str, MatrixNormal]:
        return {p: f for p, f in self.family.parts.items() if isinstance(f, MatrixNormal)}

    def start(self, params: Tensors) -> State:
        like, matrices = next(iter(params.values())), self._matrices()
        return {
            "kron_rows": {p: like.new_zeros(f.rows, f.rows) for p, f in matrices.items()},
            "kron_columns": {p: like.new_zeros(f.columns, f.columns) for p, f in matrices.items()},
        }

    def step(self, params: Tensors, grads: Tensors, state: State, curvature: Any = None) -> Step:
        count = state["count"]
        a, b = rate_at(self.lr, count), rate_at(self.curvature_lr, count)
        b = torch.maximum(b, 1.0 / (count + 1.0))
        matrices = self._matrices()
        averages = {
            kind: {p: torch.lerp(state[kind][p], curvature[kind][p], b) for p in matrices}
            for kind in ("kron_rows", "kron_columns")
        }
        if self.prior_precision is not None:
            priors: Any = dict.fromkeys(self.family.parts, self.prior_precision)
        else:
            priors = {p: v.mean() for p, v in self.family.split(curvature["prior"]).items()}

        tensors: dict[str, Tensors] = {}  # of the posteriors of the matrices
        moves: dict[str, Tensors] = {}
        squares = []
        for name, f in self.family.parts.items():
            own, gradient = self.family.own(name, params), self.family.own(name, grads)
            if name in matrices:
                K = averages["kron_rows"][name], averages["kron_columns"][name]
                A, B = A_mean, B_mean = covariance_factors(*K, priors[name])
                tensors[name] = {"row_tril": A, "column_tril": B}
                if self.damping:
                    A_mean, B_mean = covariance_factors(*K, priors[name] + self.damping)
                G = gradient["loc"].reshape(len(A), len(B))
                move = A_mean @ (A_mean.mT @ G @ B_mean) @ B_mean.mT
                moves[name] = {"loc": move.reshape(-1)}
                half = solve_triangular(A, move, upper=False)
                squares.append(solve_triangular(B, half.mT, upper=False).square().sum())
            else:
                pulled = f.pull(own, gradient)
                moves[name] = f.natural_gradient(own, pulled)
                squares.append(dot(pulled, moves[name]))
        length = a * reduce(torch.add, squares).clamp_min(0.0).sqrt()
        shrink = (self.trust_radius / length).clamp_max(1.0)

        new: Tensors = {}
        for name, f in self.family.parts.items():
            own = self.family.own(name, params)
            if name in matrices:
                moved = {"loc": own["loc"] - shrink * a * moves[name]["loc"], **tensors[name]}
            else:
                moved = f.retract(own, moves[name], -shrink * a)
            new |= {f"{name}_{k}": v for k, v in moved.items()}

        radius = torch.full_like(length, self.trust_radius)
        damped, finite = shrink < 1.0, torch.isfinite(length)
        return Step(new, shrink * length, a, averages, radius, damped, finite)

    def bad_entries(self, grads: Tensors, curvature: Any) -> Tensor:
        bad = self.family.split(self.family.not_finite(grads))
        for name in self._matrices():
            for kind in ("kron_rows", "kron_columns"):
                bad[name] = bad[name] | ~torch.isfinite(curvature[kind][name]).all()
        return self.family.join(bad)


class NoisyKFAC(NaturalGradientOptim):
    """Noisy K-FAC for :class:`~pyro_ngvi.AutoMatrixNormal`, from the factors of each layer's curvature.

    ``loss=BatchedELBO(num_particles, curvature="kronecker")``; the data must lie in a plate, and each
    matrix of the guide must be the weight of one linear layer over them (F.linear, ``x @ W``).  The
    equations are in :mod:`pyro_ngvi.optim.noisy_kfac`.

    Args:
        guide: an ``AutoMatrixNormal``.
        lr: rate a of the mean, in (0, 1], or a function of the step count k = 0, 1, ... (0-dim tensor).
        curvature_lr: rate b of the averages, likewise.
        damping: precision added in the step of the mean, never in the posterior.
        prior_precision: tau of every site; ``None``: the mean over the site of the prior's curvature.
        trust_radius: largest Fisher length of a move, nats^(1/2); ``None``: no bound.
        others: a ``PyroOptim`` for parameters that are not the guide's; see :class:`~pyro_ngvi.NGVB`.

    Raises:
        ValueError: for another guide, or arguments out of range; from the loss, at the first step, for
            a matrix that is no weight of a linear layer.
        RuntimeError: at a step whose loss left no factors.

    Example:
        >>> import torch, pyro_ngvi as ngvi
        >>> from pyro.infer import SVI
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(100, 2)
        >>> y = x[:, 0] * x[:, 1]
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        >>> model = ngvi.nn.bayesianize(net, "normal", num_data=100, noise=0.1)
        >>> guide = ngvi.AutoMatrixNormal(model, init_loc_fn=model.init_to_module, init_scale=0.03)
        >>> loss = ngvi.BatchedELBO(8, curvature="kronecker")
        >>> svi = SVI(model, guide, ngvi.optim.NoisyKFAC(guide, lr=0.1, curvature_lr=0.05), loss)
        >>> for _ in range(250):
        ...     _ = svi.step(x, y)
        >>> prediction = ngvi.nn.predict(model, guide, x, num_samples=50)
        >>> bool((prediction.mean - y).square().mean() < 0.05 * y.var())
        True
    """

    suits = "pyro_ngvi.AutoMatrixNormal(model)"
    accepts: ClassVar[tuple[str | None, ...]] = ("kronecker",)

    def __init__(
        self,
        guide: Any,
        lr: Rate = LEARNING_RATE,
        curvature_lr: Rate = CURVATURE_RATE,
        damping: float = 0.0,
        prior_precision: float | None = None,
        trust_radius: float | None = 1.0,
        others: PyroOptim | None = ADAM,
    ) -> None:
        settings = {"damping": damping, "prior_precision": prior_precision}
        radius = torch.inf if trust_radius is None else trust_radius
        rates = {"lr": lr, "curvature_lr": curvature_lr}
        rule = partial(NoisyKFACRule, trust_radius=radius, **rates, **settings)
        super().__init__(guide, others, rule)

    def _beside_gradients(
        self, path: str, block: Any, values: Tensors, parts: Tensors
    ) -> Mapping[str, Any]:
        # losses speak of sites, the family of its parts
        beside: dict[str, Any] = {k: v for k, v in parts.items() if k == "prior"}
        for kind in ("kron_rows", "kron_columns"):
            beside[kind] = {p: parts[f"{kind}.{site}"] for site, p in block.matrices.items()}
        return beside
