"""Under bfloat16 autocast the guide's and the optimizer's linear algebra keep their precision."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

import pyro_ngvi as ngvi

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(30, 2, generator=GENERATOR, dtype=torch.float32)
Y = (X[:, 0] - X[:, 1] > 0).float()


def model(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(2), 1.0).to_event(1))
    with torch.autocast("cpu", enabled=False), pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def elbo(curvature: str | None = None) -> Any:
    return ngvi.BatchedELBO(2, curvature=curvature)


CASES: dict[str, Any] = {
    "full rank, NGVB": (ngvi.AutoFullRankNormal, ngvi.NGVB, elbo()),
    "full rank, VON": (
        ngvi.AutoFullRankNormal,
        lambda g: ngvi.optim.VON(g, lr=0.3),
        elbo("hessian"),
    ),
    "full rank, Gauss-Newton": (ngvi.AutoFullRankNormal, ngvi.NGVB, elbo("gauss_newton")),
    "full rank, IFVB": (ngvi.AutoFullRankNormal, ngvi.IFVB, elbo()),
    "factor, SPRING": (
        lambda m: ngvi.AutoFactorNormal(m, rank=1),
        ngvi.optim.SPRING,
        elbo("scores"),
    ),
    "factor precision, NGVB": (lambda m: ngvi.AutoFactorPrecision(m, rank=1), ngvi.NGVB, elbo()),
    "rotations, IFVB": (ngvi.AutoOrthogonalFlow, ngvi.IFVB, elbo()),
    "coupling flow, IFVB": (ngvi.AutoCouplingFlow, ngvi.IFVB, elbo()),
    "sites": (ngvi.AutoSites, ngvi.CVI, ngvi.SitesELBO()),
}


def fitted(kind: str, autocast: bool) -> dict[str, Tensor]:
    """Five steps of a model that computes in float32 itself, so that only our algebra could round."""
    make, optimizer, loss = CASES[kind]
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = make(model)
    svi = SVI(model, guide, optimizer(guide), loss)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for _ in range(5):
            svi.step(X, Y)
    return {name: p.detach().clone() for name, p in guide.named_parameters()}


@pytest.mark.parametrize("kind", CASES)
def test_steps_are_those_without_autocast(kind: str) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        expected, found = fitted(kind, False), fitted(kind, True)
    finally:
        torch.set_default_dtype(before)
    assert expected.keys() == found.keys() and expected
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
