"""Guides that have no scores are refused in a sentence that says which site and what to do."""

import functools
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import transforms
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormalizingFlow
from torch import Tensor, nn

from pyro_ngvi import IFVB
from pyro_ngvi.fisher.scores import GuideScores
from pyro_ngvi.fisher.watch import remember_arguments


def model() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.sample("b", dist.Normal(a, torch.ones(2)).to_event(1))


def with_data(x: Tensor, y: Tensor | None = None) -> None:
    pyro.sample("z", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 1.0))


def test_function_with_arguments_that_are_not_remembered() -> None:
    with pytest.raises(ValueError, match=r"'with_data' takes arguments.*remember_arguments"):
        GuideScores(with_data)
    for takes in (lambda x=1: None, lambda *args: None, lambda **kwargs: None):
        with pytest.raises(ValueError, match=r"remember_arguments"):
            GuideScores(takes)  # SVI may call it with some, and q depends on them
    GuideScores(lambda: None)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(3, 2), nn.Linear(1, 3)

    def model(self, x: Tensor) -> None:
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(len(x), 1), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.decoder(z), 1.0).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", len(x)):
            loc, log_scale = self.encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))

    def forward(self, x: Tensor) -> None:
        self.guide(x)


@pytest.mark.filterwarnings("ignore:IFVB leaves what is not natural:UserWarning")
def test_networks_over_data_say_how_to_pass_it_and_then_train() -> None:
    """By the function that remembers, and by the module itself, which needs no help."""
    x = torch.randn(30, 3)
    with pytest.raises(ValueError, match=r"remember_arguments") as error:
        IFVB(VAE().guide)
    assert len(str(error.value)) <= 240
    losses = []
    for wrap in (lambda vae: remember_arguments(vae.guide), lambda vae: vae):
        pyro.clear_param_store()
        vae = VAE()
        guide: Any = wrap(vae)
        before = vae.encoder.weight.detach().clone()
        svi = SVI(vae.model, guide, IFVB(guide), Trace_ELBO())
        pyro.set_rng_seed(0)
        losses.append([svi.step(x[i : i + 10 + i % 2]) for i in range(10)])
        assert not torch.equal(vae.encoder.weight, before)
    assert losses[0] == losses[1]


def test_remembered_function_that_svi_never_called() -> None:
    scores = GuideScores(remember_arguments(with_data))
    with pytest.raises(ValueError, match=r"'with_data' was not called yet.*Give SVI"):
        scores.draw(1)


@pytest.mark.parametrize("n", [1, 5])
def test_density_without_inverse_names_the_site(n: int) -> None:
    flow = transforms.planar(2)

    def guide() -> None:
        pyro.module("flow", flow)
        base = dist.Normal(torch.zeros(2), 1.0).to_event(1)
        pyro.sample("z", dist.TransformedDistribution(base, [flow]))

    with pytest.raises(ValueError, match=r"density of the site 'z'.*TransformedDistribution"):
        GuideScores(guide).draw(n)


def test_joint_guide_without_inverse() -> None:
    guide = AutoNormalizingFlow(model, functools.partial(transforms.iterated, 1, transforms.planar))
    guide()
    with pytest.raises(ValueError, match=r"joint latent vector.*no scores"):
        GuideScores(guide).dependent()


@pytest.mark.parametrize("n", [1, 5])
def test_a_guide_that_is_wrong_says_so_itself(n: int) -> None:
    """What vmap refuses is tried plainly, where the guide's own error comes out."""

    def guide() -> None:
        pyro.sample("z", dist.Normal(pyro.param("loc", torch.zeros(2)) @ torch.ones(3), 1.0))

    with pytest.raises(RuntimeError, match="size"):
        GuideScores(guide).draw(n)
