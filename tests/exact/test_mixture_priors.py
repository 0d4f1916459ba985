"""Latent sites whose prior is a MixtureSameFamily: spikes and slabs."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import biject_to, transform_to

import pyro_ngvi as ngvi


def spikes(d: int) -> Any:
    kinds = dist.Categorical(torch.tensor([0.4, 0.6]).expand(d, 2))
    return dist.MixtureSameFamily(kinds, dist.Normal(torch.zeros(d, 2), torch.tensor([0.4, 1.5])))


def test_the_best_gaussian_is_found() -> None:
    """Where E_q g = 0 and -E_q g' = 1 / variance, g the slope of log p; by a grid."""
    y, tol = torch.tensor([0.6, -1.2]), 0.001
    grid = torch.linspace(-8.0, 8.0, 4001).unsqueeze(-1).expand(-1, 2).clone().requires_grad_()

    def model() -> None:
        w: Any = pyro.sample("w", spikes(2).to_event(1))
        pyro.sample("y", dist.Normal(w, 0.5).to_event(1), obs=y)

    fit = ngvi.fit(model, guide="AutoFullRankNormal", tol=tol, seed=0, progress=False)
    posterior: Any = fit.guide.get_posterior()
    mean, variance = posterior.mean.detach(), posterior.variance.detach()
    log_p = spikes(2).log_prob(grid) + dist.Normal(y, 0.5).log_prob(grid)
    slope = torch.autograd.grad(log_p.sum(), grid, create_graph=True)[0]
    curvature = torch.autograd.grad(slope.sum(), grid)[0]
    q = (-0.5 * (grid.detach() - mean).square() / variance).softmax(0)
    bound = 2.0 * (2.0 * tol) ** 0.5  # twice what tol nats leave
    assert ((q * slope).sum(0).detach().abs() * variance.sqrt() < bound).all()
    assert ((-(q * curvature).sum(0) * variance).log().abs() < 2.0 * bound).all()


def test_the_support_is_that_of_the_components() -> None:
    kinds = dist.Categorical(torch.tensor([0.5, 0.5]))
    positive = dist.MixtureSameFamily(kinds, dist.Gamma(torch.tensor([2.0, 5.0]), 1.0))
    x = torch.tensor([-3.0, 0.0, 2.0])
    for registry in (biject_to, transform_to):
        assert torch.equal(registry(positive.support)(x), x.exp())
    vectors = dist.MixtureSameFamily(kinds, dist.Normal(torch.zeros(2, 3), 1.0).to_event(1))
    assert torch.equal(biject_to(vectors.support)(x), x)
    with pytest.raises(NotImplementedError, match="bounds of their own") as error:
        biject_to(
            dist.MixtureSameFamily(kinds, dist.Uniform(0.0, torch.tensor([1.0, 2.0]))).support
        )
    assert len(str(error.value)) <= 240
