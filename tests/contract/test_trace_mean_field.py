"""TraceMeanField_ELBO on our guides: the log-Jacobians of their sites count, as in Trace_ELBO."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch import Tensor

from pyro_ngvi import AutoProperWalshHadamard, AutoWalshHadamard
from tests.contract.registry import GUIDES, called, constrained, perturbed, plates


def weights(x: Tensor, y: Tensor) -> None:
    W = pyro.sample("W", dist.Normal(torch.zeros(5, 3), 1.0).to_event(2))
    sd = pyro.sample("sd", dist.HalfNormal(1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ W.mT, sd).to_event(1), obs=y)


def assert_same(model: Any, guide: Any, *args: Any) -> None:
    losses = []
    for elbo in (Trace_ELBO(3), TraceMeanField_ELBO(3)):
        torch.manual_seed(2)
        loss: Any = elbo.differentiable_loss(model, guide, *args)
        parameters = list(guide.parameters())
        losses.append((loss.detach(), torch.autograd.grad(loss, parameters)))
    torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.parametrize("model", [constrained, plates])
@pytest.mark.parametrize("kind", GUIDES)
def test_the_loss_of_a_draw_is_that_of_trace_elbo(kind: str, model: Any) -> None:
    assert_same(model, perturbed(called(kind, model)))


@pytest.mark.parametrize("kind", [AutoWalshHadamard, AutoProperWalshHadamard])
def test_the_density_of_a_site_made_of_g_counts(kind: Any) -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 5)
    guide = kind(weights)
    guide(x, y)
    assert_same(weights, perturbed(guide), x, y)
