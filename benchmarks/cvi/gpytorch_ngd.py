"""GPyTorch's natural gradients for a Gaussian process with all inputs as inducing points.

``gpytorch.optim.NGD`` on a ``NaturalVariationalDistribution``, with kernel, jitter and quadrature
points as ours and nothing else trained.  GPyTorch's ``BernoulliLikelihood`` is a probit; ours here
takes any distribution given f.  GPyTorch is imported on first use: it comes with the extra ``bench``.

Two strategies: ``VariationalStrategy``, the default, whitened, with the jitter that it is given; and
``UnwhitenedVariationalStrategy``, whose steps cost less, but which adds 1e-3 to the diagonal of the
prior whatever it is given: another model.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["UNWHITENED_JITTER", "Process", "have_gpytorch"]

UNWHITENED_JITTER = 1e-3


def have_gpytorch() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("gpytorch") is not None


class Process:
    """The variational process at inputs X (N, D); ``step`` is one of NGD, ``posterior`` is q(f)."""

    def __init__(
        self,
        X: Tensor,
        y: Tensor,
        given: Callable[[Tensor], Any],
        length: float,
        variance: float,
        jitter: float,
        points: int,
        lr: float,
        whiten: bool = True,
    ) -> None:
        gpytorch: Any = importlib.import_module("gpytorch")
        quadrature: Any = importlib.import_module("gpytorch.utils.quadrature")
        likelihoods: Any = importlib.import_module("gpytorch.likelihoods.likelihood")
        kind = gpytorch.variational
        strategy_type = kind.VariationalStrategy if whiten else kind.UnwhitenedVariationalStrategy

        class Likelihood(likelihoods._OneDimensionalLikelihood):
            def __init__(self) -> None:
                super().__init__()
                self.quadrature = quadrature.GaussHermiteQuadrature1D(points)

            def forward(self, f: Tensor, *args: Any, **kwargs: Any) -> Any:
                return given(f)

        class Model(gpytorch.models.ApproximateGP):
            def __init__(self) -> None:
                # q begins at the prior, as ours does
                q = kind.NaturalVariationalDistribution(len(X), mean_init_std=0.0)
                super().__init__(
                    strategy_type(self, X, q, learn_inducing_locations=False, jitter_val=jitter)
                )
                self.mean = gpytorch.means.ZeroMean()
                self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
                self.kernel.outputscale = variance
                self.kernel.base_kernel.lengthscale = length
                for p in self.kernel.parameters():
                    p.requires_grad_(False)

            def forward(self, x: Tensor) -> Any:
                return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

        self.X, self.y, self.whiten = X, y, whiten
        self.model = Model()
        self.model.train()
        self.bound = gpytorch.mlls.VariationalELBO(Likelihood(), self.model, len(X))
        self.ngd = gpytorch.optim.NGD(self.model.variational_parameters(), len(X), lr)

    def step(self) -> None:
        self.ngd.zero_grad()
        (-self.bound(self.model(self.X), self.y)).backward()
        self.ngd.step()

    def posterior(self, root: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance of f at the inputs, ``root`` (N, N) that of the prior's covariance."""
        with torch.no_grad():
            q = self.model.variational_strategy._variational_distribution()
            mean, covariance = q.mean, q.covariance_matrix
            if not self.whiten:
                return mean, covariance
            return root @ mean, root @ covariance @ root.mT
