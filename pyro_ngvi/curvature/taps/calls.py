"""Which torch calls are layers with a latent weight, and which only rearrange a latent's entries.

F.linear, F.conv1d/2d/3d and their transposed kin, F.embedding, F.layer_norm and its like,
``x @ W``, ``h + b``, ``h * w`` and ``W[index]``, and the modules that call them. What is not recognised
here is found out by :mod:`pyro_ngvi.curvature.taps.check`: the gradient of that latent is then not
explained by its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .squares import Add, Conv, Embedding, Inputs, Layer, Linear, Multilinear, Scale

Call = tuple[Tensor, Layer, Inputs]
"""A weight, its layer, and the layer's inputs that the gradient depends on."""

Find = Callable[..., Iterator[Call]]
"""Finds the latent weights in the arguments of a call."""


class Weights(Container[Any]):
    """The tensors that are latent values or views of them, known by identity."""

    def __init__(self) -> None:
        # The tensor is kept so that its id is not given to another.
        self._entries: dict[int, tuple[Tensor, str, Tensor]] = {}

    def add(self, tensor: Tensor, site: str, twin: Tensor) -> None:
        """``twin``: a meta tensor whose strides say which entries of the site these are."""
        self._entries[id(tensor)] = (tensor, site, twin)

    def __contains__(self, x: object) -> bool:
        return id(x) in self._entries

    def __getitem__(self, x: Tensor) -> tuple[str, Tensor]:
        return self._entries[id(x)][1:]

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Add the result ``out`` of a call that rearranges the entries of its first argument."""
        if not args or args[0] not in self or not _is_plain((args[1:], tuple(kwargs.values()))):
            return
        site, twin = self[args[0]]
        twins = func(twin, *args[1:], **kwargs)
        if isinstance(out, Tensor):
            out, twins = (out,), (twins,)
        for view, its_twin in zip(out, twins, strict=True):
            if (
                its_twin is twin or its_twin._is_view()
            ):  # else it is a copy: its strides say nothing
                self.add(view, site, its_twin)


def _is_plain(x: Any) -> bool:
    """Whether an argument is made of numbers and slices only."""
    if isinstance(x, list | tuple):
        return all(map(_is_plain, x))
    return x is None or x is Ellipsis or isinstance(x, int | slice)


def _linear(
    weights: Weights, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Iterator[Call]:
    if weight in weights:
        yield weight, Linear(tuple(weight.shape)), (input,)
    if bias is not None and bias in weights:
        yield bias, Add(tuple(bias.shape)), ()


def _matmul(weights: Weights, input: Tensor, other: Tensor, **_: Any) -> Iterator[Call]:
    if other in weights and other.dim() <= 2:
        yield other, Linear(tuple(other.shape), transposed=True), (input,)


def _add(weights: Weights, input: Any, other: Any, *, alpha: Any = 1, **_: Any) -> Iterator[Call]:
    if isinstance(input, Tensor) and isinstance(other, Tensor) and alpha == 1:
        for x in (input, other):
            if x in weights:
                yield x, Add(tuple(x.shape)), ()


def _mul(weights: Weights, input: Any, other: Any, **_: Any) -> Iterator[Call]:
    if isinstance(input, Tensor) and isinstance(other, Tensor):
        for w, x in ((input, other), (other, input)):
            if w in weights and x not in weights:
                x = x.expand(torch.broadcast_shapes(x.shape, w.shape))
                yield w, Scale(tuple(w.shape)), (x,)


def _named(names: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of its parameters."""
    return dict(zip(names.split(), args, strict=False)) | kwargs


def _norm(function: Callable[..., Tensor], names: str, over_places: bool = False) -> Find:
    """A normalisation: x weight + bias, x its result without the two."""

    def find(weights: Weights, *args: Any, **kwargs: Any) -> Iterator[Call]:
        given = _named(names, args, kwargs)
        weight, bias = given.pop("weight", None), given.pop("bias", None)
        if (weight not in weights and bias not in weights) or given.get("training"):
            return
        given["input"] = given["input"].detach()
        places = given["input"].dim() - 2 if over_places else 0
        if weight in weights:
            yield weight, Scale(tuple(weight.shape), places), (function(**given),)
        if bias in weights:
            yield bias, Add(tuple(bias.shape), places), ()

    return find


def _multilinear(function: Callable[..., Tensor], names: str, spatial: int = 0) -> Find:
    """A layer that is linear in its weight and in each input, and may add a bias."""

    def find(weights: Weights, *args: Any, **kwargs: Any) -> Iterator[Call]:
        given = _named(names, args, kwargs)
        weight, bias = given.pop("weight"), given.pop("bias", None)
        inputs = tuple(given.pop(name) for name in names.split() if name.startswith("input"))
        if weight in weights:
            settings = tuple((k, v if isinstance(v, int) else tuple(v)) for k, v in given.items())
            shape = tuple(weight.shape)
            yield weight, Multilinear(shape, function, settings, 1 + spatial), inputs
        if bias is not None and bias in weights:
            yield bias, Add(tuple(bias.shape), spatial), ()

    return find


def _embedding(
    weights: Weights,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Iterator[Call]:
    if weight in weights and max_norm is None and not scale_grad_by_freq:
        if padding_idx is not None:
            padding_idx %= len(weight)
        yield weight, Embedding(tuple(weight.shape), padding_idx), (input,)


def _getitem(weights: Weights, input: Tensor, index: Any) -> Iterator[Call]:
    integer = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
    if integer and input in weights:
        yield input, Embedding(tuple(input.shape)), (index.long(),)


def _conv(
    weights: Weights,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Iterator[Call]:
    k = weight.dim() - 2
    if weight in weights:
        gaps = _repeat(dilation, k)
        spans = [gap * (size - 1) for gap, size in zip(gaps, weight.shape[2:], strict=True)]
        if padding == "same":
            sides = [(span // 2, span - span // 2) for span in spans]
        else:
            sides = [(m, m) for m in _repeat(0 if padding == "valid" else padding, k)]
        pads = tuple(m for pair in reversed(sides) for m in pair)
        shape = tuple(weight.shape)
        yield weight, Conv(shape, _repeat(stride, k), pads, gaps, groups), (input,)
    if bias is not None and bias in weights:
        yield bias, Add(tuple(bias.shape), places=k), ()


def _repeat(x: Any, k: int) -> tuple[int, ...]:
    """One number for each dimension, as torch's convolutions take them."""
    numbers = (x,) if isinstance(x, int) else tuple(x)
    return numbers * k if len(numbers) == 1 else numbers


_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"
_BATCH = "input running_mean running_var weight bias training momentum eps"

LAYERS: dict[Any, Find] = {
    F.linear: _linear,
    F.conv1d: _conv,
    F.conv2d: _conv,
    F.conv3d: _conv,
    F.embedding: _embedding,
    F.layer_norm: _norm(F.layer_norm, "input normalized_shape weight bias eps"),
    F.rms_norm: _norm(F.rms_norm, "input normalized_shape weight eps"),
    F.group_norm: _norm(F.group_norm, "input num_groups weight bias eps", over_places=True),
    F.batch_norm: _norm(F.batch_norm, _BATCH, over_places=True),
    F.conv_transpose1d: _multilinear(F.conv_transpose1d, _TRANSPOSED, spatial=1),
    F.conv_transpose2d: _multilinear(F.conv_transpose2d, _TRANSPOSED, spatial=2),
    F.conv_transpose3d: _multilinear(F.conv_transpose3d, _TRANSPOSED, spatial=3),
    Tensor.__getitem__: _getitem,
    **dict.fromkeys((torch.matmul, torch.mm, torch.mv), _matmul),
    **dict.fromkeys((Tensor.matmul, Tensor.mm, Tensor.mv, Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _add),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _mul),
}

_VIEWS = """t transpose swapaxes permute movedim reshape flatten unflatten squeeze unsqueeze
            select narrow split chunk unbind tensor_split""".split()
VIEWS: frozenset[Any] = frozenset(
    [getattr(owner, name) for owner in (torch, Tensor) for name in _VIEWS]
    + [Tensor.view, Tensor.__getitem__]
    + [getter.__get__ for getter in (Tensor.T, Tensor.mT)]  # type: ignore[attr-defined]
)


def is_training_batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call normalises over the examples of the batch."""
    if func is F.batch_norm:
        return bool(args[5] if len(args) > 5 else kwargs.get("training", False))
    return func is torch.batch_norm and bool(args[5])
