"""A member of a family as a Pyro distribution over the flat latent vector, and values of its sites."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pyro.distributions import Delta, Distribution, TorchDistribution
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.kl import register_kl

from ..families.base import Family, Tensors
from ..linalg.host import outside_autocast

__all__ = ["FamilyDistribution", "WithDensity"]


class FamilyDistribution(TorchDistribution):
    r"""q(z; params), event shape (d,), with sticking-the-landing inside.

    The gradient of the negative ELBO through z = f(eps, lambda) is

        E[(grad_z log q - grad_z log p)' df/dlambda] + E[grad_lambda log q(z)],

    and the last expectation is zero.  With ``sticking_the_landing`` the density is evaluated at
    detached parameters, which drops it: the estimator stays unbiased and its noise vanishes as q
    approaches the posterior (Roeder, Wu & Duvenaud 2017).  Values are the same either way; only
    ``log_prob(z)`` at a fixed z then has no gradient in the parameters.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support: Any = constraints.real_vector
    has_rsample = True

    def __init__(
        self,
        family: Family,
        params: Tensors,
        *,
        sticking_the_landing: bool = False,
        batch_shape: torch.Size | tuple[int, ...] = (),
    ) -> None:
        self.family = family
        self.params = params
        self.sticking_the_landing = sticking_the_landing
        shapes = torch.Size(batch_shape), torch.Size((family.dim(params),))
        super().__init__(*shapes, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> FamilyDistribution:
        return FamilyDistribution(
            self.family,
            self.params,
            sticking_the_landing=self.sticking_the_landing,
            batch_shape=torch.Size(batch_shape),
        )

    @outside_autocast
    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return self.family.draw(self.params, torch.Size(sample_shape) + self.batch_shape)

    @outside_autocast
    def log_prob(self, value: Tensor) -> Tensor:
        params = self.params
        if self.sticking_the_landing:
            params = {name: tensor.detach() for name, tensor in params.items()}
        result = self.family.log_prob(params, value)
        if result.shape == self.batch_shape:
            return result
        return result.expand(torch.broadcast_shapes(self.batch_shape, result.shape))

    @outside_autocast
    def entropy(self) -> Tensor:
        return self.family.entropy(self.params).expand(self.batch_shape)

    @property
    def mean(self) -> Tensor:
        return self.family.mean(self.params).expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        return self.family.stddev(self.params).square().expand(self.batch_shape + self.event_shape)

    @property
    def scale_tril(self) -> Tensor:
        """Lower triangular L (d, d) with covariance L L': for small d."""
        return self.family.scale_tril(self.params)

    @property
    def covariance_matrix(self) -> Tensor:
        """The d x d covariance (d, d): for small d."""
        return self.family.covariance(self.params)


class SiteValue(Delta):
    """The value of a site within the flat vector, with its share of log q, a log-Jacobian."""


@register_kl(SiteValue, Distribution)
def _kl_of_value(p: SiteValue, q: Any) -> Tensor:
    # Pyro's own for Delta leaves log_density out, and with it the Jacobians of autoguides under
    # TraceMeanField_ELBO
    return p.log_density - q.log_prob(p.v)


class WithDensity(Messenger):
    """Around ``AutoContinuous.forward``: makes each ``Delta`` a :class:`SiteValue`."""

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if type(fn) is Delta:
            log_density: Any = fn.log_density
            msg["fn"] = SiteValue(fn.v, log_density, fn.event_dim)
