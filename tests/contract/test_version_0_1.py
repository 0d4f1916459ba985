"""What version 0.1 saved: states load and go on."""

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
