r"""Which torch calls are layers with a latent weight, and squares of their gradients of single data.

For one datum with input rows a_t (i,) and output gradients g_t (o,), t = 1..T (the positions of a
convolution, tokens), the gradient in W (o, i) is

    sum_t g_t a_t',      and what is wanted is      h = sum_n (sum_t g_nt a_nt')^2   (o, i).

T = 1:  h = (G^2)' (A^2), one matrix product (Goodfellow 2015, arXiv:1510.01799).
T > 1:  gradients of single data are formed, for as many at a time as ``budget`` bytes allow.

With S particles and n data, g is (S, n, ...), and the input x is (S, n, ...) or, where all particles
see one, (1, n, ...).  Results have the shape of the weight, summed over S and n.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp, vmap

#: the input of a layer, if it matters, and its output's gradient
Pair = tuple[Any, Tensor]


@dataclass(frozen=True)
class Layer:
    """A layer's rule for gradients of single data; ``shape`` is that of its weight."""

    shape: tuple[int, ...]

    @property
    def tail(self) -> int:
        """How many dimensions at the end of the output never number the data."""
        return len(self.shape) - 1

    def rows(self, x: Any, g: Tensor) -> Tensor:
        """Gradient of each row of x (r, ...) and g (r, ...): (r, *shape)."""
        raise NotImplementedError

    def row_size(self, g: Tensor) -> int:
        """Numbers that :meth:`rows` holds for each row of g (S, n, ...)."""
        return prod(self.shape)

    def squares(self, x: Any, g: Tensor, budget: int) -> Tensor:
        """Sum of squared gradients over particles and data, ``shape``."""
        return self.sum(x, g, budget, torch.square)

    def sum(self, x: Any, g: Tensor, budget: int, of: Any = torch.positive) -> Tensor:
        """Sum of gradients, or ``of`` them, with as many at a time as fit into ``budget`` bytes."""
        rows = budget // (g.element_size() * self.row_size(g))
        blocks = (self.rows(*pair) for (pair,) in row_blocks([(x, g)], rows))
        return reduce(torch.add, (of(gradients).sum(0) for gradients in blocks))


def row_blocks(pairs: Sequence[Pair], rows: int) -> Iterator[list[Pair]]:
    """The same particles and data of several (x, g) at a time, as rows (r, ...), r <= ``rows``."""
    S, n = pairs[0][1].shape[:2]
    particles, data = max(1, rows // max(1, n)), max(1, min(n, rows))

    def part(x: Any, block: Any) -> Any:
        return None if x is None else x.expand(S, *x.shape[1:])[block].flatten(0, 1)

    for s in range(0, S, particles):
        for i in range(0, n, data):
            block = slice(s, s + particles), slice(i, i + data)
            yield [(part(x, block), part(g, block)) for x, g in pairs]


@dataclass(frozen=True)
class Linear(Layer):
    """out (..., o) = x (..., i) W', W (o, i); or, ``transposed``, x W with W (i, o) or (i,)."""

    transposed: bool = False

    def rows(self, x: Tensor, g: Tensor) -> Tensor:
        a, g = self._factors(x, g, 1)
        gradient = a.mT @ g if self.transposed else g.mT @ a
        return gradient.reshape(len(g), *self.shape)

    def squares(self, x: Tensor, g: Tensor, budget: int) -> Tensor:
        a, b = self._factors(x, g, 2)
        if a.shape[2] != 1:
            return super().squares(x, g, budget)
        b = b.square()
        if len(a) != len(b):  # one product for all particles
            b = b.sum(0, keepdim=True)
        a, b = a.square().flatten(0, 2), b.flatten(0, 2)
        return (a.mT @ b if self.transposed else b.mT @ a).reshape(self.shape)

    def _factors(self, x: Tensor, g: Tensor, batch: int) -> list[Tensor]:
        """x (*batch, T, i) and g (*batch, T, o)."""
        g = g.unsqueeze(-1) if len(self.shape) == 1 else g
        return [v.reshape(*v.shape[:batch], -1, v.shape[-1]) for v in (x, g)]


@dataclass(frozen=True)
class Conv(Layer):
    """Convolution of any dimension: x (n, c, *in), W (o, c / groups, *kernel), out (n, o, *out)."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]  # as F.pad takes it: last dimension first, left and right
    dilation: tuple[int, ...]
    groups: int

    def row_size(self, g: Tensor) -> int:
        columns = self.groups * prod(self.shape[1:]) * prod(g.shape[-len(self.stride) :])
        return prod(self.shape) + 2 * columns

    def rows(self, x: Tensor, g: Tensor) -> Tensor:
        r, k = len(g), len(self.stride)
        a = F.pad(x, self.padding)
        steps = zip(self.stride, self.dilation, self.shape[2:], strict=True)
        for j, (step, gap, size) in enumerate(steps):
            a = a.unfold(2 + j, gap * (size - 1) + 1, step)[..., ::gap]
        # (r, c, *out, *kernel) -> (r, groups, out, c / groups * kernel)
        a = a.unflatten(1, (self.groups, -1)).movedim(2, 2 + k)
        a = a.flatten(2 + k).flatten(2, 1 + k)
        gradient = g.reshape(r, self.groups, self.shape[0] // self.groups, -1) @ a
        return gradient.reshape(r, *self.shape)


@dataclass(frozen=True)
class Add(Layer):
    """out = x + b, b a bias, broadcast over data and over ``places`` at the end of the output."""

    places: int = 0

    @property
    def tail(self) -> int:
        return len(self._bare())

    def row_size(self, g: Tensor) -> int:
        return max(prod(self.shape), prod(g.shape[2:]))

    def _bare(self) -> tuple[int, ...]:
        """The shape that is broadcast, without the ones it starts with."""
        shape = self.shape
        while shape and shape[0] == 1:
            shape = shape[1:]
        return (*shape, *(1,) * self.places)

    def rows(self, x: None, g: Tensor) -> Tensor:
        shape = self._bare()
        ones = (1,) * (g.dim() - 1 - len(shape))
        return g.sum_to_size(len(g), *ones, *shape).reshape(len(g), *self.shape)


@dataclass(frozen=True)
class Scale(Add):
    """out = x * w entry by entry, x (r, ...) in the shape of out: the scales of a normalisation."""

    def rows(self, x: Any, g: Tensor) -> Tensor:
        return super().rows(None, x * g)


@dataclass(frozen=True)
class Embedding(Layer):
    """out (..., *rest) = W[x], W (V, *rest), x integers; no gradient where x == ``padding``."""

    padding: int | None = None

    def rows(self, x: Tensor, g: Tensor) -> Tensor:
        index, g = self._factors(x, g, 1)  # (r, T), (r, T, o)
        zeros = g.new_zeros(len(g), self.shape[0], g.shape[-1])
        gradient = zeros.scatter_add(1, index.unsqueeze(-1).expand_as(g), g)
        return gradient.reshape(len(g), *self.shape)

    def squares(self, x: Tensor, g: Tensor, budget: int) -> Tensor:
        index, g = self._factors(x, g, 2)
        T, o = g.shape[2:]
        result = g.new_zeros(self.shape[0], o)
        rows = budget // (g.element_size() * max(1, T * (T + 3 * o)))
        for ((i, b),) in row_blocks([(index, g)], rows):
            # each of the k places t that share an index adds one k-th of the square of their sum
            same = (i.unsqueeze(-1) == i.unsqueeze(-2)).to(b)
            squares = (same @ b).square() / same.sum(-1, keepdim=True)
            result.index_add_(0, i.flatten(), squares.flatten(0, 1))
        return result.reshape(self.shape)

    def _factors(self, x: Tensor, g: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Indices (*batch, T), each in 0..V-1, and g (*batch, T, o)."""
        index = x.unsqueeze(-1).flatten(batch)
        g = g.reshape(*g.shape[:batch], index.shape[-1], prod(self.shape[1:]))
        if self.padding is not None:
            g = g.masked_fill((index == self.padding).unsqueeze(-1), 0.0)
        return index.remainder(self.shape[0]), g


@dataclass(frozen=True)
class Generic(Layer):
    """Any other ``function`` that is linear in x and in its weight: one vjp for each row."""

    function: Callable[..., Tensor]
    settings: dict[str, Any]

    def rows(self, x: Tensor, g: Tensor) -> Tensor:
        def gradient(g: Tensor, x: Tensor) -> Tensor:
            def layer(w: Tensor) -> Tensor:
                return self.function(x[None], w, **self.settings)

            return vjp(layer, g.new_zeros(self.shape))[1](g[None])[0]

        return vmap(gradient)(g, x)


#: a weight, its layer, and the input if it matters
Call = tuple[Tensor, Layer, Any]
#: finds those of ``weights`` among the arguments of a torch call
Find = Callable[..., Iterator[Call]]


def _layer(
    make: Callable[..., Layer | None] | None, names: str, places: int | None = 0, norm: Any = None
) -> Find:
    """A layer made of the weight's shape and other settings, or a normalisation; it may add a bias."""
    order = names.split()

    def find(weights: Container[Any], *args: Any, **kwargs: Any) -> Iterator[Call]:
        given = dict(zip(order, args, strict=False)) | kwargs
        weight, bias = given.pop("weight", None), given.pop("bias", None)
        if given.get("training"):  # which mixes the data of a batch
            return
        k = given["input"].dim() - 2 if places is None else places
        if weight in weights:
            x, shape = given.pop("input"), tuple(weight.shape)
            if make is None:  # the result without weight and bias is scaled
                yield weight, Scale(shape, k), norm(x.detach(), **given)
            elif (layer := make(shape, **given)) is not None:
                yield weight, layer, x
        if bias in weights:
            yield bias, Add(tuple(bias.shape), k), None

    return find


def _conv(
    shape: tuple[int, ...], stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Conv:
    def repeat(x: Any) -> tuple[int, ...]:
        numbers = (x,) if isinstance(x, int) else tuple(x)
        return numbers * k if len(numbers) == 1 else numbers

    k = len(shape) - 2
    gaps = repeat(dilation)
    if padding == "same":
        spans = [gap * (size - 1) for gap, size in zip(gaps, shape[2:], strict=True)]
        sides = [(span // 2, span - span // 2) for span in spans]
    else:
        sides = [(m, m) for m in repeat(0 if padding == "valid" else padding)]
    pads = tuple(m for pair in reversed(sides) for m in pair)
    return Conv(shape, repeat(stride), pads, gaps, groups)


def _generic(function: Any) -> Callable[..., Generic]:
    return lambda shape, **settings: Generic(shape, function, settings)


def _embedding(
    shape: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    scale_grad_by_freq: Any = False,
    **_: Any,
) -> Embedding | None:
    if max_norm is not None or scale_grad_by_freq:
        return None
    return Embedding(shape, None if padding_idx is None else padding_idx % shape[0])


def _getitem(weights: Container[Any], input: Tensor, index: Any) -> Iterator[Call]:
    integer = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
    if integer and input in weights:
        yield input, Embedding(tuple(input.shape)), index.long()


def _product(shape: tuple[int, ...], **_: Any) -> Linear | None:
    return Linear(shape, transposed=True) if len(shape) <= 2 else None


def _add(weights: Container[Any], input: Any, other: Any, *, alpha: Any = 1) -> Iterator[Call]:
    if alpha == 1:
        yield from ((b, Add(tuple(b.shape)), None) for b in (input, other) if b in weights)


def _mul(weights: Container[Any], input: Any, other: Any) -> Iterator[Call]:
    for w, x in ((input, other), (other, input)):
        if w in weights and isinstance(x, Tensor) and x not in weights:
            shape = torch.broadcast_shapes(x.shape, w.shape)
            yield w, Scale(tuple(w.shape)), x.expand(shape)


_CONV = "input weight bias stride padding dilation groups"
_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"
_EMBEDDING = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
_BATCH = "input running_mean running_var weight bias training momentum eps"

LAYERS: dict[Any, Find] = {
    F.linear: _layer(Linear, "input weight bias"),
    F.embedding: _layer(_embedding, _EMBEDDING),
    F.layer_norm: _layer(None, "input normalized_shape weight bias eps", norm=F.layer_norm),
    F.rms_norm: _layer(None, "input normalized_shape weight eps", norm=F.rms_norm),
    F.group_norm: _layer(None, "input num_groups weight bias eps", None, F.group_norm),
    F.batch_norm: _layer(None, _BATCH, None, F.batch_norm),
    F.prelu: _layer(None, "input weight", None, lambda x: x.clamp(max=0.0)),
    Tensor.__getitem__: _getitem,
}
for _owner, _names, _find in (
    (torch, "matmul mm mv", _layer(_product, "input weight")),
    (Tensor, "matmul mm mv __matmul__", _layer(_product, "input weight")),
    (torch, "add", _add),
    (Tensor, "add __add__ __radd__", _add),
    (torch, "mul", _mul),
    (Tensor, "mul __mul__ __rmul__", _mul),
):
    LAYERS |= {getattr(_owner, name): _find for name in _names.split()}
for _k in (1, 2, 3):
    _function = getattr(F, f"conv_transpose{_k}d")
    LAYERS[getattr(F, f"conv{_k}d")] = _layer(_conv, _CONV, _k)
    LAYERS[_function] = _layer(_generic(_function), _TRANSPOSED, _k)
