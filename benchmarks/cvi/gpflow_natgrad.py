"""GPflow's natural gradients for a Gaussian process, ``gpflow.models.VGP``.

``gpflow.optimizers.NaturalGradient`` with gamma 1 on the whitened q(f) = N(L m, L S S' L') of all N
values, K = L L' with the jitter given; the logit by 32 Gauss-Hermite points, the Poisson in its own
closed form; kernel fixed.  Two ways to step: ``compiled``, the step as one ``tf.function``, whose first
call traces it, and as it comes, eagerly.

GPflow needs TensorFlow and NumPy below 2, so no extra of this package brings it: it is compared where
it is installed, and left out elsewhere.  Imported on first use.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["NaturalGradientVGP", "have_gpflow"]


def have_gpflow() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("gpflow") is not None


def _modules() -> tuple[Any, Any]:
    """TensorFlow with one thread, and GPflow in double precision."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    first = "tensorflow" not in sys.modules
    tf: Any = importlib.import_module("tensorflow")
    if first:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    gpflow: Any = importlib.import_module("gpflow")
    gpflow.config.set_default_float(np.float64)
    return tf, gpflow


class NaturalGradientVGP:
    """The variational process at inputs X (N, D); ``step`` is one of NaturalGradient.

    ``likelihood`` is "bernoulli", with a logit, or "poisson", with a log link.
    """

    def __init__(
        self,
        X: Tensor,
        y: Tensor,
        likelihood: str,
        length: float,
        variance: float,
        jitter: float,
        points: int,
        compiled: bool,
    ) -> None:
        tf, gpflow = _modules()
        gpflow.config.set_default_jitter(jitter)
        kernel = gpflow.kernels.SquaredExponential(variance=variance, lengthscales=length)
        gpflow.set_trainable(kernel, False)
        if likelihood == "poisson":
            given = gpflow.likelihoods.Poisson()
        else:
            given = gpflow.likelihoods.Bernoulli(invlink=tf.sigmoid)
            given.quadrature = gpflow.quadrature.NDiagGHQuadrature(1, points)
        data = X.numpy(), y.numpy()[:, None]
        self.model = gpflow.models.VGP(data, kernel=kernel, likelihood=given)
        optimizer = gpflow.optimizers.NaturalGradient(gamma=1.0)
        variables = [(self.model.q_mu, self.model.q_sqrt)]

        def step() -> None:
            optimizer.minimize(self.model.training_loss, variables)

        self.step = tf.function(step) if compiled else step

    def posterior(self, root: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance of f at the inputs, ``root`` (N, N) that of the prior's covariance."""
        mean = torch.as_tensor(np.array(self.model.q_mu)[:, 0])
        half = root @ torch.as_tensor(np.array(self.model.q_sqrt)[0])
        return root @ mean, half @ half.mT
