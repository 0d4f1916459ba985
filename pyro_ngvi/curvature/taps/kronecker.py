r"""The two factors of the curvature of a layer's weight, from the backward pass that is run anyway.

For a layer with inputs x_i and outputs W x_i, over data i and draws s,

    A = mean_is x_i x_i',    S = mean_s sum_i scale_i g_i g_i',    g_i = d log p(y_i) / d(W x_i),

approximate the Gauss-Newton matrix of vec W (row by row) by S kron A (Martens & Grosse 2015,
arXiv:1503.05671).  The y_i are those observed: products of the gradients of single data, as in
"gauss_newton", and not of labels drawn from the model.  A minibatch stands for all data, with its mean
in A and its sum times the scale in S: unbiased, both.

By site W (n, m) this leaves "kron_rows.W" (n, n) and "kron_columns.W" (m, m), and as "prior" (d,) the
diagonal of the Hessian of -rest.  Other sites, such as biases and scales, need nothing: their gradients
are enough.  Not for a weight that one datum meets several times (sequences, recurrence): refused here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...runtime.run import run_particles
from .check import taps_behind
from .layers import Linear
from .taps import LayerTaps, Run, Use, View

if TYPE_CHECKING:
    from ..estimators import Drawn


class KroneckerTaps(LayerTaps):
    """Taps that leave factors in place of squares."""

    def fits(self, name: str) -> bool:
        """Whether a site is the whole weight of one linear layer that meets each datum once."""
        uses = [use for use in self.expected[0] if use.site == name]
        if len(uses) != 1 or not isinstance(uses[0].layer, Linear):
            return False
        whole = uses[0].view in (View.like(self.twins[name]), View.like(self.twins[name].mT))
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
        past = self._sums.get(use.site)  # of other particles
        self._sums[use.site] = (
            new if past is None else [p + q for p, q in zip(past, new, strict=True)]
        )

    def factors(self, num_particles: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Take by site the factors of its rows (n, n) and columns (m, m), after one ``backward``.

        For F.linear(x, W) these are S and A, for x @ W they are A and S.  The loss is the average over
        so many particles.
        """
        factor = self.factor(num_particles)
        if factor is None or self.observed in self.runs[-1].masked:
            raise ValueError(
                'BatchedELBO(curvature="kronecker") needs the layers of its first step at every '
                f"step, and at {self.observed!r} one scale and no mask, whose hidden data have inputs "
                "all the same. Leave such data out."
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
            as_stored = use.view == View.like(self.twins[use.site])
            result[use.site] = pair if as_stored != transposed else (pair[1], pair[0])
        self.clear()
        return result


def kronecker(drawn: Drawn) -> dict[str, Tensor]:
    """The factors of every matrix of the guide, and the diagonal of the rest's Hessian.

    The first step finds the layers, checks them, and is then run again with taps.
    """
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
            'BatchedELBO(curvature="kronecker") needs each matrix of the guide to be, unconstrained '
            "and whole, the weight of one linear layer over independent data in a plate, once a "
            f"datum. {', '.join(map(repr, unfit))} is not: take pyro_ngvi.NGVB without it."
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
