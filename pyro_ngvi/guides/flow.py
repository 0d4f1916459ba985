"""Normalizing-flow guides: any flow, couplings that are ready to use, and orthogonal flows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pyro
from pyro import poutine
from torch import Tensor, nn

from ..families import FlowFamily, OrthogonalFlow
from ..families.base import Family, Tensors
from ..families.flow import PREFIX
from ..flows.transforms import KINDS, as_flow, coupling_flow, spline_of_one
from ..linalg.host import host_bool, outside_autocast
from ..optim.rule import require
from ..runtime.store import module_name
from .base import AutoFamily, FamilyDistribution
from .centers import init_to_center
from .search import find_gaussian

#: flows that a guide of this process has
_taken: WeakSet[nn.Module] = WeakSet()

#: largest relative change of a length under what should be a rotation
TOLERANCE = 1e-3


class AutoFlow(AutoFamily):
    r"""A normalizing flow over all unconstrained latent variables: z = mu + A T(eps), eps ~ N(0, I).

    T is the flow that you pass, mu and A an affine map behind it, which starts at a fitted Gaussian.

    Train it by :class:`~pyro_ngvi.optim.SPRING` with ``BatchedELBO(num_particles=128,
    curvature="scores")``, above some twenty latent variables by :class:`~pyro_ngvi.IFVB` with
    ``BatchedELBO(16)``; ordinary optimizers work too.  ``quantiles`` are those of 4,096 draws.

    Not for posteriors close to a Gaussian (:class:`~pyro_ngvi.AutoFullRankNormal` is exact there and
    ten times faster a step), nor for thousands of latent variables.

    Args:
        flow: a flow or lazy transform of Zuko, a transform of ``pyro.distributions.transforms``, a list
            of them, or a function that makes one from the number d of unconstrained latent variables.
            A flow that is passed is trained in place: give two guides copies of it.
        affine: "full" (default) or "diagonal", the form of A.  A full one has d^2 / 2 parameters.
        init: "gaussian" (default): mu and A come from 200 steps of natural gradients for a Gaussian, at
            the first call.  ``None``: ``init_loc_fn`` and ``init_scale``; several modes may be easier
            to find from there.  "map": mu at the posterior mode.
        kwargs: those of :class:`~pyro_ngvi.guides.AutoFamily`, whose errors it raises.

    Raises:
        TypeError: at the first call, for something that is not a flow.
        ValueError: for another ``affine``; at the first call, for a flow of another dimension or
            without an inverse.

    Source: Rezende & Mohamed (2015); Papamakarios et al. (2021) for the couplings.

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model():
        ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(x.square(), 0.3))
        >>> coupling = dist.transforms.affine_coupling
        >>> guide = ngvi.AutoFlow(model, lambda d: [coupling(d, [16])])
        >>> fit = ngvi.fit(model, guide=guide, seed=1, max_steps=100, progress=False)
        >>> fit.elbo[0] > -1.0  # nats below log Z = 0; the best Gaussian is at -1.6
        True
    """

    family: FlowFamily
    starts = ("map", "gaussian")

    def __init__(
        self,
        model: Callable[..., Any],
        flow: Any,
        *,
        affine: str = "full",
        init: str | None = "gaussian",
        **kwargs: Any,
    ) -> None:
        self._affine = affine
        # within a tuple, since a module cannot be assigned before Module.__init__
        self._given: tuple[Any, ...] = (flow,)
        super().__init__(model, init=init, **kwargs)

    def make_family(self) -> Family:
        return FlowFamily(self._affine)

    def _make_flow(self, d: int) -> nn.Module:
        return as_flow(self._given[0], d)

    def _define_family(self, args: Any, kwargs: Any) -> None:
        # to read it off a PyroModule would put it into the parameter store
        self.flow = flow = self._make_flow(self.latent_dim).to(self._init_loc())
        self.family.define(flow)

    def _start(self, loc: Tensor, args: Any, kwargs: Any) -> Tensors:
        params = super()._start(loc, args, kwargs)
        if self.init != "gaussian":
            return params
        gaussian = self.family.gaussian
        affine = {name: params[name] for name in gaussian.names}
        try:
            return params | find_gaussian(self, gaussian, affine, args, kwargs)
        except RuntimeError as error:
            error.add_note("This was the start of the flow: init=None does without. See AutoFlow.")
            raise

    def _register_params(self, values: Tensors) -> None:
        super()._register_params({k: v for k, v in values.items() if not k.startswith(PREFIX)})
        for given in (part for part in self._given if isinstance(part, nn.Module)):
            if given in _taken:
                warnings.warn(
                    f"{type(self).__name__}: the flow {type(given).__name__} belongs to another guide "
                    f"too, whose answer changes when this one is trained. Pass copy.deepcopy(flow), or "
                    f"a function that makes a flow.",
                    stacklevel=2,
                )
            _taken.add(given)
        self._given = ()  # the guide's own from here on
        # takes over what a parameter store that was loaded holds, as for mu and A
        with poutine.block():
            pyro.module(f"{module_name(self)}.flow", self.flow, update_module_params=True)


class AutoCouplingFlow(AutoFlow):
    """A flow of couplings or masked autoregressive layers that starts as a Gaussian, T the identity.

    A coupling leaves half of the d variables alone, and moves each other one by an increasing map f
    whose parameters a network has of these: (a, b) -> (a, f(b; network(a))).  One latent variable
    leaves nothing to couple: it gets a monotone spline, with a warning.

    Args:
        kind: "affine" couplings (RealNVP, Dinh et al. 2017), "spline" couplings (on [-5, 5], Durkan et
            al. 2019; for several modes, with ``init=None``), or "autoregressive" (affine, Papamakarios
            et al. 2017: a draw takes d passes).  The last two need Zuko.
        layers: number of layers; with two couplings every variable depends on every other.
        hidden: widths of the hidden layers of each network.
        bins: number of bins of a spline.
        kwargs: those of :class:`AutoFlow`.

    Raises:
        ValueError: for another ``kind``, or numbers that are too small.
        ImportError: where Zuko is needed and not installed: ``pip install "pyro-ngvi[flows]"``.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model():
        ...     v = pyro.sample("v", dist.Normal(0.0, 3.0))
        ...     pyro.sample("x", dist.Normal(torch.zeros(4), (v / 2).exp()).to_event(1))
        >>> guide = ngvi.AutoCouplingFlow(model, layers=2, hidden=(16,))
        >>> guide()["x"].shape, guide.get_posterior().rsample((3,)).shape
        (torch.Size([4]), torch.Size([3, 5]))
    """

    def __init__(
        self,
        model: Callable[..., Any],
        init_loc_fn: Callable[..., Any] = init_to_center,
        *,
        kind: str = "affine",
        layers: int = 4,
        hidden: tuple[int, ...] = (16, 16),
        bins: int = 8,
        **kwargs: Any,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}.")
        hidden = tuple(hidden)
        require(layers >= 1, "layers", "be at least 1", layers)
        require(min(hidden, default=1) >= 1, "hidden", "have widths of at least 1", hidden)
        require(bins >= 2, "bins", "be at least 2", bins)
        self._shape = kind, layers, hidden, bins
        super().__init__(model, None, init_loc_fn=init_loc_fn, **kwargs)

    def _make_flow(self, d: int) -> nn.Module:
        if d > 1:
            return coupling_flow(d, *self._shape)
        bins = self._shape[-1]
        warnings.warn(
            f"AutoCouplingFlow: the model has a single latent variable (site {self.site_of(0)!r}), and "
            f"nothing to couple. It gets a monotone spline of {bins} bins.",
            UserWarning,
            stacklevel=2,
        )
        return spline_of_one(bins)


class AutoOrthogonalFlow(AutoFamily):
    r"""A normalizing flow of elementwise activations psi between rotations W of all latent variables.

    Over the flat unconstrained vector z (d,), with a skewness and a tail of each coordinate in psi;
    equations: :class:`~pyro_ngvi.families.OrthogonalFlow`.  One layer says skewness; curved posteriors
    need ``layers=2`` or more.

    Train it by :class:`~pyro_ngvi.optim.SPRING` with ``BatchedELBO(128, curvature="scores")``, by
    :class:`~pyro_ngvi.IFVB` or by :class:`~pyro_ngvi.AIFVB`, which all move the W as rotations.
    Not for thousands of latent variables (a step costs O(d^3)), nor for posteriors close to a
    Gaussian: :class:`AutoFullRankNormal` is exact there and far faster.

    Args:
        layers: number of activations, at least 1, else ValueError.
        kwargs: those of :class:`~pyro_ngvi.guides.AutoFamily`, whose errors it raises.

    Raises:
        RuntimeError: when a W is not orthogonal, because an optimizer that does not know rotations
            has stepped it; for losses that trace by torch.jit, which could not tell.

    Source: after Godichon-Baggioni, Nguyen & Tran (2024, JASA), example 3.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model():
        ...     pyro.sample("x", dist.Gumbel(torch.zeros(2), 1.0).to_event(1))
        >>> fit = ngvi.fit(model, guide="AutoOrthogonalFlow", max_steps=200, seed=0, progress=False)
        >>> low, high = fit.guide.quantiles([0.05, 0.95])["x"][:, 0]
        >>> bool(high > -low)  # a Gumbel is skewed to the right: -1.1, 3.0
        True
    """

    family: OrthogonalFlow
    traceable = False

    def __init__(self, model: Callable[..., Any], layers: int = 1, **kwargs: Any) -> None:
        self._layers = layers
        super().__init__(model, **kwargs)

    def make_family(self) -> Family:
        return OrthogonalFlow(self._layers)

    @outside_autocast
    def _distribution(self, params: Tensors, **how: Any) -> FamilyDistribution:
        detached = {name: p.detach() for name, p in params.items()}
        if host_bool(self.family.drift(detached) > TOLERANCE):
            raise RuntimeError(
                f"The rotations of {type(self).__name__} are no longer orthogonal, so its density "
                f"would be wrong. An optimizer that does not know rotations has stepped them: train "
                f"this guide by pyro_ngvi.optim.SPRING, IFVB or AIFVB, in their default frame."
            )
        return super()._distribution(params, **how)
