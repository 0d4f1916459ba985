"""Gaussians with a diagonal covariance."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg.cholesky import SMALLEST
from .base import NormalFamily, Tensors, clamp_exponent

#: 1 + a + a^2 / 2 stands for exp(a) near 0 only, and below -1 it rises again
LARGEST = 1.0


class MeanFieldNormal(NormalFamily):
    """Gaussians with a diagonal covariance, q(z) = N(z; mu, diag(sigma^2)).

    Stored: ``loc`` = mu (d,), ``log_scale`` = log sigma (d,).  In the local frame, mu + sigma t
    and log sigma + m, with Euclidean gradients g, Fisher matrix and natural gradient are

        F = diag(1, 2),   t = sigma g_mu,   m = g_logsigma / 2.

    Natural coordinates (Khan & Nielsen 2018, eq. 14, diagonal form), with precision p = 1 / sigma^2:

        p <- p (1 + 2 b m),   mu <- mu - b g_mu / p_new,     b halved until p_new >= p / 4;

    "improved" adds the second-order term of Lin, Schmidt & Khan (2020), p (1 + a + a^2 / 2) with
    a = 2 b m cut to [-1, 1], so that a step multiplies a precision by 1/2 to 5/2.

    Not for strongly correlated posteriors: the fitted sds are those of conditionals, far too small.

    Example:
        >>> import torch
        >>> family = MeanFieldNormal()
        >>> q = family.init(torch.zeros(3), scale=0.5)
        >>> family.stddev(q)
        tensor([0.5000, 0.5000, 0.5000])
    """

    names = ("loc", "log_scale")
    coordinates = ("local", "natural", "improved")
    orthogonal_frame = True
    curvature_form = "diagonal"

    def init(self, loc: Tensor, scale: float | Tensor) -> Tensors:
        return {"loc": loc.clone(), "log_scale": (torch.ones_like(loc) * scale).log()}

    def matched(self, loc: Tensor, precision: Tensor) -> Tensors:
        """The member with the least KL(q || N(loc, precision^-1)), of ``precision`` (d, d)."""
        return {"loc": loc.clone(), "log_scale": -0.5 * precision.diagonal().log()}

    def rsample(self, params: Tensors, noise: Tensor) -> Tensor:
        return params["loc"] + params["log_scale"].exp() * noise

    def log_det(self, params: Tensors) -> Tensor:
        return params["log_scale"].sum(-1)

    def transport(self, params: Tensors, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self.rsample(params, noise), self.log_det(params).expand(noise.shape[:-1])

    def noise_of(self, params: Tensors, z: Tensor) -> Tensor:
        return (z - params["loc"]) * (-params["log_scale"]).exp()

    def score(self, params: Tensors, z: Tensor) -> Tensors:
        w = self.noise_of(params, z)
        return {"loc": w * (-params["log_scale"]).exp(), "log_scale": w.square() - 1.0}

    def kl(self, params: Tensors, other: Tensors) -> Tensor:
        log_ratio = params["log_scale"] - other["log_scale"]
        w = self.noise_of(other, params["loc"])
        return 0.5 * ((2.0 * log_ratio).exp() - 1.0 - 2.0 * log_ratio + w.square()).sum()

    def scale_tril(self, params: Tensors) -> Tensor:
        return torch.diag(self.stddev(params))

    def stddev(self, params: Tensors) -> Tensor:
        return params["log_scale"].exp()

    def frame(self, params: Tensors) -> Tensors:
        return {"loc": params["log_scale"].exp()}

    def dilation(self, params: Tensors) -> Tensors:
        return {"log_scale": torch.ones_like(params["log_scale"])}

    def pull_curvature(self, params: Tensors, gradient: Tensors, curvature: Tensors) -> Tensors:
        h = curvature["dense"].diagonal() if "dense" in curvature else curvature["diagonal"]
        return gradient | {"log_scale": (2.0 * params["log_scale"]).exp_().mul_(h).sub_(1.0)}

    def covariance_product(
        self, params: Tensors, v: Tensor, damping: Tensor | float = 0.0
    ) -> Tensor:
        return v / ((-2.0 * params["log_scale"]).exp() + damping)

    def precision_step(
        self, params: Tensors, grads: Tensors, curvature: Tensors, rate: Tensor, safe: bool
    ) -> Tensors:
        # the same in few passes over memory, which is what a step costs with a network's weights
        log_scale = params["log_scale"]
        if curvature:
            change = self.pull_curvature(params, {}, curvature)["log_scale"].mul_(rate)
        else:
            change = rate * grads["log_scale"]
        if safe:
            change = change.clamp_(-LARGEST, LARGEST)
            change = torch.addcmul(change, change, change, value=0.5)
        else:
            change = change.clamp_min_(SMALLEST - 1.0)
        log_ratio = change.log1p_()
        new = torch.add(log_scale, log_ratio, alpha=-0.5)
        return {"loc": params["loc"], "log_scale": clamp_exponent(new)}

    def fisher_product(self, params: Tensors, tangent: Tensors) -> Tensors:
        return {"loc": tangent["loc"], "log_scale": 2.0 * tangent["log_scale"]}

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        return {"loc": gradient["loc"], "log_scale": 0.5 * gradient["log_scale"]}

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        loc, log_scale = params["loc"], params["log_scale"]
        change = step * tangent["log_scale"]
        if coordinates == "local":
            return {
                "loc": loc + step * log_scale.exp() * tangent["loc"],
                "log_scale": clamp_exponent(log_scale + change),
            }
        if coordinates == "natural":
            # p_new / p = 1 - 2 change; halve the step until every ratio is at least 1/4
            room = 1.0 - SMALLEST
            worst = (2.0 * change).amax().clamp_min(room)
            shrink = torch.exp2(-torch.log2(worst / room).ceil())
            step, new = shrink * step, log_scale - 0.5 * torch.log1p(-2.0 * shrink * change)
        else:
            a = (-2.0 * change).clamp(-LARGEST, LARGEST)
            new = clamp_exponent(log_scale - 0.5 * torch.log1p(a + 0.5 * a.square()))
        velocity = (2.0 * new - log_scale).exp() * tangent["loc"]
        return {"loc": loc + step * velocity, "log_scale": new}
