"""Mixtures of Gaussians as a guide: where components start, and q with its strata."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..curvature.estimators import Curvature, leave_curvature
from ..families import FullRankNormal, MeanFieldNormal, MixtureNormal
from ..families.base import Family, Tensors
from ..families.mixture import LEAST, each
from ..linalg.host import apart, host_bool, outside_autocast, own_random_state
from ..optim.rule import require
from .base import AutoFamily, FamilyDistribution
from .found import SAME, Found, lower, modes_of
from .laplace import BUDGET, FINAL, FULL, Search
from .normal import LAPLACE
from .search import start_points

#: the family of each component, by the argument of the guide that names it
COVARIANCES: dict[str, Any] = {"full": FullRankNormal, "diagonal": MeanFieldNormal}
#: so many points, and one for each mode so far, without a further mode end the search
PATIENCE = 8
#: Bhattacharyya distance in nats above which two components are apart: 6 sds, where both have one shape
APART = 4.5
#: weight below which a component is of no use
IN_USE = 1e-3


class MixtureDistribution(FamilyDistribution):
    """q of a mixture, from which an ELBO draws by components."""

    family: Any
    _stratified = False

    @outside_autocast
    def strata(self, n: int, guide: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """n draws of each component, (K n, d), and what weighs their losses, log q - log p.

        While gradients are recorded, draws (n, K, d) and losses stay on ``guide`` for its optimizer.
        """
        strata = self.family.strata(self.params, torch.Size((n,)), self.centred)
        z = strata.flatten(0, 1)
        weights = self.family.num_components * self.family.probs(self.params).repeat_interleave(n)
        self._stratified = True

        def weighted(losses: Tensor) -> Tensor:
            if z.requires_grad:
                draws, residuals = strata.detach(), losses.detach().reshape(-1, n)
                left = {"draws": draws.transpose(0, 1), "residuals": residuals.mT}
                leave_curvature(guide, Curvature("price", left))
            return weights * losses

        return z, weighted

    @outside_autocast
    def log_prob(self, value: Tensor) -> Tensor:
        share, self.path_share = self.path_share, None
        result = super().log_prob(value)
        if share is None or not (self._stratified and self.sticking_the_landing):
            return result
        if host_bool((share == 1.0).all()):
            return result
        # as the base does of a Gaussian, for each component; the rest of log q keeps its path
        K, fixed = len(share), {name: p.detach() for name, p in self.params.items()}
        own = self.family.component_log_prob(fixed, value).reshape(K, K, -1).diagonal().mT
        entropy = each(self.family.component.entropy, self.family.own(self.params)).unsqueeze(-1)
        path = own + entropy
        zero = (share.to(path).unsqueeze(-1) - 1.0) * (path - path.detach())
        return result + zero.flatten()


def best_mixture(
    density: Callable[[Tensor], Tensor], family: Any, given: Tensors, points: Iterable[Tensor]
) -> Found:
    """A Gaussian at each mode to which the ``points`` (d,) lead, weighed by their ELBO.

    Components beyond the modes are further ones of the same scales, at a draw of each by turns.
    """
    K, reached, modes, alone, points = family.num_components, [], [], 0, iter(points)
    with own_random_state(apart(0)), torch.no_grad():
        search = Search(density, given["loc"][0])
        search.within = -LEAST
        for point in points:
            end = search.visit(point)
            reached.append(-torch.inf if end is None else end.elbo)
            # a path may have ended on a slope, where no Gaussian fits
            good = [q for q in search.ends if q.spread < SAME]
            before, modes = len(modes), modes_of(good or search.ends, -LEAST)
            alone = alone + 1 if len(modes) <= before else 0
            # beyond the modes that there are components for they are counted, at half the cost
            most = BUDGET if good and len(modes) >= K else 2 * BUDGET
            if alone > PATIENCE + before or search.evaluations > most:
                break
        reached += search.scouted(points)
        good = [q for q in search.ends if q.spread < SAME]
        modes = modes_of(good or search.ends, -LEAST)

        def elbo(params: Tensors) -> float:
            z = family.draw(params, torch.Size((FINAL,)))
            return lower(-search.f(z) - family.log_prob(params, z))

        floor, params = elbo(given), None
        if modes:
            chosen = [modes[k % len(modes)] for k in range(K)]
            parts = [family.component.matched(q.loc, q.precision) for q in chosen]
            params = {n: torch.stack([p[n] for p in parts]) for n in family.component.names}
            for k in range(len(modes), K):
                L = FULL.matched(chosen[k].loc, chosen[k].precision)["scale_tril"]
                params["loc"][k] += L @ torch.randn_like(L[0])
            elbos = params["loc"].new_tensor([q.elbo for q in chosen])
            params["logits"] = elbos.log_softmax(-1).clamp_min(LEAST)
            params = params if elbo(params) > floor else None
        return Found(params, tuple(reached), floor, search.evaluations, search.apart(good))


class AutoMixtureNormal(AutoFamily):
    """A mixture of Gaussians over all unconstrained latent variables: sum_k pi_k N(mu_k, Sigma_k).

    For posteriors with several modes, or a bent one, of up to some tens of latent variables.  Train it
    by :class:`~pyro_ngvi.NGVB` and :class:`~pyro_ngvi.BatchedELBO`, which draws ``num_particles`` times
    from *every* component.  A component that has lost its weight, or doubles another, moves to where
    the posterior is missed (:mod:`pyro_ngvi.optim.mixture`).

    Components start at the modes that a search finds, those beyond them beside one of these; without a
    search (above 200 latent variables, minibatches) at draws of the prior and points around the centre.
    What no point of the search leads to is not found.

    Not for posteriors close to one Gaussian, where :class:`AutoFullRankNormal` is K times cheaper, nor
    for many latent variables.

    Stored: ``logits`` = log pi (K,), ``loc`` (K, d), ``scale_tril`` (K, d, d) or ``log_scale`` (K, d).

    Args:
        num_components: K, the number of Gaussians (2); more than there are modes for a better fit.
        covariance: "full" (default) or "diagonal", of each component.
        kwargs: those of :class:`~pyro_ngvi.guides.AutoFamily`, whose errors it raises.  With ``init``
            ``None`` or "map" all components start within ``init_scale`` of one point.

    Raises:
        ValueError: for arguments out of range.
        RuntimeError: in the backward pass of a loss that is not a ``BatchedELBO``, for K > 1.

    Source: Lin, Khan & Schmidt (2019, arXiv:1906.02914); Arenz et al. (2023, arXiv:2209.11533).

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model():
        ...     x = pyro.sample("x", dist.Normal(0.0, 3.0))
        ...     pyro.sample("y", dist.Normal(x.abs(), 0.5), obs=torch.tensor(2.0))
        >>> guide = ngvi.AutoMixtureNormal(model, num_components=2)
        >>> fit = ngvi.fit(model, guide=guide, seed=0, progress=False)
        >>> [round(x, 1) for x in sorted(guide.loc[:, 0].tolist())]
        [-1.9, 1.9]
    """

    starts = LAPLACE
    search = staticmethod(best_mixture)
    distribution = MixtureDistribution
    family: MixtureNormal

    def __init__(
        self,
        model: Callable[..., Any],
        num_components: int = 2,
        covariance: str = "full",
        **kwargs: Any,
    ) -> None:
        whole = isinstance(num_components, Integral) and num_components >= 1
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

    @property
    def weights(self) -> Tensor:
        """pi (K,), which sums to 1, of the answer so far."""
        return self.family.probs(self._current()).detach()

    @property
    @torch.no_grad()
    def modes(self) -> Tensor:
        """The mode that each component is of, (K,), by the number of its first component: those in use
        that overlap, or overlap by way of others, are of one; -1 for components without weight."""
        params = self._current()
        loc, cov = params["loc"], each(self.family.component.covariance, self.family.own(params))
        root = torch.linalg.cholesky(0.5 * (cov + cov[:, None]))
        white = torch.linalg.solve_triangular(root, (loc - loc[:, None])[..., None], upper=False)
        half_log_det = torch.linalg.cholesky(cov).diagonal(0, -2, -1).log().sum(-1)
        spread = root.diagonal(0, -2, -1).log().sum(-1)
        spread = spread - 0.5 * (half_log_det + half_log_det[:, None])
        used = self.weights > IN_USE
        near = (white.square().sum((-2, -1)) / 8.0 + spread < APART) & used & used[:, None]
        for _ in used:
            near = near | (near.to(loc) @ near.to(loc) > 0.0)
        return torch.where(used, near.to(loc).argmax(1), -1)

    @property
    def lost(self) -> str:
        """That a mode may be lost with a component and no search knows, in words; else empty."""
        idle = int((self.weights <= IN_USE).sum())
        if self.start_report is not None or not idle:
            return ""
        return (
            f"{idle} of {len(self.weights)} components lost their weight, and no search has counted "
            f"modes: one may be lost with them. Take another seed, or all data in each step."
        )

    @torch.no_grad()
    def modes_at(self, theta: Tensor) -> Tensor:
        """Of which of :attr:`modes` points theta (S, d) of the unconstrained vector are, (S,)."""
        params, modes = self._current(), self.modes
        log_n = self.family.component_log_prob(params, theta)
        joint = log_n + params["logits"].log_softmax(-1).unsqueeze(-1)
        return modes[joint.masked_fill((modes < 0).unsqueeze(-1), -torch.inf).argmax(0)]
