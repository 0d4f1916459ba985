r"""A Gaussian process at some inputs X, seen from its white values eps at others, Z.

    u = f(Z) = mean(Z) + L eps,   L L' = k(Z, Z) + jitter I,
    f(X) = mean(X) + A eps + rest,   A = k(X, Z) L^-T,   rest independent of eps,
    var rest_n = k(x_n, x_n) + jitter - |A_n|^2.

For inducing points Z (Titsias 2009; eps as in Hensman, Matthews & Ghahramani 2015), and for new
inputs X with Z those of training.  O(N M^2), and no N x N matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..distributions.gaussian_process import GaussianProcess, factor, with_jitter
from ..linalg.host import fixed_normal
from .kept import same_bits

__all__ = ["Regression", "probe", "regress"]


@dataclass(frozen=True)
class Regression:
    """A (N, M), mean(X) (N,), variances of the rest (N,); L (M, M) and mean(Z) (M,) of u.

    ``marks`` tell others from it.
    """

    design: Tensor
    offset: Tensor
    rest: Tensor
    root: Tensor
    level: Tensor
    marks: tuple[Tensor, ...]

    @property
    def learns(self) -> bool:
        """Whether it depends on parameters of the model."""
        return any(t.requires_grad for t in (self.design, self.offset, self.rest))

    def at(self, index: Tensor) -> Regression:
        """f at the inputs of these numbers (n,), of which each may come several times."""
        rows = {n: getattr(self, n).index_select(0, index) for n in ("design", "offset", "rest")}
        return replace(self, **rows)

    def marginals(self, mean: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f (N,), for eps of mean (M,) and A eps of covariance half' half."""
        return self.design @ mean + self.offset, half.square().sum(0) + self.rest


def regress(fn: GaussianProcess, known: Tensor, before: Regression | None = None) -> Regression:
    """f at the inputs of ``fn`` on its white values at ``known`` (M, ...).

    ``before``, that of another call, is given back where kernel, mean and inputs are still the same:
    O(N M).  So an unchanged prior is recognised by its object.
    """
    cross, inner = fn.kernel(known, fn.inputs), fn.kernel(known)
    variance, loc = fn.variance, fn.loc
    v = probe(cross)
    marks = (v @ cross, v @ inner, variance, loc)
    if before is not None and same_bits(marks, before.marks):
        return before
    root = factor(with_jitter(inner, fn.jitter), fn.jitter)
    half = torch.linalg.solve_triangular(root, cross, upper=False)
    rest = (variance - half.square().sum(0)).clamp_min(0.0)
    return Regression(half.mT, loc, rest, root, fn.mean_at(known), marks)


def probe(like: Tensor) -> Tensor:
    """A fixed eps (M,) for ``like`` (M, ...), at which two maps would differ."""
    return fixed_normal(len(like), seed=20_090_416).to(like)
