"""Tests on a GPU, skipped without one.  ``PYRO_NGVI_TEST_DEVICE=cpu`` tries what a CPU can do,
``=pretend`` the same on a device that it plays (tests/pretend.py)."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import pretend

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYRO_NGVI_TEST_DEVICE" not in os.environ and not torch.cuda.is_available():
        why = "there is no GPU; PYRO_NGVI_TEST_DEVICE=cpu tries these tests without one"
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    # with its number, as tensors have it
    named = os.environ.get("PYRO_NGVI_TEST_DEVICE", "cuda:0")
    if named != "pretend":
        return torch.device(named)
    request.getfixturevalue("pretended")
    return pretend.DEVICE


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A device that is not the CPU."""
    if device.type == "cpu":
        pytest.skip("is a matter of a GPU")
    return device


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs CUDA itself")
    return device


@pytest.fixture
def float32_default(float64_default: None) -> Iterator[None]:
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)
