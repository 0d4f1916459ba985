"""The small exact tools."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyro_ngvi.linalg import gauss_hermite
from pyro_ngvi.linalg.cholesky import (
    HALVINGS,
    _by_eigenvalues,
    _by_factorisations,
    inverse_cholesky_of_shifted,
)
from tests.cubature import sphere_points


@pytest.mark.parametrize("d", [1, 2, 7])
def test_sphere_points_integrate_cubics(d):
    x = sphere_points(d)
    g = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(d, generator=g) for _ in range(3))
    torch.testing.assert_close((x @ a).mean(), torch.zeros(()))
    torch.testing.assert_close(((x @ a) * (x @ b)).mean(), a @ b)
    torch.testing.assert_close(((x @ a) * (x @ b) * (x @ c)).mean(), torch.zeros(()))


def test_gauss_hermite_integrates_to_its_degree():
    x, w = gauss_hermite(6)
    moments = [float((w * x**k).sum()) for k in range(12)]
    expected = [1, 0, 1, 0, 3, 0, 15, 0, 105, 0, 945, 0]
    assert moments == pytest.approx(expected, abs=1e-9)


def test_a_bad_order_is_refused():
    with pytest.raises(ValueError, match="order of at least 1, got 0"):
        gauss_hermite(0)


@given(seed=st.integers(0, 10_000), step=st.floats(0.0, 1.0))
@settings(deadline=None, max_examples=50)
def test_inverse_cholesky_against_inverse(seed, step):
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(5, 5, generator=g)
    H = root + root.T
    T, shrink = inverse_cholesky_of_shifted(H, step)
    assert torch.equal(T, T.tril()) and (T.diagonal() > 0).all()
    shifted = torch.eye(5) + shrink * step * H
    torch.testing.assert_close(T.T @ shifted @ T, torch.eye(5), rtol=1e-6, atol=1e-6)


def test_step_is_halved_only_as_often_as_needed():
    H = torch.diag(torch.tensor([1.0, -3.0]))
    T, shrink = inverse_cholesky_of_shifted(H, 1.0)
    assert float(shrink) == 0.25  # 1 - 3/2 < 1/4 <= 1 - 3/4
    torch.testing.assert_close(T, torch.diag(torch.tensor([1.25, 0.25]) ** -0.5))
    _, shrink = inverse_cholesky_of_shifted(H, 0.2)
    assert float(shrink) == 1.0
    T, shrink = inverse_cholesky_of_shifted(H * 1e9, 1.0)
    assert float(shrink) == 0.0 and torch.equal(T, torch.eye(2))


@given(seed=st.integers(0, 10_000), size=st.floats(-3.0, 8.0))
@settings(deadline=None, max_examples=50)
def test_devices_and_cpu_halve_a_step_equally_often(seed, size):
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(5, 5, generator=g)
    H = 10.0**size * (root + root.T)
    wanted = _by_eigenvalues(H, HALVINGS).clamp_max(HALVINGS + 1)
    assert torch.equal(_by_factorisations(H, HALVINGS), wanted)


@pytest.mark.parametrize("halvings", [0, 1, 2, 3, HALVINGS])
def test_every_number_of_halvings_is_found(halvings):
    needed = torch.arange(halvings + 2)
    # the largest that needs j halvings: singular exactly after them; no shift for j = 0
    H = torch.diag_embed(torch.stack([0.75 * torch.exp2(needed), -torch.ones(len(needed))], -1))
    assert torch.equal(_by_factorisations(-H, halvings), needed.to(H.dtype))
    # a millionth more needs one more, as far as there is one
    more = (needed + 1).clamp_max(halvings + 1).to(H.dtype)
    assert torch.equal(_by_factorisations(-H * (1.0 + 1e-6), halvings), more)


def test_inverse_cholesky_runs_on_meta_tensors():
    """Where a value that is read raises: a device is not waited for."""
    H = torch.zeros(3, 3, dtype=torch.float32, device="meta")
    T, shrink = inverse_cholesky_of_shifted(H, torch.ones((), dtype=torch.float32, device="meta"))
    assert T.shape == (3, 3) and T.dtype == torch.float32 and T.device.type == "meta"
    assert shrink.shape == () and shrink.dtype == torch.float32
