"""A sparse symmetric matrix from few products with vectors of zeros and ones.

Columns without a common row share a product; and of an entry (i, j) the other, (j, i), will do
(Gebremedhin, Manne & Pothen 2005, What color is your Jacobian?, SIAM Review 47).  So the columns with
most entries have a product of their own, and the others need not keep out of the rows of these.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: limits on the entries of a column, beyond which it has its own colour, that are tried
TRIED = 8


class Coloring:
    """Colours of the k columns, and where entries of the matrix are found in its products.

    Entry (i, j) is entry ``place[i, j]`` of the C products (C k numbers in a row), or 0 where it is
    ``empty``.
    """

    def __init__(self, pattern: Tensor) -> None:
        """The fewest colours that this search sees; ``pattern`` (k, k): where there may be entries."""
        pattern = (pattern | pattern.mT).cpu()
        degree = pattern.sum(0)
        limits = degree.unique()
        limits = limits[torch.linspace(0, len(limits) - 1, min(len(limits), TRIED)).long()]
        tried = (_colors(pattern, degree > limit) for limit in limits)
        self.colors = min(tried, key=lambda c: int(c.max()))
        self.count, self.empty = int(self.colors.max()) + 1, ~pattern
        k, colors = len(pattern), self.colors
        every = torch.arange(k, device=pattern.device)
        i, j = torch.meshgrid(every, every, indexing="ij")
        alone = _alone(pattern, colors)
        self.place = torch.where(alone, colors[j] * k + i, colors[i] * k + j)

    def add(self, pattern: Tensor) -> None:
        """Go on with these entries too."""
        self.__init__(pattern.cpu() | ~self.empty)

    def vectors(self, like: Tensor) -> Tensor:
        """Zeros and ones (C, k): the columns of each colour."""
        every = torch.arange(self.count, device=self.colors.device)[:, None] == self.colors
        return every.to(like)

    def matrix(self, products: Tensor) -> Tensor:
        """H (..., k, k) from its products H v (C, ..., k)."""
        rows = products.movedim(0, -2).flatten(-2)
        place, empty = (x.to(rows.device) for x in (self.place, self.empty))
        found = rows.index_select(-1, place.flatten())
        return found.reshape(*rows.shape[:-1], *place.shape).masked_fill(empty, 0.0)


def _colors(pattern: Tensor, own: Tensor) -> Tensor:
    """Colours (k,) where the columns ``own`` (k,) have one each, and others share no row but theirs."""
    others = pattern & ~own[:, None] & ~own
    meets = (others.float() @ others.float()) > 0.0
    colors = torch.full((len(pattern),), -1, device=pattern.device)
    for j in (~own).nonzero().flatten().tolist():
        taken = set(colors[meets[j]].tolist())
        colors[j] = next(c for c in range(len(pattern)) if c not in taken)
    first = int(colors.max()) + 1
    colors[own] = torch.arange(first, first + int(own.sum()), device=pattern.device)
    return colors


def _alone(pattern: Tensor, colors: Tensor) -> Tensor:
    """Whether no other column of the colour of j has an entry in row i, (k, k)."""
    of_color = torch.nn.functional.one_hot(colors).float()
    return (pattern.float() @ of_color)[:, colors] - pattern.float() == 0.0
