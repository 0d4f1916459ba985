"""The log joint density of a problem as a function of the unconstrained latent vector.

Independent of the package, so that tests and benchmarks can judge the package by it.
"""

from collections.abc import Mapping
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to

from .problem import Problem


class LogJoint:
    """theta (S, d) -> log p(y, z(theta)) + log |dz/dtheta|, shape (S,), in nats.

    Latent sites lie in theta in the order in which the model samples them, as in Pyro's
    autoguides. ``chunk`` bounds the number of draws that the model sees at once.
    """

    def __init__(self, problem: Problem, chunk: int = 1024) -> None:
        self._problem, self._chunk = problem, chunk
        trace = poutine.trace(problem.model).get_trace(*problem.args)
        self.transforms, self.shapes = {}, {}
        site: Any
        for name, site in trace.iter_stochastic_nodes():
            if site_is_subsample(site):
                continue
            transform = biject_to(site["fn"].support)
            self.transforms[name] = transform
            self.shapes[name] = transform.inv(site["value"]).shape
        self.dim = sum(shape.numel() for shape in self.shapes.values())

    def constrain(self, theta: Tensor) -> dict[str, Tensor]:
        """Latent vector (..., d) to the constrained value of every site."""
        parts = theta.split([shape.numel() for shape in self.shapes.values()], dim=-1)
        return {
            name: self.transforms[name](part.reshape(theta.shape[:-1] + self.shapes[name]))
            for name, part in zip(self.shapes, parts, strict=True)
        }

    def unconstrain(self, values: Mapping[str, Tensor]) -> Tensor:
        """Constrained values with leading batch dimensions to latent vectors (..., d)."""
        parts = []
        for name, shape in self.shapes.items():
            free = self.transforms[name].inv(values[name])
            parts.append(free.flatten(free.dim() - len(shape)) if shape else free.unsqueeze(-1))
        return torch.cat(parts, dim=-1)

    def single(self, theta: Tensor) -> Tensor:
        """The log joint density at one latent vector (d,)."""
        values = self.constrain(theta)
        free = theta.split([shape.numel() for shape in self.shapes.values()])
        jacobian = torch.zeros_like(theta[0])
        for (name, shape), part in zip(self.shapes.items(), free, strict=True):
            log_det = self.transforms[name].log_abs_det_jacobian(part.reshape(shape), values[name])
            jacobian = jacobian + log_det.sum()
        model = poutine.condition(self._problem.model, data=values)
        # Validation looks at values, which vmap does not allow.
        with pyro.validation_enabled(False):
            trace = poutine.trace(model).get_trace(*self._problem.args)
            return trace.log_prob_sum() + jacobian

    def __call__(self, theta: Tensor) -> Tensor:
        return torch.func.vmap(self.single, chunk_size=self._chunk)(theta)

    def gradient(self, theta: Tensor) -> Tensor:
        """Gradients (S, d) of the log joint density."""
        return torch.func.vmap(torch.func.grad(self.single), chunk_size=self._chunk)(theta)
