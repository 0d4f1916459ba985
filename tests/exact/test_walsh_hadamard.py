"""The Walsh-Hadamard transform against the dense matrix; derivatives, vmap, dtypes, devices, errors."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, vmap

from pyro_ngvi.curvature.derivatives import jvp
from pyro_ngvi.linalg import _walsh_hadamard_triton, walsh_hadamard, walsh_hadamard_transform

LENGTHS = [2**p for p in range(13)]
#: one product, two factors, three factors
FEW = [8, 256, 2048]
HALVES = [torch.float16, torch.bfloat16]


def dense(D: int) -> Tensor:
    return torch.tensor(hadamard(D), dtype=torch.float64) / D**0.5


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small matrices are built again, in whatever mode the test is."""
    monkeypatch.setattr(walsh_hadamard, "_matrices", {})


@pytest.mark.parametrize("D", LENGTHS)
def test_against_the_dense_matrix(D: int) -> None:
    x = torch.randn(3, D)
    torch.testing.assert_close(walsh_hadamard_transform(x), x @ dense(D), rtol=0, atol=1e-13)


@pytest.mark.parametrize("D", [*LENGTHS, 2**15, 2**16])
def test_involution_that_keeps_the_norm(D: int) -> None:
    x = torch.randn(2, D)
    y = walsh_hadamard_transform(x)
    torch.testing.assert_close(walsh_hadamard_transform(y), x, rtol=0, atol=1e-13)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("D", [4, 256, 1024, 4096])
def test_even_powers_of_two_are_exact_on_integers(D: int) -> None:
    """1 / sqrt(D) is a power of two: sums of integers, without any rounding, in float32 too."""
    x = torch.randint(-8, 9, (3, D)).double()
    expected = x @ torch.tensor(hadamard(D)).double() / round(D**0.5)
    assert torch.equal(walsh_hadamard_transform(x.float()).double(), expected)


@pytest.mark.parametrize("D", FEW)
def test_shapes_and_strides(D: int) -> None:
    x = torch.randn(2, 3, 4, D)
    y = walsh_hadamard_transform(x)
    assert torch.equal(
        walsh_hadamard_transform(x[1, 2, 3]), walsh_hadamard_transform(x[1, 2, 3:4])[0]
    )
    for other in (
        x.flip(0).transpose(0, 2),
        x.mT.contiguous().mT,
        torch.stack([x, x], -1)[..., 0],
        x[..., :1].expand_as(x),
    ):
        assert not other.is_contiguous()
        expected = walsh_hadamard_transform(other.contiguous())
        torch.testing.assert_close(walsh_hadamard_transform(other), expected, rtol=0, atol=1e-13)
    assert y.shape == x.shape and y.is_contiguous()
    for shape in ((0, D), (3, 0, D), (0, 0, D)):
        assert walsh_hadamard_transform(torch.empty(shape)).shape == shape


@pytest.mark.parametrize("D", FEW)
def test_derivatives(D: int) -> None:
    """Of x H times itself, so that the second derivative is not zero."""
    x = torch.randn(1, D, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return walsh_hadamard_transform(x).square()

    tangent = jvp(walsh_hadamard_transform, (x,), (x.cos(),))[1]
    assert torch.equal(tangent, walsh_hadamard_transform(x.cos()))
    # after our jvp, which keeps torch's warning of the first forward mode quiet
    assert gradcheck(f, x, fast_mode=True, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(f, x, fast_mode=True, check_fwd_over_rev=True)
    g = torch.randn(1, D)
    (pulled,) = torch.autograd.grad(walsh_hadamard_transform(x), x, g)
    torch.testing.assert_close(pulled, walsh_hadamard_transform(g), rtol=0, atol=1e-13)


@pytest.mark.parametrize("D", FEW)
def test_vmap(D: int) -> None:
    x = torch.randn(3, 2, D)
    expected = x @ dense(D)
    for axis in (0, 1):
        y = vmap(walsh_hadamard_transform, in_dims=axis, out_dims=axis)(x)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-13)
    last = vmap(walsh_hadamard_transform, in_dims=-1)(x.permute(1, 2, 0))
    torch.testing.assert_close(last, expected, rtol=0, atol=1e-13)
    both = vmap(vmap(walsh_hadamard_transform))(x)
    torch.testing.assert_close(both, expected, rtol=0, atol=1e-13)
    sums = vmap(grad(lambda row: walsh_hadamard_transform(row).pow(3).sum()))(x[:, 0])
    torch.testing.assert_close(sums, 3.0 * (expected[:, 0].square() @ dense(D)), rtol=0, atol=1e-11)


@pytest.mark.parametrize("D", FEW)
def test_nothing_of_a_mode_is_kept(D: int, nothing_kept: None) -> None:
    """Matrices built first under vmap and grad, or in inference mode, serve a training afterwards."""
    x = torch.randn(2, D)
    vmap(grad(lambda row: walsh_hadamard_transform(row).square().sum()))(x)
    with torch.inference_mode():
        walsh_hadamard_transform(x.float())
    assert walsh_hadamard._matrices
    for kept in walsh_hadamard._matrices.values():
        assert type(kept) is Tensor and not kept.is_inference() and not kept.requires_grad
        assert kept.shape[0] <= walsh_hadamard.DENSE
        kept.tolist()  # a tensor of a vmap or grad that has ended cannot be read
    for leaf in (x.requires_grad_(), x.detach().float().requires_grad_()):
        walsh_hadamard_transform(leaf).square().sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, 2.0 * leaf.detach(), rtol=1e-5, atol=1e-5)


def test_in_a_module_that_is_called_functionally() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.s = torch.nn.Parameter(torch.randn(256))

        def forward(self, x: Tensor) -> Tensor:
            return walsh_hadamard_transform(self.s * x)

    module, x, s = Scaled(), torch.randn(4, 256), torch.randn(5, 256)
    y = vmap(lambda s: functional_call(module, {"s": s}, (x,)))(s)
    torch.testing.assert_close(y, (s[:, None] * x) @ dense(256), rtol=0, atol=1e-12)


@pytest.mark.parametrize("D", [2, 64, 512, 4096])
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_rounds_once(dtype: torch.dtype, D: int) -> None:
    """Half a unit of the result, and of float32 log2(D) + 32 units of the norm for its sums.

    The entries have size 1e3: a sum of 4096 of them would overflow float16 if it came before the scale.
    """
    x = (1e3 * torch.randn(64, D)).to(dtype)
    x[0] = 1e3  # the largest result, 64,000 at D = 4096
    y = walsh_hadamard_transform(x)
    exact = x.double() @ dense(D)
    assert y.dtype == dtype and y.isfinite().all()
    one = torch.finfo(torch.float32).eps * (D.bit_length() + 31) * x.double().norm(dim=-1)
    # eps is the spacing above 1: half of it, relative, bounds a rounding; then the smallest number
    bound = 0.5 * torch.finfo(dtype).eps * (exact.abs() + one[:, None]) + one[:, None]
    assert ((y.double() - exact).abs() <= bound + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("D", LENGTHS)
def test_single_precision(D: int) -> None:
    """Within as many units of the norm as terms are added, and one a factor: for any order of sums."""
    x = torch.randn(16, D).float()
    error = walsh_hadamard_transform(x).double() - x.double() @ dense(D)
    factors = [D] if D <= walsh_hadamard.DENSE else walsh_hadamard._factors(D)
    units = sum(factors) + len(factors)
    bound = 0.5 * torch.finfo(torch.float32).eps * units * x.double().norm(dim=-1, keepdim=True)
    assert (error.abs() <= bound).all()


def test_factors() -> None:
    for p in range(7, 25):
        factors = walsh_hadamard._factors(2**p)
        assert torch.tensor(factors).prod() == 2**p
        assert max(factors) <= 2**walsh_hadamard.LARGEST


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("D", FEW)
def test_meta(D: int, dtype: torch.dtype, nothing_kept: None) -> None:
    y = walsh_hadamard_transform(torch.empty(3, 2, D, dtype=dtype, device="meta"))
    assert y.shape == (3, 2, D) and y.dtype == dtype and y.device.type == "meta"
    assert vmap(walsh_hadamard_transform)(y).shape == (3, 2, D)
    assert not walsh_hadamard._matrices


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.tensor(1.0), ValueError, "0 dimensions"),
        (torch.ones(2, 6), ValueError, r"\(2, 6\); pad it with zeros to 8\."),
        (torch.ones(2, 0), ValueError, r"\(2, 0\); pad it with zeros to 1\."),
        (torch.ones(4, dtype=torch.int64), TypeError, "torch.int64"),
        (torch.ones(4, dtype=torch.bool), TypeError, "torch.bool"),
        (torch.ones(4, dtype=torch.complex64), TypeError, "torch.complex64"),
        (torch.ones(4).to(torch.float8_e5m2), TypeError, "torch.float8_e5m2"),
    ],
)
def test_errors(x: Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"walsh_hadamard_transform needs.*{words}"):
        walsh_hadamard_transform(x)


# ---- the kernel for GPUs, in Triton's interpreter ---------------------------------------------------


def kernel_values() -> None:
    """Within the units of float32's log2(D) additions and one scale, then one rounding."""
    from pyro_ngvi.linalg._walsh_hadamard_triton import available, transform_rows

    for dtype in (torch.float32, *HALVES):
        for D in (2, 4, 64, 1024, 2048, 4096, 8192):
            for rows in (1, 5, 33):  # 33 rows fill the programs of no D but the longest
                x = (1e3 * torch.randn(rows, D)).to(dtype)
                y = transform_rows(x)
                exact = walsh_hadamard_transform(x.double())
                single = 0.5 * torch.finfo(torch.float32).eps * (D.bit_length() + 1)
                # the interpreter cuts bfloat16 off, where a GPU rounds: a whole unit, not half
                unit = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
                error = (y.double() - exact).abs()
                bound = single * x.double().norm(dim=-1, keepdim=True) * (1 + unit)
                assert available(x) and y.dtype == dtype
                assert (error <= bound + unit * exact.abs() + torch.finfo(dtype).tiny).all()
    assert transform_rows(torch.empty(0, 3, 8)).shape == (0, 3, 8)
    assert not available(torch.ones(2, 16384).float()) and not available(torch.ones(2, 4).double())


def kernel_derivatives() -> None:
    """Both ways give the same to float32's rounding; the reference computes in float64."""
    from pyro_ngvi.linalg._walsh_hadamard_triton import transform_rows

    def second(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        first = grad(lambda x: f(x).pow(3).sum())
        return grad(lambda x: first(x).square().sum())

    x = torch.randn(3, 5, 64)
    reference, kernel, single = walsh_hadamard_transform, transform_rows, x.float()

    def same(a: Tensor, b: Tensor) -> None:
        scale = float(b.abs().max())
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5 * scale)

    same(second(kernel)(single), second(reference)(x))
    same(vmap(kernel, in_dims=1, out_dims=1)(single), reference(x))
    same(vmap(vmap(kernel), in_dims=1, out_dims=1)(single), reference(x))
    same(kernel(single.mT.contiguous().mT), reference(x))
    same(vmap(second(kernel))(single), second(reference)(x))
    same(jvp(kernel, (single,), (single.cos(),))[1], reference(x.cos()))
    leaf, plain = single.clone().requires_grad_(), x.clone().requires_grad_()
    (a,) = torch.autograd.grad(kernel(leaf).pow(3).sum(), leaf, create_graph=True)
    (b,) = torch.autograd.grad(reference(plain).pow(3).sum(), plain, create_graph=True)
    (a,), (b,) = (torch.autograd.grad(g.square().sum(), v) for g, v in ((a, leaf), (b, plain)))
    same(a, b)


def kernel_is_used() -> None:
    """On what says that it is on a GPU; in float64 and beyond the largest D the products are."""
    from unittest.mock import patch

    for x, calls in (
        (torch.randn(3, 64).float(), 1),
        (torch.randn(3, 64), 0),
        (torch.randn(1, 16384).float(), 0),
        (torch.randn(3, 1).float(), 0),
    ):
        inner = _walsh_hadamard_triton.transform_rows
        with (
            patch.object(walsh_hadamard, "_on_gpu", lambda x: True),
            patch.object(_walsh_hadamard_triton, "transform_rows", side_effect=inner) as used,
        ):
            walsh_hadamard_transform(x)
            tried = used.call_count
            y = walsh_hadamard_transform(x)
        assert tried == 2 * calls and used.call_count == tried + calls
        exact = walsh_hadamard_transform(x.double())
        torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("check", [kernel_values, kernel_derivatives, kernel_is_used])
def test_kernel_in_the_interpreter(check: Callable[[], None]) -> None:
    """In a process of its own, because Triton reads TRITON_INTERPRET when the kernel is defined."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: its kernel cannot be run")
    done = subprocess.run(
        [sys.executable, __file__, check.__name__],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def _broken(x: Tensor) -> Tensor:
    raise RuntimeError("Failed to find C compiler.")


@pytest.mark.parametrize(
    ("kernel", "why"),
    [(_broken, "RuntimeError: Failed to find C compiler"), (torch.cos, "its numbers are wrong")],
)
def test_a_kernel_that_fails_its_first_try_is_not_used(
    kernel: Callable[[Tensor], Tensor], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walsh_hadamard, "_tried", {})
    monkeypatch.setattr(walsh_hadamard, "_on_gpu", lambda x: True)
    monkeypatch.setattr(_walsh_hadamard_triton, "available", lambda x: True)
    monkeypatch.setattr(_walsh_hadamard_triton, "transform_rows", kernel)
    x = torch.randn(3, 8)
    with pytest.warns(RuntimeWarning, match=f"is not used on cpu with rows of 8 .*{why}"):
        y = walsh_hadamard_transform(x)
    torch.testing.assert_close(y, x @ dense(8), rtol=0, atol=1e-13)
    walsh_hadamard_transform(x)  # without a second try or warning
    # another length is tried for itself, and under vmap too
    with pytest.warns(RuntimeWarning, match="with rows of 16"):
        y = vmap(walsh_hadamard_transform, 1, 1)(torch.eye(16).expand(2, 16, 16))
    torch.testing.assert_close(y[1], dense(16), rtol=0, atol=1e-13)


def test_a_kernel_that_agrees_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def kernel(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return x @ dense(8)

    monkeypatch.setattr(walsh_hadamard, "_tried", {})
    monkeypatch.setattr(walsh_hadamard, "_on_gpu", lambda x: True)
    monkeypatch.setattr(_walsh_hadamard_triton, "available", lambda x: True)
    monkeypatch.setattr(_walsh_hadamard_triton, "transform_rows", kernel)
    for _ in range(2):
        walsh_hadamard_transform(torch.randn(3, 8))
    assert shapes[1:] == [(3, 8), (3, 8)]  # the first was the try


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    globals()[sys.argv[1]]()
