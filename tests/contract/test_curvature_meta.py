"""No step of a rule that reads curvature waits for the device, but the first.

The first finds out which terms are left beside the data, and whether their curvature is diagonal.  What
follows runs on tensors that hold no values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor
from torch.nn.functional import linear

import pyro_ngvi as ngvi

pytestmark = pytest.mark.usefixtures("plain_start")

N, D, H, C = 12, 3, 5, 2

RULES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any], str | None]] = {
    "VON, mean field, Hessian": (ngvi.AutoMeanFieldNormal, ngvi.optim.VON, "hessian"),
    "VON, full rank, Hessian": (ngvi.AutoFullRankNormal, ngvi.optim.VON, "hessian"),
    "VON, Price": (ngvi.AutoMeanFieldNormal, ngvi.optim.VON, "price"),
    "VON, averaged": (
        ngvi.AutoFullRankNormal,
        partial(ngvi.optim.VON, averaging=True),
        "gauss_newton",
    ),
    "VOGN": (ngvi.AutoMeanFieldNormal, ngvi.optim.VOGN, "gauss_newton"),
    "IVON": (ngvi.AutoMeanFieldNormal, ngvi.optim.IVON, None),
    "Vadam": (ngvi.AutoMeanFieldNormal, ngvi.optim.Vadam, "squared_gradient"),
    "SLANG": (
        partial(ngvi.AutoFactorPrecision, rank=2),
        partial(ngvi.optim.SLANG, lr=0.1),
        "gauss_newton",
    ),
    "NGVB, Hessian": (ngvi.AutoFullRankNormal, ngvi.NGVB, "hessian"),
    "noisy K-FAC": (ngvi.AutoMatrixNormal, ngvi.optim.NoisyKFAC, "kronecker"),
}


def network(X: Tensor, y: Tensor) -> None:
    def weights(name: str, *shape: int) -> Any:
        prior = dist.Normal(X.new_zeros(shape), X.new_ones(()))
        return pyro.sample(name, prior.to_event(len(shape)))

    hidden = linear(X, weights("W", H, D), weights("b", H)).tanh()
    logits = linear(hidden, weights("V", C, H))
    with pyro.plate("data", N):
        pyro.sample("y", dist.Categorical(logits=logits), obs=y)


@pytest.mark.parametrize(("make", "rule", "curvature"), RULES.values(), ids=RULES)
def test_later_steps(make: Any, rule: Any, curvature: str | None) -> None:
    """What ``SVI.step`` does up to the number that it returns."""
    pyro.set_rng_seed(0)
    guide = make(network)
    optim, elbo = rule(guide), ngvi.BatchedELBO(4, curvature=curvature)

    def step(*args: Tensor) -> Tensor:
        with pyro.validation_enabled(False), poutine.trace(param_only=True) as capture:
            loss = elbo.loss_and_grads(network, guide, *args)
        nodes: Any = capture.trace.nodes
        optim({site["value"].unconstrained() for site in nodes.values()})
        return loss

    X, y = torch.randn(N, D), torch.arange(N) % C
    guide(X, y)
    step(X, y)
    pyro.clear_param_store()
    guide.to("meta")
    shapes = {name: p.shape for name, p in guide.natural_params().items()}
    for _ in range(2):
        loss = step(X.to("meta"), y.to("meta"))
        assert loss.device.type == "meta" and loss.shape == ()
    after = guide.natural_params()
    assert {name: p.shape for name, p in after.items()} == shapes
    assert all(p.device.type == "meta" for p in after.values())
