r"""Noisy K-FAC: matrix-normal posteriors from Kronecker-factored curvature.

For a layer y = W x, W (n, m), the Gauss-Newton matrix (or the Fisher matrix of the likelihood) of vec W
is approximated by S kron A, where over data i with layer inputs x_i and g_i = d log p(y_i) / d(W x_i)

    A = mean_i E[x_i x_i'] (m, m),       S = sum_i E[g_i g_i'] (n, n),

a sum in S, so that no data count enters below.  With moving averages of both, prior precision tau, and
G the gradient of the loss in M:

    A <- (1 - b) A + b A_k,    S <- (1 - b) S + b S_k
    pi   = sqrt( (tr A / m) / (tr S / n) )
    A_t  = A + sqrt(t) pi I,   S_t = S + sqrt(t) / pi I                  damped factors
    q(W) = N(M, S_t^-1 kron A_t^-1)              with t = tau
    M    <- M - a S_t^-1 G A_t^-1                with t = tau + damping

The new factors serve the step of the mean.  G has the prior in it.  In the paper's symbols A = A-bar,
S = N S-bar, tau = 1 / eta, lambda = 1, and gamma_in = tau / N.

**Damping comes from the prior.**  The precision S kron A + tau I is no Kronecker product.  The damped
factors multiply out to S kron A + tau I + sqrt(tau) (pi S kron I + I kron A / pi): too large, so that
sds are too small, by 12 % where the likelihood's precision is 50 tau and by 29 % where it is tau (A and
S multiples of I).  :class:`~pyro_ngvi.NGVB` on the same guide finds the best Kronecker product instead.
``damping`` acts on the mean alone.

The averages start with the first step's statistics (b is at least 1 / (k + 1)).  Moves, of all sites
together, are shortened to a Fisher length of ``trust_radius``: the paper's code clips them so.  Sites
that are no matrices take natural-gradient steps of length a.

Source: Zhang, Sun, Duvenaud & Grosse (2018, arXiv:1712.02390), Algorithm 2; the factors are those of
Martens & Grosse (2015).  Not for posteriors far from S kron A: few data, shared weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch
from pyro.optim import PyroOptim
from torch import Tensor
from torch.linalg import solve_triangular

from .._known import choose, known
from ..families import MatrixNormal, ProductFamily
from ..families.base import Tensors, dot
from ..guides import AutoMatrixNormal
from ..guides.base import Curvature
from ..linalg.cholesky import inverse_cholesky
from .base import NaturalGradientOptim, Report, describe, part
from .schedules import Rate, as_rate, rate_at

__all__ = ["NoisyKFAC", "NoisyKFACRule", "covariance_factors", "damped_factors"]

#: the published rate of the mean (for sums over data: of a full natural step) and of the averages
LEARNING_RATE = 0.01
CURVATURE_RATE = 0.001


def damped_factors(
    kron_in: Tensor, kron_out: Tensor, precision: Tensor | float
) -> tuple[Tensor, Tensor]:
    """(S_t, A_t) for S = ``kron_out`` (n, n), A = ``kron_in`` (m, m) and t = ``precision`` > 0."""
    precision = torch.as_tensor(precision, dtype=kron_in.dtype, device=kron_in.device)
    tiny = torch.finfo(kron_in.dtype).tiny
    # of a layer without input or gradient the prior remains, to which every pi leads
    root_in = kron_in.diagonal().mean().clamp_min(tiny).sqrt()
    root_out = kron_out.diagonal().mean().clamp_min(tiny).sqrt()
    rows, columns = root_out / root_in, root_in / root_out
    return _shifted(kron_out, precision.sqrt() * rows), _shifted(
        kron_in, precision.sqrt() * columns
    )


def _shifted(K: Tensor, by: Tensor) -> Tensor:
    return torch.diagonal_scatter(K, K.diagonal() + by)


def covariance_factors(
    kron_in: Tensor, kron_out: Tensor, precision: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Lower triangular (A (n, n), B (m, m)) with A A' = S_t^-1 and B B' = A_t^-1."""
    rows, columns = damped_factors(kron_in, kron_out, precision)
    return inverse_cholesky(rows), inverse_cholesky(columns)


@dataclass(frozen=True)
class NoisyKFACRule:
    """The mathematics: ``init(params) -> state``, ``update(params, grads, state)``.  Pure functions.

    ``grads`` has the statistics of each matrix part as "curvature.kron_in.{part}" (m, m) and
    "curvature.kron_out.{part}" (n, n), and, if ``prior_precision`` is ``None``, "curvature.prior" (d,),
    the diagonal of the prior's curvature, whose mean over a part is its tau.
    """

    family: ProductFamily
    lr: Rate = LEARNING_RATE
    curvature_lr: Rate = CURVATURE_RATE
    damping: float = 0.0
    prior_precision: float | None = None
    trust_radius: float = 1.0

    #: the answer is the last iterate
    averaging: ClassVar[None] = None

    def _matrices(self) -> dict[str, MatrixNormal]:
        return {p: f for p, f in self.family.parts.items() if isinstance(f, MatrixNormal)}

    def init(self, params: Tensors) -> Tensors:
        like = next(iter(params.values()))
        zero = torch.zeros((), dtype=like.dtype, device=like.device)
        state = {"count": zero, "skipped": zero.clone()}
        state["bad_entries"] = torch.zeros_like(self.family.not_finite(params))
        for name, f in self._matrices().items():
            state["kron_in." + name] = like.new_zeros(f.columns, f.columns)
            state["kron_out." + name] = like.new_zeros(f.rows, f.rows)
        return state

    def update(
        self, params: Tensors, grads: Tensors, state: Tensors
    ) -> tuple[Tensors, Tensors, Report]:
        """One step from ``params``; nothing in it waits for the device."""
        count = state["count"]
        a, b = rate_at(self.lr, count), rate_at(self.curvature_lr, count)
        b = torch.maximum(b, 1.0 / (count + 1.0))
        matrices = self._matrices()
        averages = {
            f"{kind}.{name}": torch.lerp(
                state[f"{kind}.{name}"], grads[f"curvature.{kind}.{name}"], b
            )
            for name in matrices
            for kind in ("kron_in", "kron_out")
        }
        priors = self._priors(grads)

        covariances: dict[str, tuple[Tensor, Tensor]] = {}
        moves: dict[str, Tensors] = {}
        squares = []
        for name, f in self.family.parts.items():
            own, gradient = self.family.own(name, params), self.family.own(name, grads)
            if name in matrices:
                K = averages["kron_in." + name], averages["kron_out." + name]
                A, B = covariances[name] = covariance_factors(*K, priors[name])
                if self.damping:
                    A_mean, B_mean = covariance_factors(*K, priors[name] + self.damping)
                else:
                    A_mean, B_mean = A, B
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
                A, B = covariances[name]
                loc = own["loc"] - shrink * a * moves[name]["loc"]
                moved = {"loc": loc, "row_tril": A, "column_tril": B}
            else:
                moved = f.retract(own, moves[name], -shrink * a)
            new |= {f"{name}_{k}": v for k, v in moved.items()}

        finite = torch.isfinite(reduce(torch.add, (v.sum() for v in new.values())) + length)
        new_state = state | averages | {"count": count + 1.0}
        step_norm = shrink * length
        if not known(finite):
            refused = state | {
                "skipped": state["skipped"] + 1.0,
                "bad_entries": self._bad_entries(params, grads),
            }
            new = choose(finite, new, params)
            new_state = choose(finite, new_state, refused)
            step_norm = torch.where(finite, step_norm, 0.0)
        report = Report(
            finite=finite,
            step_norm=step_norm,
            gain=a,
            radius=torch.full_like(length, self.trust_radius),
            damped=shrink < 1.0,
            skipped=new_state["skipped"],
            bad_entries=new_state["bad_entries"],
        )
        return new, new_state, report

    def _priors(self, grads: Tensors) -> dict[str, Tensor | float]:
        if self.prior_precision is not None:
            return dict.fromkeys(self.family.parts, self.prior_precision)
        return {p: v.mean() for p, v in self.family.split(grads["curvature.prior"]).items()}

    def _bad_entries(self, params: Tensors, grads: Tensors) -> Tensor:
        bad = self.family.split(self.family.not_finite(grads))
        for name in self._matrices():
            kinds = (grads[f"curvature.{kind}.{name}"] for kind in ("kron_in", "kron_out"))
            broken = reduce(torch.logical_or, (~torch.isfinite(K).all() for K in kinds))
            bad[name] = bad[name] | broken
        return self.family.join(bad)


class NoisyKFAC(NaturalGradientOptim):
    """Noisy K-FAC for :class:`~pyro_ngvi.AutoMatrixNormal`, from the factors of each layer's curvature.

    The equations are in :mod:`pyro_ngvi.optim.noisy_kfac`.  The loss has to leave the statistics of
    each matrix W (n, m) of a layer y = W x on the guide (``guide.curvature``): "kron_in.<site>" (m, m),
    mean of x x' over data and draws, the column of a bias excluded; "kron_out.<site>" (n, n), sum over
    all data of g g', mean over draws, with g the gradient of a datum's log likelihood in y; and "prior"
    (d,), the diagonal of the prior's curvature at the flat latent vector.  A minibatch stands for all.

    Args:
        guide: an ``AutoMatrixNormal``, or a list of such guides.
        lr: rate a of the mean, in (0, 1], or a function of the step count k = 0, 1, ... (0-dim tensor).
        curvature_lr: rate b of the averages, likewise.
        damping: precision added in the step of the mean, never in the posterior.
        prior_precision: tau of every site; ``None``: from the loss, see above.
        trust_radius: largest Fisher length of a move, nats^(1/2); ``None``: no bound.
        others: a ``PyroOptim`` for parameters that are not the guide's.

    Raises:
        ValueError: for another guide, or arguments out of range.
        RuntimeError: at a step whose loss left no statistics for a site.
    """

    def __init__(
        self,
        guide: Any,
        lr: Rate = LEARNING_RATE,
        curvature_lr: Rate = CURVATURE_RATE,
        damping: float = 0.0,
        prior_precision: float | None = None,
        trust_radius: float | None = 1.0,
        others: PyroOptim | None = None,
    ) -> None:
        if not 0.0 <= damping < float("inf"):
            raise ValueError(f"damping must not be negative, got {damping!r}.")
        bounded = {"prior_precision": prior_precision, "trust_radius": trust_radius}
        for name, value in bounded.items():
            if value is not None and not 0.0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number or None, got {value!r}.")
        self._arguments: dict[str, Any] = {
            "lr": as_rate("lr", lr),
            "curvature_lr": as_rate("curvature_lr", curvature_lr),
            "damping": float(damping),
            "prior_precision": prior_precision,
            "trust_radius": torch.inf if trust_radius is None else float(trust_radius),
        }
        super().__init__(guide, others)
        if not self._rules:
            raise ValueError(_wrong_guide(describe(guide)))

    def make_rule(self, family: Any) -> NoisyKFACRule:
        return NoisyKFACRule(family, **self._arguments)

    def _adopt(self, path: str, block: Any) -> None:
        if not isinstance(block, AutoMatrixNormal):
            raise ValueError(_wrong_guide(type(block).__name__))
        super()._adopt(path, block)

    def _check_curvature(self, block: Any, curvature: Curvature | None) -> None:
        parts = {} if curvature is None else curvature.parts
        wanted = [f"{kind}.{site}" for site in block.matrices for kind in ("kron_in", "kron_out")]
        if self._arguments["prior_precision"] is None:
            wanted.append("prior")
        missing = [name for name in wanted if name not in parts]
        if missing:
            raise RuntimeError(
                f"NoisyKFAC needs the Kronecker factors of every matrix, and the loss left no "
                f"{', '.join(map(repr, missing))} on {type(block).__name__}. Pass a loss that leaves "
                f"them{', or prior_precision,' if 'prior' in missing else ''} or use pyro_ngvi.NGVB, "
                f"which needs gradients only."
            )

    def _update(
        self, path: str, block: Any, values: Tensors, grads: Tensors, state: Tensors
    ) -> tuple[Tensors, Tensors, Report]:
        # losses speak of sites, the family of its parts
        own = {name: g for name, g in grads.items() if not name.startswith("curvature.")}
        statistics = part(grads, "curvature.")
        for site, name in block.matrices.items():
            for kind in ("kron_in", "kron_out"):
                own[f"curvature.{kind}.{name}"] = statistics[f"{kind}.{site}"]
        if "prior" in statistics:
            own["curvature.prior"] = statistics["prior"]
        return self._rules[path].update(values, own, state)


def _wrong_guide(found: str) -> str:
    return (
        f"NoisyKFAC is an algorithm for pyro_ngvi.AutoMatrixNormal(model), and got {found}. For other "
        f"guides there are pyro_ngvi.NGVB and pyro_ngvi.IFVB."
    )
