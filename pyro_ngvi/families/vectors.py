"""Tensors by name as one vector and back, and quantiles of a sample."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def pack(tensors: Tensors) -> Tensor:
    """All entries as one vector (D,)."""
    return torch.cat([v.reshape(-1) for v in tensors.values()])


def unpack(vector: Tensor, like: Tensors) -> Tensors:
    """The inverse of :func:`pack`, with the names and shapes of ``like``."""
    return split(vector, {name: v.shape for name, v in like.items()})


def split(rows: Tensor, shapes: Mapping[str, torch.Size]) -> Tensors:
    """Vectors (..., D) as tensors (..., *shape) by name."""
    parts = rows.split([shape.numel() for shape in shapes.values()], -1)
    named = zip(shapes.items(), parts, strict=True)
    return {name: part.reshape(rows.shape[:-1] + shape) for (name, shape), part in named}


def entry_name(index: int, sizes: Mapping[str, Tensor | torch.Size]) -> str:
    """The name of the part that holds entry ``index`` of all parts in a row."""
    end = 0
    for name, part in sizes.items():
        end += part.numel()
        if index < end:
            return name
    raise IndexError(f"There are {end} entries, and there is no entry {index}.")


def sample_quantiles(x: Tensor, levels: Tensor) -> Tensor:
    """Quantiles (L, *shape) at ``levels`` (L,) of the sample x (n, *shape), entry by entry."""
    columns = x.flatten(1).split(max(1, 2**24 // len(x)), 1)  # torch.quantile takes 2^24 numbers
    found = torch.cat([torch.quantile(c, levels, 0) for c in columns], 1)
    return found.reshape(levels.shape + x.shape[1:])
