"""A model given its hyperparameters theta, its guide of sites, and what both say of theta."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from textwrap import shorten
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from ..linalg.host import own_random_state
from ..probing.flat import flat_sites
from ..runtime.density import LatentLayout
from ..runtime.waiting import waiting
from .conditioned_model import MeansOfProcesses, is_gaussian
from .corrections import corrected_evidence
from .cvi import CVI
from .guide import AutoSites
from .joint import joint_of
from .loss import SitesELBO
from .marginals import Draws
from .structure import ImproperError, unwrapped

#: sweeps at one point at most, and how far in q's standard deviations the last may go
SWEEPS, SETTLED = 60, 2e-3
#: draws of the prior whose median is the start
PRIORS = 9
#: what says that there is no posterior given some theta
FAILURES = (ValueError, ImproperError, LinAlgError)


class _Held(Messenger):
    """Parameters of the model without their gradients."""

    def _pyro_post_param(self, msg: Any) -> None:
        msg["value"] = msg["value"].detach()


class GivenTheta:
    def __init__(self, model: Callable[..., Any], args: Any, kwargs: Any, over: Any, latent: Any):
        self.model, self.args, self.kwargs = model, args, kwargs
        self.values: dict[str, Tensor] = {}
        self.unsettled = 0
        self.bar = waiting("integrate", unit=" points")
        #: sites by u at which they were fitted
        self.known: dict[tuple[float, ...], list[Tensor]] = {}
        self._drawn = draws = [self._latents(seed) for seed in range(PRIORS)]
        sites = draws[0]
        others = [n for n, s in sites.items() if not is_gaussian(unwrapped(s))]
        names = others if over is None else list(over)
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
        self.like = every = self.layout.pack(values)
        for name, shape in self.layout.unconstrained_shapes.items():
            images = [biject_to(s[name]["fn"].support)(every.new_zeros(shape)) for s in draws]
            if not all(torch.equal(image, images[0]) for image in images):
                raise ValueError(
                    f"integrate: the support of the hyperparameter {name!r} depends on other latent "
                    f"sites. Draw one of fixed support, as a share of it, and scale that."
                )
        self.latent, self.loss = latent, SitesELBO()
        self.failure: Exception | None = None

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

    def begin(self) -> Tensor:
        """A median of the prior or the image of zero, whichever is better: vague priors go far out.

        The structure of the model is found there, too: far out it is lost in rounding.
        """
        median = self.like.double().cpu().median(0).values
        found = []
        for u in (median, torch.zeros_like(median)):
            self.move(u)
            self.guide = AutoSites(self.conditioned, latent=self.latent)
            self.optim = CVI(self.guide, others=None)
            try:
                self.guide.call_of(self.args, self.kwargs)
                found.append((self.gradient_at(u)[0], len(found), u, self.guide, self.optim))
            except FAILURES as error:
                self.failure = self.failure or error
        best: Any = max(found, default=(-torch.inf,) * 5)
        value, _, start, self.guide, self.optim = best
        if not isfinite(value):
            reason = str(self.failure).removeprefix("AutoSites: ")
            raise self.refusal(f"integrate(over={list(self.layout.transforms)}): {reason}")
        return start

    def refusal(self, text: str) -> ValueError:
        """An error of that text, or its beginning, caused by the last failure."""
        error = ValueError(shorten(text, 240, placeholder=" ..."))
        error.__cause__ = self.failure
        return error

    def settle(self, u: Tensor) -> float:
        """Sweeps at u until q stands still; the log-Jacobian."""
        self.bar.update()
        log_det = float(self.move(u.detach()))
        params, key = self.guide.natural_params().values(), tuple(u.tolist())
        with torch.no_grad():
            for p, known in zip(params, self.known.get(key, params), strict=True):
                p.copy_(known)
        try:
            self._sweep(params)
        except FAILURES:  # under this prior those of another theta need not be proper
            self.guide.reset()
            self._sweep(params)
        self.known[key] = [p.detach().clone() for p in params]
        return log_det

    def _sweep(self, params: Any) -> None:
        before, slack = torch.inf, 64.0 * torch.finfo(self.like.dtype).eps
        for _ in range(SWEEPS):
            with poutine.block():
                program = self.conditioned, self.guide
                loss = float(self.loss.loss_and_grads(*program, *self.args, **self.kwargs))
                self.optim(params)
            still = abs(loss - before) <= slack * (1.0 + abs(loss))
            if still or self.optim.report().step_norm < SETTLED:
                break
            before = loss
        else:
            self.unsettled += 1

    def gradient_at(self, u: Tensor) -> tuple[float, Tensor]:
        """ELBO + log-Jacobian and its gradient (p,); -inf and NaN where there is none."""
        try:
            self.settle(u)
        except FAILURES as error:
            self.failure = error
            return -torch.inf, torch.full_like(u, torch.nan)
        moved = u.clone().requires_grad_()
        with torch.enable_grad(), poutine.block():
            log_det = self.move(moved)
            program = self.conditioned, self.guide
            value = log_det - self.loss.differentiable_loss(*program, *self.args, **self.kwargs)
            (slope,) = torch.autograd.grad(value, moved)
        self.move(u)
        return float(value.detach()), slope

    def log_p(self, u: Tensor) -> float:
        """log p(y, theta) + log-Jacobian, corrected; -inf where it has no value."""
        try:
            log_det = self.settle(u)
            with torch.no_grad():
                at = self.guide._snapshot(self.args, self.kwargs)
                found = corrected_evidence(at, joint_of(at)).log_p + log_det
        except FAILURES as error:
            self.failure = error
            return -torch.inf
        if not isfinite(found):
            self.failure = ValueError(f"the log evidence is {found}")
        return found if isfinite(found) else -torch.inf

    def keep_their_prior(self) -> list[str]:
        """The hyperparameters on which nothing else in the model depends."""
        draws = self._drawn
        values = {n: torch.stack([d[n]["value"] for d in draws]) for n in draws[0]}
        with suppress(*FAILURES), poutine.block():
            found = flat_sites(self.model, values, self.args, self.kwargs)
            return [n for n, moves in found.items() if n in self.layout.transforms and not moves]
        return []

    def where(self, u: Tensor) -> str:
        """The values at u (p,), in words."""
        values = {n: x[0].flatten().tolist() for n, x in self.at(u.unsqueeze(0)).items()}
        return ", ".join(f"{n} = {' '.join(f'{v:.3g}' for v in x)}" for n, x in values.items())
