r"""Example 1: Beta q for the probability of a Bernoulli variable, with exact gradients.

57 successes in 200 trials and a uniform prior: the posterior is Beta(58, 144), a member of the family.
With lambda = (alpha, beta) and the Fisher matrix F of the Beta family,

    grad LB = F(lambda) (lambda* - lambda),   natural gradient = lambda* - lambda.

Steps are 1 / (1 + k) for the exact rules, 10 / (1 + k)^0.6 without inversion, k = 1, 2, ...
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI
from torch import Tensor
from torch.distributions import constraints, kl_divergence

import pyro_ngvi as ngvi

from ..baselines import algorithm_1
from .report import Row, save, steps
from .rules import Problem, Run, inversion_free, paper_rule

__all__ = ["STARTS", "TARGET", "euclidean", "exact", "ifvb", "run", "through_svi"]

SUCCESSES, TRIALS = 57, 200
TARGET = (1.0 + SUCCESSES, 1.0 + TRIALS - SUCCESSES)
STARTS = ((5.0, 45.0), (25.0, 25.0))
CHECKPOINTS = (1, 10, 100, 1000, 5000)


def fisher(lam: Tensor) -> Tensor:
    """Fisher matrix (2, 2) of the Beta family: trigamma on the diagonal, less that of the sum."""
    trigamma = torch.polygamma(1, lam)
    return torch.diag(trigamma) - torch.polygamma(1, lam.sum())


def gradient(lam: Tensor) -> Tensor:
    """Of the negative lower bound."""
    return fisher(lam) @ (lam - lam.new_tensor(TARGET))


def scores(lam: Tensor, n: int) -> Tensor:
    """n draws (n, 2) of grad log q."""
    x = torch.distributions.Beta(lam[0], lam[1]).sample((n,))
    statistics = torch.stack([x.log(), (-x).log1p()], 1)
    return statistics - (torch.digamma(lam) - torch.digamma(lam.sum()))


PROBLEM = Problem(gradient, scores, lambda lam: bool((lam > 0).all()))


def exact(start: tuple[float, float], n: int) -> Tensor:
    """NGVB in the paper's coordinates, iterates (n + 1, 2)."""
    lam = torch.tensor(start)
    path = [lam]
    for k in range(1, n + 1):
        lam = lam - torch.linalg.solve(fisher(lam), gradient(lam)) / (1 + k)
        path.append(lam)
    return torch.stack(path)


def euclidean(start: tuple[float, float], n: int) -> Tensor:
    """Plain gradient with the same steps, iterates (n + 1, 2)."""
    lam = torch.tensor(start)
    path = [lam]
    for k in range(1, n + 1):
        lam = lam - gradient(lam) / (1 + k)
        path.append(lam)
    return torch.stack(path)


def ifvb(
    start: tuple[float, float],
    n: int,
    *,
    averaging: bool = False,
    num_scores: int = 1,
    alpha: float = 0.6,
    seed: int = 0,
) -> Run:
    """IFVB or AIFVB with the paper's settings: eps = 1, c_beta = 0, one score a step."""
    rule = paper_rule(10.0, 1.0, alpha, averaging=averaging)
    return inversion_free(PROBLEM, torch.tensor(start), n, rule, num_scores=num_scores, seed=seed)


def errors(path: Tensor) -> Tensor:
    """Euclidean distances (n,) to (58, 144)."""
    return torch.linalg.vector_norm(path - path.new_tensor(TARGET), dim=-1)


def model() -> None:
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    pyro.sample("successes", dist.Binomial(TRIALS, p), obs=torch.tensor(float(SUCCESSES)))


def natural_guide(start: tuple[float, float], positive: bool = False) -> Callable[[], None]:
    """Beta(alpha, beta) as ``pyro.param``s: plain, as in the paper, or by their logarithms."""
    domain = constraints.positive if positive else constraints.real

    def guide() -> None:
        alpha = pyro.param("alpha", torch.tensor(start[0]), constraint=domain)
        beta = pyro.param("beta", torch.tensor(start[1]), constraint=domain)
        pyro.sample("p", dist.Beta(alpha, beta))

    return guide


def exact_loss(model: Any, guide: Any) -> float:
    """KL(q || posterior) and its gradients: the negative lower bound up to a constant."""
    q = poutine.trace(guide).get_trace().nodes["p"]["fn"]
    loss = kl_divergence(q, dist.Beta(torch.tensor(TARGET[0]), torch.tensor(TARGET[1])))
    loss.backward()
    return loss.item()


def through_svi(
    make: Callable[[Any], Any], start: tuple[float, float], n: int, positive: bool = False
) -> list[float]:
    """Errors after 0, 1, ..., n steps of ``pyro.infer.SVI`` with the exact gradient."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = natural_guide(start, positive)
    guide()
    svi = SVI(model, guide, make(guide), loss=exact_loss, loss_and_grads=exact_loss)

    def error() -> float:
        lam = torch.stack([pyro.param("alpha"), pyro.param("beta")]).detach()
        return float(errors(lam[None])[0])

    found = [error()]
    for _ in range(n):
        svi.step()
        found.append(error())
    return found


def family_guide(make: Callable[[Any], Any], n: int) -> list[float]:
    """Errors after 0, 1, ..., n steps of 8 particles with ``AutoExponentialFamily``."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = ngvi.AutoExponentialFamily(model)
    svi = SVI(model, guide, make(guide), loss=ngvi.BatchedELBO(8))
    found = [torch.nan]
    for _ in range(n):
        svi.step()
        q = guide.site_distribution("p")
        found.append(float(errors(torch.stack([q.concentration1, q.concentration0])[None])[0]))
    return found


def _at(found: Any, n: int) -> dict[int, float]:
    return {k: float(found[k]) for k in CHECKPOINTS if k <= n}


def run(quick: bool, out: Path | None = None) -> list[Row]:
    """The rows of example 1; figures 1 (errors) and 2 (paths) below ``out``."""
    n = 1000 if quick else 5000
    contrast = 4000 if quick else 40000
    rows = []
    stored = ("0.128630305", "0.141455774")
    ends = ("(16.09, 43.14)", "(15.12, 32.38)")
    stored_ifvb = ("NaN (100 scores)", "1.02 after 27,817")
    stored_aifvb = ("(59.01, 146.50) (100 scores)", "2.81 after 22,278")
    for i, start in enumerate(STARTS):
        label = f"({start[0]:g}, {start[1]:g})"
        natural, plain = exact(start, n), euclidean(start, contrast)
        free, averaged = ifvb(start, n), ifvb(start, n, averaging=True)
        found = errors(free.iterates)
        smoothed = errors(averaged.averages)
        settings = "rule, 10/(1+k)^0.6, 1 score, dense, eps 1, coordinates (alpha, beta)"
        end = f"({plain[-1, 0]:.2f}, {plain[-1, 1]:.2f})"
        public = through_svi(
            lambda g: algorithm_1(g, c_a=10.0, c_a_prime=2.0, alpha=0.6, c_beta=0.0), start, n
        )
        default = through_svi(ngvi.IFVB, start, 1000, positive=True)
        reached = next((k for k, e in enumerate(default) if e < 1e-6), None)
        rows += [
            Row(
                f"from {label}: exact NGVB, 1/(1+k), error after 872",
                "-",
                stored[i],
                f"{errors(natural)[872]:.9f}",
            ),
            Row(
                f"{label}: Euclidean gradient, end after {contrast:,}",
                "figure only",
                ends[i] + " after 40,000",
                end,
            ),
            Row(f"{label}: IFVB, {settings}", "figure only", stored_ifvb[i], steps(_at(found, n))),
            Row(f"{label}: the same by algorithm_1 in SVI", "-", "-", steps(_at(public, n))),
            Row(
                f"{label}: AIFVB, average, same settings",
                "figure only",
                stored_aifvb[i],
                steps(_at(smoothed, n)),
            ),
            Row(
                f"{label}: IFVB default in SVI, exact gradient, log coordinates",
                "-",
                "-",
                f"{default[-1]:.1e} after 1,000; below 1e-6 after {reached}",
            ),
        ]
        figure = {
            "NGVB": errors(natural),
            "IFVB": found,
            "AIFVB": smoothed,
            "IFVB, our default": torch.tensor(default),
            "Euclidean": errors(plain)[: n + 1],
        }
        name = f"{start[0]:g}_{start[1]:g}"
        curves = {k: (list(range(len(v))), v.tolist()) for k, v in figure.items()}
        save(out, f"figure1_{name}", curves, "step", "distance to (58, 144)")
        paths = {"NGVB": natural, "IFVB": free.iterates, "AIFVB": averaged.averages}
        paths |= {"Euclidean": plain[:: max(1, contrast // 4000)]}
        lines = {k: (v[:, 0].tolist(), v[:, 1].tolist()) for k, v in paths.items()}
        lines["posterior"] = ([TARGET[0]], [TARGET[1]])
        save(out, f"figure2_{name}", lines, "alpha", "beta", ("linear", "linear"))
    for make in (ngvi.NGVB, ngvi.IFVB):
        found = family_guide(make, 1000)
        what = f"AutoExponentialFamily, {make.__name__} default, 8 particles"
        rows.append(Row(what, "-", "-", steps(_at(found, 1000))))
    return rows
