"""What every algebra of AutoSites does: it turns what the sites say of the latent block into q.

view = algebra.view(call)                       # prior and linear maps, at current hyperparameters
evidence = algebra.collect(view, sites)         # of the sites of the view's data
q = algebra.posterior(view, evidence)           # log_normalizer, proper, marginals of each group
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.util import sum_rightmost
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..distributed.processes import ALONE
from ..linalg.host import choose, host_bool
from ..linalg.products import matvec, symmetric_product
from ..linalg.spectral import positive_part
from .bound_model import BoundModel
from .conditioned_model import for_each
from .new_inputs import Regression
from .structure import ImproperError, Kept, LinearMap, ModelStructure, learns, tensors_of

#: nu (n, k) and Lambda (n, k, k) by group
SiteTensors = Mapping[str, tuple[Tensor, Tensor]]
#: (n, k) and (n, k, k) by group, changes or mean parameters of sites; or values by site, and log q
Pairs = dict[str, tuple[Tensor, Tensor]]

#: halvings of a step that would leave the proper densities
HALVINGS = 6


class GaussianPotential(NamedTuple):
    """What sites say of eps: exp(constant + linear' eps - eps' precision eps / 2); (), (R,), (R, R)."""

    constant: Tensor
    linear: Tensor
    precision: Tensor

    @staticmethod
    def none(like: Tensor, *shape: int) -> GaussianPotential:
        """That of no sites: zeros (), ``shape`` and (*shape, R) of the kind of ``like``, R last."""
        return GaussianPotential(*map(like.new_zeros, ((), shape, (*shape, shape[-1]))))

    def plus(self, step: GaussianPotential, share: float | Tensor = 1.0) -> GaussianPotential:
        """self + share * step."""
        return GaussianPotential(*(a + share * b for a, b in zip(self, step, strict=True)))

    def of(self, root: Tensor, shift: Tensor) -> GaussianPotential:
        """The same, said of eta (R,) with eps = root eta + shift."""
        slope = self.linear - self.precision @ shift
        constant = self.constant + 0.5 * (self.linear + slope) @ shift
        return GaussianPotential(constant, root.mT @ slope, root.mT @ self.precision @ root)


def potential_of(at: LinearMap, linear: Tensor, precision: Tensor) -> GaussianPotential:
    """What the sites ``linear`` (N, k), ``precision`` (N, k, k) of one group say of eps."""
    weighted = matvec(precision, at.offset)
    A = at.design.flatten(0, 1)
    scaled = precision.flatten(1) * A if A.shape[0] == len(linear) else precision @ at.design
    scaled = scaled.reshape(A.shape)
    return GaussianPotential(
        (linear * at.offset - 0.5 * weighted * at.offset).sum(),
        A.mT @ (linear - weighted).flatten(),
        symmetric_product(A, scaled) if at.triangular else A.mT @ scaled,
    )


@dataclass(frozen=True)
class Marginals:
    """Mean (n, k) and covariance (n, k, k) of the part of f that a site sees; ``rest`` adds to it."""

    mean: Tensor
    covariance: Tensor
    rest: Tensor | None = None

    @property
    def whole(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance of f itself."""
        return self.mean, self.covariance if self.rest is None else self.covariance + self.rest

    @property
    def second_moment(self) -> Tensor:
        """E f f' (n, k, k) of the part that a site sees: with the mean, its mean parameters."""
        return self.covariance + self.mean.unsqueeze(-1) * self.mean.unsqueeze(-2)


@dataclass(frozen=True)
class View:
    """The block at one call's arguments: linear maps by group; the prior of a chain, processes on their
    inducing points, or the directions ``basis`` (D, R) that a dense algebra keeps, if not all."""

    maps: dict[str, LinearMap]
    prior: Any = None
    processes: tuple[Regression, ...] = ()
    basis: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return tensors_of(*self.maps.values(), self.prior)

    @property
    def learns(self) -> bool:
        return learns(*self.maps.values(), self.prior)


@dataclass
class Snapshot:
    """q at one call with its marginals; ``sites`` are nu (n, k) and Lambda (n, k, k) of its data, which
    are all that q is of where ``complete``."""

    call: BoundModel
    sites: SiteTensors
    view: View
    posterior: Any
    marginals: dict[str, Marginals]
    complete: bool


def shallow_copy(module: Any) -> Any:
    """A copy of a module that shares its tensors: what it is given afterwards stays with the copy."""
    other = copy(module)
    for name, value in vars(module).items():
        other.__dict__[name] = value.copy() if isinstance(value, dict | Kept) else value
    other._modules = {name: shallow_copy(m) for name, m in module._modules.items()}
    return other


class Algebra(nn.Module):
    """Evidence as buffers, in coordinates of its own, so that it is saved and moved with the guide."""

    constant: Tensor
    linear: Tensor
    precision: Tensor
    #: the processes over which the evidence is summed
    ranks = ALONE
    #: whether the evidence is a running average over minibatches, see :meth:`begin_running`
    running = False
    #: what the sites nu (n, k), Lambda (n, k, k) of one group say, through its linear map
    of_group = staticmethod(potential_of)

    def __init__(self, evidence: GaussianPotential) -> None:
        super().__init__()
        for name, value in evidence._asdict().items():
            self.register_buffer(name, value)
        #: q of the sites at the last call
        self._q = Kept()

    @property
    def evidence(self) -> GaussianPotential:
        """What all sites say, as of the last step."""
        return GaussianPotential(self.constant, self.linear, self.precision)

    @evidence.setter
    def evidence(self, value: GaussianPotential) -> None:
        for name, tensor in value._asdict().items():
            setattr(self, name, tensor.detach())

    def view(self, call: BoundModel) -> View:
        """The block at the arguments of a call."""
        raise NotImplementedError

    def posterior(self, view: Any, evidence: GaussianPotential) -> Any:
        """q for that evidence: ``log_normalizer``, and ``proper``, without which nothing else holds."""
        raise NotImplementedError

    def joint(self, call: BoundModel) -> tuple[Tensor, Tensor]:
        """Mean (D,) and root R (D, D), lower triangular, of the flat block z: covariance R R'."""
        raise NotImplementedError

    def drawer(self, call: BoundModel) -> tuple[int, Callable[[Tensor], Pairs]]:
        """What makes the block under q of white noise (M,), and M: values by site, each with its share
        of log q - log N(noise; 0, I)."""
        mean, root = self.joint(call)
        shares: Any = call.by_site(-root.diagonal().abs().log())
        dims = call.plan.event_dims
        summed: Any = {name: sum_rightmost(x, dims[name]) for name, x in shares.items()}

        def draw(noise: Tensor) -> Pairs:
            values = call.by_site(mean + noise @ root.mT)
            return {name: (z, summed[name]) for name, z in values.items()}

        return len(mean), draw

    def sample(self, call: BoundModel, name: str) -> Pairs:
        """A draw of every site of the block, and its share of log q; ``name`` begins helpers' names."""
        size, draw = self.drawer(call)
        white = dist.Normal(call.plan.zero().new_zeros(size), 1.0).to_event(1)
        noise = pyro.sample(name + "_noise", white, infer={"is_auxiliary": True})
        lead = noise.shape[:-1]  # of plates to the left of those of the block
        if not lead:
            return draw(noise)

        def spread(x: Tensor, event_dim: int) -> Tensor:
            return x.reshape(torch.broadcast_shapes(x.shape[1:], lead + (1,) * event_dim))

        rows, dims = for_each(draw, noise.reshape(-1, size)), call.plan.event_dims
        return {n: (spread(z, dims[n]), spread(log_q, 0)) for n, (z, log_q) in rows.items()}

    def moments(self, call: BoundModel) -> tuple[Tensor, Tensor]:
        """Mean (D,) of the flat block z under q, and S (M, D) with S'S its covariance."""
        mean, root = self.joint(call)
        return mean, root.mT

    def mean_and_sd(self, call: BoundModel) -> tuple[Tensor, Tensor]:
        """Mean and sd (D,) of every entry of the flat block."""
        mean, half = self.moments(call)
        return mean, torch.linalg.vector_norm(half, dim=0)

    def distribution(self, call: BoundModel) -> Any:
        """q over the flat block, as a distribution."""
        mean, half = self.moments(call)
        return dist.MultivariateNormal(mean, covariance_matrix=half.mT @ half)

    def keep(self, view: View, sites: Iterable[Tensor], q: Any) -> None:
        """Keep the ``q`` of these site tensors, as they are now, for the next to ask."""
        sites = tuple(sites)
        versions = [p._version for p in sites]
        self._q.put(None if view.learns else (versions, q), sites, view.tensors)

    def kept(self, view: View, sites: Iterable[Tensor]) -> Any:
        """The q that was kept, if nobody wrote to the sites and the view is the same; else None."""
        sites = tuple(sites)
        versions, q = self._q.get(sites, view.tensors) or (None, None)
        found = versions == [p._version for p in sites]
        return q if self.ranks.agree(found) else None  # all make it anew, or none

    def collect(self, view: View, sites: SiteTensors) -> GaussianPotential:
        """The evidence of the sites of the view's data, and of those of other processes."""
        first, *more = [self.of_group(view.maps[name], *pair) for name, pair in sites.items()]
        for other in more:
            first = first.plus(other)
        return GaussianPotential(*self.ranks.sum(*first))

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
        return self.evidence.plus(self.collect(view, change))

    def at(self, call: BoundModel, sites: SiteTensors, view: View, q: Any = None) -> Snapshot:
        """``q``, by default that of the evidence made anew of these ``sites``, with its marginals."""
        q = self.posterior(view, self.recollect(view, sites)) if q is None else q
        if host_bool(q.proper) is False:
            raise ImproperError
        found = {n: Marginals(*q.marginals(at), rest=at.rest) for n, at in view.maps.items()}
        return Snapshot(call, sites, view, q, found, call.whole and not self.ranks.spread)

    def get_extra_state(self) -> dict[str, Any]:
        return {"running": self.running}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.running = state["running"]


class ProperStep(NamedTuple):
    """The change of every site, with its share in it; log Z and evidence after it, and q if known."""

    change: Pairs
    share: Tensor
    log_normalizer: Tensor
    evidence: GaussianPotential
    q: Any = None


def proper_step(algebra: Algebra, targets: Any, change: Pairs) -> ProperStep:
    """``change`` of the sites of ``targets``, or as much as leaves q proper: a share 2^-j, or where no
    share does the sites without the negative part of their precision."""
    step = _halved(algebra, targets, change)
    found = step.share > 0.0
    if host_bool(found):
        return step
    positive: Pairs = {}
    for name, (nu, Lambda) in change.items():
        before = targets.sites[name][1]
        positive[name] = nu, positive_part(before + Lambda) - before
    other = _halved(algebra, targets, positive)
    return ProperStep(*choose(found, step[:4], other[:4]))


def _halved(algebra: Algebra, targets: Any, change: Pairs) -> ProperStep:
    """The largest share 2^-j of a change that leaves q proper, or 0."""
    view, before = targets.view, algebra.evidence
    moved = tree_map(torch.add, targets.sites, change)
    if targets.call.whole:  # summed anew, so that roundings do not add up from sweep to sweep
        after = algebra.collect(view, moved)
    else:
        after = algebra.after(view, change, moved, targets.call)
    step, share = after.plus(before, -1.0), torch.zeros_like(before.constant)
    log_normalizer = targets.posterior.log_normalizer
    for j in range(HALVINGS + 1):
        q = algebra.posterior(view, before.plus(step, 0.5**j) if j else after)
        fits = q.proper & (share == 0.0)
        share = torch.where(fits, 0.5**j, share)
        log_normalizer = torch.where(fits, q.log_normalizer, log_normalizer)
        if host_bool(share > 0.0):
            if j == 0:
                return ProperStep(change, share, log_normalizer, after, q)
            break
    evidence = choose(share == 1.0, after, before.plus(step, share))
    return ProperStep(change, share, log_normalizer, evidence)
