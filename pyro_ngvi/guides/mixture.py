"""Mixtures of Gaussians as a guide: where components start, and q with its strata."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..curvature.estimators import Curvature, leave_curvature
from ..families import FullRankNormal, MeanFieldNormal, MixtureNormal
from ..families.base import Family, Tensors
from ..families.mixture import LEAST, each
from ..linalg.host import host_bool, outside_autocast, own_random_state
from ..optim.rule import require
from .base import AutoFamily, FamilyDistribution
from .laplace import BUDGET, FINAL, FULL, Found, Gaussian, Search, lower
from .normal import LAPLACE
from .search import start_points

#: the family of each component, by the argument of the guide that names it
COVARIANCES: dict[str, Any] = {"full": FullRankNormal, "diagonal": MeanFieldNormal}
#: so many points, and one for each mode so far, without a further mode end the search
PATIENCE = 4


class MixtureDistribution(FamilyDistribution):
    """q of a mixture, from which an ELBO draws by components."""

    family: Any
    _stratified = False

    def strata(self, n: int, guide: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """n draws of each component, and the function that weighs their losses, log q - log p.

        While gradients are recorded it leaves draws and losses on ``guide``, for its optimizer.
        """
        z, weights = outside_autocast(self.family.strata)(self.params, n, self.centred)
        self._stratified = True

        def weighted(losses: Tensor) -> Tensor:
            if z.requires_grad:
                left = {"draws": z.detach(), "residuals": losses.detach()}
                leave_curvature(guide, Curvature("price", left))
            return weights * losses

        return z, weighted

    @outside_autocast
    def log_prob(self, value: Tensor) -> Tensor:
        share = self.path_share
        if share is None or len(share) == 1:
            self.path_share = None if share is None else share[0]
            return super().log_prob(value)
        self.path_share = None
        result = super().log_prob(value)
        whole = host_bool((share == 1.0).all()) or not self._stratified
        if whole or not self.sticking_the_landing:
            return result
        # of each component, as the base does of a Gaussian: the rest of log q has no entropy of its own
        K, fixed = len(share), {name: p.detach() for name, p in self.params.items()}
        own = self.family.component_log_prob(fixed, value).reshape(K, K, -1).diagonal().mT
        entropy = each(self.family.component.entropy, self.family.own(self.params)).unsqueeze(-1)
        path = own + entropy
        zero = (share.to(path).unsqueeze(-1) - 1.0) * (path - path.detach())
        return result + zero.flatten()


def best_mixture(
    density: Callable[[Tensor], Tensor],
    family: Any,
    given: Tensors,
    points: Iterable[Tensor],
) -> Found:
    """A Gaussian at each mode to which the ``points`` (d,) lead, weighed by their ELBO.

    Components beyond the modes are further ones of the same scales, at a draw of each by turns.
    """
    K, reached, modes, alone = family.num_components, [], [], 0
    with own_random_state(0), torch.no_grad():
        search = Search(density, given["loc"][0])
        for point in points:
            end = search.visit(point)
            reached.append(-torch.inf if end is None else end.elbo)
            before, modes = len(modes), _modes(search.ends)
            alone = alone + 1 if len(modes) <= before else 0
            if len(modes) >= K or alone > PATIENCE + len(modes) or search.evaluations > 2 * BUDGET:
                break

        def elbo(params: Tensors) -> float:
            z, weights = family.strata(params, FINAL // K + 1, True)
            return lower(weights * (-search.f(z) - family.log_prob(params, z)))

        floor, params = elbo(given), None
        if modes:
            chosen = [modes[k % len(modes)] for k in range(K)]
            parts = [family.component.matched(q.loc, q.precision) for q in chosen]
            params = {n: torch.stack([p[n] for p in parts]) for n in family.component.names}
            log_pi = params["loc"].new_tensor([q.elbo for q in chosen])
            params["logits"] = log_pi.log_softmax(-1)
            roots = [FULL.matched(q.loc, q.precision)["scale_tril"] for q in chosen[len(modes) :]]
            for k, L in enumerate(roots, len(modes)):
                params["loc"][k] += L @ torch.randn_like(L[0])
            params = params if elbo(params) > floor else None
        return Found(params, tuple(reached), floor, search.evaluations)


def _modes(ends: Iterable[Gaussian]) -> list[Gaussian]:
    """Those that are apart and have a share of the mass, by their ELBO; the best comes first."""
    modes: list[Gaussian] = []
    for q in sorted(ends, key=lambda q: -q.elbo):
        lost = q.elbo == -torch.inf or (modes and q.elbo < modes[0].elbo + LEAST)
        if not lost and not any(m.holds(q.loc) for m in modes):
            modes.append(q)
    return modes


class AutoMixtureNormal(AutoFamily):
    r"""A mixture of Gaussians over all unconstrained latent variables: sum_k pi_k N(mu_k, Sigma_k).

    For posteriors with several modes, or a bent one, of up to some tens of latent variables.  Each
    component takes natural-gradient steps by itself, and one that has lost its weight, or doubles
    another, moves to where the posterior is missed (:mod:`pyro_ngvi.optim.mixture`).

    Train it by :class:`~pyro_ngvi.NGVB` and :class:`~pyro_ngvi.BatchedELBO`, which draws
    ``num_particles`` points of *every* component; other losses give the weights no gradient and are
    refused.  Components start at the modes that a search finds, those beyond them beside one of these;
    without a search (above 200 latent variables, minibatches) at draws of the prior and points around
    the centre.  What no component has come near is not found.

    Not for posteriors close to one Gaussian (:class:`AutoFullRankNormal` is K times cheaper), nor for
    many latent variables.  Under minibatches lucky points look missed: give ``num_components`` only
    as many as there are modes.

    Args:
        num_components: K, the number of Gaussians; more than there are modes for a better fit.
        covariance: "full" (default) or "diagonal", of each component.
        kwargs: those of :class:`~pyro_ngvi.guides.AutoFamily`, whose errors it raises.  With ``init``
            ``None`` or "map" all components start within ``init_scale`` of one point.

    Raises:
        ValueError: for arguments out of range.
        RuntimeError: in the backward pass of a loss that is not a ``BatchedELBO``, for K > 1.

    Source: Lin, Khan & Schmidt (2019, arXiv:1906.02914); Arenz et al. (2023, arXiv:2209.11533).

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> import pyro_ngvi as ngvi
        >>> def model():
        ...     x = pyro.sample("x", dist.Normal(0.0, 3.0))
        ...     pyro.sample("y", dist.Normal(x.abs(), 0.5), obs=torch.tensor(2.0))
        >>> guide = ngvi.AutoMixtureNormal(model, num_components=2)
        >>> svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
        >>> for _ in range(100):
        ...     loss = svi.step()
        >>> [round(x, 1) for x in sorted(guide.loc[:, 0].tolist())], guide.weights.tolist()
        ([-1.9, 1.9], [0.5, 0.5])
    """

    starts = LAPLACE
    search = staticmethod(best_mixture)
    family: MixtureNormal

    def __init__(
        self,
        model: Callable[..., Any],
        num_components: int,
        covariance: str = "full",
        **kwargs: Any,
    ) -> None:
        whole = isinstance(num_components, int) and num_components >= 1
        require(whole, "num_components", "be a whole number from 1", num_components)
        known = " or ".join(map(repr, COVARIANCES))
        require(covariance in COVARIANCES, "covariance", f"be {known}", covariance)
        self._shape = COVARIANCES[covariance], num_components
        super().__init__(model, **kwargs)

    def make_family(self) -> Family:
        component, K = self._shape
        return MixtureNormal(component(), K)

    def _start(self, loc: Tensor, args: Any, kwargs: Any) -> Tensors:
        params = super()._start(loc, args, kwargs)
        if self.init == "auto" and self.start_report is None:
            with own_random_state():
                names = self._unconstrained_shapes
                points = start_points(names, self.model, loc, args, kwargs)
                params["loc"] = torch.stack([*islice(points, self.family.num_components)])
        return params

    def _distribution(self, params: Tensors, **how: Any) -> FamilyDistribution:
        stl = self.sticking_the_landing
        return MixtureDistribution(self.family, params, sticking_the_landing=stl, **how)

    @property
    def weights(self) -> Tensor:
        """pi (K,), of the answer so far."""
        return self.family.probs(self._current()).detach()
