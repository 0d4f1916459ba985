"""float32 at network scale: 784-400-400-10, d = 478,410, through gradients that explode on purpose."""

import math
import warnings
from typing import Any

import pytest
import torch
from pyro.infer import SVI
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

import pyro_ngvi as ngvi

STEPS, BATCH = 1_000, 32


class Louder(Messenger):
    """Multiplies the log-likelihood."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] == "y":
            msg["scale"] = msg["scale"] * self.factor


def factor(k: int) -> float:
    """1e8, calm now and then, and now and then beyond what float32 or any number holds."""
    return {3: 1.0, 5: 1e30, 7: math.inf}.get(k % 10, 1e8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "kind"),
    [(ngvi.optim.VOGN, "gauss_newton"), (ngvi.optim.IVON, None)],
    ids=["VOGN", "IVON"],
)
def test_parameters_stay_finite(make: Any, kind: str | None) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10)]
    network = ngvi.nn.bayesianize(nn.Sequential(*layers).float(), "categorical", num_data=60_000)

    def model(x: Tensor, y: Tensor, factor: float = 1.0) -> None:
        with Louder(factor):
            network(x, y)

    x = torch.rand(STEPS, BATCH, 784, dtype=torch.float32)
    y = torch.randint(10, (STEPS, BATCH))
    guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=network.init_to_module, init_scale=0.02)
    optim = make(guide)
    svi = SVI(model, guide, optim, ngvi.BatchedELBO(1, curvature=kind))
    svi.step(x[0], y[0])
    before = guide.loc.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of skipped steps
        warnings.simplefilter("ignore", UserWarning)  # of infinite losses
        for k in range(STEPS):
            svi.step(x[k], y[k], factor(k))
            total = sum(p.detach().sum() for p in guide.parameters())
            assert math.isfinite(total), (k, factor(k))
    for p in guide.parameters():
        assert p.dtype == torch.float32 and p.isfinite().all()
    # at the least the infinite ones were skipped, and of the others no more than a few
    assert STEPS // 10 <= optim.report().skipped <= STEPS // 4
    assert not torch.equal(before, guide.loc)
    assert math.isfinite(float(svi.evaluate_loss(x[0], y[0])))  # pyright: ignore[reportArgumentType]
