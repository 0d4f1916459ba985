r"""Mixtures of Gaussians, q(z) = sum_k pi_k N(z; mu_k, Sigma_k).

The weights cancel in the natural gradient, that of each component's bound
(Lin, Khan & Schmidt 2019, arXiv:1906.02914; Arenz et al. 2023, arXiv:2209.11533),

    R_k = E_k[log p - log q],   F_k^-1 grad_k R_k,   R_k - sum_j pi_j R_j  of log pi_k,

E_k over N(mu_k, Sigma_k), with log q differentiated by z alone.

An ELBO draws from *every* component, and weighs those of component k by pi_k.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ..linalg.host import fixed_normal
from ..linalg.noise import even
from .base import Family, NormalFamily, Tensors, with_backward

#: the least log pi_k, and by how many nats a step changes it at most
LEAST, LARGEST = math.log(1e-6), 1.0
#: halvings of the interval that holds a quantile
HALVINGS = 60


def _refuse(*_: Any) -> None:
    raise RuntimeError(
        "A mixture learns its weights from pyro_ngvi.BatchedELBO, which draws from every component; "
        "this loss gives them no gradient. Pass SVI loss=pyro_ngvi.BatchedELBO(8)."
    )


def quantiles_of_normals(weights: Tensor, loc: Tensor, sd: Tensor, levels: Tensor) -> Tensor:
    """Quantiles (n, ...) of mixtures of K normals, loc and sd (K, ...), by bisection."""
    # between those of the components, (n, K, ...)
    ends = loc + sd * torch.special.ndtri(levels).reshape(-1, *[1] * loc.dim())
    low, high, levels = ends.amin(1), ends.amax(1), levels.reshape(-1, *[1] * (loc.dim() - 1))
    for _ in range(HALVINGS if len(loc) > 1 else 0):
        middle = 0.5 * (low + high)
        below = torch.special.ndtr((middle.unsqueeze(1) - loc) / sd)
        less = torch.einsum("k,nk...->n...", weights, below) < levels
        low, high = torch.where(less, middle, low), torch.where(less, high, middle)
    return high


_without_gradient = with_backward(lambda z: z.clone(), _refuse)


def each(function: Callable[..., Any], *stacked: Any) -> Any:
    """``function`` of the tensors of every component, in one call."""
    return vmap(function)(*stacked)


def by_component(factors: Tensor, tensors: Tensors) -> Tensors:
    """``tensors`` (K, ...), each times its own of the ``factors`` (K,)."""
    return {n: factors.reshape(-1, *[1] * (v.dim() - 1)) * v for n, v in tensors.items()}


class Weights(Family):
    """Probabilities of K classes by ``logits`` = log pi, a family over unit vectors z."""

    names = ("logits",)
    newton_like = True

    def init(self, loc: Tensor, scale: float) -> Tensors:
        return {"logits": torch.full_like(loc, -math.log(len(loc)))}

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        return (z * params["logits"].log_softmax(-1)).sum(-1)

    def fisher_product(self, params: Tensors, tangent: Tensors) -> Tensors:
        pi, u = params["logits"].softmax(-1), tangent["logits"]
        return {"logits": pi * (u - (pi * u).sum())}

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        g = gradient["logits"]  # has sum 0, and u the sum_k pi_k u_k = 0
        return {"logits": g / params["logits"].softmax(-1) - g.sum()}

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        change = (step * tangent["logits"]).clamp(-LARGEST, LARGEST)
        return {"logits": (params["logits"] + change).log_softmax(-1).clamp_min(LEAST)}


def _stacked(name: str) -> Any:
    """The method ``name`` of every component, of what the parameters and one further dict have."""

    def method(self: MixtureNormal, params: Tensors, tensors: Tensors) -> Tensors:
        own = each(getattr(self.component, name), self.own(params), self.own(tensors))
        return {"logits": tensors["logits"]} | own

    method.__doc__ = getattr(Family, name).__doc__
    return method


class MixtureNormal(Family):
    """Mixtures of Gaussians, q(z) = sum_k pi_k N(z; mu_k, Sigma_k).

    Stored: ``logits`` = log pi (K,), and the tensors (K, ...) of the Gaussians, under their own names.
    Local frame: that of each Gaussian, and log pi.  There the Fisher matrix of q(k, z), as if the
    component were seen, is blocks(pi_k F_k) and diag(pi) - pi pi': no less than that of q(z), and the
    same where components do not overlap.  Gradients go by :meth:`strata`: those of draws raise.

    Args:
        component: the family of each Gaussian.
        num_components: K, at least 1.

    Example:
        >>> import torch
        >>> from pyro_ngvi.families import FullRankNormal
        >>> family = MixtureNormal(FullRankNormal(), 3)
        >>> q = family.init(torch.zeros(2), scale=1.0)  # half of the variance is between components
        >>> {name: tuple(v.shape) for name, v in q.items()}
        {'logits': (3,), 'loc': (3, 2), 'scale_tril': (3, 2, 2)}
        >>> family.stddev(q)
        tensor([1., 1.])
    """

    push, pull = _stacked("push"), _stacked("pull")

    def __init__(self, component: NormalFamily, num_components: int) -> None:
        self.component, self.num_components = component, num_components
        self.weights, self.names = Weights(), ("logits", *component.names)

    def own(self, tensors: Tensors) -> Tensors:
        """The tensors of the components, without the weights."""
        return {name: tensors[name] for name in self.component.names}

    def probs(self, params: Tensors) -> Tensor:
        """The weights pi (K,), which sum to 1."""
        return params["logits"].softmax(-1)

    def init(self, loc: Tensor, scale: float) -> Tensors:
        K, away = self.num_components, torch.zeros_like(loc).expand(self.num_components, -1)
        if K > 1:  # half of the variance is between components
            scale, noise = scale / 2.0**0.5, fixed_normal(K, len(loc), seed=0)
            away = ((noise - noise.mean(0)) / noise.std(0, correction=0)).to(loc) * scale
        own = each(lambda at: self.component.init(at, scale), loc + away)
        return self.weights.init(away[:, 0], scale) | own

    def dim(self, params: Tensors) -> int:
        return params["loc"].shape[-1]

    def component_log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        """log N(z; mu_k, Sigma_k), (K, ...), of points z (..., d)."""
        return each(lambda own: self.component.log_prob(own, z), self.own(params))

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        log_n = self.component_log_prob(params, z)
        log_pi = params["logits"].log_softmax(-1)
        return (log_n + log_pi.reshape(-1, *[1] * (log_n.dim() - 1))).logsumexp(0)

    def strata(self, params: Tensors, shape: torch.Size, mean_zero: bool) -> Tensor:
        """Draws (K, *shape, d) of each component; ``mean_zero`` as in :meth:`centred_draw`."""
        d, loc = self.dim(params), params["loc"]
        noise = torch.randn((*shape, self.num_components * d), dtype=loc.dtype, device=loc.device)
        noise = (even(noise) if mean_zero else noise).reshape(*shape, self.num_components, d)
        return each(self.component.rsample, self.own(params), noise.movedim(-2, 0))

    def draw(self, params: Tensors, shape: torch.Size) -> Tensor:
        z = self.strata(params, shape, False)
        if self.num_components == 1:
            return z[0]
        uniform = torch.rand(shape, dtype=z.dtype, device=z.device).unsqueeze(-1)
        index = (uniform > self.probs(params).detach().cumsum(0)[:-1]).sum(-1)
        index = index.reshape(1, *shape, 1).expand(1, *z.shape[1:])
        return _without_gradient(z.gather(0, index)[0])

    def mean(self, params: Tensors) -> Tensor:
        return self.probs(params) @ params["loc"]

    def stddev(self, params: Tensors) -> Tensor:
        own = each(self.component.stddev, self.own(params))
        away = params["loc"] - self.mean(params)
        return (self.probs(params) @ (own.square() + away.square())).sqrt()

    def covariance(self, params: Tensors) -> Tensor:
        away = (params["loc"] - self.mean(params)).unsqueeze(-1)
        whole = each(self.component.covariance, self.own(params)) + away * away.mT
        return torch.tensordot(self.probs(params), whole, 1)

    def icdf(self, params: Tensors, levels: Tensor) -> Tensor:
        sd = each(self.component.stddev, self.own(params))
        return quantiles_of_normals(self.probs(params), params["loc"], sd, levels)

    def fisher_product(self, params: Tensors, tangent: Tensors) -> Tensors:
        own = each(self.component.fisher_product, self.own(params), self.own(tangent))
        whole = self.weights.fisher_product(params, tangent)
        return whole | by_component(self.probs(params), own)

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        own = each(self.component.natural_gradient, self.own(params), self.own(gradient))
        whole = self.weights.natural_gradient(params, gradient)
        return whole | by_component(1.0 / self.probs(params), own)

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        own = each(
            lambda p, u: self.component.retract(p, u, step), *map(self.own, (params, tangent))
        )
        return self.weights.retract(params, tangent, step) | own

    def pack(self, tensors: Tensors) -> Tensor:
        own = each(self.component.pack, self.own(tensors))
        return torch.cat([tensors["logits"], own.flatten()])

    def sizes(self, like: Tensors) -> dict[str, int]:
        one = self.component.sizes({name: v[0] for name, v in self.own(like).items()})
        return {"logits": self.num_components, "own": self.num_components * sum(one.values())}

    def unpack(self, vector: Tensor, like: Tensors) -> Tensors:
        logits, own = vector.tensor_split([self.num_components])
        rows = own.reshape(self.num_components, -1)
        return {"logits": logits} | each(self.component.unpack, rows, self.own(like))
