"""What version 0.1 saved: states load and go on, pickles load or name the version that wrote them."""

import importlib
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

import pyro_ngvi as ngvi

#: guide.state_dict(), optim.get_state() and guide.median() of each guide after five steps, in float32
SAVED = Path(__file__).parents[1] / "data" / "states_0_1.pt"
#: guides, and optimizers with their guides, pickled after five steps, and their medians
PICKLED = Path(__file__).parents[1] / "data" / "pickles_0_1.pt"

NGVB: Any = (ngvi.NGVB, partial(ngvi.BatchedELBO, 4))
SPRING: Any = (ngvi.optim.SPRING, partial(ngvi.BatchedELBO, 16, curvature="scores"))
GUIDES: dict[str, tuple[Callable[..., Any], Any]] = {
    "mf": (ngvi.AutoMeanFieldNormal, NGVB),
    "fr": (ngvi.AutoFullRankNormal, NGVB),
    "fac": (partial(ngvi.AutoFactorNormal, rank=1), NGVB),
    "fp": (partial(ngvi.AutoFactorPrecision, rank=1), NGVB),
    "ef": (ngvi.AutoExponentialFamily, NGVB),
    "cf": (partial(ngvi.AutoCouplingFlow, layers=2, hidden=(4,)), SPRING),
    "of": (ngvi.AutoOrthogonalFlow, SPRING),
    "sites": (ngvi.AutoSites, (ngvi.CVI, ngvi.SitesELBO)),
}


def model() -> None:
    X = torch.linspace(-1, 1, 24).view(8, 3)
    w: Any = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("d", 8):
        pyro.sample("y", dist.Normal(X @ w, 1.0), obs=X.sum(1))


@pytest.mark.parametrize("kind", GUIDES)
def test_states_load_and_go_on(kind: str) -> None:
    torch.set_default_dtype(torch.float32)
    saved = torch.load(SAVED, weights_only=True)[kind]
    make, (optimizer, loss) = GUIDES[kind]
    guide = make(model)
    optim = optimizer(guide)
    guide.load_state_dict(saved["guide"])
    optim.set_state(saved["optim"])
    guide()
    median = guide.median()
    for name, value in saved["median"].items():
        torch.testing.assert_close(median[name], value)
    SVI(model, guide, optim, loss()).step()
    assert optim.get_state()["natural"][""]["count"] == 6


@pytest.mark.parametrize("what", ["guide", "optim"])
@pytest.mark.parametrize("kind", GUIDES)
def test_pickles_load_and_go_on_or_say_what_wrote_them(kind: str, what: str) -> None:
    torch.set_default_dtype(torch.float32)
    saved = torch.load(PICKLED, weights_only=True)[f"{kind}, {what}"]
    _, (optimizer, loss) = GUIDES[kind]
    try:
        found = pickle.loads(saved["pickle"])
    except ImportError as refusal:
        assert re.search(r"by pyro_ngvi 0\.1: .*get_state\(\)", str(refusal))
        return
    optim = found if what == "optim" else optimizer(found)
    median = optim.guide.median()
    for name, value in saved["median"].items():
        torch.testing.assert_close(median[name], value)
    SVI(model, optim.guide, optim, loss()).step()
    assert optim.get_state()["natural"][""]["count"] == (6 if what == "optim" else 1)


def test_public_names_are_found_where_0_1_had_them() -> None:
    assert pickle.loads(b"cpyro_ngvi.flows\nStretch\n.") is ngvi.flows.Stretch


def test_a_missing_module_is_still_a_missing_module() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"no module 'pyro_ngvi\.nothing'"):
        importlib.import_module("pyro_ngvi.nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from pyro_ngvi import nothing")
