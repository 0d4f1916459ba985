r"""Mixtures of Gaussians, q(z) = sum_k pi_k N(z; mu_k, Sigma_k).

Stored: ``logits`` = log pi (K,), and the tensors of each Gaussian, all K in one, under its own names.
Local frame: that of each Gaussian, and log pi.  In it the Fisher matrix of q(k, z), with the number of
the component as if it were seen, is

    F = blocks(pi_k F_k) and diag(pi) - pi pi',

F_k that of a Gaussian.  It is no less than that of q(z), and the same where components do not overlap.
The weights cancel in the natural gradient, that of each component's own bound (Lin, Khan & Schmidt
2019, arXiv:1906.02914; Arenz et al. 2023, arXiv:2209.11533),

    R_k = E_k[log p - log q],   d/dlambda_k = F_k^-1 grad_k R_k,   dlog pi_k = R_k - sum_j pi_j R_j,

where E_k is over N(mu_k, Sigma_k), and log q is differentiated by z alone.

**Strata.**  A step draws S points of *every* component, and weighs those of component k by pi_k: so the
ELBO is a differentiable function of the weights too, and a light component learns as fast as others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ..linalg.host import fixed_normal, own_random_state
from .base import DRAWS, Family, NormalFamily, Tensors, centred, with_backward

#: the least weight, as a logarithm; and by how many nats a step changes a weight at most
LEAST, LARGEST = math.log(1e-6), 1.0
#: halvings of the interval that holds a quantile
HALVINGS = 60


def _refuse(*_: Any) -> None:
    raise RuntimeError(
        "A mixture learns its weights from pyro_ngvi.BatchedELBO, which draws from every component; "
        "this loss gives them no gradient. Pass SVI loss=pyro_ngvi.BatchedELBO(8)."
    )


_without_gradient = with_backward(lambda z: z.clone(), _refuse)


def each(function: Callable[..., Any], *stacked: Any) -> Any:
    """``function`` of the tensors of every component, stacked as they are: one call for all."""
    return vmap(function)(*stacked)


def by_component(factors: Tensor, tensors: Tensors) -> Tensors:
    """``tensors`` (K, ...), each times its own of the ``factors`` (K,)."""
    return {n: factors.reshape(-1, *[1] * (v.dim() - 1)) * v for n, v in tensors.items()}


class Weights(Family):
    """Probabilities of K classes, ``logits`` = log pi, as the categorical family that they are."""

    names = ("logits",)
    newton_like = True

    def init(self, loc: Tensor, scale: float) -> Tensors:
        return {"logits": torch.full_like(loc, -math.log(len(loc)))}

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        return (z * params["logits"].log_softmax(-1)).sum(-1)  # of one class, z a unit vector

    def fisher_product(self, params: Tensors, tangent: Tensors) -> Tensors:
        pi, u = params["logits"].softmax(-1), tangent["logits"]
        return {"logits": pi * (u - (pi * u).sum())}

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        # F u = g for the g of sum 0 that there are; u is the one with sum_k pi_k u_k = 0
        g = gradient["logits"]
        return {"logits": g / params["logits"].softmax(-1) - g.sum()}

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        change = (step * tangent["logits"]).clamp(-LARGEST, LARGEST)
        return {"logits": (params["logits"] + change).log_softmax(-1).clamp_min(LEAST)}


class MixtureNormal(Family):
    """Mixtures of K Gaussians, all of one family.

    Args:
        component: the family of each.
        num_components: K.

    Example:
        >>> import torch
        >>> from pyro_ngvi.families import FullRankNormal
        >>> family = MixtureNormal(FullRankNormal(), 3)
        >>> q = family.init(torch.zeros(2), scale=1.0)
        >>> {name: tuple(v.shape) for name, v in q.items()}
        {'logits': (3,), 'loc': (3, 2), 'scale_tril': (3, 2, 2)}
    """

    def __init__(self, component: NormalFamily, num_components: int) -> None:
        self.component, self.num_components = component, num_components
        self.weights = Weights()
        self.names = ("logits", *component.names)

    def own(self, tensors: Tensors) -> Tensors:
        """The tensors of the components, without the weights."""
        return {name: tensors[name] for name in self.component.names}

    def init(self, loc: Tensor, scale: float) -> Tensors:
        """Components around ``loc``, each with half of the variance: together the sd is ``scale``."""
        K = self.num_components
        away = torch.zeros_like(loc).expand(K, -1)
        if K > 1:
            scale = scale / 2.0**0.5
            noise = fixed_normal(K, len(loc), seed=0)
            away = ((noise - noise.mean(0)) / noise.std(0, correction=0)).to(loc) * scale
        own = each(lambda at: self.component.init(at, scale), loc + away)
        return self.weights.init(away[:, 0], scale) | own

    def dim(self, params: Tensors) -> int:
        return params["loc"].shape[-1]

    def probs(self, params: Tensors) -> Tensor:
        """pi (K,)."""
        return params["logits"].softmax(-1)

    def component_log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        """log N(z; mu_k, Sigma_k), (K, ...), of points z (..., d)."""
        return each(lambda own: self.component.log_prob(own, z), self.own(params))

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        log_n = self.component_log_prob(params, z)
        log_pi = params["logits"].log_softmax(-1)
        return (log_n + log_pi.reshape(-1, *[1] * (log_n.dim() - 1))).logsumexp(0)

    def _draws_of_each(self, params: Tensors, shape: torch.Size, mean_zero: bool) -> Tensor:
        """Draws (K, *shape, d)."""
        d, K = self.dim(params), self.num_components
        noise = torch.randn(*shape, K * d, dtype=params["loc"].dtype, device=params["loc"].device)
        noise = (centred(noise) if mean_zero else noise).reshape(*shape, K, d).movedim(-2, 0)
        return each(self.component.rsample, self.own(params), noise)

    def strata(self, params: Tensors, n: int, mean_zero: bool) -> tuple[Tensor, Tensor]:
        """n draws of each component, (K n, d), and weights of mean 1, (K n,), that know ``params``."""
        z = self._draws_of_each(params, torch.Size((n,)), mean_zero)
        weights = self.num_components * self.probs(params)
        return z.flatten(0, 1), weights.repeat_interleave(n)

    def draw(self, params: Tensors, shape: torch.Size) -> Tensor:
        return self._draw(params, shape, False)

    def centred_draw(self, params: Tensors, shape: torch.Size) -> Tensor:
        return self._draw(params, shape, True)

    def _draw(self, params: Tensors, shape: torch.Size, mean_zero: bool) -> Tensor:
        z = self._draws_of_each(params, shape, mean_zero)
        if self.num_components == 1:
            return z[0]
        # one that is not its own component's draw is as good, so all are made and one is chosen
        uniform = torch.rand(shape, dtype=z.dtype, device=z.device).unsqueeze(-1)
        below = uniform > self.probs(params).detach().cumsum(0)[:-1]
        index = below.sum(-1).reshape(1, *shape, 1).expand(1, *z.shape[1:])
        return _without_gradient(z.gather(0, index)[0])

    def pack(self, tensors: Tensors) -> Tensor:
        own = each(self.component.pack, self.own(tensors))
        return torch.cat([tensors["logits"], own.flatten()])

    def unpack(self, vector: Tensor, like: Tensors) -> Tensors:
        K = self.num_components
        own = each(self.component.unpack, vector[K:].reshape(K, -1), self.own(like))
        return {"logits": vector[:K]} | own

    def not_finite(self, params: Tensors) -> Tensor:
        own = ~torch.isfinite(params["loc"]).all(0)
        found = torch.stack([~torch.isfinite(v).all() for v in params.values()]).any()
        return torch.where(own.any(), own, found)

    def mean(self, params: Tensors) -> Tensor:
        return self.probs(params) @ params["loc"]

    def _variances(self, params: Tensors, what: str, outer: Callable[[Tensor], Tensor]) -> Tensor:
        """Those within components and between them, of entries or of pairs of entries."""
        within = each(getattr(self.component, what), self.own(params))
        within = within.square() if what == "stddev" else within
        total = within + outer(params["loc"] - self.mean(params))
        return torch.tensordot(self.probs(params), total, 1)

    def stddev(self, params: Tensors) -> Tensor:
        return self._variances(params, "stddev", torch.square).sqrt()

    def covariance(self, params: Tensors) -> Tensor:
        return self._variances(params, "covariance", lambda m: m.unsqueeze(-1) * m.unsqueeze(-2))

    def icdf(self, params: Tensors, levels: Tensor) -> Tensor:
        """Marginal quantiles (n, d) by halving: each lies between those of the components."""
        loc, sd = params["loc"], each(self.component.stddev, self.own(params))
        ends = loc + sd * torch.special.ndtri(levels).reshape(-1, 1, 1)  # (n, K, d)
        low, high = ends.amin(1), ends.amax(1)
        for _ in range(HALVINGS if self.num_components > 1 else 0):
            middle = 0.5 * (low + high)
            below = torch.special.ndtr((middle.unsqueeze(1) - loc) / sd)
            less = torch.einsum("k,nkd->nd", self.probs(params), below) < levels.unsqueeze(-1)
            low, high = torch.where(less, middle, low), torch.where(less, high, middle)
        return high

    def _expectation(self, params: Tensors, function: Callable[[Tensor], Tensor]) -> Tensor:
        with own_random_state(0):
            z, weights = self.strata(params, DRAWS // self.num_components, False)
        return (weights * function(z)).mean()

    def entropy(self, params: Tensors) -> Tensor:
        """Of a stratified sample with its gradient; exact for one component."""
        if self.num_components == 1:
            return each(self.component.entropy, self.own(params))[0]
        return self._expectation(params, lambda z: -self.log_prob(params, z))

    def kl(self, params: Tensors, other: Tensors) -> Tensor:
        def log_ratio(z: Tensor) -> Tensor:
            return self.log_prob(params, z) - self.log_prob(other, z)

        return self._expectation(params, log_ratio)

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        return tangent | each(self.component.push, self.own(params), self.own(tangent))

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        own = each(self.component.pull, self.own(params), self.own(grads))
        return {"logits": grads["logits"]} | own

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
