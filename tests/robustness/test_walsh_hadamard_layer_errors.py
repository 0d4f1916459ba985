"""What the layers and local reparameterisation refuse, and that they say what to do."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoMultivariateNormal, AutoNormal
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.nn import RandomFourierFeatures, WalshHadamardLinear, local_reparameterization

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = WalshHadamardLinear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Folded(Net):
    """Calls its layer for six data, and for three with two rows each."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(x.reshape(3, 2, 4)).reshape(6, 3)


def test_square_is_for_one_output() -> None:
    with pytest.raises(ValueError, match="one output, and this has 3"):
        WalshHadamardLinear(4, 3, square=True)


@pytest.mark.parametrize(
    "sizes, options, message",
    [
        ((4, 3), {"lengthscale": -1.0}, r"lengthscale must be positive and finite, got -1\.0"),
        ((2, 3), {"lengthscale": torch.tensor([1.0, 0.0])}, "lengthscale must be positive"),
        ((4, 3), {"variance": float("inf")}, "variance must be positive and finite"),
    ],
)
def test_features_that_can_not_be(sizes: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RandomFourierFeatures(*sizes, **options)


@pytest.mark.parametrize("kind", [WalshHadamardLinear, RandomFourierFeatures])
def test_inputs_that_do_not_fit(kind: Any) -> None:
    layer = kind(4, 3)
    with pytest.raises(ValueError, match=rf"{kind.__name__} takes .* \(\.\.\., 4\).* \(6, 5\)"):
        layer(torch.randn(6, 5))
    with pytest.raises(ValueError, match=r"got shape \(\)"):
        layer(torch.tensor(1.0))
    assert layer(torch.ones(6, 4, dtype=torch.long)).dtype == torch.float64


def step(model: Any, local: Any, guide: Any) -> None:
    SVI(local, guide, Adam({"lr": 0.01}), Trace_ELBO()).step(X)


def test_a_guide_that_was_never_called() -> None:
    model = Net()
    local = local_reparameterization(model, ngvi.AutoMeanFieldNormal(model))
    with pytest.raises(
        ValueError, match=r"no site 'layer.g', or was never called.*that SVI trains"
    ):
        step(model, local, AutoNormal(model))


def test_a_guide_without_the_site() -> None:
    model = Net()
    other = AutoNormal(lambda x: pyro.sample("z", dist.Normal(0.0, 1.0)))
    other(X)
    local = local_reparameterization(model, other)
    with pytest.raises(ValueError, match=r"AutoNormal, has no site 'layer.g'"):
        step(model, local, ngvi.AutoMeanFieldNormal(model))


def test_guides_that_correlate_g() -> None:
    model = Net()
    ours = ngvi.AutoFullRankNormal(model)
    with pytest.raises(ValueError, match=r"alone from AutoFullRankNormal.*AutoGuideList"):
        step(model, local_reparameterization(model, ours), ours)
    theirs = AutoMultivariateNormal(model)
    with pytest.raises(ValueError, match=r"cannot draw 'layer.g' alone from AutoMultivariate"):
        step(model, local_reparameterization(model, theirs), theirs)
    listed = AutoGuideList(model)
    listed.append(ngvi.AutoFactorNormal(model, rank=2))
    with pytest.raises(ValueError, match=r"cannot draw 'layer.g' alone from AutoFactorNormal"):
        step(model, local_reparameterization(model, listed), listed)


def test_latent_vectors_that_are_not_real() -> None:
    model = Net()
    model.layer.g = PyroSample(dist.LogNormal(torch.zeros(4), 1.0).to_event(1))
    guide = ngvi.AutoMeanFieldNormal(model)
    with pytest.raises(ValueError, match=r"alone.* a real vector outside of plates"):
        step(model, local_reparameterization(model, guide), guide)


def test_data_that_can_not_be_told() -> None:
    model = Folded()
    guide = ngvi.AutoMeanFieldNormal(model)
    with pytest.raises(ValueError, match=r"'layer.g', .* x of shape \(3, 2, 4\).*the model itself"):
        step(model, local_reparameterization(model, guide), guide)


@pytest.mark.parametrize("shape", [(6, 4), (6, 2, 5, 4)])
def test_vectorised_particles(shape: tuple[int, ...]) -> None:
    model, x = Net(), torch.randn(shape)
    guide = ngvi.AutoMeanFieldNormal(model)
    guide(x)
    particles = pyro.plate("particles", 5, dim=-2)
    trace = poutine.trace(particles(guide)).get_trace(x)
    local: Any = local_reparameterization(model, guide)
    with pytest.raises(ValueError, match=r"\(5, 1, 4\).*\(6, .*4\).*BatchedELBO"):
        poutine.replay(particles(local), trace=trace)(x)
