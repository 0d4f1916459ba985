"""What every algebra of AutoSites does.

An algebra holds what the sites together say of the latent block (:class:`GaussianPotential`), in
coordinates of its own, and turns it into q.  It sees the model through *views*: the plan at one call's
arguments.

    view = algebra.view(call)                       # prior and linear maps, at current hyperparameters
    evidence = algebra.collect(view, sites)         # of the sites of the view's data
    q = algebra.posterior(view, evidence)           # log_normalizer, proper, marginals of each group
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from .bound_model import BoundModel
from .dense import GaussianPotential, collect
from .kept import Kept
from .processes import Regression
from .structure import LinearMap, ModelStructure

__all__ = ["Algebra", "Marginals", "SiteTensors", "View", "apart"]

#: nu (n, k) and Lambda (n, k, k) by group
SiteTensors = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Marginals:
    """Mean (n, k) and covariance (n, k, k) of the part of f that a site sees; ``rest`` adds to it."""

    mean: Tensor
    covariance: Tensor
    rest: Tensor | None = None

    @property
    def whole(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance of f itself."""
        if self.rest is None:
            return self.mean, self.covariance
        return self.mean, self.covariance + self.rest

    @property
    def second_moment(self) -> Tensor:
        """E f f' (n, k, k) of the part that a site sees: with the mean, its mean parameters."""
        return self.covariance + self.mean.unsqueeze(-1) * self.mean.unsqueeze(-2)


@dataclass(frozen=True)
class View:
    """The block at one call's arguments: linear maps by group, and a prior that has a structure.

    ``processes`` are those of the block on their inducing points, in order.
    """

    maps: dict[str, LinearMap]
    prior: Any = None
    processes: tuple[Regression, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """All that it is made of."""
        found = [t for m in self.maps.values() for t in (m.design, m.offset, m.rest)]
        if self.prior is not None:
            found += vars(self.prior).values()
        return [t for t in found if isinstance(t, Tensor)]

    @property
    def learns(self) -> bool:
        """Whether it depends on parameters of the model."""
        return any(t.requires_grad for t in self.tensors)


def apart(module: Any) -> Any:
    """A copy of a module that shares its tensors: what it is given afterwards stays with the copy."""
    other = copy(module)
    for name, value in vars(module).items():
        other.__dict__[name] = value.copy() if isinstance(value, dict | Kept) else value
    other._modules = {name: apart(m) for name, m in module._modules.items()}
    return other


class Algebra(nn.Module):
    """Evidence as buffers, so that it is saved and moved with the guide."""

    constant: Tensor
    linear: Tensor
    precision: Tensor
    #: whether the evidence is a running average over minibatches, see :meth:`begin_running`
    running = False
    #: whether the block may have entries of single data, as a process at their inputs has
    has_latent_at_data = True

    def __init__(self, evidence: GaussianPotential) -> None:
        super().__init__()
        for name in ("constant", "linear", "precision"):
            self.register_buffer(name, getattr(evidence, name))
        #: the view of the last call, and q of its sites
        self._view, self._q = Kept(), Kept()

    @property
    def evidence(self) -> GaussianPotential:
        """What all sites say, as of the last step."""
        return GaussianPotential(self.constant, self.linear, self.precision)

    @evidence.setter
    def evidence(self, value: GaussianPotential) -> None:
        self.constant = value.constant.detach()
        self.linear = value.linear.detach()
        self.precision = value.precision.detach()

    def view(self, call: BoundModel) -> View:
        raise NotImplementedError

    def keep(self, view: View, sites: Iterable[Tensor], q: Any) -> None:
        """Keep the ``q`` of these site tensors, as they are now, for the next to ask."""
        sites = tuple(sites)
        versions = [p._version for p in sites]
        self._q.put(None if view.learns else (versions, q), [view, *sites])

    def kept(self, view: View, sites: Iterable[Tensor]) -> Any:
        """The q that was kept, if nobody wrote to the sites and the view is the same; else None."""
        sites = tuple(sites)
        versions, q = self._q.get([view, *sites]) or (None, None)
        return q if versions == [p._version for p in sites] else None

    def forget(self) -> None:
        """Drop the q that was kept: the sites are other tensors now."""
        self._q.put(None)

    def collect(self, view: View, sites: SiteTensors) -> GaussianPotential:
        """The evidence of the sites of the view's data."""
        found = [self.of_group(view.maps[name], *tensors) for name, tensors in sites.items()]
        return sum(found[1:], found[0])

    @staticmethod
    def of_group(at: LinearMap, linear: Tensor, precision: Tensor) -> GaussianPotential:
        """The evidence of the sites nu (n, k), Lambda (n, k, k) of one group."""
        return collect(at, linear, precision)

    def recollect(self, view: View, sites: SiteTensors) -> GaussianPotential:
        """Make the evidence anew, of the sites of all data."""
        evidence = self.collect(view, sites)
        self.evidence, self.running = evidence, False
        return evidence

    def reset(self) -> None:
        """Forget all sites."""
        self.evidence = GaussianPotential.none(self.linear, *self.linear.shape)
        self.running = False

    def make_room(self, plan: ModelStructure) -> None:
        """Be ready for the data of a structure that has more of them than before."""

    def begin_running(self, view: View) -> None:
        """Before a step with a minibatch in which parameters of the prior are learned."""
        raise ValueError(
            "AutoSites: this step has a minibatch, and the prior or the predictors have "
            "parameters that are learned. Learn them in steps with all data, or hold them by "
            "requires_grad_(False) or .detach(). Those of the likelihood may be learned in both."
        )

    def after(
        self, view: View, change: SiteTensors, sites: SiteTensors, call: BoundModel
    ) -> GaussianPotential:
        """The evidence after a ``change`` of the sites of a minibatch, which makes them ``sites``."""
        return self.evidence + self.collect(view, change)

    def white(self, view: View, evidence: GaussianPotential) -> GaussianPotential:
        """Evidence in white coordinates, at the hyperparameters of the view."""
        return evidence

    def posterior(self, view: View | None, evidence: GaussianPotential) -> Any:
        """q for that evidence: ``log_normalizer``, and ``proper``, without which nothing else holds."""
        raise NotImplementedError

    def marginals(self, view: View, q: Any) -> dict[str, Marginals]:
        """Those of all data of the view."""
        found = {}
        for name, at in view.maps.items():
            mean, covariance = q.marginals(at)
            found[name] = Marginals(mean, covariance, at.rest)
        return found

    def sample(self, call: BoundModel, name: str) -> dict[str, tuple[Tensor, Tensor]]:
        """A draw of every site of the block, and its share of log q; ``name`` begins helpers' names."""
        raise NotImplementedError

    def moments(self, call: BoundModel) -> tuple[Tensor, Tensor]:
        """Mean (D,) of the flat block z under q, and S (M, D) with S'S its covariance."""
        raise NotImplementedError

    def mean_and_sd(self, call: BoundModel) -> tuple[Tensor, Tensor]:
        """Mean and sd (D,) of every entry of the flat block."""
        mean, half = self.moments(call)
        return mean, torch.linalg.vector_norm(half, dim=0)

    def distribution(self, call: BoundModel) -> Any:
        """q over the flat block, as a distribution."""
        mean, half = self.moments(call)
        return dist.MultivariateNormal(mean, covariance_matrix=half.mT @ half)

    def get_extra_state(self) -> dict[str, Any]:
        """For ``state_dict``, beside the buffers."""
        return {"running": self.running}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """What :meth:`get_extra_state` gave."""
        self.running = state["running"]

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        for value in vars(self).values():
            if isinstance(value, Kept):  # it may be of another device or dtype
                value.put(None)
        return super()._apply(fn, *args, **kwargs)
