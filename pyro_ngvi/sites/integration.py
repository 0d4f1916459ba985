r"""Latent Gaussian models with priors on their hyperparameters: nested, deterministic integration.

    p(theta | y)  propto  p(y | theta) p(theta),       p(x | y) = sum_k w_k p(x | y, theta_k),

with p(y | theta) and p(x | y, theta) those of :mod:`pyro_ngvi.sites.corrections`, and points theta_k
around the mode of p(theta | y) in unconstrained coordinates (:mod:`pyro_ngvi.sites.design`).  This is
the plan of INLA (Rue, Martino & Chopin 2009, "Approximate Bayesian inference for latent Gaussian models
by using integrated nested Laplace approximations", JRSS B 71), with variational sites in the place of
Laplace approximations.  The mode is that of the ELBO.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributions.transforms import IndependentTransform

from ..guides.marginals import entry_by_entry
from ..linalg.host import apart
from .corrections import component_of
from .densities import Densities
from .design import Design, explore, find_mode
from .given_theta import GivenTheta
from .marginals import Draws, SiteMarginals, combined, shapes_of

#: the least share of the largest weight that counts; points in effect below which they are in doubt
LEAST, FEW = 1e-3, 8.0
#: nats below the largest log p(theta | y) at which a point may be lost, and nats by which the integral
#: of what is interpolated may differ from the sum of the points
LOST, ROUGH = 5.0, 0.2


@dataclass(frozen=True)
class IntegratedMarginals(SiteMarginals):
    """Marginals of latent sites and of hyperparameters theta, with these integrated out.

    Attributes:
        points: theta_k (K, *shape) by name at which sites were fitted.
        weights: p(theta_k | y) there, (K,), of sum one.

    Example: see :func:`pyro_ngvi.integrate`.
    """

    points: Draws = field(repr=False)
    weights: Tensor = field(repr=False)

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.points))
        effective = float(1.0 / self.weights.square().sum())
        return (
            f"Integrated over {names} by {len(self.weights)} points, as {effective:.0f} of equal "
            f"weight. {super().__str__()}"
        )


def integrate(
    model: Callable[..., Any],
    *args: Any,
    over: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    latent: str | None = None,
    num_samples: int = 1000,
    seed: int = 0,
    **kwargs: Any,
) -> IntegratedMarginals:
    """Posterior marginals of a latent Gaussian model whose hyperparameters have priors.

    For fixed hyperparameters theta the model is one for :class:`~pyro_ngvi.AutoSites`.  It is fitted by
    CVI at tens to some hundred points theta, chosen around the mode of p(theta | y), and the marginals
    of :meth:`AutoSites.marginals` are mixed by the corrected evidences.  No draws are made but for
    ``samples``.  For one to some five hyperparameters.  Equations: :mod:`pyro_ngvi.sites.integration`.

    Args:
        model: a Pyro model.
        args: its arguments with all data, and ``kwargs``.
        over: names of the hyperparameters; by default the latent sites that are not Gaussian.
        names: sites whose marginals to find beside theta's, as in :meth:`AutoSites.marginals`.
        latent: as for :class:`~pyro_ngvi.AutoSites`.
        num_samples: draws to make of everything.
        seed: of the draws.

    Raises:
        ValueError: for a hyperparameter that is not there, is discrete, or where there is none; and
            what :class:`~pyro_ngvi.AutoSites` raises for the model given theta.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> import pyro_ngvi as ngvi
        >>> def schools(y, se):
        ...     tau = pyro.sample("tau", dist.HalfNormal(10.0))
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 20.0))
        ...     with pyro.plate("school", len(y)):
        ...         effect = pyro.sample("effect", dist.Normal(mu, tau))
        ...         pyro.sample("y", dist.Normal(effect, se), obs=y)
        >>> y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]).double()
        >>> se = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]).double()
        >>> found = ngvi.integrate(schools, y, se)
        >>> found.mean["tau"].round(), found.mean["effect"].round()
        (tensor(5.), tensor([10.,  8.,  6.,  7.,  6.,  6., 10.,  8.]))
        >>> found.quantiles([0.05, 0.95])["tau"].round(), round(found.log_evidence, 1)
        (tensor([ 0., 12.]), -31.9)
    """
    at_theta = GivenTheta(model, args, kwargs, over, latent)
    mode, root, definite = find_mode(at_theta.gradient_at, at_theta.begin())
    at_theta.unsettled = 0  # on the way, which does not matter
    design = explore(at_theta.log_p, mode, root)
    of_design = _doubts(at_theta, design, definite)
    counts = design.weights >= LEAST * design.weights.max()
    kept = (counts & design.every_other()).nonzero().squeeze(-1)
    weights = design.weights[kept] / design.weights[kept].sum()
    generator = torch.Generator().manual_seed(apart(seed))
    # theta as it is, and for each draw the fitted point next to it
    z, log_w = design.fine
    w = torch.softmax(log_w, 0)
    drawn = z[torch.multinomial(w, num_samples, replacement=True, generator=generator)]
    nearest = torch.cdist(drawn, design.z[kept]).argmin(-1)
    components, rows = [], {}
    for k, point in enumerate(kept.tolist()):
        at_theta.settle(design.u(design.z[point]))
        at = at_theta.guide._snapshot(args, kwargs)
        shapes = shapes_of(at.call.plan, names)
        mine = (nearest == k).nonzero().squeeze(-1)
        found = component_of(at, list(shapes), len(mine), generator)
        for name, draws in found.draws.items():
            draws = draws.reshape(-1, *shapes[name])
            every = rows.setdefault(name, draws.new_empty(num_samples, *shapes[name]))
            every[mine.to(every.device)] = draws
        components.append(found._replace(draws={}))
    at_theta.bar.close()
    tables, doubts = combined(components, weights)
    return IntegratedMarginals(
        log_evidence=design.log_integral,
        samples=at_theta.at(design.u(drawn)) | rows,
        doubts=(*of_design, *doubts),
        _tables=_of_theta(at_theta, design.u(z), w) | tables,
        _shapes=at_theta.layout.constrained_shapes | shapes,
        points=at_theta.at(design.u(design.z)),
        weights=design.weights.to(at_theta.like),
    )


def _of_theta(at: GivenTheta, u: Tensor, weights: Tensor) -> dict[str, Densities]:
    """Densities of the hyperparameters by name, from weighted points u (S, p)."""
    tables = {}
    for name, transform, part in at.layout.unconstrained(u):
        if entry_by_entry(transform):
            free = Densities.of_points(part.reshape(len(u), -1), weights)
            t = free.x.reshape(-1, *part.shape[1:])
            x = transform(t)
            while isinstance(transform, IndependentTransform):
                transform = transform.base_transform
            slope = transform.log_abs_det_jacobian(t, x).reshape(free.x.shape)
            found = Densities.of(x.reshape(free.x.shape), free.p * (-slope).exp())
        else:
            found = Densities.of_points(transform(part).reshape(len(u), -1), weights)
        tables[name] = Densities(found.x.to(at.like), found.p.to(at.like))
        if not bool(tables[name].p.isfinite().all()):
            raise ValueError(
                f"integrate: {name!r} goes from {float(found.x.min()):.2g} to "
                f"{float(found.x.max()):.2g}, and its density rounds to points. Give it a narrower "
                f"prior."
            )
    return tables


def _doubts(at: GivenTheta, design: Design, definite: bool) -> tuple[str, ...]:
    """What speaks against a design; refuses one that misses a part of theta that matters."""
    found, where = [], at.where(design.center)
    if len(design.lost):
        left = design.interpolated(design.lost) - design.log_p.max() if len(design.z) else None
        worst = 0 if left is None else int(left.argmax())
        where = at.where(design.u(design.lost[worst]))
        if left is None or not left[worst] < -LOST:
            raise at.refusal(
                f"integrate: there is no posterior given {where}, which cannot be left out. Give it a "
                f"prior that rules such values out. {at.failure}"
            )
        found.append(
            f"In doubt: there is no posterior given {where} (one of {len(design.lost)} such points), "
            f"which counts for nothing."
        )
    if unseen := at.keep_their_prior():
        names = ", ".join(map(repr, unseen))
        found.append(f"In doubt: nothing else in the model depends on {names}: its prior is left.")
    if not definite:
        found.append(
            f"In doubt: log p(theta | y) is not concave where the search for its mode ended: {where}."
        )
    if not design.closed:
        u = design.u(design.z)
        ranges = {n: float(x.std(0).max()) for n, _, x in at.layout.unconstrained(u)}
        found.append(
            f"In doubt: p(theta | y) has not vanished within {len(u)} points, which go furthest in "
            f"{max(ranges, key=lambda n: ranges[n])!r}. Give it a narrower prior."
        )
    if design.effective < min(FEW, 3.0 if design.z.shape[1] == 1 else FEW):
        found.append(
            f"In doubt: the points weigh as {design.effective:.1f} of equal weight, so p(theta | y) is "
            f"narrower or wider than they are, or far from Gaussian."
        )
    rough = abs(design.log_integral - design.log_sum)
    if not rough < ROUGH:
        found.append(
            f"In doubt: log p(theta | y) is rough: interpolated between the points it integrates to "
            f"{rough:.1f} nats more or less than they sum to."
        )
    if at.unsettled:
        found.append(f"In doubt: sites had not converged at {at.unsettled} points.")
    return tuple(found)
