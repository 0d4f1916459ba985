"""What every algebra of AutoSites does, and the dense one.

An algebra holds what the sites together say of the latent block (:class:`Evidence`), in coordinates
of its own, and turns it into q.  It sees the model through *views*: the plan at one call's arguments.

    view = algebra.view(call)                       # prior and linear maps, at current hyperparameters
    evidence = algebra.collect(view, sites)         # of the sites of the view's data
    q = algebra.posterior(view, evidence)           # log_normalizer, proper, marginals of each group
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyro
import torch
from torch import Tensor, nn

from .._known import at_hand
from .dense import Evidence, NoisePosterior, WhitePosterior, collect, reduced
from .plan import Call, LinearMap, Plan
from .run import for_each

__all__ = ["Algebra", "DenseAlgebra", "Marginals", "Posterior", "SiteTensors", "View"]

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


class Posterior(Protocol):
    """q; where it is not ``proper``, nothing else holds."""

    log_normalizer: Tensor
    proper: Tensor


@dataclass(frozen=True)
class View:
    """The block at one call's arguments: linear maps by group, and a prior that has a structure."""

    maps: dict[str, LinearMap]
    prior: Any = None

    @property
    def learns(self) -> bool:
        """Whether it depends on parameters of the model."""
        tensors = [t for m in self.maps.values() for t in (m.design, m.offset, m.rest)]
        return any(t is not None and t.requires_grad for t in tensors) or bool(
            getattr(self.prior, "learns", False)
        )


class Algebra(nn.Module):
    """Evidence as buffers, so that it is saved and moved with the guide."""

    constant: Tensor
    linear: Tensor
    precision: Tensor

    def __init__(self, evidence: Evidence) -> None:
        super().__init__()
        for name in ("constant", "linear", "precision"):
            self.register_buffer(name, getattr(evidence, name))

    @property
    def evidence(self) -> Evidence:
        """What all sites say, as of the last step."""
        return Evidence(self.constant, self.linear, self.precision)

    @evidence.setter
    def evidence(self, value: Evidence) -> None:
        self.constant = value.constant.detach()
        self.linear = value.linear.detach()
        self.precision = value.precision.detach()

    def view(self, call: Call) -> View:
        raise NotImplementedError

    def collect(self, view: View, sites: SiteTensors) -> Evidence:
        """The evidence of the sites of the view's data."""
        found = [collect(view.maps[name], *tensors) for name, tensors in sites.items()]
        return sum(found[1:], found[0])

    def posterior(self, view: View | None, evidence: Evidence) -> Any:
        """q for that evidence, a :class:`Posterior`."""
        raise NotImplementedError

    def marginals(self, view: View, q: Any) -> dict[str, Marginals]:
        """Those of all data of the view."""
        found = {}
        for name, at in view.maps.items():
            mean, covariance = q.marginals(at)
            found[name] = Marginals(mean, covariance, at.rest)
        return found

    def sample(self, call: Call, name: str) -> dict[str, tuple[Tensor, Tensor]]:
        """A draw of every site of the block, and its share of log q; ``name`` begins helpers' names."""
        raise NotImplementedError

    def moments(self, call: Call) -> tuple[Tensor, Tensor]:
        """Mean (D,) of the flat block z under q, and S (M, D) with S'S its covariance."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_cached", "_view")}


class DenseAlgebra(Algebra):
    """White noise eps (D,), or the R directions of it that the data see (``basis`` (D, R))."""

    basis: Tensor | None
    _cached: dict[str, LinearMap] | None = None
    _view: View | None = None

    def __init__(self, plan: Plan, call: Call) -> None:
        rows = sum(group.size * group.width for group in plan.groups)
        size = min(plan.dim, rows) if call.whole else plan.dim
        zero = plan.zero()
        super().__init__(
            Evidence(zero.new_zeros(()), zero.new_zeros(size), zero.new_zeros(size, size))
        )
        basis = None
        if size < plan.dim:
            basis = torch.eye(plan.dim, size, dtype=plan.dtype, device=plan.device)
        self.register_buffer("basis", basis)

    def view(self, call: Call) -> View:
        """Maps made by running the model, or those of the last call where they still hold.

        That they hold is tried at one random point, wherever the host can look without waiting.
        """
        if self.basis is not None and not call.whole:
            raise ValueError(
                f"AutoSites: the guide began with all data and keeps {self.basis.shape[1]} directions "
                f"of {self.basis.shape[0]} latent variables, so it can not take minibatches. Begin "
                f"with a minibatch."
            )
        if self._cached is None or not self._still_hold(self._cached, call):
            maps = call.linear_maps()
            self._cached = None
            view = self._reduced_view(maps)
            if view.learns:
                return view
            self._cached, self._view = maps, view
        assert self._view is not None
        return self._view

    def _reduced_view(self, maps: dict[str, LinearMap]) -> View:
        if self.basis is None:
            return View(maps)
        smaller, basis = reduced(maps)
        assert basis is not None
        self.basis = basis.detach()
        return View(smaller)

    @staticmethod
    def _still_hold(maps: Mapping[str, LinearMap], call: Call) -> bool:
        for name, at in maps.items():
            seen = call.at_probe[name]
            if seen.requires_grad or not at_hand(seen) or seen.shape != at.offset.shape:
                return False
            expected = at.design @ call.probe + at.offset
            size = seen.abs().max() + at.design.abs().max()
            if not bool((seen - expected).abs().max() <= 1e4 * torch.finfo(seen.dtype).eps * size):
                return False
        return True

    def posterior(self, view: View | None, evidence: Evidence) -> WhitePosterior:
        return WhitePosterior(evidence)

    def sample(self, call: Call, name: str) -> dict[str, tuple[Tensor, Tensor]]:
        q = NoisePosterior(self.posterior(None, self.evidence), self.basis)
        noise = pyro.sample(name + "_noise", q, infer={"is_auxiliary": True})
        lead = noise.shape[:-1]

        def values(noise: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
            return call.block_at(noise)

        if not lead:
            return values(noise)
        batched = for_each(values, noise.reshape(-1, noise.shape[-1]))
        return {
            site: (_spread(z, lead, call.plan.event_dims[site]), _spread(log_q, lead, 0))
            for site, (z, log_q) in batched.items()
        }

    def moments(self, call: Call) -> tuple[Tensor, Tensor]:
        q = NoisePosterior(self.posterior(None, self.evidence), self.basis)

        def flat(noise: Tensor) -> Tensor:
            return torch.cat([z.reshape(-1) for z, _ in call.block_at(noise).values()])

        origin = flat(call.plan.zero())
        mean = flat(q.mean)
        return mean, for_each(lambda e: flat(e) - origin, q.root())


def _spread(x: Tensor, lead: torch.Size, event_dim: int) -> Tensor:
    """x (S, *shape) with S = lead.numel(), for plates to the left of those of the site."""
    shape = torch.broadcast_shapes(x.shape[1:], lead + (1,) * event_dim)
    return x.reshape(shape)
