"""What the loss of one rank left for the optimizer, averaged over ranks in one flat buffer.

Rows, which stand for their products, and draws with their residuals are put side by side.  A number
that is not finite on one rank is so on all after this, and all of them skip the step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from .processes import extremes, mean_over_ranks, rank, world_size

#: parts of curvature that stand side by side: rows always, the others if each rank has its own draws
ROWS, DRAWS = "rows", ("draws", "residuals")


def average(
    losses: list[Any],
    params: list[Tensor],
    blocks: list[Any],
    *,
    own_draws: bool,
    step: int,
    like: Tensor,
) -> list[Tensor]:
    """The losses, averaged over ranks, as are the gradients of ``params`` and what ``blocks`` hold.

    Losses that are numbers go where ``like`` is, as NCCL sums on GPUs alone.
    """
    flat = [(x if isinstance(x, Tensor) else like.new_tensor(x)).detach() for x in losses]
    flat += [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    held = [b for b in blocks if b.curvature is not None]
    for block in held:
        curvature = block.curvature
        if "count" in curvature.parts:
            raise ValueError(
                "distributed: the square of a sum over shards is no sum of squares. Take "
                "curvature='gauss_newton' in place of 'squared_gradient'."
            )
        flat += [
            _side_by_side(v) if _is_listed(name, own_draws) else v
            for name, v in curvature.parts.items()
        ]
    means = _mean(flat, step)
    for p in params:
        mean = means.pop(len(losses)).to(p)
        # a loss without gradient in a parameter is another matter than one with a gradient of zero
        if p.grad is not None or bool(mean.any()):
            p.grad = mean
    for block in held:
        parts = {}
        for name, own in block.curvature.parts.items():
            mean = means.pop(len(losses)).to(own)
            if _is_listed(name, own_draws):  # the mean of slots that one rank fills each
                mean = mean.flatten(0, 1) * (world_size() ** 0.5 if name == ROWS else world_size())
            parts[name] = mean
        block.curvature = replace(block.curvature, parts=parts)
    return means


def _is_listed(name: str, own_draws: bool) -> bool:
    return name == ROWS or (own_draws and name in DRAWS)


def _side_by_side(x: Tensor) -> Tensor:
    """(R, n, ...): zeros, and in the slot of this rank x, as long as that of any rank."""
    count = torch.tensor([len(x)], device=x.device)
    most = int(extremes(count, "counting the rows of a step")[1])
    slots = x.new_zeros(world_size(), most, *x.shape[1:])
    slots[rank(), : len(x)] = x
    return slots


def _mean(tensors: list[Tensor], step: int) -> list[Tensor]:
    # sums of different things would crash in gloo, or be wrong without a word
    sizes = [sum(x.numel() for x in tensors), step]
    least, most = extremes(torch.tensor(sizes, device=tensors[0].device), "meeting for a sum")
    if not torch.equal(least, most):
        raise RuntimeError(
            f"distributed: this rank sums {sizes[0]} numbers at step {step}, others {least.tolist()} "
            f"to {most.tolist()}. step, evaluate_loss and load are calls of all ranks together."
        )
    wide = reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)
    buffer = mean_over_ranks(torch.cat([x.reshape(-1).to(wide) for x in tensors]))
    pieces = buffer.split([x.numel() for x in tensors])
    return [piece.view(x.shape) for piece, x in zip(pieces, tensors, strict=True)]
