r"""The two factors of the curvature of a layer's weight, from the backward pass that is run anyway.

For a layer with inputs x_i and outputs W x_i, over data i and draws s,

    A = mean_is x_i x_i',    S = mean_s sum_i scale_i g_i g_i',    g_i = d log p(y_i) / d(W x_i),

approximate the Gauss-Newton matrix of vec W (row by row) by S kron A (Martens & Grosse 2015,
arXiv:1503.05671).  The y_i are those observed: products of the gradients of single data, as in
"gauss_newton", and not of labels drawn from the model.  A minibatch stands for all data, with its mean
in A and its sum times the scale in S: unbiased, both.

How: the taps of :mod:`pyro_ngvi.curvature.taps.taps`, at the cost of two matrix products a layer.

Do not use it for a weight that one datum meets several times (sequences, recurrence): refused here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .run import Run, Use
from .squares import Inputs, Linear, View
from .taps import LayerTaps

__all__ = ["KroneckerTaps"]


class KroneckerTaps(LayerTaps):
    """Taps that leave factors in place of squares; see :class:`LayerTaps`.

    ``reasons`` also says which sites are no weights of this kind (:meth:`check_weights`).
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # by site: the sums of x x' and of g g', and the number of rows x
        self._sums: dict[str, tuple[Tensor, Tensor, int]] = {}

    def check_weights(self) -> None:
        """After :meth:`discover`: add to ``reasons`` the sites that have no two factors."""
        uses, _ = self.signature
        for name in self.sites:
            why = self._unfit(name, [use for use in uses if use.site == name])
            if why is not None:
                self.reasons[name] = why

    def _unfit(self, name: str, uses: list[Use]) -> str | None:
        if len(uses) != 1:
            return f"The matrix {name!r} is the weight of {len(uses)} layers."
        use, twin = uses[0], self.twins[name]
        if not isinstance(use.layer, Linear):
            kind = use.layer.name
            return f"The matrix {name!r} is no weight of a linear layer, but of one of kind {kind}."
        if use.view not in (View.like(twin), View.like(twin.mT)):
            return f"The layer of the matrix {name!r} uses a part of it only, or in another shape."
        if use.out_dim != self.examples + 1:
            return (
                f"The layer of the matrix {name!r} meets a datum at several places, or the "
                f"dimensions of its output are not those of the data and one more."
            )
        return None

    def clear(self) -> None:
        super().clear()
        self._sums = {}

    def factors(self, num_particles: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Take by site the factors of its rows (n, n) and columns (m, m), after one ``backward``.

        For F.linear(x, W) these are S and A, for x @ W they are A and S.  Nothing is returned where
        ``failure`` says why.

        Args:
            num_particles: S; the loss is the average over so many.
        """
        sums, run = self._sums, self.last
        self.clear()
        factor = self._factor(run, num_particles)
        if factor is not None and run is not None and self.observed in run.masked:
            factor = None
            self.failure = (
                f"The observed site {self.observed!r} has a mask, and data that it hides have inputs "
                f"all the same; leave these data out."
            )
        if factor is None:
            return {}
        result = {}
        for use in self.signature[0]:
            if use.site in sums:
                inputs, outputs, count = sums[use.site]
                pair = outputs * factor, inputs / count
            else:  # the loss does not depend on this layer
                like, shape = self._like[use.site], use.layer.shape
                o, i = reversed(shape) if _is_transposed(use) else shape
                pair = like.new_zeros(o, o), like.new_zeros(i, i)
            result[use.site] = pair if _rows_are_outputs(use) else (pair[1], pair[0])
        return result

    def arrived(self, run: Run, uses: list[Use], xs: Inputs, g: Tensor) -> None:
        """As in the taps for squares, but what comes by is summed to x x' and g g'."""
        if self.arrivals is not None:
            super().arrived(run, uses, xs, g)
        elif run.as_checked:
            (use,) = uses
            (x,), g = self._rows(use, xs, g)
            S, n = g.shape[:2]
            a, b = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
            inputs = a.mT @ a * (S // len(x))  # all particles may see one input
            outputs = b.mT @ b
            if use.site in self._sums:  # of other particles
                past = self._sums[use.site]
                self._sums[use.site] = past[0] + inputs, past[1] + outputs, past[2] + S * n
            else:
                self._sums[use.site] = inputs, outputs, S * n


def _is_transposed(use: Use) -> bool:
    return isinstance(use.layer, Linear) and use.layer.transposed


def _rows_are_outputs(use: Use) -> bool:
    """Whether the rows of the site's value belong to the outputs of the layer."""
    as_stored = use.view.stride[1] == 1 and use.view.stride[0] == use.view.size[1]
    return as_stored != _is_transposed(use)
