r"""Draws and log densities of any reparameterised distribution, with less noise in their gradients.

With z = z(e, lambda) ~ q_lambda, the gradient of log q_lambda(z) is that along the path of z, and the
score at a fixed z, whose expectation is zero.  :class:`Steady` leaves the score out ("sticking the
landing", Roeder, Wu & Duvenaud 2017), also that of parameters that came from draws of other sites.

Gaussian draws that are made together are centred besides,

    z_s' = m + sqrt(S / (S - 1)) (z_s - mean of all z):

each is exactly one of N(m, Sigma), and their mean is m: the gradient in the scales has no part of a
large gradient in z times the mean of the noise.
"""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

import torch
import torch.distributions as td
from pyro.distributions import Delta
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions.kl import register_kl
from torch.utils._pytree import tree_leaves

from ..runtime.density import innermost
from ..runtime.pyro_adapter import with_inner

GAUSSIAN = (td.Normal, td.MultivariateNormal, td.LowRankMultivariateNormal)


class Steady(TorchDistribution):
    """``base_dist`` with those draws and gradients.

    Draws of one call belong together, also in batch dimensions to the left of the distribution's own.

    Example:
        >>> import pyro.distributions as dist
        >>> z = Steady(dist.Normal(torch.tensor(2.0), 1.0)).rsample((2,))
        >>> bool((z.mean() - 2.0).abs() < 1e-6)
        True
    """

    has_rsample = True
    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, base_dist: Any, own: int | None = None) -> None:
        self.base_dist = base_dist
        self._own = len(base_dist.batch_shape) if own is None else own
        super().__init__(base_dist.batch_shape, base_dist.event_shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Steady:
        return Steady(self.base_dist.expand(batch_shape), self._own)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        shape = torch.Size(sample_shape)
        z = self.base_dist.rsample(shape)
        together = z.shape[: len(shape) + len(self.batch_shape) - self._own]
        n = prod(together)
        if n < 2 or not isinstance(innermost(self.base_dist), GAUSSIAN):
            return z
        mean = z.mean(tuple(range(len(together))), keepdim=True)
        return self.base_dist.mean + (n / (n - 1)) ** 0.5 * (z - mean)

    def log_prob(self, value: Tensor) -> Tensor:
        log_prob, at_fixed = self.base_dist.log_prob(value), self.base_dist.log_prob(value.detach())
        if log_prob.requires_grad and not value.requires_grad:
            raise ValueError(
                "The loss takes log q at fixed values, as ReweightedWakeSleep does, where steady draws "
                "have no gradient. Give the optimizer steady=False: IFVB(guide, steady=False)."
            )
        return log_prob - (at_fixed - at_fixed.detach())

    @property
    def support(self) -> Any:
        return self.base_dist.support

    def __getattr__(self, name: str) -> Any:
        if name == "base_dist":
            raise AttributeError(name)
        return getattr(self.base_dist, name)


@register_kl(Steady, td.Distribution)
def _kl(p: Steady, q: td.Distribution) -> Tensor:
    return td.kl_divergence(p.base_dist, q)


class SteadyDraws(Messenger):
    """Makes every site of a guide :class:`Steady` that can be."""

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and msg["value"] is None and can_be_steady(msg["fn"]):
            msg["fn"] = Steady(msg["fn"])


def can_be_steady(fn: Any) -> bool:
    """Whether ``fn`` draws by a path and has a log density at any value that costs little."""
    # our guides have it inside
    if isinstance(fn, Steady) or hasattr(fn, "sticking_the_landing"):
        return False
    if not getattr(fn, "has_rsample", False):
        return False
    base = innermost(fn)
    if isinstance(base, td.TransformedDistribution):
        return all(map(is_fixed, base.transforms))
    return not isinstance(base, Delta)


def is_fixed(transform: Any) -> bool:
    """Whether a transform of torch has no parameters that could move."""
    if type(transform).__module__ != td.transforms.__name__:
        return False
    inner = (item for part in with_inner(transform) for item in vars(part).items())
    held = (value for name, value in inner if not name.startswith("_cached"))
    return not any(isinstance(x, Tensor | nn.Module) for x in tree_leaves(list(held)))
