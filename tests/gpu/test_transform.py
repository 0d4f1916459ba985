"""The kernel of the Walsh-Hadamard transform on the GPU itself, beside dense products in float64."""

from __future__ import annotations

import warnings

import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor
from torch.func import vmap

from pyro_ngvi.linalg import walsh_hadamard_transform

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def dense(D: int) -> Tensor:
    return torch.tensor(hadamard(D), dtype=torch.float64) / D**0.5


def bound(exact: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """D.bit_length() + 32 units of the norm, of float32 or float64, for sums; then one rounding.

    As in tests/exact/test_walsh_hadamard.py, where the products of matrices have as many.
    """
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    norm = x.double().norm(dim=-1, keepdim=True)
    one = torch.finfo(sums).eps * (x.shape[-1].bit_length() + 31) * norm
    rounding = torch.finfo(dtype).eps
    return 0.5 * rounding * (exact.abs() + one) + one + torch.finfo(dtype).tiny


@pytest.mark.parametrize("D", [1, 2, 8, 64, 256, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradient(dtype: torch.dtype, D: int, device: torch.device) -> None:
    H = dense(D) if D <= 4096 else None
    for rows in (1, 5, 33, 200):
        x = torch.randn(rows, D).to(dtype)
        # beyond, the CPU's own transform in float64, which is tested there
        exact = walsh_hadamard_transform(x.double()) if H is None else x.double() @ H
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a kernel that is not used says so
            leaf = x.clone().to(device).requires_grad_()
            y = walsh_hadamard_transform(leaf)
            (gradient,) = torch.autograd.grad(y, leaf, x.to(device))
        assert y.device == device and y.dtype == dtype
        for what, found in (("value", y), ("gradient", gradient)):
            error = (found.detach().cpu().double() - exact).abs() / bound(exact, x, dtype)
            worst = float(error.max())
            assert worst <= 1.0, f"{what}, {rows} rows: {worst:.2g} times what rounding explains"


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_batches_and_strides(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(64, 3, 7).to(dtype)
    exact = x.double().permute(1, 2, 0) @ dense(64)
    found = vmap(walsh_hadamard_transform, in_dims=1)(x.to(device).permute(2, 1, 0))
    assert (found.cpu().double() - exact).abs().max() < 200 * torch.finfo(dtype).eps
    first = vmap(torch.func.grad(lambda row: walsh_hadamard_transform(row).pow(3).sum()))
    rows = x[:, :, 0].mT
    slopes = 3.0 * ((rows.double() @ dense(64)).square() @ dense(64))
    apart = (first(rows.to(device)).cpu().double() - slopes).abs().max() / slopes.abs().max()
    assert apart < 200 * torch.finfo(dtype).eps


def test_the_kernel_is_the_one_that_runs(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from pyro_ngvi.linalg import _walsh_hadamard_triton, walsh_hadamard

    calls = []
    inner = _walsh_hadamard_triton.transform_rows

    def counting(x: Tensor) -> Tensor:
        calls.append(tuple(x.shape))
        return inner(x)

    monkeypatch.setattr(_walsh_hadamard_triton, "transform_rows", counting)
    monkeypatch.setattr(walsh_hadamard, "_tried", {})
    for _ in range(2):
        walsh_hadamard_transform(torch.randn(3, 64, device=cuda, dtype=torch.float32))
    assert calls[1:] == [(3, 64), (3, 64)], f"calls {calls}, kernels tried {walsh_hadamard._tried}"
