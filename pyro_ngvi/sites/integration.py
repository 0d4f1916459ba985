r"""Latent Gaussian models with priors on their hyperparameters: nested, deterministic integration.

    p(theta | y)  propto  p(y | theta) p(theta),       p(x | y) = sum_k w_k p(x | y, theta_k),

with p(y | theta) and p(x | y, theta) those of :mod:`pyro_ngvi.sites.corrections`, after sweeps of CVI
that begin at the sites of the point before, and points theta_k around the mode of p(theta | y) in
unconstrained coordinates (:mod:`pyro_ngvi.sites.design`).  This is the plan of INLA (Rue, Martino &
Chopin 2009, "Approximate Bayesian inference for latent Gaussian models by using integrated nested
Laplace approximations", JRSS B 71), with variational sites in the place of Laplace approximations.  The
mode is that of the ELBO, whose gradient in theta is exact once the sites have converged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions.transforms import IndependentTransform

from ..guides.marginals import entry_by_entry
from ..linalg.host import own_random_state
from ..runtime.density import LatentLayout
from .conditioned_model import MeansOfProcesses
from .corrections import component_of, evidence_of, joint_of
from .cvi import CVI
from .densities import Densities
from .design import Design, explore, find_mode
from .guide import AutoSites
from .loss import SitesELBO
from .marginals import Draws, SiteMarginals, combined, shapes_of
from .structure import unwrapped

#: sweeps at one point at most, and how far in q's standard deviations the last may go
SWEEPS, SETTLED = 60, 2e-3
#: draws of the prior whose median is the start; the least share of the largest weight that counts
PRIORS, LEAST = 9, 1e-3
#: points in effect below which their weights are in doubt
FEW = 8.0


class _Held(Messenger):
    """Parameters of the model without their gradients."""

    def _pyro_post_param(self, msg: Any) -> None:
        msg["value"] = msg["value"].detach()


class _Conditioned:
    """The model given theta, its guide of sites, and what both say of theta."""

    def __init__(self, model: Callable[..., Any], args: Any, kwargs: Any, over: Any, latent: Any):
        self.model, self.args, self.kwargs = model, args, kwargs
        self.values: dict[str, Tensor] = {}
        self.unsettled = 0
        #: sites by u at which they were fitted
        self.known: dict[tuple[float, ...], list[Tensor]] = {}
        draws = [self._latents(seed) for seed in range(PRIORS)]
        sites = draws[0]
        names = [n for n, s in sites.items() if not _is_gaussian(s)] if over is None else list(over)
        for name in names:
            fn = sites[name]["fn"] if name in sites else None
            if fn is None or fn.support.is_discrete:
                what = "is discrete" if name in sites else "is no latent site of the model"
                raise ValueError(
                    f"integrate: the hyperparameter {name!r} {what}, which has "
                    f"{', '.join(map(repr, sites))}. Pass over=[...] with continuous ones."
                )
        if not names:
            raise ValueError(
                "integrate: all latent sites of the model are Gaussian. Name those that are "
                "hyperparameters, over=['log_scale'], or fit AutoSites(model), and guide.marginals()."
            )
        with poutine.block(), own_random_state(0), torch.no_grad(), MeansOfProcesses():
            hyper: Any = poutine.block(model, expose=names)
            self.layout = LatentLayout(poutine.trace(hyper).get_trace(*args, **kwargs))
        values = {n: torch.stack([s[n]["value"] for s in draws]) for n in names}
        every = self.layout.pack(values)
        self.start, self.like = every.double().cpu().median(0).values, every
        self.move(self.start)
        self.guide = AutoSites(self.conditioned, latent=latent)
        self.program = self.conditioned, self.guide
        self.loss, self.optim = SitesELBO(), CVI(self.guide, others=None)
        try:
            self.guide.call_of(args, kwargs)
        except ValueError as error:
            raise ValueError(
                f"integrate: given {', '.join(map(repr, names))} the model is none for AutoSites (see "
                f"above). Name all hyperparameters, over=[...], those of Gaussian priors too."
            ) from error

    def _latents(self, seed: int) -> dict[str, Any]:
        with poutine.block(), own_random_state(seed), torch.no_grad(), MeansOfProcesses():
            trace: Any = poutine.trace(self.model).get_trace(*self.args, **self.kwargs)
        return {n: s for n, s in trace.iter_stochastic_nodes() if not site_is_subsample(s)}

    def conditioned(self, *args: Any, **kwargs: Any) -> Any:
        with _Held(), poutine.condition(data=self.values):
            return self.model(*args, **kwargs)

    def at(self, u: Tensor) -> Draws:
        """Values (S, *shape) by name at u (S, p)."""
        return {n: x.to(self.like) for n, x in self.layout.unpack(u).items()}

    def move(self, u: Tensor) -> Tensor:
        """Go to u (p,); the log-Jacobian there."""
        values, log_det = self.layout.unpack_with_log_det(u.to(self.like).unsqueeze(0))
        self.values.clear()
        self.values |= {n: x[0] for n, x in values.items()}
        return log_det[0]

    def settle(self, u: Tensor) -> float:
        """Sweeps at u until q stands still; the log-Jacobian."""
        log_det = float(self.move(u.detach()))
        params, key = self.guide.natural_params().values(), tuple(u.tolist())
        with torch.no_grad():
            for p, known in zip(params, self.known.get(key, params), strict=True):
                p.copy_(known)
        before, slack = torch.inf, 64.0 * torch.finfo(self.like.dtype).eps
        for _ in range(SWEEPS):
            with poutine.block():
                loss = float(self.loss.loss_and_grads(*self.program, *self.args, **self.kwargs))
                self.optim(params)
            still = abs(loss - before) <= slack * (1.0 + abs(loss))
            if still or self.optim.report().step_norm < SETTLED:
                break
            before = loss
        else:
            self.unsettled += 1
        self.known[key] = [p.detach().clone() for p in params]
        return log_det

    def gradient_at(self, u: Tensor) -> tuple[float, Tensor]:
        """ELBO + log-Jacobian and its gradient (p,)."""
        self.settle(u)
        moved = u.clone().requires_grad_()
        with torch.enable_grad(), poutine.block():
            log_det = self.move(moved)
            loss = self.loss.differentiable_loss(*self.program, *self.args, **self.kwargs)
            value = log_det - loss
            (slope,) = torch.autograd.grad(value, moved)
        self.move(u)
        return float(value.detach()), slope

    def log_p(self, u: Tensor) -> float:
        """log p(y, theta) + log-Jacobian, corrected."""
        log_det = self.settle(u)
        with torch.no_grad():
            at = self.guide._snapshot(self.args, self.kwargs)
            found = evidence_of(at, joint_of(at)).log_p + log_det
        if not isfinite(found):
            where = ", ".join(
                f"{n} = {x.tolist():.4g}" if x.dim() == 0 else n for n, x in self.values.items()
            )
            raise ValueError(
                f"integrate: the log evidence is {found} at {where}. Check the data and the supports, "
                f"and whether the prior lets hyperparameters go where the model cannot."
            )
        return found


def _is_gaussian(site: Any) -> bool:
    fn = unwrapped(site)
    return isinstance(fn, dist.Normal | dist.MultivariateNormal) or hasattr(fn, "from_noise")


@dataclass(frozen=True)
class IntegratedMarginals(SiteMarginals):
    """Marginals of latent sites and of hyperparameters, with these integrated out.

    Attributes:
        points: the hyperparameters (K, *shape) by name at which sites were fitted.
        weights: their weights (K,).
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
        kwargs: keyword arguments of the model.

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
    """
    at_theta = _Conditioned(model, args, kwargs, over, latent)
    mode, root, definite = find_mode(at_theta.gradient_at, at_theta.start)
    design = explore(at_theta.log_p, mode, root)
    kept = (design.weights >= LEAST * design.weights.max()).nonzero().squeeze(-1)
    weights = design.weights[kept] / design.weights[kept].sum()
    generator = torch.Generator().manual_seed(seed)
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
        found = component_of(at, list(shapes))
        mine = (nearest == k).nonzero().squeeze(-1)
        for name, draws in found.draws(len(mine), at.call.plan, generator).items():
            draws = draws.reshape(-1, *shapes[name])
            every = rows.setdefault(name, draws.new_empty(num_samples, *shapes[name]))
            every[mine.to(every.device)] = draws
        components.append(found._replace(joint=None))  # of D^2 numbers
    tables, distance, doubts = combined(components, weights)
    theta, shapes = _of_theta(at_theta, design.u(z), w), at_theta.layout.constrained_shapes | shapes
    distance = {n: table.from_gaussian for n, table in theta.items()} | distance
    return IntegratedMarginals(
        log_evidence=design.log_integral,
        samples=at_theta.at(design.u(drawn)) | rows,
        distance={n: x.reshape(shapes[n]) for n, x in distance.items()},
        doubts=(*_doubts(at_theta, design, definite), *doubts),
        _tables=theta | tables,
        _shapes=shapes,
        points=at_theta.at(design.u(design.z)),
        weights=design.weights.to(at_theta.like),
    )


def _of_theta(at: _Conditioned, u: Tensor, weights: Tensor) -> dict[str, Densities]:
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
    return tables


def _doubts(at: _Conditioned, design: Design, definite: bool) -> tuple[str, ...]:
    found = []
    if not definite:
        found.append("In doubt: log p(theta | y) is not concave at its mode.")
    if design.effective < min(FEW, 3.0 if design.z.shape[1] == 1 else FEW):
        found.append(
            f"In doubt: the points weigh as {design.effective:.1f} of equal weight, so p(theta | y) is "
            f"narrower or wider than they are, or far from Gaussian."
        )
    if at.unsettled:
        found.append(f"In doubt: sites had not converged at {at.unsettled} points.")
    return tuple(found)
