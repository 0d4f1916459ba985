r"""Sums of squared per-example gradients in the weights of a layer.

They follow from the layer's inputs and the gradients of its outputs. For one example with input rows
a_t (i,) and output gradients g_t (o,), t = 1..T (T > 1 where the layer uses its weight at several
places: the positions of a convolution, tokens), the gradient in W (o, i) is

    sum_t g_t a_t',      and what is wanted is      h = sum_n (sum_t g_nt a_nt')^2   (o, i).

T = 1:  h = (G^2)' (A^2), one matrix product (Goodfellow 2015, arXiv:1510.01799).
T > 1:  the sum over t comes before the square, so per-example gradients are formed, for as many
        examples at a time as a budget of bytes allows.

Shapes: S particles, n examples. ``g`` is (S, n, ...), and ``x`` is (S, n, ...) or, where all particles
see one input, (1, n, ...). Results have the shape of the weight, summed over S and n.

Do not use these for layers whose output row depends on more than its own input row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Add",
    "Conv",
    "Embedding",
    "Layer",
    "Linear",
    "Scale",
    "View",
    "joint_squares",
    "row_sum",
]

Member = tuple["Layer", "View", Tensor | None, Tensor]


@dataclass(frozen=True)
class View:
    """Where the entries of a weight lie in its site's flat value (numel,)."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @staticmethod
    def like(x: Tensor) -> View:
        """The place of ``x``, a view of a contiguous tensor."""
        return View(tuple(x.shape), tuple(x.stride()), int(x.storage_offset()))

    def of(self, flat: Tensor) -> Tensor:
        """That part of ``flat`` (..., numel), contiguous, as a view (..., *size)."""
        batch = flat.shape[:-1]
        return flat.as_strided(
            (*batch, *self.size), (*flat.stride()[: len(batch)], *self.stride), self.offset
        )


@dataclass(frozen=True)
class Layer:
    """A layer's rule for per-example gradients; ``shape`` is that of its weight."""

    shape: tuple[int, ...]

    def fits(self, examples: int, out_dim: int) -> bool:
        """Whether the output (of ``out_dim`` dimensions) may start with that many of examples."""
        raise NotImplementedError

    def rows(self, x: Tensor | None, g: Tensor) -> Tensor:
        """Gradient of each row of x (r, ...) and g (r, ...): (r, *shape)."""
        raise NotImplementedError

    def row_size(self, x: Tensor | None, g: Tensor) -> int:
        """Numbers that :meth:`rows` holds for each row."""
        return prod(self.shape)

    def squares(self, x: Tensor | None, g: Tensor, budget: int) -> Tensor:
        """Sum of squared gradients over particles and examples, ``shape``.

        ``budget``: bytes for what is held beside x, g and the result (one row at the least).
        """
        total = None
        rows = budget // (g.element_size() * self.row_size(x, g))
        for xs, gs in row_blocks([(x, g)], rows):
            block = self.rows(xs[0], gs[0])
            total = _add(total, block.square().sum(0))
        assert total is not None
        return total


def row_blocks(
    pairs: Sequence[tuple[Tensor | None, Tensor]], rows: int
) -> Iterator[tuple[list[Tensor | None], list[Tensor]]]:
    """The same particles and examples of several (x, g) at a time, as rows (r, ...), r <= ``rows``."""
    S, n = pairs[0][1].shape[:2]
    particles, examples = max(1, rows // max(1, n)), max(1, min(n, rows))
    for s in range(0, S, particles):
        for i in range(0, n, examples):
            block = (slice(s, s + particles), slice(i, i + examples))
            xs = [None if x is None else _expand(x, S)[block].flatten(0, 1) for x, _ in pairs]
            yield xs, [g[block].flatten(0, 1) for _, g in pairs]


@dataclass(frozen=True)
class Linear(Layer):
    """out (..., o) = x (..., i) W', W (o, i); or, ``transposed``, x W with W (i, o) or (i,)."""

    transposed: bool = False

    def fits(self, examples: int, out_dim: int) -> bool:
        return out_dim - (len(self.shape) > 1) >= examples

    def rows(self, x: Tensor | None, g: Tensor) -> Tensor:
        a, g = self._factors(x, g, 1)
        gradient = a.mT @ g if self.transposed else g.mT @ a
        return gradient.reshape(len(g), *self.shape)

    def squares(self, x: Tensor | None, g: Tensor, budget: int) -> Tensor:
        a, b = self._factors(x, g, 2)
        if a.shape[2] != 1:
            return super().squares(x, g, budget)
        b = b.square()
        if len(a) != len(b):  # one product for all particles
            b = b.sum(0, keepdim=True)
        a, b = a.square().flatten(0, 2), b.flatten(0, 2)
        return (a.mT @ b if self.transposed else b.mT @ a).reshape(self.shape)

    def _factors(self, x: Tensor | None, g: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """x (*batch, T, i) and g (*batch, T, o)."""
        assert x is not None
        if len(self.shape) == 1:
            g = g.unsqueeze(-1)
        return _middle(x, batch), _middle(g, batch)


@dataclass(frozen=True)
class Conv(Layer):
    """Convolution of any dimension: x (n, c, *in), W (o, c / groups, *kernel), out (n, o, *out)."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]  # as F.pad takes it: last dimension first, left and right
    dilation: tuple[int, ...]
    groups: int = 1

    def fits(self, examples: int, out_dim: int) -> bool:
        return examples == 1 and out_dim == len(self.shape)

    def row_size(self, x: Tensor | None, g: Tensor) -> int:
        columns = self.groups * prod(self.shape[1:]) * prod(g.shape[-len(self.stride) :])
        return prod(self.shape) + 2 * columns

    def rows(self, x: Tensor | None, g: Tensor) -> Tensor:
        assert x is not None
        r, k = len(g), len(self.stride)
        a = F.pad(x, self.padding)
        for j, (step, gap, size) in enumerate(
            zip(self.stride, self.dilation, self.shape[2:], strict=True)
        ):
            a = a.unfold(2 + j, gap * (size - 1) + 1, step)[..., ::gap]
        # (r, c, *out, *kernel) -> (r, groups, out, c / groups * kernel)
        a = a.unflatten(1, (self.groups, -1)).movedim(2, 2 + k)
        a = a.flatten(2 + k).flatten(2, 1 + k)
        gradient = g.reshape(r, self.groups, self.shape[0] // self.groups, -1) @ a
        return gradient.reshape(r, *self.shape)


@dataclass(frozen=True)
class Embedding(Layer):
    """out (..., *rest) = W[x], W (V, *rest), x integers; no gradient where x == ``padding``."""

    padding: int | None = None

    def fits(self, examples: int, out_dim: int) -> bool:
        return out_dim - len(self.shape) + 1 >= examples

    def rows(self, x: Tensor | None, g: Tensor) -> Tensor:
        index, g = self._factors(x, g, 1)  # (r, T), (r, T, o)
        zeros = g.new_zeros(len(g), self.shape[0], g.shape[-1])
        gradient = zeros.scatter_add(1, index.unsqueeze(-1).expand_as(g), g)
        return gradient.reshape(len(g), *self.shape)

    def squares(self, x: Tensor | None, g: Tensor, budget: int) -> Tensor:
        flat = g.new_zeros(self.shape[0], prod(self.shape[1:]))
        index, values = self._factors(x, g, 2)
        if index.shape[2] == 1:
            values = values.square()
            if len(index) != len(values):
                values = values.sum(0, keepdim=True)
            flat.index_add_(0, index.flatten(), values.flatten(0, 2))
            return flat.reshape(self.shape)
        rows = budget // (g.element_size() * 4 * max(1, values[0, 0].numel()))
        for xs, gs in row_blocks([(index, values)], rows):
            assert xs[0] is not None
            places, sums = _sum_repeats(xs[0], gs[0])
            flat.index_add_(0, places.flatten(), sums.square().flatten(0, 1))
        return flat.reshape(self.shape)

    def _factors(self, x: Tensor | None, g: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Indices (*batch, T), each in 0..V-1, and g (*batch, T, o)."""
        assert x is not None
        index = x.unsqueeze(-1).flatten(batch)
        g = g.reshape(*g.shape[:batch], index.shape[-1], prod(self.shape[1:]))
        if self.padding is not None:
            g = g.masked_fill((index == self.padding).unsqueeze(-1), 0.0)
        return index.remainder(self.shape[0]), g


def _sum_repeats(index: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Sum g (r, T, o) over equal entries of index (r, T): places (r, T) and sums, zeros at the end."""
    index, order = index.sort(1)
    first = F.pad(index[:, 1:] != index[:, :-1], (1, 0))
    segment = first.cumsum(1)  # 0, 0, 1, 2, 2, ...: one number for each distinct entry
    places = torch.zeros_like(index).scatter(1, segment, index)
    g = g.gather(1, order.unsqueeze(-1).expand_as(g))
    return places, torch.zeros_like(g).scatter_add(1, segment.unsqueeze(-1).expand_as(g), g)


@dataclass(frozen=True)
class _Broadcast(Layer):
    """A weight that is broadcast over the examples, and over ``places`` at the end of the output."""

    places: int = 0

    def fits(self, examples: int, out_dim: int) -> bool:
        return len(self._bare()) + examples <= out_dim

    def row_size(self, x: Tensor | None, g: Tensor) -> int:
        return max(prod(self.shape), prod(g.shape[2:]))

    def _bare(self) -> tuple[int, ...]:
        """The shape that is broadcast, without the ones it starts with."""
        shape = self.shape
        while shape and shape[0] == 1:
            shape = shape[1:]
        return (*shape, *(1,) * self.places)

    def rows(self, x: Tensor | None, g: Tensor) -> Tensor:
        shape = self._bare()
        ones = (1,) * (g.dim() - 1 - len(shape))
        return g.sum_to_size(len(g), *ones, *shape).reshape(len(g), *self.shape)


@dataclass(frozen=True)
class Add(_Broadcast):
    """out = x + b, b a bias."""


@dataclass(frozen=True)
class Scale(_Broadcast):
    """out = x * w entry by entry, x (r, ...) in the shape of out: the scales of a normalisation."""

    def rows(self, x: Tensor | None, g: Tensor) -> Tensor:
        assert x is not None
        return super().rows(None, x * g)


def row_sum(layer: Layer, x: Tensor | None, g: Tensor, budget: int) -> Tensor:
    """The plain sum of the rows' gradients, ``layer.shape``: the gradient of the whole."""
    total = None
    rows = budget // (g.element_size() * layer.row_size(x, g))
    for xs, gs in row_blocks([(x, g)], rows):
        total = _add(total, layer.rows(xs[0], gs[0]).sum(0))
    assert total is not None
    return total


def joint_squares(members: Sequence[Member], numel: int, budget: int) -> Tensor:
    """As :meth:`Layer.squares` for several uses of one site's value: their sum is squared, (numel,).

    The members of a use: its layer, the place of its weight, x and g.
    """
    total = None
    size = 2 * numel + max(layer.row_size(x, g) for layer, _, x, g in members)
    pairs = [(x, g) for _, _, x, g in members]
    for xs, gs in row_blocks(pairs, budget // (pairs[0][1].element_size() * size)):
        gradient = gs[0].new_zeros(len(gs[0]), numel)
        for (layer, view, _, _), x, g in zip(members, xs, gs, strict=True):
            view.of(gradient).add_(layer.rows(x, g))
        total = _add(total, gradient.square_().sum(0))
    assert total is not None
    return total


def _add(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total.add_(term)


def _expand(x: Tensor, S: int) -> Tensor:
    return x if len(x) == S else x.expand(S, *x.shape[1:])


def _middle(x: Tensor, batch: int) -> Tensor:
    """(*batch, *places, m) to (*batch, T, m); without places T is 1."""
    return x.reshape(*x.shape[:batch], -1, x.shape[-1])
