"""Normalizing-flow guides: any flow, and couplings that are ready to use."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pyro
from pyro import poutine
from torch import Tensor, nn

from ..families import FlowFamily
from ..families.base import Family, Tensors
from ..families.flow import GAUSSIANS, PREFIX
from ..flows.transforms import KINDS, as_flow, coupling_flow, spline_of_one
from ..runtime.store import module_name
from .base import AutoFamily
from .initialization import init_to_center
from .warm_start import find_gaussian

__all__ = ["AutoCouplingFlow", "AutoFlow"]

#: flows that were passed to a guide
_TAKEN: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class AutoFlow(AutoFamily):
    r"""A normalizing flow over all unconstrained latent variables: z = mu + A T(eps), eps ~ N(0, I).

    T is the flow that you pass, mu and A an affine map behind it, so that a flow that stays near the
    identity is a Gaussian guide.  mu and A start at a Gaussian that is fitted first.

    Train it by :class:`~pyro_ngvi.optim.SPRING` with ``BatchedELBO(num_particles=128,
    curvature="scores")``, above some twenty latent variables by :class:`~pyro_ngvi.IFVB` with
    ``BatchedELBO(16)``; ordinary optimizers work too.  ``median`` and ``quantiles`` are those of 4,096
    draws.  For HMC in the coordinates of the trained flow see :func:`~pyro_ngvi.neutra`.

    Not for: posteriors close to a Gaussian (:class:`~pyro_ngvi.AutoFullRankNormal` is exact there and
    ten times faster a step), nor for thousands of latent variables.

    Args:
        flow: a flow or lazy transform of Zuko, a transform of ``pyro.distributions.transforms``, a list
            of them, or a function that makes one from the number d of unconstrained latent variables.
            A flow that is passed is trained in place.
        affine: "full" (default) or "diagonal", the form of A.  A full one has d^2 / 2 parameters.
        init: "gaussian" (default): mu and A come from 200 steps of natural gradients for a Gaussian, at
            the first call, with the model under vmap.  ``None``: ``init_loc_fn`` and ``init_scale``;
            several modes may be easier to find from there.  "map": mu at the posterior mode.

    See :class:`~pyro_ngvi.guides.base.AutoFamily` for the other arguments.

    Raises:
        TypeError: for something that is not a flow.
        ValueError: at the first call, for a flow of another dimension or without an inverse.

    Source: Rezende & Mohamed (2015); Papamakarios et al. (2021) for the couplings.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> import pyro_ngvi as ngvi
        >>> def model():
        ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(x.square(), 0.3))
        >>> coupling = dist.transforms.affine_coupling
        >>> guide = ngvi.AutoFlow(model, lambda d: [coupling(d, [16])])
        >>> loss = ngvi.BatchedELBO(64, curvature="scores")
        >>> svi = SVI(model, guide, ngvi.optim.SPRING(guide), loss)
        >>> for _ in range(100):
        ...     _ = svi.step()
        >>> svi.evaluate_loss() < 1.0  # nats above log Z = 0; the best Gaussian is at 1.6
        True
    """

    starts = (None, "map", "gaussian")

    def __init__(
        self,
        model: Callable[..., Any],
        flow: Any,
        *,
        affine: str = "full",
        init: str | None = "gaussian",
        **kwargs: Any,
    ) -> None:
        if affine not in GAUSSIANS:
            raise ValueError(
                f"affine must be {' or '.join(map(repr, sorted(GAUSSIANS)))}, got {affine!r}."
            )
        self._affine = affine
        # within a tuple, since a module cannot be assigned before Module.__init__
        self._given: tuple[Any, ...] = (flow,)
        super().__init__(model, init=init, **kwargs)

    def make_family(self) -> Family:
        return FlowFamily(self._affine)

    def _make_flow(self, d: int) -> nn.Module:
        return as_flow(self._given[0], d)

    def _define_family(self) -> None:
        family: Any = self.family
        flow = self._make_flow(self.latent_dim).to(self._init_loc())
        self.flow = flow
        family.define(flow)

    def _start(self, loc: Tensor, args: Any, kwargs: Any) -> Tensors:
        params = super()._start(loc, args, kwargs)
        if self.init != "gaussian":
            return params
        family: Any = self.family
        affine = {name: params[name] for name in family.gaussian.names}
        try:
            return params | find_gaussian(
                self._model_alone(args, kwargs), family.gaussian, affine, args, kwargs
            )
        except RuntimeError as error:
            error.add_note("This was the start of the flow: init=None does without. See AutoFlow.")
            raise

    def _register_params(self, values: Tensors) -> None:
        super()._register_params({k: v for k, v in values.items() if not k.startswith(PREFIX)})
        for given in self._given:
            self._claim(given)
        self._given = ()  # the guide's own from here on
        # takes over what a parameter store that was loaded holds, as for mu and A
        with poutine.block():
            pyro.module(f"{module_name(self)}.flow", self.flow, update_module_params=True)

    def _claim(self, given: Any) -> None:
        """Warn where a flow has another guide already."""
        if not isinstance(given, nn.Module):
            return
        if given in _TAKEN:
            warnings.warn(
                f"{type(self).__name__}: the flow {type(given).__name__} belongs to another guide too, "
                f"whose answer changes when this one is trained. Pass copy.deepcopy(flow), or a "
                f"function that makes a flow.",
                UserWarning,
                stacklevel=2,
            )
        _TAKEN.add(given)

    def natural_params(self) -> dict[str, nn.Parameter]:
        """mu and A, and the parameters of the flow; empty before the first call."""
        flow: Any = self._modules.get("flow")
        if flow is None:
            return {}
        return super().natural_params() | self._of_flow(flow)

    def _stored_modules(self) -> dict[str, nn.Module]:
        flow: Any = self._modules["flow"]
        root = f"{module_name(self)}.flow$$$"
        parts = {root + (f"{path}." if path else ""): m for path, m in flow.named_modules()}
        return super()._stored_modules() | parts

    def _current(self) -> Tensors:
        self._follow_store()
        affine = {name: getattr(self, name) for name in self.family.names if PREFIX not in name}
        flow: Any = self.flow  # this registers its parameters with Pyro
        return affine | self._of_flow(flow)

    def _of_flow(self, flow: nn.Module) -> dict[str, Any]:
        named = {PREFIX + name: p for name, p in flow.named_parameters()}
        return {name: named[name] for name in self.family.names if name in named}


class AutoCouplingFlow(AutoFlow):
    """A flow of couplings or masked autoregressive layers, ready to be trained.

    It starts as a Gaussian, T being the identity.

    Args:
        kind: "affine" couplings (RealNVP, Dinh et al. 2017), "spline" couplings (monotone
            rational-quadratic splines on [-5, 5], Durkan et al. 2019; for several modes, with
            ``init=None``), or "autoregressive" (affine, masked; Papamakarios et al. 2017: more flexible
            a layer, and a draw takes d passes).  The last two need Zuko.
        layers: number of layers; with two couplings every variable depends on every other.
        hidden: widths of the hidden layers of each network.
        bins: number of bins of a spline.

    One latent variable leaves nothing to couple: it gets a monotone spline, with a warning.

    See :class:`AutoFlow` and :class:`~pyro_ngvi.guides.base.AutoFamily` for the other arguments.

    Raises:
        ImportError: where Zuko is needed and not installed: ``pip install "pyro-ngvi[flows]"``.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> import pyro_ngvi as ngvi
        >>> def model():
        ...     v = pyro.sample("v", dist.Normal(0.0, 3.0))
        ...     pyro.sample("x", dist.Normal(torch.zeros(4), (v / 2).exp()).to_event(1))
        >>> guide = ngvi.AutoCouplingFlow(model, layers=2, hidden=(16,))
        >>> _ = guide()
        >>> guide.get_posterior().rsample((3,)).shape
        torch.Size([3, 5])
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
        widths = ((f"hidden[{i}]", h, 1) for i, h in enumerate(hidden))
        for name, size, least in (("layers", layers, 1), ("bins", bins, 2), *widths):
            if not isinstance(size, int) or size < least:
                raise ValueError(
                    f"{name} must be a whole number of at least {least}, got {size!r}."
                )
        self._kind, self._layers = kind, layers
        self._hidden, self._bins = tuple(hidden), bins
        super().__init__(model, None, init_loc_fn=init_loc_fn, **kwargs)

    def _make_flow(self, d: int) -> nn.Module:
        if d > 1:
            return coupling_flow(d, self._kind, self._layers, self._hidden, self._bins)
        warnings.warn(
            f"AutoCouplingFlow: the model has a single latent variable (site "
            f"{next(iter(self._unconstrained_shapes))!r}), and nothing to couple. It gets a monotone "
            f"spline of {self._bins} bins.",
            UserWarning,
            stacklevel=2,
        )
        return spline_of_one(self._bins)
