"""Kernels, data and models of Gaussian processes for the tests."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]

import pyro_ngvi as ngvi
from pyro_ngvi.distributions import GaussianProcess

NOISE, LEVEL = 0.3, 0.2


class Matern(torch.nn.Module):
    """Matern-3/2 with parameters; exact on its diagonal."""

    def __init__(self, variance=1.3, lengthscale=0.7, learn=False):
        super().__init__()
        self.log_variance = torch.nn.Parameter(torch.tensor(math.log(variance)), learn)
        self.log_lengthscale = torch.nn.Parameter(torch.tensor(math.log(lengthscale)), learn)

    def forward(self, X, Z=None, diag=False):
        variance = self.log_variance.exp()
        if diag:
            return variance.expand(len(X))
        Z = X if Z is None else Z
        r = math.sqrt(3) * (X[:, None] - Z).abs() / self.log_lengthscale.exp()
        return variance * (1 + r) * (-r).exp()


def data(N=40, binary=False):
    generator = torch.Generator().manual_seed(1)
    X = 5 * torch.rand(N, generator=generator)
    y = (2 * X).sin() + NOISE * torch.randn(N, generator=generator)
    return X, (y > 0).double() if binary else y


def make_model(kernel, jitter=1e-4, binary=False, learn=False):
    """f at the inputs of the data or of a minibatch of them."""

    def model(X, y=None, batch=None):
        if learn:
            pyro.module("kernel", kernel)
        plate = pyro.plate("data", len(X), subsample_size=batch)
        f = pyro.sample("f", GaussianProcess(kernel, X[plate.indices], mean=LEVEL, jitter=jitter))
        with plate:
            y = None if y is None else y[plate.indices]
            pyro.sample("y", dist.Bernoulli(logits=f) if binary else dist.Normal(f, NOISE), obs=y)

    return model


def trained(model, X, y, steps, inducing=None, others=None, **how):
    guide = ngvi.AutoSites(model, inducing=inducing)
    svi = SVI(model, guide, ngvi.CVI(guide, others=others), ngvi.SitesELBO())
    return guide, [_number(svi.step(X, y, **how)) for _ in range(steps)]


def gradients_are_slopes(loss, parameters, *args):
    """Gradients that the loss leaves in parameters, against differences of its values."""
    for p in parameters:
        p.grad = None
    loss.loss_and_grads(*args)
    for p in parameters:
        assert p.grad is not None
        for i in range(p.numel()):
            at, ends = p.detach().clone(), []
            for step in (1e-5, -1e-5):
                p.data.reshape(-1)[i] = at.reshape(-1)[i] + step
                ends.append(loss.loss(*args))
            p.data.copy_(at)
            slope = (ends[0] - ends[1]) / 2e-5
            assert abs(float(p.grad.reshape(-1)[i]) - slope) < 1e-6 * (1 + abs(slope))


def minibatches_agree_with_all_data(model, Z, X, y, batch):
    """A list of guides, "scale" by mean field: the losses, within 4 of their standard errors.

    Gives a trace of the guides under a minibatch.
    """
    guide = AutoGuideList(model)
    guide.append(ngvi.AutoSites(pyro.poutine.block(model, hide=["scale"]), inducing=Z))
    guide.append(ngvi.AutoMeanFieldNormal(pyro.poutine.block(model, expose=["scale"])))
    optimizer = ngvi.CVI(guide, lr=0.5, others=Adam({"lr": 0.01}))
    loss = ngvi.SitesELBO()
    svi = SVI(model, guide, optimizer, loss)
    for _ in range(8):
        svi.step(X, y)
    few = torch.tensor([loss.loss(model, guide, X, y, batch=batch) for _ in range(60)])
    every = torch.tensor([loss.loss(model, guide, X, y) for _ in range(30)])
    error = (few.var() / 60 + every.var() / 30).sqrt()
    assert abs(few.mean() - every.mean()) < 4 * error
    trace: Any = pyro.poutine.trace(guide).get_trace(X, y, batch=batch)
    return trace


def _number(loss: Any) -> float:
    return float(loss)
