"""Sparse Gaussian processes beside the random features of figure 2: GPyTorch's, and ours.

    f ~ GP(level, variance exp(-|x - x'|^2 / 2, ARD)),   y_n ~ N(f_n, noise^2),   u = f(Z), Z (M, D).

Both learn D length-scales, variance, level, noise and Z, from the same values (GPyTorch's) and from
data points as Z, and have the same M: the largest for which M D + M (M + 1) numbers, Z and q(u) as
GPyTorch keeps it, and D + 3 hyperparameters fit.  M (M + 3) / 2 numbers of q(u) are free, and counted
for ours, which keeps none of them: its q(u) follows from a site for every datum, and for Gaussian noise
from the hyperparameters alone (Titsias 2009).

GPyTorch's takes minibatches by Adam 0.01.  Ours learns the prior with all data in every step, as
``AutoSites`` asks for, so there is no noise in its gradients; Adam's rate falls from 0.1 to 0.001.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.contrib.gp.kernels import RBF
from pyro.infer import SVI
from pyro.nn import PyroModule, PyroParam
from pyro.optim import ClippedAdam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor, nn
from torch.distributions import constraints

import pyro_ngvi as ngvi

from ..blr_papers.common import train

__all__ = ["Fit", "gpytorch_process", "inducing_points", "sites_process"]

#: softplus(0), where GPyTorch begins: length-scales, variance and variance of the noise
BEGIN = math.log(2.0)
#: variance of the white noise that float32 needs at every input; GPyTorch's adds as much to k(Z, Z)
JITTER = 1e-4
#: of the quadrature: exact for Gaussian noise
POINTS = 3
#: rate of Adam at the first step and at the last
RATES = 0.1, 0.001


class Fit(NamedTuple):
    """RMSE on the test part, number of parameters, seconds a step, steps."""

    rmse: float
    parameters: int
    seconds: float
    steps: int


def inducing_points(parameters: int, D: int) -> int:
    """The largest M for which GPyTorch's process has at most so many parameters, at least 1."""
    M = 1
    while (M + 1) * (D + 1) + (M + 1) ** 2 + D + 3 <= parameters:
        M += 1
    return M


def gpytorch_process(data: Sequence[Tensor], parameters: int, batch: int, epochs: int) -> Fit:
    gpytorch: Any = importlib.import_module("gpytorch")  # comes with the extra `bench`

    X, y, X_test, y_test = data
    D = X.shape[1]
    M = inducing_points(parameters, D)

    class Sparse(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            q = gpytorch.variational.CholeskyVariationalDistribution(M)
            strategy = gpytorch.variational.VariationalStrategy(
                self, X[torch.randperm(len(X))[:M]], q, learn_inducing_locations=True
            )
            super().__init__(strategy)
            self.mean = gpytorch.means.ConstantMean()
            kernel = gpytorch.kernels.RBFKernel(ard_num_dims=D)
            self.kernel = gpytorch.kernels.ScaleKernel(kernel)

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    model, likelihood = Sparse(), gpytorch.likelihoods.GaussianLikelihood()
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, len(X))
    trained = [*model.parameters(), *likelihood.parameters()]
    adam = torch.optim.Adam(trained, lr=0.01)

    class Steps:
        def step(self, x: Tensor, y: Tensor) -> None:
            adam.zero_grad()
            (-bound(model(x), y)).backward()
            adam.step()

    loop: Any = Steps()
    seconds = train(loop, X, y, batch, epochs)
    model.eval()
    with torch.no_grad():
        mean = torch.cat([model(part).mean for part in X_test.split(2_000)])
    rmse = float((mean - y_test).square().mean().sqrt())
    return Fit(rmse, sum(p.numel() for p in trained), seconds, epochs * math.ceil(len(X) / batch))


class Process(PyroModule):
    """The model of ours."""

    noise: Any
    level: Any

    def __init__(self, D: int) -> None:
        super().__init__()
        self.kernel = RBF(D, torch.tensor(BEGIN), torch.full((D,), BEGIN))
        self.level = PyroParam(torch.tensor(0.0))
        self.noise = PyroParam(torch.tensor(math.sqrt(BEGIN)), constraints.positive)

    def forward(self, x: Tensor, y: Tensor | None = None) -> None:
        f = pyro.sample("f", ngvi.distributions.GaussianProcess(self.kernel, x, self.level, JITTER))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, self.noise), obs=y)


def sites_svi(X: Tensor, M: int, steps: int) -> tuple[Process, Any, SVI]:
    """Model, guide and SVI, from M of the inputs."""
    model = Process(X.shape[1])
    guide = ngvi.AutoSites(model, inducing=nn.Parameter(X[torch.randperm(len(X))[:M]]))
    fall = (RATES[1] / RATES[0]) ** (1.0 / steps)
    adam = ClippedAdam({"lr": RATES[0], "lrd": fall, "clip_norm": math.inf})
    loss = ngvi.SitesELBO(num_points=POINTS)
    return model, guide, SVI(model, guide, ngvi.CVI(guide, others=adam), loss)


def sites_process(data: Sequence[Tensor], parameters: int, steps: int) -> Fit:
    """Our sparse process; the first step includes the search for the structure."""
    X, y, X_test, y_test = data
    M = inducing_points(parameters, X.shape[1])
    pyro.clear_param_store()
    start = time.perf_counter()
    model, guide, svi = sites_svi(X, M, steps)
    for _ in range(steps):
        svi.step(X, y)
    seconds = (time.perf_counter() - start) / steps
    mean, _ = guide.predict(X_test)["f"]
    rmse = float((mean - y_test).square().mean().sqrt())
    learned = sum(p.numel() for p in model.parameters()) + guide.inducing.numel()
    return Fit(rmse, learned + M * (M + 3) // 2, seconds, steps)
