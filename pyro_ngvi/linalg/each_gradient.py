"""Gradients of several numbers that share one graph."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["each_gradient"]


def each_gradient(values: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of each of ``values`` (n,) in each leaf, (n, *shape); zero where there is none."""
    n = len(values)
    if n == 1:
        grads = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
        grads = [None if g is None else g[None] for g in grads]
    else:
        unit = torch.eye(n, dtype=values.dtype, device=values.device)
        try:
            grads = torch.autograd.grad(
                values, leaves, unit, is_grads_batched=True, allow_unused=True, retain_graph=True
            )
        except RuntimeError:  # an operation without a batching rule
            rows = [
                torch.autograd.grad(v, leaves, allow_unused=True, retain_graph=True) for v in values
            ]
            grads = [
                torch.stack([torch.zeros_like(p) if g is None else g for g in column])
                for p, column in zip(leaves, zip(*rows, strict=True), strict=True)
            ]
    return [
        p.new_zeros((n, *p.shape)) if g is None else g for p, g in zip(leaves, grads, strict=True)
    ]
