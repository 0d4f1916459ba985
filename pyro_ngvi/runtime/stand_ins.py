"""What ``torch.func.vmap`` cannot run, or does slowly, of Pyro's and torch's distributions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from pyro.ops import special
from torch import Tensor
from torch.distributions import dirichlet, multivariate_normal
from torch.distributions.utils import broadcast_all
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..linalg.triangular import solve

DIRICHLET = dirichlet._Dirichlet
MAHALANOBIS = multivariate_normal._batch_mahalanobis


class SafeLog:
    """Pyro's logarithm with a gradient of at most 1 / eps, of functions that ``torch.func`` knows;
    ``DiscreteHMM`` and enumeration call it."""

    @staticmethod
    def apply(x: Tensor) -> Tensor:
        eps, here = torch.finfo(x.dtype).eps, x.detach()
        return torch.where(here < eps, here.log() + (x - here) / eps, x.clamp(min=eps).log())


class DirichletDraw:
    """Draws of a Dirichlet, and so of Beta and LKJ; torch's function that makes them has a derivative,
    and no rule under ``vmap``, so it is left where a derivative may be asked for."""

    @staticmethod
    def apply(concentration: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return DIRICHLET.apply(concentration)  # pyright: ignore[reportReturnType]
        return torch._sample_dirichlet(concentration)  # pyright: ignore[reportPrivateImportUsage]


def ordered_logistic(
    self: dist.OrderedLogistic, predictor: Tensor, cutpoints: Tensor, validate_args: Any = None
) -> None:
    """``OrderedLogistic(predictor, cutpoints)``, which in Pyro writes into a tensor of its own."""
    below = torch.sigmoid(cutpoints - predictor.unsqueeze(-1))
    self.predictor, self.cutpoints = predictor.expand(below.shape[:-1]), cutpoints.expand_as(below)
    end = torch.zeros_like(below[..., :1])
    probs = torch.cat([end, below, end + 1.0], -1).diff(dim=-1)
    dist.Categorical.__init__(self, probs, validate_args=validate_args)


def multinomial_sample(self: td.Multinomial, sample_shape: Any = ()) -> Tensor:
    """A draw of ``Multinomial``, which in torch adds up counts in a tensor of its own."""
    with torch.no_grad():
        shape = torch.Size((self.total_count, *sample_shape))
        which = self._categorical.sample(shape).movedim(0, -1)
        counts = which.new_zeros(self._extended_shape(torch.Size(sample_shape)))
        return counts.scatter_add(-1, which, torch.ones_like(which)).type_as(self.probs)


def multinomial_log_prob(self: td.Multinomial, value: Tensor) -> Tensor:
    """The log probability of ``Multinomial``, which in torch writes by a mask."""
    if self._validate_args:
        self._validate_sample(value)
    logits, value = broadcast_all(self.logits, value)
    logits = logits.masked_fill((value == 0) & (logits == -torch.inf), 0.0)
    orders = torch.lgamma(value.sum(-1) + 1) - torch.lgamma(value + 1).sum(-1)
    return orders + (logits * value).sum(-1)


def batch_mahalanobis(bL: Tensor, bx: Tensor) -> Tensor:
    """x' (L L')^-1 x, in ``MultivariateNormal``, by one solve for all particles that share L."""
    return solve(bL, bx).square().sum(-1) if bL.dim() == 2 else MAHALANOBIS(bL, bx)


#: the class or module, the name in it, what is there, and what stands in for it
STAND_INS: tuple[tuple[Any, str, Any, Any], ...] = (
    (special, "_SafeLog", special._SafeLog, SafeLog),
    (dirichlet, "_Dirichlet", DIRICHLET, DirichletDraw),
    (td.Multinomial, "sample", td.Multinomial.sample, multinomial_sample),
    (td.Multinomial, "log_prob", td.Multinomial.log_prob, multinomial_log_prob),
    (multivariate_normal, "_batch_mahalanobis", MAHALANOBIS, batch_mahalanobis),
    (dist.OrderedLogistic, "__init__", dist.OrderedLogistic.__init__, ordered_logistic),
)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Within it the distributions run under ``vmap``, and attention without fused kernels, which have
    no batched form and no second derivative; a run within a run leaves them as they were."""
    before = [getattr(place, name) for place, name, _, _ in STAND_INS]
    for place, name, _, other in STAND_INS:
        setattr(place, name, other)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for (place, name, _, _), was in zip(STAND_INS, before, strict=True):
            setattr(place, name, was)
