"""The Walsh-Hadamard transform on a GPU: rows are read once and written once.  Needs Triton.

A program holds 2048 numbers, or one row if that is longer, in registers.  A stage replaces neighbours
(a, b) by a + b and a - b and then rotates the bits of the position, so that the next stage again meets
neighbours:

    x (n / 2, 2) -> [a + b, a - b] (2, n / 2).

After log2(D) stages and the rotation that is left the numbers are back in their order.  A thread keeps
16 or 32 numbers, so that most stages stay within threads.  float16, bfloat16 and float32 are summed in
float32: additions only, no tensor cores, no TF32.

Not for D above 8192, whose rows do not fit into registers, nor for float64.  On an H100 it takes the
time of a copy (benchmarks/README.md, "On a GPU").
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:  # CPU builds of torch come without it
    triton: Any = None
    tl: Any = None

#: what the kernel takes
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST = 8192
#: numbers that a program holds at least; 16 a thread leave registers for several programs at a time
BLOCK, PER_WARP = 2048, 32 * 16
#: warps at most: with 32 numbers a thread the longest rows need one exchange less
WARPS = 8


def available(x: Tensor) -> bool:
    """Whether the kernel takes ``x`` (..., D)."""
    return triton is not None and x.dtype in DTYPES and 2 <= x.shape[-1] <= LARGEST


def transform_rows(x: Tensor) -> Tensor:
    """x H for ``x`` (..., D); differentiable any number of times in both modes, and under ``vmap``."""
    y: Any = _Transform.apply(x)
    return y


class _Transform(torch.autograd.Function):
    """H is symmetric, so the transform is its own derivative and the adjoint of that."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        D, total = x.shape[-1], x.numel()
        if total:
            block = max(D, BLOCK)
            with torch.cuda.device_of(x):
                _kernel[(triton.cdiv(total, block),)](
                    x,
                    y,
                    total,
                    1.0 / math.sqrt(D),
                    D=D,
                    LOG2=D.bit_length() - 1,
                    BLOCK=block,
                    num_warps=min(block // PER_WARP, WARPS),
                )
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Transform.apply(grads[0])

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        return _Transform.apply(tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return _Transform.apply(x.movedim(in_dims[0], 0)), 0


if triton is not None:

    @triton.jit
    def _kernel(
        x_ptr,
        y_ptr,
        total,
        scale,
        D: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
        LOG2: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
        BLOCK: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < total, other=0.0).to(tl.float32)
        for _ in tl.static_range(LOG2):
            a, b = tl.split(tl.reshape(x, (BLOCK // 2, 2)))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (1, 0)), (BLOCK,))
        if D < BLOCK:  # the rows of this program have come last
            x = tl.reshape(tl.permute(tl.reshape(x, (D, BLOCK // D)), (1, 0)), (BLOCK,))
        tl.store(y_ptr + at, (x * scale).to(y_ptr.dtype.element_ty), mask=at < total)
