r"""The two factors of the curvature of a layer's weight, from the backward pass that is run anyway.

They are A and S of :mod:`pyro_ngvi.optim.noisy_kfac`, for vec W row by row, E a mean over draws.  A
minibatch has its mean in A and its sum times the scale in S.

By site W (n, m) this leaves "kron_rows.W" (n, n) and "kron_columns.W" (m, m), and as "prior" (d,) the
diagonal of the Hessian of -rest.  For other sites, such as biases, their gradients are enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...runtime.pyro_adapter import masks_of
from ...runtime.run import run_particles
from .check import taps_behind
from .layers import Linear
from .taps import LayerTaps, Run, Use, place

if TYPE_CHECKING:
    from ..estimators import Drawn


class KroneckerTaps(LayerTaps):
    """Taps that leave factors in place of squares."""

    def fits(self, name: str) -> bool:
        """Whether a site is the whole weight of one linear layer that meets each datum once."""
        uses = [use for use in self.expected[0] if use.site == name]
        if len(uses) != 1 or not isinstance(uses[0].layer, Linear):
            return False
        whole = uses[0].place in (place(self.twins[name]), place(self.twins[name].mT))
        return whole and uses[0].out_dim == self.data_dims + 1

    def clear(self) -> None:
        super().clear()
        # by site: the sums of x x' and of g g', and the number of rows x
        self._sums: dict[str, Any] = {}

    def take(self, run: Run, use: Use, x: Any, g: Tensor) -> None:
        """What comes by is summed to x x' and g g'."""
        S, n = g.shape[:2]
        a, b = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        new = a.mT @ a * (S // len(x)), b.mT @ b, S * n  # all particles may see one input
        past = self._sums.get(use.site, (0, 0, 0))  # of other particles
        self._sums[use.site] = [p + q for p, q in zip(past, new, strict=True)]

    def factors(self, num_particles: int) -> dict[str, tuple[Tensor, Tensor]]:
        """By site the factors of its rows and columns, after a backward pass of an average over S.

        For F.linear(x, W) these are S and A, for x @ W they are A and S.
        """
        factor, site = self.factor(num_particles), self.runs[-1].observed.get(self.observed)
        if not factor or any(mask is not True for mask, _ in masks_of(site)):
            raise ValueError(
                'BatchedELBO(curvature="kronecker") needs the layers of its first step at each step, '
                f"and at {self.observed!r} one scale and no mask: leave hidden data out."
            )
        result = {}
        for use in self.expected[0]:
            assert isinstance(use.layer, Linear)
            transposed, like = use.layer.transposed, self.like[use.site]
            if use.site in self._sums:
                inputs, outputs, count = self._sums[use.site]
                pair = outputs * factor, inputs / count
            else:  # the loss does not depend on this layer
                sizes = reversed(use.layer.shape) if transposed else use.layer.shape
                pair = tuple(like.new_zeros(n, n) for n in sizes)
            as_stored = use.place == place(self.twins[use.site])
            result[use.site] = pair if as_stored != transposed else (pair[1], pair[0])
        self.clear()
        return result


def kronecker(drawn: Drawn) -> dict[str, Tensor]:
    """The parts; the first step finds the layers, checks them, and is then run again with taps."""
    drawn.warn_of_kinks()
    diagonal, decided, taps = drawn.rest_is_diagonal(), True, drawn.taps
    if taps is None:
        decided = drawn.has_several_data()  # which refuses data without a plate
        taps = drawn.taps = _layers_of_matrices(drawn)
        decided = decided and not taps.undecided
        _run_again(drawn, taps)
    assert isinstance(taps, KroneckerTaps)
    factors = taps.factors(len(drawn.draws))
    parts = {"prior": drawn.rest_row_sums if diagonal else drawn.rest_curvature()}
    for name, (rows, columns) in factors.items():
        parts |= {f"kron_rows.{name}": rows, f"kron_columns.{name}": columns}
    if not decided:
        drawn.taps = None  # it could not be seen whether data mix: the next step tries again
    return parts


def _layers_of_matrices(drawn: Drawn) -> KroneckerTaps:
    """Taps behind the layers of all matrices; a site that has no such layer is refused."""
    taps = taps_behind(drawn, KroneckerTaps, drawn.guide.matrices)
    unfit = [name for name in drawn.guide.matrices if not taps.fits(name)]
    if unfit:
        raise ValueError(
            'BatchedELBO(curvature="kronecker") needs each matrix, unconstrained and whole, to be the '
            f"weight of one linear layer that meets independent data in a plate once. "
            f"{', '.join(map(repr, unfit))} is not: take pyro_ngvi.NGVB without it."
        )
    return taps


def _run_again(drawn: Drawn, taps: KroneckerTaps) -> None:
    """The step of the loss once more, so that its first step has factors too."""
    S = len(drawn.draws)
    with torch.enable_grad():
        theta = drawn.draws.detach().requires_grad_()
        values, log_det = drawn.layout.unpack_with_log_det(theta)
        drawn.start(theta, log_det)
        given: Any = taps, taps.log_probs, values, S, drawn.args, drawn.kwargs
        log_p = drawn.log_joint(*run_particles(*given, minibatches=drawn.minibatches))
        drawn.before_backward()
        torch.autograd.grad(-log_p.sum() / S, theta)
