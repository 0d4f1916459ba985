r"""A block-diagonal inverse Fisher matrix: one estimate for each part of the parameters.

    F ~ diag(F_1, ..., F_B),      F^-1 g = (F_1^-1 g_1, ..., F_B^-1 g_B),

with F_b estimated from slice b of the scores alone.  Each part has its own size of steps (a ridge or a
level of its own), and its K x K or D_b x D_b systems are those of fewer parameters.  What is lost are
the entries of F between parts.  The parts of a flow are its affine map and its layers
(:meth:`~pyro_ngvi.families.Family.layer_sizes`).

Not for: parts that say the same, such as two affine layers in a row: each is moved as if it were alone,
and the sum of the steps is twice too long.

Source: Martens & Grosse (2015, ICML), section 4.2, for Fisher matrices of networks by layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..families.base import Tensors
from .inversion_free import InverseFisher, good_rows

__all__ = ["Blocks"]


@dataclass(frozen=True)
class Blocks(InverseFisher):
    """``inner``, an estimate, for consecutive slices of the packed vector of those ``sizes``.

    A score that is not finite in one slice is left out of all.

    Example:
        >>> import torch
        >>> from pyro_ngvi.fisher import Blocks, Window
        >>> estimate = Blocks((1, 2), Window(size=2, damping=1.0))
        >>> state = estimate.init(torch.ones(3), weight=1.0)
        >>> state = estimate.update(state, torch.tensor([[1.0, 2.0, 0.0], [1.0, 0.0, 2.0]]))
        >>> estimate.product(state, torch.tensor([2.0, 4.0, 4.0])).round(decimals=4)  # diag(2, 4, 4)
        tensor([1., 1., 1.])
    """

    sizes: tuple[int, ...]
    inner: InverseFisher

    def init(self, diagonal: Tensor, weight: float) -> Tensors:
        parts = diagonal.split(self.sizes)
        return self._joined([self.inner.init(part, weight) for part in parts])

    def update(self, state: Tensors, scores: Tensor) -> Tensors:
        scores = torch.where(good_rows(scores), scores, torch.nan)
        parts = zip(self._states(state), scores.split(self.sizes, 1), strict=True)
        return self._joined([self.inner.update(own, part) for own, part in parts])

    def product(self, state: Tensors, g: Tensor) -> Tensor:
        parts = zip(self._states(state), g.split(self.sizes), strict=True)
        return torch.cat([self.inner.product(own, part) for own, part in parts])

    def _joined(self, states: list[Tensors]) -> Tensors:
        return {f"{b}.{k}": v for b, own in enumerate(states) for k, v in own.items()}

    def _states(self, state: Tensors) -> list[Tensors]:
        states: list[Tensors] = [{} for _ in self.sizes]
        for name, v in state.items():
            b, _, key = name.partition(".")
            states[int(b)][key] = v
        return states
