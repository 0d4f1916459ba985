r"""The orthonormal Walsh-Hadamard transform x -> x H of rows of length D, a power of two.

    H_1 = 1,   H_2n = [[H_n, H_n], [H_n, -H_n]] / sqrt(2)      (Sylvester's, or natural, order),

symmetric and orthonormal: H H = I, so that the transform is its own inverse and its own adjoint.

H_ab = H_a kron H_b, and for x viewed as a matrix X (a, b) the transform is H_a X H_b: D (a + b)
multiplications a row, in products of small matrices, which a CPU does four to seven times faster than
the D log2(D) additions of the butterfly (`benchmarks/whvi_paper/transform.py`).

On a GPU, where Triton is installed, a kernel does the same (`_walsh_hadamard_triton`), if it compiles
there and a first try of each length and dtype agrees with the products.
"""

from __future__ import annotations

import math
import warnings
from functools import partial

import torch
from torch import Tensor

from .host import constant, fixed_normal, outside_modes

HALVES = (torch.float16, torch.bfloat16)
#: largest D for which one product with a dense matrix costs least
DENSE = 64
#: log2 of the largest factor of a larger D
LARGEST = 5

_matrices: dict[tuple[int, int, torch.dtype, torch.device], Tensor] = {}
#: whether the kernel serves rows of a length and dtype on a device
_tried: dict[tuple[int, torch.dtype, torch.device], bool] = {}


def walsh_hadamard_transform(x: Tensor) -> Tensor:
    """x H along the last axis of ``x`` (..., D), with H the orthonormal Hadamard matrix (D, D).

    D is a power of two, 1 included; the rows of H are in Sylvester's order: for another (sequency,
    dyadic) permute the result.  It has the shape and the floating dtype of ``x``; float16 and bfloat16
    are computed in float32 and rounded once.

    Raises:
        ValueError: D is not a power of two, or ``x`` has no axis.
        TypeError: ``x`` is not float16, bfloat16, float32 or float64.

    Example:
        >>> import torch
        >>> y = walsh_hadamard_transform(torch.tensor([1.0, 0.0, 0.0, 3.0]))
        >>> y
        tensor([ 2., -1., -1.,  2.])
        >>> walsh_hadamard_transform(y)
        tensor([1., 0., 0., 3.])
    """
    if x.ndim == 0:
        raise ValueError(
            "walsh_hadamard_transform needs a tensor of shape (..., D), got one of 0 dimensions."
        )
    D = x.shape[-1]
    if D < 1 or D & (D - 1):
        raise ValueError(
            f"walsh_hadamard_transform needs a last axis whose length is a power of two, got shape "
            f"{tuple(x.shape)}; pad it with zeros to {1 << D.bit_length() if D else 1}."
        )
    if x.dtype not in (*HALVES, torch.float32, torch.float64):
        raise TypeError(
            f"walsh_hadamard_transform needs float16, bfloat16, float32 or float64, got {x.dtype}; "
            "convert with x.to(torch.float32)."
        )
    if _on_gpu(x):
        from ._walsh_hadamard_triton import available, transform_rows

        if available(x) and _kernel_serves(x):
            return transform_rows(x)
    return _by_factors(x.float()).to(x.dtype) if x.dtype in HALVES else _by_factors(x)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _kernel_serves(x: Tensor) -> bool:
    """Whether the kernel does; tried once, which waits for the device, and not while tracing."""
    key = x.shape[-1], x.dtype, x.device
    if torch.compiler.is_compiling():
        return _tried.get(key, True)
    if key not in _tried:
        why = outside_modes(partial(_try_kernel, *key))
        if why is not None:
            warnings.warn(
                f"Triton's kernel for the Walsh-Hadamard transform is not used on {x.device} with rows "
                f"of {x.shape[-1]} in {x.dtype}: {why} Products with small matrices take its place.",
                RuntimeWarning,
                stacklevel=3,
            )
        _tried[key] = why is None
    return _tried[key]


def _try_kernel(D: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernel must not be used, if so: it fails, or does not give what the products give."""
    from ._walsh_hadamard_triton import BLOCK, transform_rows

    rows = 2 * BLOCK // D + 3  # several programs, one of them not full
    try:
        x = fixed_normal(rows, D, seed=D).to(device, dtype)
        y = transform_rows(x).double()
    except Exception as error:  # no compiler, another version of Triton, another kind of GPU
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    exact = _by_factors(x.double())
    bound = 8.0 * torch.finfo(dtype).eps * exact.abs().max()
    return None if bool(((y - exact).abs() <= bound).all()) else "its numbers are wrong."


def _by_factors(x: Tensor) -> Tensor:
    D = x.shape[-1]
    if D <= DENSE:
        return x @ _matrix(D, D, x)
    *left, last = _factors(D)
    # the scale is in the first matrix: it costs nothing, and sums stay as small as the result
    y, length = x.reshape(-1, last) @ _matrix(last, D, x), D
    for n in left:
        length //= n
        blocks = x.numel() // (n * length)
        # from the left, each entry of the small matrix meets rows of ``length`` adjacent numbers
        y = torch.bmm(_matrix(n, 1, x).expand(blocks, n, n), y.view(blocks, n, length))
    return y.view(x.shape)


def _factors(D: int) -> list[int]:
    """Powers of two of nearly equal size, at most 2^LARGEST, smallest first, with the product D."""
    exponent = D.bit_length() - 1
    count = -(-exponent // LARGEST)
    small, larger = divmod(exponent, count)
    return [2**small] * (count - larger) + [2 ** (small + 1)] * larger


def _matrix(n: int, squared_scale: int, x: Tensor) -> Tensor:
    """Sylvester's matrix of +-1 (n, n), over sqrt(squared_scale), in the dtype and place of ``x``."""
    if x.device.type == "meta":
        return torch.empty(n, n, dtype=x.dtype, device="meta")
    key = (n, squared_scale, x.dtype, x.device)
    if key not in _matrices:
        if torch.compiler.is_compiling():  # part of the graph, kept by nobody
            return _build(*key)
        # so that what is kept is a plain tensor; a copy is waited for, a kernel in a new thread is not
        _matrices[key] = outside_modes(lambda: _build(*key[:3], torch.device("cpu")).to(x.device))
    return constant(_matrices[key])


def _build(n: int, squared_scale: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    H = torch.ones(1, 1, dtype=dtype, device=device)
    while len(H) < n:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H * (1.0 / math.sqrt(squared_scale))
