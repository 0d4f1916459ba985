"""float64 by default, and the directory of data sets that do not ship with the project."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
def smooth_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jumps are looked for once in the units of each model, for tests that make its guide many times.

    The search takes longer than some steps, and what it finds stands with the model.
    """
    from pyro_ngvi.hierarchy.probe import Probe

    look, known = Probe.is_smooth, SMOOTH

    def remembered(self: Any, e: Any, u: Any) -> bool:
        key = self.call.model, self.units.names, e.dtype, str(self.call.args), str(self.call.kwargs)
        if key not in known:
            known[key] = look(self, e, u)
        return known[key]

    monkeypatch.setattr(Probe, "is_smooth", remembered)


#: what ``smooth_once`` has found
SMOOTH: dict[Any, bool] = {}


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
