"""``AutoFamily``, Pyro's ``AutoContinuous`` around a family, and q as a Pyro distribution."""

from __future__ import annotations

from typing import Any, ClassVar

import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta, Normal, TorchDistribution
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import constraints

from ..curvature.estimators import Curvature
from ..families.base import Family, Tensors
from ..linalg.host import choose, equal, host_bool, outside_autocast
from ..probing.vectorized import check_vectorized_call
from ..runtime.pyro_adapter import particle_plate
from ..runtime.store import follow_store, module_name
from ..runtime.told_in import told_in
from .marginals import SiteValue, site_quantiles
from .neutra import FamilyTransform
from .start import FirstCall


class FamilyDistribution(TorchDistribution):
    """q(z; params), event shape (d,), with sticking-the-landing inside.

    The gradient of log q along the path of a draw has a part of expectation zero, the score, which
    ``sticking_the_landing`` drops by log q at detached parameters: the noise vanishes as q approaches
    the posterior (Roeder, Wu & Duvenaud 2017), and ``log_prob(z)`` at a fixed z has no gradient.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support: Any = constraints.real_vector
    has_rsample = True

    def __init__(
        self,
        family: Family,
        params: Tensors,
        *,
        sticking_the_landing: bool = False,
        batch_shape: torch.Size | tuple[int, ...] = (),
        centred: bool = False,
        path_share: Tensor | None = None,
    ) -> None:
        self.family, self.params = family, params
        self.sticking_the_landing, self.centred = sticking_the_landing, centred
        self.path_share = path_share
        event_shape = torch.Size((family.dim(params),))
        super().__init__(torch.Size(batch_shape), event_shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> FamilyDistribution:
        how: Any = {"sticking_the_landing": self.sticking_the_landing, "batch_shape": batch_shape}
        how |= {"centred": self.centred, "path_share": self.path_share}
        return FamilyDistribution(self.family, self.params, **how)

    @outside_autocast
    def rsample(self, sample_shape: Any = ()) -> Tensor:
        draw = self.family.centred_draw if self.centred else self.family.draw
        return draw(self.params, torch.Size(sample_shape) + self.batch_shape)

    @outside_autocast
    def log_prob(self, value: Tensor) -> Tensor:
        params = self.params
        if self.sticking_the_landing:
            params = {name: tensor.detach() for name, tensor in params.items()}
        result, share = self.family.log_prob(params, value), self.path_share
        if share is not None and self.sticking_the_landing:
            share = share.to(result)
            # the same value, and a gradient of the same expectation
            entropy = (1.0 - share) * self.family.entropy(self.params)
            result = torch.lerp(result.detach(), result, share) - (entropy - entropy.detach())
        return result.expand(torch.broadcast_shapes(self.batch_shape, result.shape))

    @outside_autocast
    def entropy(self) -> Tensor:
        return self.family.entropy(self.params).expand(self.batch_shape)

    @property
    def mean(self) -> Tensor:
        return self.family.mean(self.params).expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        return self.family.stddev(self.params).square().expand(self.batch_shape + self.event_shape)

    @property
    def scale_tril(self) -> Tensor:
        """Lower triangular L (d, d) with covariance L L': for small d."""
        return self.family.scale_tril(self.params)

    @property
    def covariance_matrix(self) -> Tensor:
        """The d x d covariance (d, d): for small d."""
        return self.family.covariance(self.params)


class _Drawing(Messenger):
    """Around ``AutoContinuous.forward``: makes each ``Delta`` a :class:`SiteValue`."""

    #: the plate of vectorised particles in which the flat vector was drawn
    particles: Any = None

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if type(fn) is Delta:
            log_density: Any = fn.log_density
            msg["fn"] = SiteValue(fn.v, log_density, fn.event_dim)

    def _pyro_post_sample(self, msg: Any) -> None:
        if isinstance(msg["fn"], FamilyDistribution):
            self.particles = particle_plate(msg)


def _tracing() -> bool:
    return torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


class AutoFamily(FirstCall):
    """A guide whose flat latent vector follows a :class:`~pyro_ngvi.families.Family`.

    The vector z (d,) holds all latent sites, each taken to the real line by Pyro's own transform of its
    support.  Subclasses name their family by :meth:`make_family`.  Any optimizer may train its
    parameters, but only the natural-gradient ones keep a triangular factor from becoming singular.

    Under an optimizer that averages its iterates the parameters, and all that is read off them, are the
    *average*; draws made while gradients are recorded come from the iterate
    (:meth:`sampling_posterior`).

    The first call runs the model for its sites, and again where a support is not the real line or a
    site is masked.  Copies have parameters of their own and no model: make them
    after the first call.  A state may be loaded before or after it: :func:`pyro_ngvi.save` and
    ``load``, or ``guide.state_dict()`` and then ``optim.get_state()``, or Pyro's parameter store.

    Args:
        model: a Pyro model whose latent sites are all continuous and of fixed size.
        init_loc_fn: a Pyro initialisation strategy for the location; by default :func:`init_to_center`.
        init_scale: sd of every unconstrained latent variable at the start, by default 0.1.
        sticking_the_landing: evaluate log q at detached parameters (:class:`FamilyDistribution`).
        init: "auto" (default), a search for a Gaussian where family and model allow one, see
            :mod:`pyro_ngvi.guides.laplace`; "laplace", that search; "map", the mode; ``None``.
        name: name of the guide in Pyro's parameter store, by default counted from its class.

    Raises:
        RuntimeError: where the answer is asked for before the first call.
        ValueError: for another ``init``, or an ``init_scale`` that is not positive and finite; at the
            first call, for a latent site that is discrete or inside a subsampled plate, whose support
            moves with other latent sites or a learned parameter, or with masked entries that nothing
            depends on; with Pyro's vectorised particles, for a model that
            broadcasts wrongly against them (:func:`~pyro_ngvi.diagnostics.check_vectorized`).

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model():
        ...     pyro.sample("s", dist.LogNormal(1.0, 0.5))
        >>> guide = ngvi.AutoMeanFieldNormal(model)
        >>> _ = guide()
        >>> guide.get_posterior().mean.detach(), guide.quantiles([0.5])["s"]  # of log s; of s
        (tensor([1.]), tensor([2.7183]))
    """

    #: sites whose log density in the guide takes the model's prior back
    replaced_priors: tuple[str, ...] = ()
    #: the class of q
    distribution: type[FamilyDistribution] = FamilyDistribution
    #: a triangle among the parameters, whose diagonal ordinary optimizers may take to 0 or below
    triangle: str | None = None
    #: whether a trace of torch.jit draws rightly from other parameters
    traceable = True
    #: under an optimizer that averages, the guide itself holds the average
    holds_average = True
    #: whether its optimizer averages
    averaged = False
    #: iterate minus average, by name, and the parameters to which it belongs
    _lag: Tensors | None = None
    _lag_of: Tensors | None = None
    _broadcasting_checked = False
    #: the share of its path in the gradient of log q, which the optimizer asks for; ``None``: all
    path_share: Tensor | None = None
    #: what the loss leaves for the optimizer
    curvature: Curvature | None = None

    def _create_plates(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # Out of sight of the model: replayed there, the indices of a plate that has grown since the
        # first call would silently leave out the new data.
        with poutine.block():
            return super()._create_plates(*args, **kwargs)

    def natural_params(self) -> dict[str, nn.Parameter]:
        """The tensors of the family, by its ``names``; empty before the first call."""
        own = dict(self.named_parameters())
        return {name: own[name] for name in self.family.names if name in own}

    def _current(self) -> Tensors:
        """The parameters that Pyro's store holds now: it may have been restored in between."""
        self._require_setup()
        root = module_name(self)
        holders: dict[str, nn.Module] = {f"{root}.": self}
        for child, module in self.named_children():  # as pyro.module names them
            for path, part in module.named_modules():
                holders[f"{root}.{child}$$${path}.".replace("$$$.", "$$$")] = part
        follow_store(self, holders)
        for name in (*self._parameters, *self._modules):
            getattr(self, name)  # which registers its parameters with Pyro
        return dict(self.natural_params())

    def set_iterate_offset(self, lag: Tensors | None, answer: Tensors | None = None) -> None:
        """Iterate minus average, by name; dropped by whoever writes to ``answer``, the parameters."""
        self._lag, self._lag_of = lag, answer

    def iterate_offset(self, intact: Tensor | None = None) -> Tensors:
        """The lag of each parameter, by name; ``intact``: what :meth:`offset_is_intact` said."""
        if self._lag is None:
            return {}
        self._lag = {k: self._lag[k].to(p) for k, p in self.natural_params().items()}  # if loaded
        intact = self.offset_is_intact() if intact is None else intact
        if host_bool(intact):
            return dict(self._lag)
        return choose(intact, self._lag, {k: torch.zeros_like(v) for k, v in self._lag.items()})

    def offset_is_intact(self) -> Tensor:
        """Whether the parameters are as the optimizer left them: a 0-dim tensor, not waited for."""
        params = self.natural_params()
        if self._lag_of is None:
            return torch.ones((), dtype=torch.bool, device=next(iter(params.values())).device)
        return equal(params, self._lag_of)

    def take_curvature(self) -> Curvature | None:
        """The curvature that the loss left beside the gradients of this step, once."""
        curvature, self.curvature = self.curvature, None
        return curvature

    def _distribution(self, params: Tensors, **how: Any) -> FamilyDistribution:
        stl = self.sticking_the_landing
        return self.distribution(self.family, params, sticking_the_landing=stl, **how)

    def get_posterior(self, *args: Any, **kwargs: Any) -> FamilyDistribution:
        """q as a distribution over the flat, unconstrained latent vector (d,): the answer so far."""
        return self._distribution(self._current())

    def get_base_dist(self) -> Any:
        """N(0, I) over R^d, the noise that :meth:`get_transform` makes draws of."""
        like = next(iter(self._current().values()))
        loc = like.new_zeros(self.latent_dim)
        normal: Any = Normal(loc, torch.ones_like(loc))
        return normal.to_event(1)

    def get_transform(self, *args: Any, **kwargs: Any) -> FamilyTransform:
        """The map from noise to the flat latent vector, detached: see :func:`pyro_ngvi.neutra`."""
        return FamilyTransform(self)

    def sampling_posterior(self, *args: Any, **kwargs: Any) -> FamilyDistribution:
        """The distribution that the guide draws from: ``get_posterior()``, but for recorded gradients.

        The draws of one call are then centred (:func:`~pyro_ngvi.linalg.noise.centred`), each of them
        one of q but not independent, and come from the iterate of an optimizer that averages.
        """
        params = self._current()
        if not torch.is_grad_enabled():
            return self._distribution(params)
        kind, tracing = type(self).__name__, _tracing()
        if tracing and (self.averaged or not self.traceable):
            raise RuntimeError(
                f"{kind} cannot be trained through torch.jit: the trace would freeze the lag between "
                f"iterate and average, or the check of rotations. Use Trace_ELBO or BatchedELBO, or "
                f"averaging=False."
            )
        if self.triangle is not None and not tracing:
            crossed = params[self.triangle].detach().diagonal() <= 0.0
            with told_in("guides.md#adam-on-autofullranknormal"):
                if host_bool(crossed.any()):
                    raise RuntimeError(
                        f"{kind}: the optimizer took the diagonal of {self.triangle} to 0 or below "
                        f"(site {self.site_of(int(crossed.nonzero()[0]))!r}). Train it by NGVB, "
                        f"lower the learning rate, or use Pyro's AutoMultivariateNormal."
                    )
        lag = self.iterate_offset()
        at = {n: p + lag[n] for n, p in params.items()} if lag else params
        share = self.path_share
        if share is not None and (tracing or host_bool(share == 1.0)):
            share = None
        return self._distribution(at, centred=True, path_share=share)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Draw all latent sites: a dict of values (*shape) by name."""
        with _Drawing() as drawing:
            values = super().forward(*args, **kwargs)
        if drawing.particles is not None and not self._broadcasting_checked and not _tracing():
            self._broadcasting_checked = True  # the check calls the guide
            try:
                check_vectorized_call(self, drawing.particles, args, kwargs)
            except BaseException:
                self._broadcasting_checked = False  # so that the next call says the same again
                raise
        return values

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Draw all latent sites: a tuple, for ``torch.jit.trace_module``, without gradients there."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not _tracing()):
            return super().call(*args, **kwargs)

    def sample_latent(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draw the flat latent vector, as an auxiliary sample site."""
        q: Any = self.sampling_posterior(*args, **kwargs)
        return pyro.sample(f"_{module_name(self)}_latent", q, infer={"is_auxiliary": True})

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior median of every entry of each latent site: ``quantiles([0.5])[0]``.

        Those of the entries of a simplex do not sum to 1: for a point of such a support take a draw.
        """
        return {name: q[0] for name, q in self.quantiles([0.5]).items()}

    @torch.no_grad()
    def quantiles(self, quantiles: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Quantiles (len(quantiles), ...) of each entry of each latent site, for levels in (0, 1).

        Where the transform to the support mixes entries (simplices, ordered vectors, Cholesky factors
        of correlations) those of 16,384 draws of a fixed seed, to 0.01 sd at a Gaussian's median.
        """
        return site_quantiles(self, self._current(), quantiles)

    def _exact_quantiles(self, name: str, levels: Tensor) -> Tensor | None:
        """Quantiles (L, *shape) of a site at ``levels`` (L,) that do not follow from its transform."""
        return None

    def _require_setup(self) -> None:
        if self.prototype_trace is None:
            raise RuntimeError(
                f"{type(self).__name__} does not know the model's sites yet: call it once with the "
                f"arguments of the model, or take a step of SVI."
            )

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        # .to(), .double() and the like move the parameters, and the lag with them
        for name in ("_lag", "_lag_of"):
            tensors = getattr(self, name)
            setattr(self, name, None if tensors is None else {k: fn(v) for k, v in tensors.items()})
        return super()._apply(fn, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # what belongs to a running optimizer stays: a copy is the answer alone
        running = ("_lag", "_lag_of", "path_share")
        return super().__getstate__() | dict.fromkeys(running) | {"averaged": False}
