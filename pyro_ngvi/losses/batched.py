"""An ELBO whose particles run together under ``torch.func.vmap``.

    ELBO = E_q[log p(y, z) - log q(z)]  ~  1/S sum_s [log p(y, z_s) - log q(z_s)],
    z_s = g(noise_s; parameters),

the fully reparameterised estimator of ``pyro.infer.Trace_ELBO`` (Kingma & Welling 2014; Kucukelbir
et al. 2017), particle for particle.
"""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import ELBO
from pyro.infer.autoguide import AutoContinuous
from pyro.nn.module import pyro_method
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.util import warn_if_nan
from torch import Tensor

from ..curvature.estimators import ESTIMATORS, READ_OFF, Drawn
from ..guides.base import AutoFamily
from ..linalg.host import outside_autocast
from ..runtime.checks import (
    check_guide,
    check_guide_of_this_model,
    check_log_prob_shape,
    check_model,
    check_whole_plates,
    sum_log_prob,
)
from ..runtime.density import site_kind, site_log_prob, with_density
from ..runtime.layout import LatentLayout
from ..runtime.vmap import (
    Conditioned,
    Minibatches,
    Site,
    Sites,
    is_auxiliary,
    is_latent,
    is_minibatch,
    run_particles,
)
from ..runtime.vmap_error import CannotBatch
from ..runtime.whole_gradients import whole_gradients
from .first_run import Checked, check_takes_curvature, first_run
from .without_vmap import WithoutVmap

Program = Callable[..., Any]
Values = dict[str, Tensor]


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
            :mod:`pyro_ngvi.curvature.estimators`. "hessian": the Hessian; "gauss_newton": products
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
        self._pair: tuple[Program, Any] | None = None
        self._checked: Checked | None = None  # by the first run of the pair
        self._structure: Any = None  # of the model's last run
        self._data: dict[str, Any] = {}  # which observed values were checked
        self._without_vmap: list[WithoutVmap] = []
        self._layout: tuple[Trace, LatentLayout] | None = None
        self._drawn: Drawn | None = None  # what lasts of the curvature from step to step

    def __getstate__(self) -> dict[str, Any]:
        # a weak reference cannot be stored; this one refers to nothing
        return vars(self) | {"_data": dict.fromkeys(self._data, (type(None), None))}

    def loss(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> float:
        """An estimate of the negative ELBO, as a number and without gradients."""
        with torch.no_grad():
            loss = self.differentiable_loss(model, guide, *args, **kwargs)
        warn_if_nan(loss, "loss")
        return float(loss)

    def loss_and_grads(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> Tensor:
        """An estimate of the negative ELBO; adds its gradient to every parameter's ``.grad``.

        Where it raises, no ``.grad`` of a parameter in Pyro's store has changed.  The estimate stays a
        tensor on its device, so that nothing waits for it here.
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
                with torch.no_grad(), _Tempered(self.kl_weight):
                    drawn.leave(self._checked.model, self._minibatches, args, kwargs)
        return loss.detach()

    @property
    def curvature_reasons(self) -> dict[str, str]:
        """Why the fast route of "gauss_newton" does not cover a latent site: a sentence by name.

        Known after the first step.  What is not covered takes a slower route to the same numbers.
        """
        return {} if self._drawn is None else dict(self._drawn.reasons)

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
        joint, shared = _is_joint(guide), {}
        if kind is not None and (self._drawn is None or self._drawn.kind != kind):
            check_takes_curvature(guide, kind, joint)
        if joint:
            values, log_q, drawn = self._draw_jointly(guide, args, kwargs, kind)
        else:
            values, log_q = self._draw(guide, args, kwargs, shared)
            drawn = None
        taps = None if drawn is None else drawn.taps
        validates = dist.is_validation_enabled()  # it is off under vmap

        def log_joint(sites: Sites) -> Any:
            terms = self._log_probs(sites, values, shared, validates)
            if taps is None:
                return _total(terms.values())
            return terms.pop(taps.observed), _total(terms.values())

        how: Any = {"shared": shared, "chunk_size": self.chunk_size}
        how |= {"loops": drawn is None or kind in READ_OFF, "totals": drawn is None}
        program = self._checked.model if taps is None else taps
        with _Tempered(self.kl_weight):
            log_p = self._run(program, log_joint, values, args, kwargs, **how)
        if drawn is not None and taps is not None:
            log_p = drawn.log_joint(*log_p)
        losses = log_q - log_p
        if drawn is not None:
            drawn.losses = losses.detach()
        return losses.sum() / self.num_particles, drawn

    def _run(
        self,
        program: Program,
        reduce: Any,
        values: Values,
        *call: Any,
        loops: bool = True,
        totals: bool = False,
        shared: Any = None,
        **how: Any,
    ) -> Any:
        """``run_particles``; where it cannot and ``loops`` allows it, in another way."""
        given = reduce, values, self.num_particles, *call
        common: Any = {"minibatches": self._minibatches, "shared": shared}
        for other in self._without_vmap:
            if other.program is program:
                return other(*given, **common)
        try:
            return run_particles(program, *given, **common, **how)
        except CannotBatch as error:
            if not loops or isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            reason = error
        other = WithoutVmap(program)
        result = other.first(reason, totals, not self._without_vmap, *given, **common)
        self._without_vmap.append(other)
        return result

    def _log_probs(self, sites: Sites, values: Values, shared: Values, validates: bool) -> Values:
        """log p of one particle by site; what is not as it was when it was checked is checked."""
        checked, structure = self._checked, [list(values), *map(_structure, sites.values())]
        changed = bool(shared) or structure != self._structure
        if changed:
            check_model(sites, values, shared)
            check_guide_of_this_model(values.keys() - checked.helpers, sites)
        if validates and checked.supports is not None:
            checked.supports.check(sites)
        observed = {name: sites[name]["value"] for name in self._data if name in sites}
        if validates and not all(_is_same(x, self._data[name]) for name, x in observed.items()):
            checked.later_data.check(sites)
            self._data |= {name: _identity(x) for name, x in observed.items()}
        terms = {name: site_log_prob(site)[1] for name, site in with_density(sites).items()}
        if changed:
            for name, log_prob in terms.items():
                check_log_prob_shape(sites[name], log_prob)
        self._structure = structure
        return {name: log_prob.sum() for name, log_prob in terms.items()}

    def _draw(
        self, guide: Program, args: Any, kwargs: Any, shared: Values
    ) -> tuple[Values, Tensor]:
        """Run a guide of any kind under ``vmap``: values (S, ...) by site, and log q, (S,).

        A minibatch drawn for the guide goes into ``shared``; one that the guide passes to its
        plate is among the values.
        """

        def reduce(sites: Sites) -> tuple[Values, Tensor]:
            values = {}
            for name, site in sites.items():
                if is_minibatch(site) and site["value"] is self._minibatches.get(name):
                    shared[name] = site["value"]
                elif is_minibatch(site) or is_latent(site):
                    values[name] = torch.as_tensor(site["value"])
            check_guide(sites)
            helpers = {name for name, site in sites.items() if is_auxiliary(site)}
            self._checked = self._checked._replace(helpers=helpers)
            return values, sum_log_prob(sites)

        return self._run(guide, reduce, {}, args, kwargs, sampling=True)

    def _draw_jointly(
        self, guide: AutoContinuous, args: Any, kwargs: Any, kind: str | None
    ) -> tuple[Values, Tensor, Drawn | None]:
        """All particles from the guide's joint distribution: values by site, and log q."""
        trace: Any = guide.prototype_trace
        if self._layout is None or self._layout[0] is not trace:
            check_whole_plates(type(guide).__name__, dict(trace.iter_stochastic_nodes()))
            self._layout = (trace, LatentLayout(trace))
        layout, scores, drawn = self._layout[1], kind == "scores", self._drawn
        # Validation would wait for the device. The factor lets handlers around SVI.step, such as
        # poutine.scale, act on log q as they do on the model.
        with pyro.validation_enabled(False), Conditioned({}, self._minibatches) as handler:
            q = _posterior_of(guide, *args, **kwargs)
            # with scores of its own, the optimizer needs no gradient through the draws
            with torch.set_grad_enabled(torch.is_grad_enabled() and not scores):
                theta = q.rsample((self.num_particles,))
                values, log_det = layout.unpack_with_log_det(theta)
                pyro.factor("_log_q", q.log_prob(theta) - log_det, has_rsample=True)
        site = handler.sites["_log_q"]
        log_q = site_log_prob(site)[1]
        if kind is None or not (theta.requires_grad or scores):
            return values, log_q, None
        unscaled = isinstance(site["scale"], int | float) and site["scale"] == 1.0
        if kind != "price" and not (unscaled and site["mask"] is None):
            raise ValueError(
                f"BatchedELBO(curvature={kind!r}) stands under a poutine.scale or mask around model "
                "and guide, which changes the curvature but not the precision of q that it becomes. "
                "Leave it out; to temper the posterior there is kl_weight."
            )
        if drawn is None or drawn.kind != kind:
            drawn = self._drawn = Drawn(kind, guide, layout)
        drawn.start(theta, log_det)
        return values, log_q, drawn

    def _get_trace(self, model: Program, guide: Program, args: Any, kwargs: Any) -> None:
        """Of a new pair: the first run, without ``vmap`` and with every check."""
        self._minibatches, self._drawn, self._structure = Minibatches(), None, None
        self._checked = first_run(model, guide, args, kwargs, self._minibatches)
        self._data = {name: _identity(value) for name, value in self._checked.data.items()}
        self._pair, self._without_vmap = (model, guide), []


class _Tempered(Messenger):
    """Multiplies the log probability of observed sites (not factors) by ``1 / kl_weight``.

    Dividing by tau rather than multiplying the KL term keeps the entropy of q at weight 1, on which
    natural-gradient rules are built: their precision is then that of the tempered posterior.
    """

    def __init__(self, kl_weight: float) -> None:
        super().__init__()
        self.kl_weight = kl_weight

    def _pyro_sample(self, msg: Any) -> None:
        if self.kl_weight != 1.0 and msg["is_observed"] and site_kind(msg) == "observed":
            msg["scale"] = msg["scale"] / self.kl_weight


@pyro_method
def _posterior_of(guide: AutoContinuous, *args: Any, **kwargs: Any) -> Any:
    # As a method of the module, so that its parameters are registered as in a call of the guide.
    if isinstance(guide, AutoFamily):
        return guide.sampling_posterior()
    return guide.get_posterior(*args, **kwargs)


def _is_joint(guide: Program) -> bool:
    """Whether a guide samples one flat vector in Pyro's own way, and can do so in a batch."""
    return (
        isinstance(guide, AutoContinuous)
        and type(guide).forward in (AutoContinuous.forward, AutoFamily.forward)
        and type(guide).sample_latent in (AutoContinuous.sample_latent, AutoFamily.sample_latent)
    )


def _structure(site: Site) -> tuple[Any, ...]:
    """What the checks of a site look at, but for the numbers of its value."""
    fn, plates = site["fn"], [(f.name, f.dim, f.size) for f in site["cond_indep_stack"]]
    shapes = [getattr(x, "shape", None) for x in (site["value"], site["scale"], site["mask"])]
    of_fn = [getattr(fn, name, None) for name in ("batch_shape", "event_shape")]
    return site["name"], site["is_observed"], plates, shapes, of_fn


def _identity(value: Tensor) -> tuple[Any, int | None]:
    return ref(value), None if value.is_inference() else value._version


def _is_same(value: Any, identity: tuple[Any, int | None]) -> bool:
    """Whether this is the tensor of then, and nobody has written into it."""
    seen, version = identity
    return seen() is value and version is not None and value._version == version


def _total(log_probs: Iterable[Tensor]) -> Tensor:
    total = None
    for x in log_probs:
        total = x if total is None else total + x
    return torch.zeros(()) if total is None else total
