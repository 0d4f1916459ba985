r"""Factors of the curvature of each matrix of a matrix-normal guide: ``curvature="kronecker"``.

By site W (n, m), the weight of a linear layer,

    "kron_rows.W" (n, n), "kron_columns.W" (m, m)     the Gauss-Newton matrix of vec W is about their
                                                      Kronecker product (elbo/layer_kronecker.py)
    "prior" (d,)                                      the diagonal of the Hessian of -rest

with rest the prior, the log-Jacobian and all else that is no datum, averaged over the draws.  Other
sites, such as biases and scales, need nothing: their gradients are enough.

Not for networks whose matrices are shared between places or layers: such a site is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..runtime.layout import LatentLayout
from ..runtime.vmap import Minibatches, run_particles
from .estimator import CurvatureEstimator
from .kinds import data_terms, rest_curvature, rest_is_diagonal
from .taps.kronecker import KroneckerTaps

__all__ = ["KroneckerEstimator"]


class KroneckerEstimator(CurvatureEstimator):
    """The factors of every site in ``matrices``, step after step.

    The first step finds the layers, checks them, and is then run again with taps; from then on the
    loss's own backward pass leaves the factors.
    """

    def __init__(self, layout: LatentLayout, matrices: Iterable[str]) -> None:
        super().__init__("kronecker", "kronecker", layout)
        self.matrices = tuple(matrices)

    def before_backward(self) -> None:
        if self._diagonal_rest:
            super().before_backward()

    def after_backward(
        self, model: Callable[..., Any], minibatches: Minibatches, args: Any, kwargs: Any
    ) -> dict[str, Tensor]:
        run = self._runner(model, minibatches, args, kwargs)
        theta = self._draws.detach()
        self._warn_of_kinks(run, theta[0])
        if self._diagonal_rest is None:
            self._diagonal_rest = rest_is_diagonal(run, theta[0])
        known, enough = self._taps, True
        if known is None:
            _, weights = data_terms(run)(theta[0])  # which refuses data without a plate
            enough = int((weights != 0).sum()) > 1
            self._taps = self._found(model, theta, args, kwargs, minibatches)
            enough = enough and not self._taps.undecided
            self._again(theta, args, kwargs, minibatches)
        taps = self._taps
        assert isinstance(taps, KroneckerTaps)
        factors = taps.factors(len(theta))
        if taps.failure is not None:
            raise ValueError(f'BatchedELBO(curvature="kronecker"): {taps.failure}')
        prior = self._prior if self._diagonal_rest else rest_curvature(run, theta, False)
        if not enough:
            self._taps = None  # it could not be seen whether data mix: the next step tries again
        self._forget()
        parts = {"prior": prior}
        for name, (rows, columns) in factors.items():
            parts |= {f"kron_rows.{name}": rows, f"kron_columns.{name}": columns}
        return parts

    def _found(
        self, model: Any, theta: Tensor, args: Any, kwargs: Any, minibatches: Minibatches
    ) -> KroneckerTaps:
        """Taps behind the layers of all matrices; a site that has no such layer is refused."""
        values, free = self.layout.unpack(theta), self._free(theta)
        matrices = {name: values[name] for name in self.matrices if name in free}
        shared = {name: value[0] for name, value in values.items() if name not in matrices}
        how: Any = {"minibatches": minibatches, "shared": shared}
        with torch.enable_grad():
            taps = KroneckerTaps.discover(model, matrices, args, kwargs, **how)
        assert isinstance(taps, KroneckerTaps)
        taps.check_weights()
        constrained = [name for name in self.matrices if name not in free]
        reasons = {name: f"The support of {name!r} is constrained." for name in constrained}
        reasons |= taps.reasons
        if reasons:
            raise ValueError(
                f'BatchedELBO(curvature="kronecker") needs each matrix of the guide to be the weight '
                f"of one linear layer over the data. {' '.join(reasons.values())} Take "
                f"pyro_ngvi.NGVB on the same guide, which needs no curvature."
            )
        return taps

    def _again(self, theta: Tensor, args: Any, kwargs: Any, minibatches: Minibatches) -> None:
        """The step of the loss once more, so that its first step has factors too."""
        assert self._taps is not None
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            values, log_det = self.layout.unpack_with_log_det(theta)
            self.start(theta, log_det)
            how: Any = {"minibatches": minibatches}
            S = len(theta)
            terms = run_particles(self._taps, self.terms, values, S, args, kwargs, **how)
            log_p = self.log_joint(terms)
            self.before_backward()
            torch.autograd.grad(-log_p.sum() / S, theta)
