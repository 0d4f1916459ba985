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
    parts = vector.split([v.numel() for v in like.values()])
    return {name: part.reshape(like[name].shape) for name, part in zip(like, parts, strict=True)}


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
