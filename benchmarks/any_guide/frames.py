r"""Frames of a covariance, four of them, for the inverse Fisher matrix that IFVB carries on.

The guide is a function with N(m, Sigma), ``pyro.param`` of ``constraints.positive_definite``, on
logistic regressions from zero with sds of 0.1.  All methods are IFVB with the same settings, and differ
in the frame in which scores, estimate and step live:

* **stored**: Pyro's unconstrained coordinates, log-Cholesky.
* **Bures-Wasserstein**: dSigma = S Sigma + Sigma S with S symmetric, retracted by the exponential map
  (I + S) Sigma (I + S); m straight.  It keeps the numbers of S, in the manner of Draca, Matsubara &
  Tran (2026, arXiv:2604.02969); only their abstracts were at hand, and their transport may be another.
* **triangles**: dL = L M, m straight: a product of manifolds.
* **affine**: that, and dm = L t; the package's (:mod:`pyro_ngvi.optim.frames`).

In the Bures-Wasserstein frame F is Sigma^-1 for m, and for S

    <S, F S> = tr(S^2) + tr(S Sigma S Sigma^-1),

which moves with q and has a condition of (k + 1)^2 / (4 k), k that of Sigma.  In the affine frame F is
diagonal, of ones and twos, at every q.  "Error": the root mean square of the logarithms of the
eigenvalues of (estimate x F), F that of the present q, exact, at step ``LOOK``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor
from torch.linalg import solve_triangular

import pyro_ngvi
from pyro_ngvi.families.base import Tensors
from pyro_ngvi.fisher import ConjugateGradients, Dense, LowRank
from pyro_ngvi.optim import remember_arguments
from pyro_ngvi.optim.blocks import GuideBlock
from pyro_ngvi.optim.frames import Straight, Triangles

from ..problems import load_present
from ..stepping import heading, line
from ..time_to_target import TARGETS, checkpoints

__all__ = ["BuresWasserstein", "Result", "fisher_error", "gaussian", "run", "table", "walk"]

PROBLEMS = ("breast_cancer_presplit", "australian_presplit", "wdbc")
START, PARTICLES, SCORES = 0.1, 8, 8
#: steps at most, and the step after which the estimate is looked at
CAP, LOOK = 600, 100
ROOT = 2.0**0.5
FRAMES = ("stored", "Bures-Wasserstein", "triangles", "affine")
ESTIMATES: dict[str, Any] = {
    "conjugate gradients": ConjugateGradients(),
    "30 conjugate gradients": ConjugateGradients(30),
    "Dense(growth=1)": Dense(growth=1.0),
    "LowRank(32, growth=1)": LowRank(32, growth=1.0),
}


@dataclass(frozen=True)
class BuresWasserstein(Triangles):
    """S, packed as a triangle in orthonormal coordinates of the symmetric matrices."""

    def push(self, params: Tensors, name: str, tangent: Tensor) -> Tensor:
        L = self.factor(params[name])
        half = solve_triangular(L, _symmetric(tangent) @ L, upper=False)  # L^-1 S L
        M = (half + half.mT).tril()
        M = torch.diagonal_scatter(M, 0.5 * M.diagonal())
        return super().push(params, name, M)

    def pull(self, params: Tensors, name: str, grad: Tensor) -> Tensor:
        L, B = self.factor(params[name]), super().pull(params, name, grad)
        B = torch.diagonal_scatter(B, 0.5 * B.diagonal())
        C = solve_triangular(L.mT, (B + B.mT) @ L.mT, upper=True)
        return torch.diagonal_scatter((C + C.mT).tril() / ROOT, C.diagonal())

    def retract(self, params: Tensors, name: str, tangent: Tensor) -> Tensor:
        L = self.factor(params[name])
        moved = L + _symmetric(tangent) @ L
        new = torch.linalg.cholesky(moved @ moved.mT)
        return torch.diagonal_scatter(new, torch.as_tensor(self.diagonal.inv(new.diagonal())))


def _symmetric(T: Tensor) -> Tensor:
    lower = T.tril(-1) / ROOT
    return lower + lower.mT + torch.diag(T.diagonal())


class FramedBlock(GuideBlock):
    """Parameters of a guide in the frame of that name."""

    kind: ClassVar[str]

    def _find_frames(self) -> dict[str, Straight]:
        frames = super()._find_frames()
        if self.kind == "affine":
            return frames
        matrices = {name: f for name, f in frames.items() if isinstance(f, Triangles)}
        if self.kind == "triangles":
            return {**matrices}
        if self.kind == "Bures-Wasserstein":
            return {name: BuresWasserstein(f.diagonal) for name, f in matrices.items()}
        return {}


class FramedIFVB(pyro_ngvi.IFVB):
    """IFVB in one of :data:`FRAMES`."""

    def __init__(self, guide: Any, kind: str, **arguments: Any) -> None:
        super().__init__(guide, **arguments)
        block = type("Block", (FramedBlock,), {"kind": kind})
        self.block = self._rest = block(guide, True)


def gaussian(d: int) -> Callable[..., None]:
    """The guide."""

    def guide(*args: Any) -> None:
        loc = pyro.param("loc", lambda: torch.zeros(d))
        start = START**2 * torch.eye(d)
        covariance = pyro.param("covariance", start, constraint=constraints.positive_definite)
        pyro.sample("w", dist.MultivariateNormal(loc, covariance_matrix=covariance))

    return remember_arguments(guide)


def fisher_error(optim: FramedIFVB) -> float:
    """The error of the estimate beside the exact F of the present q."""
    ((path, state),) = optim._states.items()
    estimate: Any = optim._rules[path].fisher
    product: Any = optim.block.product()
    params = {name: p.detach() for name, p in optim.block.natural_params().items()}
    units = torch.eye(len(optim.block.family.pack(params)))
    F = torch.stack([product(e) for e in units])
    E = torch.stack([estimate.product(state["fisher"], e) for e in units])
    there = F.diagonal() > 0.0  # the stored upper triangle means nothing
    L = torch.linalg.cholesky(F[there][:, there])
    values = torch.linalg.eigvalsh(L.mT @ (0.5 * (E + E.mT))[there][:, there] @ L)
    return float(values.log().square().mean().sqrt())


@dataclass(frozen=True)
class Result:
    """Steps to each target and the error at step :data:`LOOK`, a number for each seed."""

    problem: str
    estimate: str
    frame: str
    steps: dict[str, list[float]]
    errors: list[float]


def walk(problem: Any, frame: str, fisher: Any, seed: int) -> Iterator[tuple[int, float, Any]]:
    """Number, gap to the optimum in nats, and optimizer, at each checkpoint."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = gaussian(problem.dim)
    few = None if isinstance(fisher, ConjugateGradients) else SCORES
    optim = FramedIFVB(guide, frame, fisher=fisher, num_scores=few)
    loss = Trace_ELBO(PARTICLES, vectorize_particles=True, max_plate_nesting=1)
    svi, done, best = SVI(problem.model, guide, optim, loss), 0, problem.optimum["full_rank"].elbo
    for mark in sorted({*checkpoints(CAP, ratio=1.05), LOOK}):
        while done < mark:
            svi.step(*problem.args)
            done += 1
        covariance = pyro.param("covariance").detach()
        elbo = problem.exact_elbo(pyro.param("loc").detach(), torch.linalg.cholesky(covariance))
        yield mark, best - elbo, optim


def run(seeds: int, quick: bool) -> list[Result]:
    """All frames and estimates."""
    results = []
    for problem in load_present(PROBLEMS[:1] if quick else PROBLEMS):
        for name, fisher in ESTIMATES.items():
            for frame in FRAMES:
                steps: dict[str, list[float]] = {str(t): [] for t in TARGETS}
                errors = []
                for seed in range(seeds):
                    hits = dict.fromkeys(TARGETS, inf)
                    for mark, gap, optim in walk(problem, frame, fisher, seed):
                        for t in TARGETS:
                            hits[t] = min(hits[t], mark) if gap < t else hits[t]
                        if mark == LOOK and hasattr(fisher, "product"):
                            errors.append(fisher_error(optim))
                        if mark >= LOOK and max(hits.values()) < inf:
                            break
                    for t in TARGETS:
                        steps[str(t)].append(hits[t])
                results.append(Result(problem.name, name, frame, steps, errors))
    return results


def table(results: list[Result]) -> str:
    """Medians over seeds."""
    columns = [f"steps to {t}" for t in TARGETS]
    lines = [heading("", "estimate", "frame", *columns, f"error at step {LOOK}")]
    for r in results:
        cells = [f"{median(v):.0f}" if median(v) < inf else "-" for v in r.steps.values()]
        error = f"{median(r.errors):.2f}" if r.errors else ""
        lines.append(line(r.problem, r.estimate, r.frame, *cells, error))
    return "\n".join(lines)
