"""Several particles of a list of guides share their minibatch; models that write in place."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi

N = 12


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(N, 2, generator=generator)
    return X, X.sum(-1) + 0.3 * torch.randn(N, generator=generator)


@pytest.mark.parametrize("num_particles", [1, 4])
def test_one_minibatch_for_all_particles(num_particles: int) -> None:
    """Sites of Gaussian data have the mean y, whatever the noise that the other guide draws."""
    X, y = data()

    def model(X: Tensor, y: Tensor) -> None:
        scale = pyro.sample("scale", dist.LogNormal(-1.0, 0.1))
        w: Any = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", N, subsample_size=4) as i:
            pyro.sample("y", dist.Normal(X[i] @ w, scale), obs=y[i])

    pyro.set_rng_seed(0)
    guide = AutoGuideList(model)
    guide.append(ngvi.AutoSites(pyro.poutine.block(model, hide=["scale"])))
    guide.append(ngvi.AutoMeanFieldNormal(pyro.poutine.block(model, expose=["scale"])))
    optim = ngvi.CVI(guide, others=Adam({"lr": 0.001}))
    svi = SVI(model, guide, optim, ngvi.SitesELBO(num_particles))
    for _ in range(12):
        svi.step(X, y)
    sites: Any = guide[0]
    linear, precision = sites.site_tensors()["y"]
    seen = precision.flatten() > 0
    assert seen.sum() >= 8
    found = linear.flatten()[seen] / precision.flatten()[seen]
    torch.testing.assert_close(found, y[seen], rtol=1e-8, atol=1e-8)


def shift(z: Tensor) -> Tensor:
    z += 1.0
    return z


def spread(z: Tensor) -> Tensor:
    return z.mul_(2.0).add_(2.0).mul_(0.5)


@pytest.mark.parametrize("write", [shift, spread])
def test_models_may_write_in_place(write: Any) -> None:
    X, y = data()

    def loss_of(change: Any) -> float:
        def model(X: Tensor, y: Tensor) -> None:
            w: Any = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            with pyro.plate("data", N):
                pyro.sample("y", dist.StudentT(4.0, change(X @ w), 1.0), obs=y)

        guide = ngvi.AutoSites(model)
        svi: Any = SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
        return [svi.step(X, y) for _ in range(12)][-1]

    assert abs(loss_of(write) - loss_of(lambda z: z + 1.0)) < 1e-9
