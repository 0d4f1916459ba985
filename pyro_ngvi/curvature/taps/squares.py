r"""Sums of squared per-example gradients in the weights of a layer.

They follow from the layer's inputs and the gradients of its outputs. For one example with input rows
a_t (i,) and output gradients g_t (o,), t = 1..T (T > 1 where the layer uses its weight at several
places: the positions of a convolution, tokens), the gradient in W (o, i) is

    sum_t g_t a_t',      and what is wanted is      h = sum_n (sum_t g_nt a_nt')^2   (o, i).

T = 1:  h = (G^2)' (A^2), one matrix product (Goodfellow 2015, arXiv:1510.01799).
T > 1:  the sum over t comes before the square, so per-example gradients are formed, for as many
        examples at a time as a budget of bytes allows.

Linear layers, convolutions, biases, scales and embeddings have formulas of their own; any other layer
that is linear in its weight and in its inputs takes one vector-Jacobian product for each example.

Shapes: S particles, n examples. ``g`` is (S, n, ...), and each input in ``xs`` is (S, n, ...) or, where
all particles see one, (1, n, ...). Results have the shape of the weight, summed over S and n.

Do not use these for layers whose output row depends on more than its own input row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp, vmap

__all__ = [
    "Add",
    "Conv",
    "Embedding",
    "Inputs",
    "Layer",
    "Linear",
    "Member",
    "Multilinear",
    "Scale",
    "View",
    "joint_squares",
]

Inputs = tuple[Tensor, ...]
Member = tuple["Layer", "View", Inputs, Tensor]


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

    #: whether the gradient depends on the inputs of the layer
    reads_inputs: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return type(self).__name__

    def fits(self, examples: int, out_dim: int) -> bool:
        """Whether the output (of ``out_dim`` dimensions) may start with that many of examples."""
        raise NotImplementedError

    def rows(self, xs: Inputs, g: Tensor) -> Tensor:
        """Gradient of each row of the inputs (r, ...) and g (r, ...): (r, *shape)."""
        raise NotImplementedError

    def row_size(self, g: Tensor) -> int:
        """Numbers that :meth:`rows` holds for each row of g (S, n, ...)."""
        return prod(self.shape)

    def squares(self, xs: Inputs, g: Tensor, budget: int) -> Tensor:
        """Sum of squared gradients over particles and examples, ``shape``.

        ``budget``: bytes for what is held beside xs, g and the result (one row at the least).
        """
        return reduce(torch.add, (rows.square().sum(0) for rows in self._blocks(xs, g, budget)))

    def sum(self, xs: Inputs, g: Tensor, budget: int) -> Tensor:
        """The plain sum of the rows' gradients, ``shape``: the gradient of the whole."""
        return reduce(torch.add, (rows.sum(0) for rows in self._blocks(xs, g, budget)))

    def _blocks(self, xs: Inputs, g: Tensor, budget: int) -> Iterator[Tensor]:
        rows = budget // (g.element_size() * self.row_size(g))
        return (self.rows(*block) for (block,) in row_blocks([(xs, g)], rows))


def row_blocks(
    pairs: Sequence[tuple[Inputs, Tensor]], rows: int
) -> Iterator[list[tuple[Inputs, Tensor]]]:
    """The same particles and examples of several (xs, g) at a time, as rows (r, ...), r <= ``rows``."""
    S, n = pairs[0][1].shape[:2]
    particles, examples = max(1, rows // max(1, n)), max(1, min(n, rows))
    for s in range(0, S, particles):
        for i in range(0, n, examples):
            block = (slice(s, s + particles), slice(i, i + examples))

            def part(x: Tensor, block: Any = block) -> Tensor:
                x = x if len(x) == S else x.expand(S, *x.shape[1:])
                return x[block].flatten(0, 1)

            yield [(tuple(map(part, xs)), part(g)) for xs, g in pairs]


@dataclass(frozen=True)
class Linear(Layer):
    """out (..., o) = x (..., i) W', W (o, i); or, ``transposed``, x W with W (i, o) or (i,)."""

    transposed: bool = False

    def fits(self, examples: int, out_dim: int) -> bool:
        return out_dim - (len(self.shape) > 1) >= examples

    def rows(self, xs: Inputs, g: Tensor) -> Tensor:
        a, g = self._factors(xs, g, 1)
        gradient = a.mT @ g if self.transposed else g.mT @ a
        return gradient.reshape(len(g), *self.shape)

    def squares(self, xs: Inputs, g: Tensor, budget: int) -> Tensor:
        a, b = self._factors(xs, g, 2)
        if a.shape[2] != 1:
            return super().squares(xs, g, budget)
        b = b.square()
        if len(a) != len(b):  # one product for all particles
            b = b.sum(0, keepdim=True)
        a, b = a.square().flatten(0, 2), b.flatten(0, 2)
        return (a.mT @ b if self.transposed else b.mT @ a).reshape(self.shape)

    def _factors(self, xs: Inputs, g: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """x (*batch, T, i) and g (*batch, T, o)."""
        if len(self.shape) == 1:
            g = g.unsqueeze(-1)
        return _middle(xs[0], batch), _middle(g, batch)


@dataclass(frozen=True)
class Conv(Layer):
    """Convolution of any dimension: x (n, c, *in), W (o, c / groups, *kernel), out (n, o, *out)."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]  # as F.pad takes it: last dimension first, left and right
    dilation: tuple[int, ...]
    groups: int = 1

    def fits(self, examples: int, out_dim: int) -> bool:
        return examples == 1 and out_dim == len(self.shape)

    def row_size(self, g: Tensor) -> int:
        columns = self.groups * prod(self.shape[1:]) * prod(g.shape[-len(self.stride) :])
        return prod(self.shape) + 2 * columns

    def rows(self, xs: Inputs, g: Tensor) -> Tensor:
        r, k = len(g), len(self.stride)
        a = F.pad(xs[0], self.padding)
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
class Add(Layer):
    """out = x + b, b a bias, broadcast over examples and over ``places`` at the end of the output."""

    places: int = 0
    reads_inputs = False

    def fits(self, examples: int, out_dim: int) -> bool:
        return len(self._bare()) + examples <= out_dim

    def row_size(self, g: Tensor) -> int:
        return max(prod(self.shape), prod(g.shape[2:]))

    def _bare(self) -> tuple[int, ...]:
        """The shape that is broadcast, without the ones it starts with."""
        shape = self.shape
        while shape and shape[0] == 1:
            shape = shape[1:]
        return (*shape, *(1,) * self.places)

    def rows(self, xs: Inputs, g: Tensor) -> Tensor:
        shape = self._bare()
        ones = (1,) * (g.dim() - 1 - len(shape))
        return g.sum_to_size(len(g), *ones, *shape).reshape(len(g), *self.shape)


@dataclass(frozen=True)
class Scale(Add):
    """out = x * w entry by entry, x (r, ...) in the shape of out: the scales of a normalisation."""

    reads_inputs = True

    def rows(self, xs: Inputs, g: Tensor) -> Tensor:
        return super().rows((), xs[0] * g)


@dataclass(frozen=True)
class Embedding(Layer):
    """out (..., *rest) = W[x], W (V, *rest), x integers; no gradient where x == ``padding``."""

    padding: int | None = None

    def fits(self, examples: int, out_dim: int) -> bool:
        return out_dim - len(self.shape) + 1 >= examples

    def rows(self, xs: Inputs, g: Tensor) -> Tensor:
        index, g = self._factors(xs, g, 1)  # (r, T), (r, T, o)
        zeros = g.new_zeros(len(g), self.shape[0], g.shape[-1])
        gradient = zeros.scatter_add(1, index.unsqueeze(-1).expand_as(g), g)
        return gradient.reshape(len(g), *self.shape)

    def squares(self, xs: Inputs, g: Tensor, budget: int) -> Tensor:
        index, g = self._factors(xs, g, 2)
        T, o = g.shape[2:]
        result = g.new_zeros(self.shape[0], o)
        rows = budget // (g.element_size() * max(1, T * (T + 3 * o)))
        for (((i,), b),) in row_blocks([((index,), g)], rows):
            # each of the k places t that share an index adds one k-th of the square of their sum
            same = (i.unsqueeze(-1) == i.unsqueeze(-2)).to(b)
            squares = (same @ b).square() / same.sum(-1, keepdim=True)
            result.index_add_(0, i.flatten(), squares.flatten(0, 1))
        return result.reshape(self.shape)

    def _factors(self, xs: Inputs, g: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Indices (*batch, T), each in 0..V-1, and g (*batch, T, o)."""
        index = xs[0].unsqueeze(-1).flatten(batch)
        g = g.reshape(*g.shape[:batch], index.shape[-1], prod(self.shape[1:]))
        if self.padding is not None:
            g = g.masked_fill((index == self.padding).unsqueeze(-1), 0.0)
        return index.remainder(self.shape[0]), g


@dataclass(frozen=True)
class Multilinear(Layer):
    """Any other ``function`` of inputs and weight that is linear in each: by one vjp for each row.

    ``tail``: how many dimensions of the output belong to one example in any case.
    """

    function: Callable[..., Tensor]
    settings: tuple[tuple[str, Any], ...]
    tail: int

    @property
    def name(self) -> str:
        return self.function.__name__

    def fits(self, examples: int, out_dim: int) -> bool:
        return out_dim - self.tail >= examples

    def rows(self, xs: Inputs, g: Tensor) -> Tensor:
        def gradient(g: Tensor, *xs: Tensor) -> Tensor:
            def layer(w: Tensor) -> Tensor:
                return self.function(*(x[None] for x in xs), w, **dict(self.settings))

            return vjp(layer, g.new_zeros(self.shape))[1](g[None])[0]

        return vmap(gradient)(g, *xs)


def joint_squares(members: Sequence[Member], numel: int, budget: int) -> Tensor:
    """As :meth:`Layer.squares` for several uses of one site's value: their sum is squared, (numel,).

    The members of a use: its layer, the place of its weight, xs and g.
    """
    pairs = [(xs, g) for _, _, xs, g in members]
    size = 2 * numel + max(layer.row_size(g) for layer, _, _, g in members)
    squares = []
    for block in row_blocks(pairs, budget // (pairs[0][1].element_size() * size)):
        gradient = block[0][1].new_zeros(len(block[0][1]), numel)
        for (layer, view, _, _), (xs, g) in zip(members, block, strict=True):
            view.of(gradient).add_(layer.rows(xs, g))
        squares.append(gradient.square_().sum(0))
    return reduce(torch.add, squares)


def _middle(x: Tensor, batch: int) -> Tensor:
    """(*batch, *places, m) to (*batch, T, m); without places T is 1."""
    return x.reshape(*x.shape[:batch], -1, x.shape[-1])
