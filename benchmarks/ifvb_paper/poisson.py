r"""Example 2 of the paper: Poisson log-linear regression, Gaussian q, lower bound in closed form.

y_i ~ Poisson(exp(x_i' theta)), theta ~ N(0, 100 I), n = 200, d = 3, q = N(mu, Sigma).  With
m_i = exp(x_i' mu + x_i' Sigma x_i / 2),

    LB = sum_i [y_i x_i' mu - m_i - log y_i!] - (mu'mu + tr Sigma) / 200
         + (log|Sigma| + d - d log 100) / 2,
    grad_mu = X'(y - m) - mu / 100,   grad_Sigma = (Sigma^-1 - X' diag(m) X - I / 100) / 2.

Steps 1 / (1000 + k)^0.75 from mu = 0, Sigma = 0.01 I.  The exact rule steps Sigma^-1 by -2 t grad_Sigma
and mu by t Sigma grad_mu.  The others step lambda = (mu, vec Sigma), 12 numbers whose Fisher matrix has
rank 9; Sigma is read as its symmetric part.  The paper's data are not published: these are drawn anew.

As printed (eps = 1, one score before the first step) H is far too small at first, and Sigma is not
positive definite after one step.  It shrinks a hundredfold besides, while H averages over all the past.
``guarded`` is what the recursion needs here: 1,000 scores before the first step, and steps halved until
no variance changes by more than a factor of 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import init_to_value
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.families.base import Tensors
from pyro_ngvi.optim.blocks import Coordinates

from .report import Row, save, steps
from .rules import Problem, Run, inversion_free, paper_rule

__all__ = ["bound", "data", "gradients", "ifvb", "ngvb", "optimum", "run", "through_svi"]

N, D = 200, 3
PRIOR_VARIANCE = 100.0
CHECKPOINTS = (10, 100, 300, 1000, 3000)


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Covariates (200, 3) and counts (200,) for theta = (1, 1, 1)."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(N, D, generator=g, dtype=torch.float64)
    return X, torch.poisson(X.sum(1).exp(), generator=g)


X, Y = data()


def _means(mu: Tensor, Sigma: Tensor) -> Tensor:
    return (X @ mu + 0.5 * ((X @ Sigma) * X).sum(-1)).exp()


def bound(mu: Tensor, Sigma: Tensor) -> float:
    """The lower bound in nats; NaN where Sigma is not positive definite."""
    _, failed = torch.linalg.cholesky_ex(Sigma)
    if failed:
        return math.nan
    fit = (Y * (X @ mu) - _means(mu, Sigma) - torch.lgamma(Y + 1.0)).sum()
    prior = (mu @ mu + Sigma.trace()) / (2.0 * PRIOR_VARIANCE)
    entropy = 0.5 * (torch.logdet(Sigma) + D - D * math.log(PRIOR_VARIANCE))
    return float(fit - prior + entropy)


def gradients(mu: Tensor, Sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Of the lower bound, in mu (3,) and in the symmetric Sigma (3, 3)."""
    m = _means(mu, Sigma)
    in_mu = X.T @ (Y - m) - mu / PRIOR_VARIANCE
    curvature = (X.T * m) @ X + torch.eye(D) / PRIOR_VARIANCE
    return in_mu, 0.5 * (torch.linalg.inv(Sigma) - curvature)


def _start() -> tuple[Tensor, Tensor]:
    return torch.zeros(D), 0.01 * torch.eye(D)


def ngvb(n: int, step: Callable[[int], float]) -> tuple[Tensor, Tensor, list[float]]:
    """The exact pair of updates; also all n + 1 lower bounds."""
    mu, Sigma = _start()
    found = [bound(mu, Sigma)]
    for k in range(1, n + 1):
        in_mu, in_Sigma = gradients(mu, Sigma)
        mu = mu + step(k) * Sigma @ in_mu
        Sigma = torch.linalg.inv(torch.linalg.inv(Sigma) - 2.0 * step(k) * in_Sigma)
        found.append(bound(mu, Sigma))
    return mu, Sigma, found


def printed_step(k: int) -> float:
    return (1000.0 + k) ** -0.75


def optimum() -> tuple[Tensor, Tensor, float]:
    """mu, Sigma and lower bound of the best Gaussian: a fixed point of short, then unit steps."""
    mu, Sigma, found = ngvb(60, lambda k: 0.1 if k < 20 else 1.0)
    in_mu, in_Sigma = gradients(mu, Sigma)
    size = max(float((Sigma @ in_mu).abs().max()), float((Sigma @ in_Sigma).abs().max()))
    if not size < 1e-10:
        raise RuntimeError(f"The search for the optimum stopped at a gradient of {size:.1e}.")
    return mu, Sigma, found[-1]


def split(lam: Tensor) -> tuple[Tensor, Tensor]:
    """mu (3,) and the symmetric part of Sigma (3, 3) in lambda (12,)."""
    Sigma = lam[D:].reshape(D, D)
    return lam[:D], 0.5 * (Sigma + Sigma.T)


def _gradient(lam: Tensor) -> Tensor:
    in_mu, in_Sigma = gradients(*split(lam))
    return -torch.cat([in_mu, in_Sigma.reshape(-1)])


def scores(lam: Tensor, n: int) -> Tensor:
    """n draws (n, 12) of grad log q in (mu, vec Sigma); they span 9 dimensions."""
    _, Sigma = split(lam)
    L = torch.linalg.cholesky(Sigma)
    w = torch.linalg.solve_triangular(L.T, torch.randn(n, D).T, upper=True).T  # Sigma^-1 (z - mu)
    outer = w[:, :, None] * w[:, None, :] - torch.cholesky_inverse(L)
    return torch.cat([w, 0.5 * outer.reshape(n, -1)], 1)


def _valid(lam: Tensor) -> bool:
    return not math.isnan(bound(*split(lam)))


class Guarded(Coordinates):
    """(mu, vec Sigma), with moves halved until variances change by a factor of 4 at most."""

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        old, move = params["lambda"], step * tangent["lambda"]
        L = torch.linalg.cholesky(split(old)[1])
        for _ in range(60):
            half = torch.linalg.solve_triangular(L, split(old + move)[1], upper=False)
            ratios = torch.linalg.solve_triangular(L, half.T, upper=False)
            if ratios.isfinite().all():
                values = torch.linalg.eigvalsh(ratios)
                if values[0] >= 0.25 and values[-1] <= 4.0:
                    break
            move = 0.5 * move
        return {"lambda": old + move}


def ifvb(
    n: int, *, eps: float = 1.0, guarded: bool = False, averaging: bool = False, seed: int = 0
) -> Run:
    """IFVB or AIFVB in (mu, vec Sigma) with exact gradients, c_beta = 1, beta = 0.2, one score a step.

    ``guarded``: see the head of this file.
    """
    mu, Sigma = _start()
    rule = paper_rule(
        1.0,
        1000.0,
        0.75,
        averaging=averaging,
        eps=eps,
        c_beta=1.0,
        beta=0.2,
        frame=Guarded(("lambda",)) if guarded else None,
    )
    start = torch.cat([mu, Sigma.reshape(-1)])
    problem = Problem(_gradient, scores, _valid)
    before = 1000 if guarded else 0
    return inversion_free(problem, start, n, rule, scores_before=before, seed=seed)


def bounds(path: Tensor) -> list[float]:
    return [bound(*split(lam)) for lam in path]


def model() -> None:
    theta = pyro.sample("theta", dist.Normal(torch.zeros(D), 10.0).to_event(1))
    with pyro.plate("data", N):
        pyro.sample("y", dist.Poisson((X @ theta).exp()), obs=Y)


def through_svi(make: Callable[[Any], Any], n: int, seed: int = 0) -> list[float]:
    """Lower bounds after 0, ..., n steps of our full-rank guide from the paper's start, 8 particles."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    init = init_to_value(values={"theta": torch.zeros(D)})
    guide = ngvi.AutoFullRankNormal(model, init_loc_fn=init, init_scale=0.1)
    svi = SVI(model, guide, make(guide), loss=ngvi.BatchedELBO(8))
    found = [bound(*_start())]
    for _ in range(n):
        svi.step()
        with torch.no_grad():
            q = guide.get_posterior()
            found.append(bound(q.mean, q.covariance_matrix))
    return found


def run(quick: bool, out: Path | None = None) -> list[Row]:
    """Rows of the Poisson model; figure 3 (lower bound against steps) below ``out``."""
    n = 1000 if quick else 3000
    _, _, best = optimum()
    lines: dict[str, list[float]] = {"NGVB, exact pair": ngvb(n, printed_step)[2]}
    rows = [Row("Poisson model: best Gaussian, lower bound", "-", "no code", f"{best:.6f}")]
    for name, averaging in (("IFVB", False), ("AIFVB", True)):
        for eps in (1.0, 1e4):
            left = [ifvb(300, eps=eps, averaging=averaging, seed=s).left for s in range(5)]
            at = [str(k) for k in left if k]
            claimed = "figure only" if eps == 1.0 else "-"
            what = f"{name} in (mu, vec Sigma), c_beta 1, eps {eps:g}: Sigma not positive definite"
            ours = f"in {len(at)} of 5 runs, after step {', '.join(at)}" if at else "never"
            rows.append(Row(what, claimed, "no code", ours))
        found = ifvb(n, guarded=True, averaging=averaging)
        path = found.averages if averaging else found.iterates
        lines[f"{name}, eps 1, guarded"] = bounds(path)
    short = min(n, 1000)
    lines["NGVB, our default, 8 particles"] = through_svi(ngvi.NGVB, short)
    lines["IFVB, our default, 8 particles"] = through_svi(ngvi.IFVB, short)
    for label, found in lines.items():
        gaps = {k: best - found[k] for k in CHECKPOINTS if k < len(found)}
        claimed = "-" if "our" in label or "guarded" in label else "figure only"
        rows.append(Row(f"{label}: gap to the best, nats", claimed, "no code", steps(gaps)))
    curves = {k: (list(range(len(v))), v) for k, v in lines.items()}
    save(out, "figure3_poisson", curves, "step", "lower bound, nats", ("symlog", "linear"))
    gaps = {k: (x, [max(best - v, 1e-9) for v in y]) for k, (x, y) in curves.items()}
    save(out, "figure3_poisson_gap", gaps, "step", "gap to the best Gaussian, nats")
    return rows
