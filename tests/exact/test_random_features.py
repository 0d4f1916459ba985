"""Random Fourier features: their kernel and its error, particles, and deep processes."""

from __future__ import annotations

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive
from pyro.infer.autoguide import init_to_sample
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.nn import RandomFourierFeatures, WalshHadamardLinear


def latent_omega(inputs: int, features: int) -> PyroSample:
    return PyroSample(dist.Normal(torch.zeros(inputs, features), 1.0).to_event(2))


class Deep(PyroModule):
    """A deep Gaussian process of two layers."""

    def __init__(self, latent: bool) -> None:
        super().__init__()
        self.features_1: Any = RandomFourierFeatures(2, 16, seed=0)
        self.layer_1 = WalshHadamardLinear(32, 3, weight_sd=1.0)
        self.features_2: Any = RandomFourierFeatures(3, 16, seed=1)
        self.layer_2 = WalshHadamardLinear(32, 1, weight_sd=1.0)
        if latent:
            self.features_1.omega = latent_omega(2, 16)
            self.features_2.omega = latent_omega(3, 16)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        f = self.layer_1(self.features_1(x))
        f = self.layer_2(self.features_2(f)).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 0.2), obs=y)
        return f


def run(layer: Any, x: Tensor, **values: Tensor) -> Tensor:
    """The layer at given values of its sites."""
    return poutine.condition(layer, values)(x)


def kernel(x: Tensor, other: Tensor, lengthscale: Tensor) -> Tensor:
    scaled = (x.unsqueeze(-2) - other) / lengthscale
    return (-0.5 * scaled.square().sum(-1)).exp()


def test_random_features_give_the_kernel() -> None:
    R, variance, lengthscale = 4000, 2.5, torch.tensor([0.7, 1.5, 3.0])
    layer = RandomFourierFeatures(3, R, lengthscale=lengthscale, variance=variance, seed=0)
    x = torch.randn(12, 3)
    phi = layer(x)
    assert phi.shape == (12, 2 * R)
    rho = kernel(x, x, lengthscale)
    gram = (phi @ phi.mT).detach()
    standard_error = variance * ((0.5 * (1.0 + rho**4) - rho.square()).clamp_min(0.0) / R).sqrt()
    torch.testing.assert_close(gram.diagonal(), torch.full((12,), variance))
    off = ~torch.eye(12, dtype=torch.bool)
    z = ((gram - variance * rho) / standard_error)[off]
    assert z.abs().max() < 4.5  # 66 pairs
    assert z.square().mean() < 3.0  # and the stated error is that size


def test_random_features_of_particles_and_of_latent_omega() -> None:
    layer: Any = RandomFourierFeatures(3, 4, ard=False)
    layer.omega = latent_omega(3, 4)
    assert layer.lengthscale.shape == ()
    S, x = 2, torch.randn(5, 3)
    omega = torch.randn(S, 1, 3, 4)
    each = torch.stack([run(layer, x, omega=omega[s, 0]) for s in range(S)])
    torch.testing.assert_close(run(layer, x, omega=omega), each)
    torch.testing.assert_close(run(layer, x, omega=omega[:, 0]), each)
    layer = RandomFourierFeatures(3, 4)
    layer.omega = latent_omega(3, 4)
    layer.lengthscale = PyroSample(dist.LogNormal(torch.zeros(3), 1.0).to_event(1))
    layer.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    values = {"lengthscale": torch.rand(S, 1, 3) + 0.5, "variance": torch.rand(S, 1) + 0.5}
    each = torch.stack(
        [
            run(
                layer,
                x,
                omega=omega[s, 0],
                lengthscale=values["lengthscale"][s, 0],
                variance=values["variance"][s, 0],
            )
            for s in range(S)
        ]
    )
    torch.testing.assert_close(run(layer, x, omega=omega, **values), each)


def test_seed_and_trained_parameters_of_random_features() -> None:
    state = torch.get_rng_state()
    one, other = (RandomFourierFeatures(2, 3, seed=5) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(one.omega, other.omega)
    names = {name for name, _ in one.named_parameters()}
    assert names == {"lengthscale_unconstrained", "variance_unconstrained"}
    torch.testing.assert_close(one.lengthscale, torch.full((2,), math.sqrt(2.0) / 2.0))
    assert {name for name, _ in one.named_buffers()} == {"omega"}


@pytest.mark.parametrize("latent", [False, True])
def test_deep_process_learns(latent: bool) -> None:
    x = torch.randn(60, 2)
    y = torch.sin(2.0 * x[:, 0]) + 0.2 * torch.randn(60)
    model = Deep(latent)
    guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=init_to_sample)
    optim = ngvi.NGVB(guide, others=Adam({"lr": 0.01}))
    svi = SVI(model, guide, optim, ngvi.BatchedELBO(4))
    guide(x, y)
    before = ngvi.BatchedELBO(200).loss(model, guide, x, y)
    for _ in range(120):
        svi.step(x, y)
    after = ngvi.BatchedELBO(200).loss(model, guide, x, y)
    assert after < 0.5 * before
    residual = y - guide_mean(model, guide, x)
    assert residual.square().mean() < 0.5 * y.var()


def guide_mean(model: Any, guide: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        draws = [
            poutine.replay(model, trace=poutine.trace(guide).get_trace(x))(x) for _ in range(50)
        ]
    return torch.stack(draws).mean(0)


def test_features_without_values() -> None:
    layer = RandomFourierFeatures(3, 5, device="meta")
    assert layer(torch.empty(4, 3, device="meta")).shape == (4, 10)


@pytest.mark.parametrize("rows", [3, 5])
def test_one_latent_lengthscale_with_particles(rows: int) -> None:
    """Particles (S, 1, ...) and rows of x do not meet, whether S is the number of rows or not."""
    S = 5
    layer: Any = RandomFourierFeatures(2, 7, ard=False, seed=0)
    x, lengthscales = torch.randn(rows, 2), torch.rand(S) + 0.5
    layer.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0))
    # (S, 1), as a plate of particles makes it
    found = run(layer, x, lengthscale=lengthscales.unsqueeze(-1))
    for s, lengthscale in enumerate(lengthscales):
        torch.testing.assert_close(found[s], run(layer, x, lengthscale=lengthscale))


@pytest.mark.parametrize("plate", [True, False], ids=["plate", "event"])
@pytest.mark.parametrize("S", [4, 5])
@pytest.mark.parametrize("ard", [True, False])
def test_predictive_in_parallel_with_latent_hyperparameters(ard: bool, S: int, plate: bool) -> None:
    """Predictive leaves the dimension of the plate out where a value has one of its own."""

    class Process(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.features: Any = RandomFourierFeatures(2, 7, ard=ard, seed=0)
            prior = dist.LogNormal(torch.zeros(2 if ard else ()), 0.3).to_event(int(ard))
            self.features.lengthscale = PyroSample(prior)
            self.features.variance = PyroSample(dist.LogNormal(0.0, 1.0))
            self.layer = WalshHadamardLinear(14, 1, weight_sd=1.0)

        def forward(self, x: Tensor) -> Tensor:
            f = self.layer(self.features(x)).squeeze(-1)
            if plate:
                with pyro.plate("data", len(x)):
                    pyro.sample("y", dist.Normal(f, 0.1))
            else:
                pyro.sample("y", dist.Normal(f, 0.1).to_event(1))
            return f

    model, x = Process(), torch.randn(4, 2)
    shapes: Any = poutine.trace(model).get_trace(x).nodes
    latents = {
        name: shapes[name]["fn"].expand(torch.Size([S])).sample()
        for name in ("features.lengthscale", "features.variance", "layer.g", "layer.bias")
    }
    both = [
        Predictive(model, latents, return_sites=["_RETURN"], parallel=parallel)(x)["_RETURN"]
        for parallel in (False, True)
    ]
    torch.testing.assert_close(both[1].reshape(S, 4), both[0].reshape(S, 4))


def test_dtype_of_the_lengthscale_is_that_of_the_layer() -> None:
    layer = RandomFourierFeatures(
        2, 3, lengthscale=torch.ones(2, dtype=torch.float64), dtype=torch.float32
    )
    assert layer(torch.randn(4, 2, dtype=torch.float32)).dtype == torch.float32


def test_construction_under_a_meta_device() -> None:
    with torch.device("meta"):
        assert WalshHadamardLinear(4, 8).left.device.type == "meta"
