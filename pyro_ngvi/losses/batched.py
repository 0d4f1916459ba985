"""An ELBO whose particles run together under ``torch.func.vmap``.

    ELBO = E_q[log p(y, z) - log q(z)]  ~  1/S sum_s [log p(y, z_s) - log q(z_s)],

z_s reparameterised, as in ``pyro.infer.Trace_ELBO`` (Kingma & Welling 2014), particle for particle.
"""

import warnings
from collections.abc import Callable
from numbers import Integral
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import ELBO
from pyro.infer.autoguide import AutoContinuous
from pyro.nn.module import pyro_method
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.util import warn_if_nan
from torch import Tensor

from ..curvature.estimators import ESTIMATORS, READ_OFF, Drawn, check_takes_curvature
from ..distributions.steady import Steady, can_be_steady
from ..fisher.watch import draws_steadily
from ..guides.base import AutoFamily
from ..linalg.host import outside_autocast, own_random_state
from ..optim.host import find_blocks
from ..runtime import checks, density, run
from ..runtime.density import LatentLayout, Sites, site_log_prob, sum_log_prob
from ..runtime.pyro_adapter import draws_one_vector
from ..runtime.run import CannotBatch, Conditioned, Minibatches
from ..runtime.store import ModuleParams, whole_gradients
from ..runtime.summed_out import summed_out

Program = Callable[..., Any]
Values = dict[str, Tensor]


class BatchedELBO(ELBO):
    """Negative ELBO for ``pyro.infer.SVI``, in nats, with the particles batched by ``vmap``.

    The model is written for *one* draw of its latent sites (``X @ w``): it needs no plate for the
    particles and cannot broadcast against them. A joint autoguide draws all its particles in one call
    of ``get_posterior()``; any other guide is run under ``vmap`` too. A subsampled plate has one
    minibatch a step, shared by model, guide and particles. Latent sites of the model that are marked
    ``infer={"enumerate": "parallel"}`` and not in the guide are summed out, as in ``TraceEnum_ELBO``.

    Do not use it with a guide whose draws are not reparameterised (discrete ones above all):
    ``Trace_ELBO`` is for these. The first call for a pair of model and guide also runs both once and
    validates the data. Later data are checked on a CPU only, and only against supports that do not
    depend on latent sites; NaN is not refused there, nor what a mask hides.

    Args:
        num_particles: S, the number of draws of the guide; of a mixture, of each of its components.
        curvature: what ``loss_and_grads``, called once a step, leaves on a guide of ours for its
            optimizer: "hessian", "gauss_newton" (both wrong, with a warning, where gradients jump:
            Laplace distributions, and for "hessian" ReLU; the second sums squares of each datum's
            gradients, from which sds are wrong where the model does not fit), "squared_gradient",
            "price", "kronecker" for ``NoisyKFAC``, "scores" for ``SPRING``, without gradients, as
            :mod:`pyro_ngvi.curvature.estimators` defines them, or another name in its table.
        kl_weight: tau, a weight on the KL term: the loss becomes that of the tempered posterior,
            prior x likelihood^(1 / tau), where a ``pyro.factor`` counts as prior. An attribute too, so
            that a loop can let it grow to 1 (a warm-up).
        chunk_size: run at most that many particles of the model at a time, to bound memory.
        retain_graph: passed to ``backward``.

    Raises:
        ValueError: for arguments out of range; when called, where a site cannot be handled or its
            ``log_prob`` was broadcast, or for a guide that has no use for the curvature.
        RuntimeError: when model or guide cannot run under ``vmap``, with a curvature that needs it.

    Warns:
        RuntimeWarning: when model or guide cannot run under ``vmap`` (it branches on a latent value,
            say): a step then takes S runs.

    Example:
        >>> import torch, pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> guide = ngvi.AutoFullRankNormal(model)
        >>> svi = pyro.infer.SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
        >>> round(svi.step(torch.tensor([1.0, 2.0, 3.0])), 2)  # where this guide starts: -log p(y)
        6.63
    """

    def __init__(
        self,
        num_particles: int = 1,
        *,
        curvature: str | None = None,
        kl_weight: float = 1.0,
        chunk_size: int | None = None,
        retain_graph: bool | None = None,
    ) -> None:
        if not isinstance(num_particles, Integral) or num_particles < 1:
            raise ValueError(f"num_particles is {num_particles}; it must be a whole number from 1.")
        if curvature not in (None, *ESTIMATORS):
            kinds = ", ".join(map(repr, ESTIMATORS))
            raise ValueError(f"curvature is {curvature!r}; it must be None or one of {kinds}.")
        super().__init__(num_particles=num_particles, retain_graph=retain_graph)
        self.curvature, self.kl_weight, self.chunk_size = curvature, kl_weight, chunk_size
        self._pair: tuple[Program, Any] | None = None
        self._model: Any = None  # the one of the pair, without its enumerated sites
        self._helpers: set[str] = set()  # sites of the guide that the model does not have
        self._supports, self._later_data = checks.LatentSupports(None), checks.LaterData({})
        self._minibatches = Minibatches()
        self._in_loop: list[Program] = []  # which vmap cannot run
        self._layout: tuple[Trace, LatentLayout] | None = None
        self._drawn: Drawn | None = None  # what lasts of the curvature from step to step

    def loss(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> float:
        """An estimate of the negative ELBO in nats, a number, without gradients."""
        with torch.no_grad():
            loss = self.differentiable_loss(model, guide, *args, **kwargs)
        warn_if_nan(loss, "loss")
        return float(loss)

    def loss_and_grads(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> Tensor:
        """An estimate of the negative ELBO, 0-dim in nats; adds its gradient to every ``.grad``.

        Where it raises, no ``.grad`` of a parameter in Pyro's store has changed.
        """
        with whole_gradients():
            kind = self.curvature if torch.is_grad_enabled() else None
            loss, drawn = self._estimate(model, guide, args, kwargs, kind)
            if drawn is not None:
                drawn.before_backward()
            if loss.requires_grad:
                outside_autocast(loss.backward)(retain_graph=self.retain_graph)
            if drawn is not None:
                # parameters of the model need no graph of the curvature
                with torch.no_grad(), density.Tempered(self.kl_weight):
                    drawn.leave(self._model, self._minibatches, args, kwargs)
        return loss.detach()

    @property
    def subsamples(self) -> bool:
        """Whether a plate of the last call drew a minibatch."""
        return bool(self._minibatches)

    @property
    def curvature_reasons(self) -> dict[str, str]:
        """By latent site, why it takes a slower way to "gauss_newton"; empty before the first step."""
        return {} if self._drawn is None else dict(self._drawn.reasons)

    def differentiable_loss(self, model: Program, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """An estimate of the negative ELBO, 0-dim with a graph; a ValueError with ``curvature``."""
        if self.curvature is not None and torch.is_grad_enabled():
            raise ValueError(
                f"BatchedELBO(curvature={self.curvature!r}) leaves its curvature in loss_and_grads "
                f"only. Pass it as SVI's loss=, or leave curvature out."
            )
        return self._estimate(model, guide, args, kwargs)[0]

    def _estimate(
        self, model: Program, guide: Any, args: Any, kwargs: Any, kind: str | None = None
    ) -> tuple[Tensor, Drawn | None]:
        """The loss, and where a ``kind`` of curvature is asked for, the draws."""
        if self._pair is None or self._pair[0] is not model or self._pair[1] is not guide:
            self._get_trace(model, guide, args, kwargs)
        if not 0.0 < self.kl_weight < float("inf"):
            raise ValueError(f"kl_weight is {self.kl_weight}; it must be a positive number.")
        self._minibatches.redraw()
        outer = guide.globals if hasattr(guide, "draw_units") else guide
        checks.check_tempers(outer, self.kl_weight)
        joint, shared, weighted = draws_one_vector(outer, AutoFamily), {}, None
        if kind is not None and (self._drawn is None or self._drawn.kind != kind):
            check_takes_curvature(guide, kind, joint and isinstance(guide, AutoFamily))
        if joint:
            values, log_q, drawn, weighted = self._draw_jointly(outer, args, kwargs, kind)
        else:
            (values, log_q), drawn = self._draw(outer, args, kwargs, shared), None
        if outer is not guide:  # units given globals, for all particles at once
            weight = 1.0 / self.kl_weight
            units = guide.draw_units(values, args, kwargs, self._minibatches, weight)
            with pyro.validation_enabled(False), Conditioned({}, self._minibatches) as handler:
                pyro.factor("_log_q_units", units.total, has_rsample=True)
            values |= units.values
            log_q = log_q + site_log_prob(handler.sites["_log_q_units"])[1]
        taps = None if drawn is None else drawn.taps
        validates = dist.is_validation_enabled()  # it is off under vmap

        def log_joint(sites: Sites) -> Any:
            density.check_model(sites, values, shared)
            density.check_guide_of_this_model(values.keys() - self._helpers, sites)
            if validates:
                self._check_what_is_new(sites)
            return sum_log_prob(sites) if taps is None else taps.log_probs(sites)

        program = self._model if taps is None else taps
        given = program, log_joint, values, len(log_q), args, kwargs
        loops = drawn is None or kind in READ_OFF
        with density.Tempered(self.kl_weight):
            log_p = self._run(*given, loops=loops, shared=shared, chunk_size=self.chunk_size)
        if drawn is not None and taps is not None:
            log_p = drawn.log_joint(*log_p)
        losses = log_q - log_p
        if drawn is not None:
            drawn.losses = losses.detach()
        losses = losses if weighted is None else weighted(losses)
        return losses.sum() / len(losses), drawn

    def _run(self, program: Any, *given: Any, loops: bool, shared: Any = None, **how: Any) -> Any:
        """``run_particles``; where it cannot and ``loops`` allows it, one after the other."""
        common: Any = {"minibatches": self._minibatches, "shared": shared}
        reason = None
        if not any(other is program for other in self._in_loop):
            try:
                return run.run_particles(program, *given, **common, **how)
            except CannotBatch as error:
                if not loops or isinstance(error.__cause__, torch.OutOfMemoryError):
                    raise
                reason = error.where
        with pyro.validation_enabled(False):
            result = run.run_in_loop(program, *given, **common)  # shows what is wrong in any run
        if reason is not None:
            if not self._in_loop:  # one notice is enough
                warnings.warn(
                    f"BatchedELBO: vmap cannot run the program ({reason}): each of {given[2]} "
                    f"particles has a run of its own, at so many times the cost. Keep latent values "
                    f"out of in-place writes (take index_put), .item() and if.",
                    RuntimeWarning,
                    stacklevel=5,
                )
            self._in_loop.append(program)
        return result

    def _check_what_is_new(self, sites: Sites) -> None:
        """Refuse supports of latent sites that have moved, and new data outside their support."""
        if self._supports.bounds:
            self._supports.check(sites)
        self._later_data.check(sites)

    def _draw(self, guide: Any, args: Any, kwargs: Any, shared: Values) -> tuple[Values, Tensor]:
        """Values (S, ...) by site of a guide, and log q (S,); minibatches drawn go into ``shared``."""

        def drawn(sites: Sites) -> tuple[Values, Tensor]:
            values = {}
            for name, site in sites.items():
                if density.is_minibatch(site) and site["value"] is self._minibatches.get(name):
                    shared[name] = site["value"]
                elif density.is_minibatch(site) or density.is_latent(site):
                    values[name] = torch.as_tensor(site["value"])
            checks.check_guide(sites)
            self._helpers = {name for name, site in sites.items() if density.is_auxiliary(site)}
            return values, sum_log_prob(sites)

        given = guide, drawn, {}, self.num_particles, args, kwargs
        return self._run(*given, loops=True, sampling=True)

    def _draw_jointly(
        self, guide: AutoContinuous, args: Any, kwargs: Any, kind: str | None
    ) -> tuple[Values, Tensor, Drawn | None, Any]:
        """As :meth:`_draw`, from the guide's joint distribution; what is recorded; and weights."""
        trace: Any = guide.prototype_trace
        if self._layout is None or self._layout[0] is not trace:
            checks.check_whole_plates(type(guide).__name__, dict(trace.iter_stochastic_nodes()))
            self._layout = (trace, LatentLayout(trace))
        layout, scores, drawn = self._layout[1], kind == "scores", self._drawn
        # Validation would wait for the device. The factor lets handlers around SVI.step, such as
        # poutine.scale, act on log q as they do on the model.
        with pyro.validation_enabled(False), Conditioned({}, self._minibatches) as handler:
            q = _posterior_of(guide, *args, **kwargs)
            # with scores of its own, the optimizer needs no gradient through the draws
            with torch.set_grad_enabled(torch.is_grad_enabled() and not scores):
                n, stratified = self.num_particles, not scores and hasattr(q, "strata")
                theta, weighted = q.strata(n, guide) if stratified else (q.rsample((n,)), None)
                values, log_det = layout.unpack_with_log_det(theta)
                pyro.factor("_log_q", q.log_prob(theta) - log_det, has_rsample=True)
        site = handler.sites["_log_q"]
        log_q = site_log_prob(site)[1]
        if kind is None or not (theta.requires_grad or scores):
            return values, log_q, None, weighted
        unscaled = isinstance(site["scale"], int | float) and site["scale"] == 1.0
        if kind != "price" and not (unscaled and site["mask"] is None):
            raise ValueError(
                f"BatchedELBO(curvature={kind!r}): a poutine.scale or mask around model and guide "
                "changes the curvature, not the precision of q. Leave it out, or take kl_weight."
            )
        if drawn is None or drawn.kind != kind:
            drawn = self._drawn = Drawn(kind, guide, layout)
        drawn.start(theta, log_det)
        return values, log_q, drawn, weighted

    def _get_trace(self, model: Program, guide: Any, args: Any, kwargs: Any) -> None:
        """Run a new pair once without ``vmap``, with every check."""
        if isinstance(poutine.unwrap(guide), Messenger):
            raise ValueError(
                f"The guide {type(guide).__name__} is an effect handler around its model, which "
                f"BatchedELBO cannot run on its own; use pyro.infer.Trace_ELBO."
            )
        minibatches = self._minibatches = Minibatches()
        with own_random_state(), poutine.block(), torch.no_grad():
            first = ModuleParams()(model)
            of_guide, of_model = run.run_both(first, guide, args, kwargs, minibatches)
            guide_sites, drawn, sites = of_guide.sites, of_model.values, of_model.sites
            if hasattr(guide, "draw_units"):  # the order of draws is to be that of later calls
                for name in (n for n, site in sites.items() if density.is_minibatch(site)):
                    minibatches.draw(name, sites[name]["fn"])
            checks.check_guide(guide_sites)
            self._model = summed_out(model, sites, drawn)
            if self._model is not model:
                sites = run.run_plainly(self._model, drawn, args, kwargs, minibatches)
            self._helpers = {n for n, site in guide_sites.items() if density.is_auxiliary(site)}
            own = {name for name, site in guide_sites.items() if not site["is_observed"]}
            density.check_guide_of_this_model(own - self._helpers, sites)
            self._supports = checks.LatentSupports(guide)
            self._supports.check(sites)
            for _, block in find_blocks(guide):
                checks.check_replaced_priors(block.replaced_priors, guide_sites, sites)
            density.check_model(sites, drawn, drawn)
            checks.check_values(guide_sites)
            checks.check_values(of_model.sites)
        self._later_data = checks.LaterData(sites)
        self._pair, self._drawn, self._in_loop = (model, guide), None, []


@pyro_method
def _posterior_of(guide: AutoContinuous, *args: Any, **kwargs: Any) -> Any:
    # As a method of the module, so that its parameters are registered as in a call of the guide.
    if isinstance(guide, AutoFamily):
        return guide.sampling_posterior(*args, **kwargs)
    q = guide.get_posterior(*args, **kwargs)
    return Steady(q) if draws_steadily(guide) and can_be_steady(q) else q
