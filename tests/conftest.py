"""float64 by default, and the directory of data sets that do not ship with the project."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def float64_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def plain_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guides start as where their search found nothing, for tests of what comes after the start.

    A search takes longer than most tests.  tests/exact/test_laplace_start.py and the tests of flows are
    tests of it; those without this fixture begin with it.
    """
    monkeypatch.setattr("pyro_ngvi.guides.search.UNASKED", -1)
    monkeypatch.setattr("pyro_ngvi.guides.flow.find_gaussian", lambda g, family, params, *_: params)


@pytest.fixture
def few_first_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """IFVB begins with 8 scores of q: for flows the draws, one by one, take longer than some steps."""
    monkeypatch.setattr("pyro_ngvi.optim.ifvb.FIRST_SCORES", 8)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """``forbid_waiting`` holds for the device of tests/pretend.py."""
    from tests import pretend

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: pretend.waiting["mode"])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", pretend.set_waiting)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The directory that PYRO_NGVI_DATA names; without it the test is skipped."""
    value = os.environ.get("PYRO_NGVI_DATA")
    if not value:
        pytest.skip("PYRO_NGVI_DATA is not set: it names the directory that holds the data sets")
    path = Path(value)
    if not path.is_dir():
        pytest.fail(f"PYRO_NGVI_DATA names {path}, which is not a directory")
    return path
