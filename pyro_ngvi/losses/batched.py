"""An ELBO whose particles run together under ``torch.func.vmap``.

    ELBO = E_q[log p(y, z) - log q(z)]  ~  1/S sum_s [log p(y, z_s) - log q(z_s)],
    z_s = g(noise_s; parameters),

the fully reparameterised estimator of ``pyro.infer.Trace_ELBO`` (Kingma & Welling 2014; Kucukelbir
et al. 2017), particle for particle.
"""

from collections.abc import Callable
from typing import Any, cast

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import ELBO
from pyro.infer.autoguide import AutoContinuous
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.util import warn_if_nan
from torch import Tensor

from ..curvature.estimator import CurvatureEstimator
from ..curvature.kinds import ESTIMATORS, READ_OFF
from ..curvature.record import leave_curvature
from ..guides.base import AutoFamily
from ..linalg.host import outside_autocast, own_random_state
from ..optim.host import find_blocks
from ..runtime.checks import (
    LatentSupports,
    LaterData,
    check_guide,
    check_replaced_priors,
    check_values,
    check_whole_plates,
)
from ..runtime.density import (
    LatentLayout,
    Sites,
    check_guide_of_this_model,
    check_model,
    is_auxiliary,
    is_latent,
    is_minibatch,
    site_log_prob,
    sum_log_prob,
)
from ..runtime.run import Conditioned, Minibatches, run_both, run_plainly
from ..runtime.store import whole_gradients
from ..runtime.summed_out import summed_out
from .guide_checks import check_all_have_scores, check_guide_takes_curvature, check_unscaled
from .joint import is_joint, posterior_of
from .loop import Runs
from .tempering import Tempered

Program = Callable[..., Any]
Draw = tuple[dict[str, Tensor], Tensor]


class BatchedELBO(ELBO):
    """Negative ELBO for ``pyro.infer.SVI``, in nats, with the particles batched by ``vmap``.

    The model is written for *one* draw of its latent sites (``X @ w``): it needs no plate for the
    particles and cannot broadcast against them. A guide that derives from ``AutoContinuous``, and
    overrides neither ``forward`` nor ``sample_latent``, draws all its particles in one call of
    ``get_posterior()``; any other guide is run under ``vmap`` too. A subsampled plate has one
    minibatch a step, shared by model, guide and particles.

    Latent sites of the model that are marked ``infer={"enumerate": "parallel"}`` and not in the guide
    are summed out, as in ``TraceEnum_ELBO``.  A program that ``vmap`` cannot run, because it branches
    on the value of a latent site, say, runs once for each particle, with one notice.

    Do not use it with a guide whose draws are not reparameterised (discrete ones above all):
    ``Trace_ELBO`` is for these. ``pyro.poutine`` handlers around ``SVI.step`` act as usual.

    The first call for a pair of model and guide also runs both once without ``vmap``. That creates
    their parameters, validates the data against the supports, and leaves the random state alone. Data
    of later calls are checked against the supports on a CPU only, and only against supports that do
    not depend on latent sites (elsewhere it would have to wait for the answer): on a GPU they are
    yours to check. NaN in later data is not refused there, nor what a mask hides.

    Args:
        num_particles: S, the number of draws of the guide.
        curvature: what ``loss_and_grads`` leaves on the guide for its optimizer, beside the
            gradients: an expected curvature of -log p(y, z), see
            :mod:`pyro_ngvi.curvature.kinds`. "hessian": the Hessian; "gauss_newton": products
            of the gradients of single data, with the Hessian of the prior (both wrong, with a
            warning, where the gradient of what they are taken of jumps: Laplace distributions,
            and for "hessian" ReLU); "squared_gradient": squares of the gradient of the
            minibatch, as Adam has them; "price": none, the gradients of the scales carry it;
            "kronecker": the factors of each layer, for ``AutoMatrixNormal`` and ``NoisyKFAC``;
            "scores": the draws and log q - log p at each, for ``SPRING``, and no gradients. For
            a guide of ours that has a use for it; it is that of one call, so call this once a
            step. Further names are those registered in :data:`pyro_ngvi.curvature.ESTIMATORS`.
        kl_weight: tau, a weight on the KL term: the loss becomes that of the tempered
            posterior, prior x likelihood^(1 / tau), where a ``pyro.factor`` counts as prior. An
            attribute too, so that a loop can let it grow to 1 (a warm-up): ``loss.kl_weight =
            min(1.0, (k + 1) / 1000)``.
        chunk_size: run at most that many particles of the model at a time, to bound memory.
        retain_graph: passed to ``backward``.

    Raises:
        ValueError: when a site cannot be handled, or its ``log_prob`` has a shape that its
            plates and its value do not explain.
        RuntimeError: when model or guide cannot run under ``vmap``, with a curvature that needs it.

    Warns:
        RuntimeWarning: when model or guide cannot run under ``vmap``, so that a step takes S runs,
            or two where Pyro's vectorised particles agree with them.

    Example:
        >>> import torch, pyro, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> from pyro.infer.autoguide import AutoMultivariateNormal
        >>> def model(X, y):
        ...     w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)
        >>> guide, adam = AutoMultivariateNormal(model), pyro.optim.Adam({"lr": 0.01})
        >>> svi = SVI(model, guide, adam, loss=BatchedELBO(num_particles=8))
        >>> isinstance(svi.step(torch.eye(2), torch.ones(2)), float)
        True
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
        if num_particles < 1:
            raise ValueError(f"num_particles is {num_particles}; it must be at least 1.")
        super().__init__(num_particles=num_particles, retain_graph=retain_graph)
        self.chunk_size = chunk_size
        if curvature not in (None, *ESTIMATORS):
            kinds = ", ".join(map(repr, ESTIMATORS))
            raise ValueError(f"curvature is {curvature!r}; it must be None or one of {kinds}.")
        self.curvature = curvature
        self.kl_weight = kl_weight
        self._minibatches = Minibatches()
        self._estimator: CurvatureEstimator | None = None
        self._active: CurvatureEstimator | None = None  # the estimator, in a step that records
        self._prepared: tuple[Program, Program] | None = None
        self._model: Any = None  # the one of the pair, without its enumerated sites
        self._runs = Runs()
        self._layout: tuple[Trace, LatentLayout] | None = None
        self._later_data = LaterData({})
        self._supports = LatentSupports(None)
        self._helpers: set[str] = set()

    def loss(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> float:
        """An estimate of the negative ELBO, as a number and without gradients."""
        with torch.no_grad():
            loss = self.differentiable_loss(model, guide, *args, **kwargs)
        warn_if_nan(loss, "loss")
        return float(loss)

    def loss_and_grads(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> Tensor:
        """An estimate of the negative ELBO; adds its gradient to every parameter's ``.grad``.

        Where it raises, no ``.grad`` of a parameter in Pyro's store has changed.

        The estimate stays a tensor on its device, so that nothing waits for it here.
        """
        if self.curvature is not None:
            check_guide_takes_curvature(guide, self.curvature, is_joint(guide))
        with whole_gradients():
            loss = self._estimate(model, guide, args, kwargs)
            estimator = self._active
            if estimator is not None:
                estimator.before_backward()
            if loss.requires_grad:
                outside_autocast(loss.backward)(retain_graph=self.retain_graph)
            if estimator is not None:
                # parameters of the model need no graph of the curvature
                with torch.no_grad(), Tempered(self.kl_weight):
                    left = estimator.after_backward(self._model, self._minibatches, args, kwargs)
                leave_curvature(cast(AutoFamily, guide), left)
        return loss.detach()

    @property
    def curvature_reasons(self) -> dict[str, str]:
        """Why the fast route of "gauss_newton" does not cover a latent site: a sentence by name.

        Known after the first step.  What is not covered takes a slower route to the same numbers.
        """
        return {} if self._estimator is None else dict(self._estimator.reasons)

    def differentiable_loss(
        self, model: Program, guide: Program, *args: Any, **kwargs: Any
    ) -> Tensor:
        """An estimate of the negative ELBO, a scalar tensor that can be differentiated.

        It leaves no curvature, and neither does a module ``BatchedELBO(...)(model, guide)``, which
        calls it: with ``curvature`` it raises a ValueError while gradients are recorded.
        """
        if self.curvature is not None and torch.is_grad_enabled():
            raise ValueError(
                f"BatchedELBO(curvature={self.curvature!r}) leaves its curvature in loss_and_grads "
                f"only, and this is differentiable_loss, or a loss module. Pass it as SVI's loss=, "
                f"or leave curvature out."
            )
        return self._estimate(model, guide, args, kwargs)

    def _estimate(self, model: Program, guide: Program, args: Any, kwargs: Any) -> Tensor:
        prepared = self._prepared
        if prepared is None or prepared[0] is not model or prepared[1] is not guide:
            sites, _ = self._get_trace(model, guide, args, kwargs)
            self._later_data = LaterData(sites)
            self._estimator = None
            self._prepared = (model, guide)
            self._runs.forget()
        self._active = None
        if not 0.0 < self.kl_weight < float("inf"):
            raise ValueError(f"kl_weight is {self.kl_weight}; it must be a positive number.")
        self._minibatches.redraw()
        shared: dict[str, Tensor] = {}
        if is_joint(guide):
            values, log_q = self._draw_jointly(guide, args, kwargs)
        else:
            values, log_q = self._draw(guide, args, kwargs, shared)

        estimator = self._active
        validates = dist.is_validation_enabled()  # it is off under vmap

        def log_joint(sites: Sites) -> Any:
            check_model(sites, values, shared)
            check_guide_of_this_model(values.keys() - self._helpers, sites)
            if validates:
                self._supports.check(sites)
                self._later_data.check(sites)
            return sum_log_prob(sites) if estimator is None else estimator.terms(sites)

        how: Any = {"shared": shared, "chunk_size": self.chunk_size, "totals": estimator is None}
        program: Any = self._model if estimator is None else estimator.program(self._model)
        with Tempered(self.kl_weight):
            log_p = self._run(program, log_joint, values, args, kwargs, **how)
        if estimator is not None:
            log_p = estimator.log_joint(log_p)
        losses = log_q - log_p
        if estimator is not None:
            estimator.losses(losses)
        return losses.sum() / self.num_particles

    def _run(self, program: Program, reduce: Any, values: Any, args: Any, kwargs: Any, **how: Any):
        kind = None if self._active is None else self._active.kind
        given = program, reduce, values, self.num_particles, args, kwargs
        loops = kind in (None, *READ_OFF)
        return self._runs(loops, *given, minibatches=self._minibatches, **how)

    def _draw(self, guide: Program, args: Any, kwargs: Any, shared: dict[str, Tensor]) -> Draw:
        """Run a guide of any kind under ``vmap``: values (S, ...) by site, and log q, (S,).

        A minibatch drawn for the guide goes into ``shared``; one that the guide passes to its
        plate is among the values.
        """

        def reduce(sites: Sites) -> Draw:
            values = {}
            for name, site in sites.items():
                if is_minibatch(site) and site["value"] is self._minibatches.get(name):
                    shared[name] = site["value"]
                elif is_minibatch(site) or is_latent(site):
                    values[name] = torch.as_tensor(site["value"])
            check_guide(sites)
            self._helpers = {name for name, site in sites.items() if is_auxiliary(site)}
            return values, sum_log_prob(sites)

        return self._run(guide, reduce, {}, args, kwargs, sampling=True)

    def _draw_jointly(self, guide: AutoContinuous, args: Any, kwargs: Any) -> Draw:
        """Draw all particles from the guide's joint distribution: values by site, and log q."""
        trace: Any = guide.prototype_trace
        if self._layout is None or self._layout[0] is not trace:
            check_whole_plates(type(guide).__name__, dict(trace.iter_stochastic_nodes()))
            self._layout = (trace, LatentLayout(trace))
        _, layout = self._layout
        # Validation would wait for the device. The factor lets handlers around SVI.step, such as
        # poutine.scale, act on log q as they do on the model.
        with pyro.validation_enabled(False), Conditioned({}, self._minibatches) as handler:
            q = posterior_of(guide, *args, **kwargs)
            ours = isinstance(guide, AutoFamily) and torch.is_grad_enabled()
            kind = self.curvature if ours else None
            # with scores of its own, the optimizer needs no gradient through the draws
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.curvature != "scores"):
                theta = q.rsample((self.num_particles,))
                values, log_det = layout.unpack_with_log_det(theta)
                pyro.factor("_log_q", q.log_prob(theta) - log_det, has_rsample=True)
        site = handler.sites["_log_q"]
        if kind is not None and (theta.requires_grad or kind == "scores"):
            check_unscaled(site, kind)
            if self._estimator is None or self._estimator.kind != kind:
                if kind == "scores":
                    check_all_have_scores(cast(AutoFamily, guide))
                self._estimator = CurvatureEstimator(kind, guide, layout)
            self._active = self._estimator
            self._active.start(theta, log_det)
        return values, site_log_prob(site)[1]

    def _get_trace(self, model: Program, guide: Program, args: Any, kwargs: Any) -> Any:
        """Run guide and model once without ``vmap``, with every check; return their sites."""
        if isinstance(poutine.unwrap(guide), Messenger):
            raise ValueError(
                f"The guide {type(guide).__name__} is an effect handler around its model, which "
                f"BatchedELBO cannot run on its own; use pyro.infer.Trace_ELBO."
            )
        minibatches = self._minibatches = Minibatches()
        with own_random_state(), poutine.block(), torch.no_grad():
            of_guide, of_model = run_both(model, guide, args, kwargs, minibatches)
            guide_sites, drawn, model_sites = of_guide.sites, of_model.values, of_model.sites
            check_guide(guide_sites)
            self._model = summed_out(model, model_sites, drawn)
            if self._model is not model:
                model_sites = run_plainly(self._model, drawn, args, kwargs, minibatches)
            self._helpers = {n for n, site in guide_sites.items() if is_auxiliary(site)}
            own = {name for name, site in guide_sites.items() if not site["is_observed"]}
            check_guide_of_this_model(own - self._helpers, model_sites)
            self._supports = LatentSupports(guide)
            self._supports.check(model_sites)
            for _, block in find_blocks(guide):
                check_replaced_priors(block.replaced_priors, guide_sites, model_sites)
            check_model(model_sites, drawn, drawn)
            for sites in (guide_sites, of_model.sites):
                check_values(sites)
        return model_sites, guide_sites
