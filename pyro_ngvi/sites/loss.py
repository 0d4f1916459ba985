r"""SitesELBO: the exact ELBO of an AutoSites guide, up to quadrature.

    ELBO = log Z + sum_n w_n (E_q log p(y_n | f_n) - E_q log t_n(f_n)),
    log Z = log int p(z) prod_n t_n(f_n) dz,

with t_n the sites and E log p by the points of :mod:`pyro_ngvi.sites.expectation`; w_n is 1, or N / B
in a minibatch of B.  Where minibatches learn the prior (:mod:`pyro_ngvi.sites.inducing`) it is
sum_n w_n E_q log p(y_n | f_n) - KL(q || p).  Gradients in parameters of the model hold the *sites* and
let q move with the prior (Adam, Chang, Khan & Solin 2021, "Dual parameterization of sparse variational
Gaussian processes").  Latent sites r of other guides in an ``AutoGuideList`` are drawn, and
log p(r) - log q(r) added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from pyro import poutine
from pyro.infer import ELBO
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..curvature.estimators import leave_curvature
from ..linalg.host import at_hand, outside_autocast
from ..linalg.products import matvec
from ..runtime.density import minibatch_scale, site_log_prob
from ..runtime.run import Program
from ..runtime.store import whole_gradients
from .algebra import Pairs, Snapshot, shallow_copy
from .bound_model import BoundModel
from .checks import check_seen
from .dense import WhitePosterior
from .expectation import (
    Expected,
    enough_points,
    expectations,
    first_targets,
    quadrature_points,
)
from .probe_points import same
from .site_guide import SiteGuide, find_sites


def site_targets(gradient: Tensor, hessian: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """grad_mu E log p as (nu, Lambda) = (g - H m, -H), from g (n, k), H (n, k, k) and m (n, k)."""
    return gradient - matvec(hessian, mean), -hessian


@dataclass
class SiteTargets(Snapshot):
    """What the loss leaves on the guide for :class:`~pyro_ngvi.CVI`."""

    kind = "sites"
    expected: dict[str, Expected]
    elbo: Tensor
    whole: bool
    """all data, and no draws of other guides: the ELBO is exact"""

    def residuals(self) -> tuple[Pairs, dict[str, Tensor], Tensor]:
        """Target - site for each datum of the call, which are exact, and how many are not finite."""
        residual: Pairs = {}
        exact = {}
        left = torch.zeros_like(self.elbo)
        for name, (linear, precision) in self.sites.items():
            e, index = self.expected[name], self.call.index[name]
            nu, Lambda = site_targets(e.gradient, e.hessian, self.marginals[name].mean)
            finite = torch.isfinite(nu).all(-1) & torch.isfinite(Lambda).flatten(1).all(-1)
            finite = finite & torch.isfinite(e.value)
            left = left + (~finite).sum()
            moves = finite
            if index is not None:  # a datum that comes twice is updated once
                order = torch.arange(len(index), device=index.device)
                last = order.new_zeros(self.call.plan.group(name).size).scatter_(0, index, order)
                moves = finite & (last[index] == order)
            residual[name] = (
                torch.where(moves.unsqueeze(-1), nu - linear, 0.0),
                torch.where(moves.reshape(-1, 1, 1), Lambda - precision, 0.0),
            )
            exact[name] = e.quadratic
        return residual, exact, left


class SitesELBO(ELBO):
    """Negative ELBO, in nats, of an :class:`~pyro_ngvi.AutoSites` guide for ``pyro.infer.SVI``.

    Equations: :mod:`pyro_ngvi.sites.loss`.  ``loss_and_grads`` leaves on the guide what
    :class:`~pyro_ngvi.CVI` needs.

    Args:
        num_particles: draws of latent sites of other guides in an ``AutoGuideList``; without such
            guides the bound is deterministic and this has no effect.
        num_points: quadrature points per entry of f for up to three (default 32, 14, 9; for one up to
            256, where the likelihood is not smooth), in all for more (default 1024).  Compare
            :meth:`loss` with twice as many.

    Raises:
        ValueError: for arguments out of range; when called, for a guide without an ``AutoSites``, or
            with two, and for minibatches that come as a ``poutine.scale``.

    Example:
        >>> import torch, pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> guide = ngvi.AutoSites(model)
        >>> svi = pyro.infer.SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
        >>> [round(svi.step(torch.tensor([1.0, 2.0, 3.0])), 2) for _ in range(2)]  # last: -log p(y)
        [159.76, 6.63]
    """

    def __init__(self, num_particles: int = 1, *, num_points: int | None = None) -> None:
        whole = isinstance(num_particles, Integral) and isinstance(num_points, Integral | None)
        if not whole or num_particles < 1 or (num_points is not None and num_points < 2):
            raise ValueError(
                f"SitesELBO: num_particles must be at least 1 and num_points at least 2, both whole, "
                f"got {num_particles} and {num_points}."
            )
        super().__init__(num_particles=num_particles)
        self.num_points = num_points

    def loss(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> float:
        """The negative ELBO in nats, a number, without gradients."""
        with torch.no_grad():
            return -float(self._estimate(model, guide, args, kwargs, derivatives=False)[0])

    def differentiable_loss(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> Any:
        """The negative ELBO, 0-dim with a graph to the parameters of the model."""
        return -self._estimate(model, guide, args, kwargs, derivatives=False)[0]

    def loss_and_grads(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> Tensor:
        """The negative ELBO before the step, 0-dim; adds to ``.grad`` of parameters of the model."""
        with whole_gradients():
            elbo, targets = self._estimate(model, guide, args, kwargs, derivatives=True)
            if elbo.requires_grad:
                (-elbo).backward()
            block = _block_of(guide)
            if not block.fresh:  # sites that have moved may be held, to learn hyperparameters
                block.curvature = None
            leave_curvature(block, targets)
            block.last_step.remember(args, kwargs, targets.view.learns and targets.call.whole)
            return -elbo.detach()

    def _get_trace(self, model: Program, guide: Program, args: Any, kwargs: Any) -> Any:
        """One draw: a trace of the model and one of the guide, for Pyro's own tools."""
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        replayed = poutine.replay(model, trace=guide_trace)
        return poutine.trace(replayed).get_trace(*args, **kwargs), guide_trace

    @outside_autocast
    def _estimate(
        self, model: Program, guide: Any, args: Any, kwargs: Any, derivatives: bool
    ) -> tuple[Tensor, SiteTargets]:
        block = _block_of(guide)
        block.adopt(model)
        if guide is block:
            return self._at(block, block.call_of(args, kwargs), derivatives, exact=True)
        estimates: list[tuple[Tensor, SiteTargets]] = []
        for _ in range(self.num_particles):  # one minibatch for all, so that their data agree
            given = estimates[0][1].call.runner.minibatches if estimates else {}
            drawn: Any = poutine.condition(guide, data=dict(given)) if given else guide
            trace = poutine.trace(drawn).get_trace(*args, **kwargs)
            values, given, log_q = _others(block, trace, given)
            call = block.call_of(args, kwargs, values, given)
            elbo, targets = self._at(block, call, derivatives, exact=False)
            estimates.append((elbo - log_q, targets))
        elbo = torch.stack([elbo for elbo, _ in estimates]).mean(0)
        return elbo, _averaged([targets for _, targets in estimates])

    def _at(
        self, block: SiteGuide, call: BoundModel, derivatives: bool, exact: bool
    ) -> tuple[Tensor, SiteTargets]:
        call.hidden = False
        if derivatives:
            last = block.last_step
            last.scaled = _check_scaled(call, last.scaled)
            learns = any(terms.requires_grad for terms in call.terms_at_probe.values())
            if learns or not last.has_arguments_of(call):  # parameters may bring in what was unseen
                check_seen(call)
        # a look at other data, or at other parameters, leaves q as it is
        algebra = block.algebra if derivatives else shallow_copy(block.algebra)
        view = algebra.view(call)
        tensors = {n: (a.detach(), b.detach()) for n, (a, b) in block.site_tensors().items()}
        if call.whole:
            q = None if algebra.running else algebra.kept(view, block.natural_params().values())
            at = algebra.at(call, tensors, view, q)
        else:
            block.make_current()  # a step before, with all data, may have moved the prior
            if view.learns:
                algebra.begin_running(view)
            chosen = {n: call.rows(n, *pair) for n, pair in tensors.items()}
            at = algebra.at(call, chosen, view, algebra.posterior(view, algebra.evidence))
        if derivatives and exact and not (view.learns or algebra.running):
            block.last_step.see(call, at.sites)
        q, marginals = at.posterior, at.marginals
        count, like = self.num_points, call.plan.zero()
        of_f = {name: m.whole for name, m in marginals.items()}
        if derivatives and count is None and block.counts is None and not block.fresh:
            weights = {name: call.weight(name) for name in of_f}
            block.counts = enough_points(call.log_likelihood, of_f, weights)
        counts = block.counts or {}
        points = {
            g.name: quadrature_points(g.width, count or counts.get(g.name), like)
            for g in call.plan.groups
        }
        targets = expected = expectations(call.log_likelihood, of_f, points, derivatives)
        if derivatives and block.fresh:
            targets = first_targets(call.log_likelihood, of_f, points, algebra.ranks)
        kl: Any = None
        if algebra.running:  # whose evidence is not quite that of the sites
            kl = q.kl()
        elif call.whole and isinstance(q, WhitePosterior):
            pairs = [(at.sites[name][1], m.covariance) for name, m in marginals.items()]
            kl = q.kl(None if algebra.ranks.spread else pairs)
        elbo = q.log_normalizer if kl is None else -kl
        for name, m in marginals.items():
            local = expected[name].value
            if kl is None:  # what the sites say is taken back datum by datum
                linear, precision = at.sites[name]
                trace = (precision * m.second_moment).sum((-2, -1))
                local = local - ((linear * m.mean).sum(-1) - 0.5 * trace)
            elbo = elbo + algebra.ranks.sum(call.weight(name) * local.sum())[0]
        elbo = elbo + call.other_terms()
        whole = exact and call.whole
        return elbo, SiteTargets(**vars(at), expected=targets, elbo=elbo.detach(), whole=whole)


def _block_of(guide: Any) -> SiteGuide:
    found = [block for _, block in find_sites(guide)]
    if len(found) != 1:
        raise ValueError(
            f"SitesELBO is the loss of one AutoSites guide, and {type(guide).__name__} has "
            f"{len(found)}. Other guides take Trace_ELBO or pyro_ngvi.BatchedELBO."
        )
    return found[0]


def _check_scaled(call: BoundModel, before: list[Tensor]) -> list[Tensor]:
    """Refuse a minibatch that comes as a scale instead of a plate, by the data of the step ``before``:
    its M sites would go to one batch after the other.

    The data of this call, if a scale above 1 makes them count for more than themselves.
    """
    whole = (n for g in call.plan.groups if call.index[g.name] is None for n in g.observed)
    for site in (call.sites[name] for name in whole):
        scale = torch.as_tensor(site["scale"] / minibatch_scale(site))
        if not (at_hand(scale) and scale.numel() == 1 and float(scale) > 1.0):
            continue
        # what is observed may be made of parameters and draws, so the arguments tell more
        given = [*call.runner.args, *call.runner.kwargs.values()]
        tensors = [x for x in given if isinstance(x, Tensor) and x.numel() > 1]
        now = [x for x in tensors or [site["value"]] if at_hand(x) and not x.requires_grad]
        # data of another number were announced, or are refused elsewhere
        pairs = zip(before, now, strict=False)
        if any(a.shape == b.shape and not same(a, b) for a, b in pairs):
            plate = site["cond_indep_stack"][-1].name if site["cond_indep_stack"] else "data"
            raise ValueError(
                f"AutoSites: under a poutine.scale the data of {site['name']!r} are not those of the "
                f"step before. For a minibatch write pyro.plate({plate!r}, N, subsample=index), "
                f"without the scale; for new data in place of the old call guide.reset() before."
            )
        # copies, since a loader may write each batch into the same tensors
        return [x.detach().clone() for x in now]
    return []


def _others(block: SiteGuide, trace: Any, given: Mapping[str, Tensor]) -> tuple[Any, Any, Tensor]:
    """What other guides have drawn: latent sites, minibatches beside those ``given``; its log q."""
    values, minibatches, log_q = {}, dict(given), torch.zeros(())
    for name, site in trace.nodes.items():
        if site["type"] != "sample" or site["is_observed"]:
            continue
        if site_is_subsample(site):
            minibatches[name] = site["value"]
        elif not block.owns(name):
            log_q = log_q + site_log_prob(site)[1].sum()
            if not site["infer"].get("is_auxiliary"):
                values[name] = site["value"]
    return values, minibatches, log_q


def _averaged(targets: list[SiteTargets]) -> SiteTargets:
    """Expectations averaged over draws; none of them counts as exact."""
    first = targets[0]
    for name, e in first.expected.items():
        every = zip(*(t.expected[name] for t in targets), strict=True)
        value, gradient, hessian = (torch.stack(x).mean(0) for x in list(every)[:3])
        first.expected[name] = Expected(value, gradient, hessian, torch.zeros_like(e.quadratic))
    first.elbo = torch.stack([t.elbo for t in targets]).mean(0)
    return first
