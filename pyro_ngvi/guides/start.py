"""The first call of a guide: its sites, where it starts, and a state that was loaded before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoContinuous, AutoGuide
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import biject_to

from ..families.base import Family, Tensors
from ..families.vectors import entry_name
from ..linalg.host import outside_autocast, own_random_state
from ..optim.ngvb import make_rule
from ..probing.latents import check_latents
from ..runtime.density import feasible_value
from ..runtime.model_density import ModelDensity
from ..runtime.pyro_adapter import (
    HidesMarked,
    has_model,
    kept_whole,
    model_as_given,
    model_under,
    unblocked,
)
from ..runtime.store import ModuleParams, OwnName, check_names, claim_name, module_name, rename
from .laplace import LARGEST, Found, best_gaussian

#: steps and draws of the Gaussian start
STEPS, DRAWS = 200, 8


def init_to_center(site: Any = None) -> Any:
    """Prior median where torch knows it, else the mean, else the mode, else the image of zero.

    For ``init_loc_fn`` of any Pyro autoguide; the default of ours.  Nothing is drawn, so a wide prior
    such as Normal(0, 1000) starts at its centre and not at the median of a few draws, hundreds of
    units away.  An improper prior starts at the image of zero under the transform to its support.

    Example:
        >>> import pyro.distributions as dist
        >>> init_to_center({"name": "x", "fn": dist.LogNormal(0.0, 10.0)})
        tensor(1.)
    """
    if site is None:
        return init_to_center
    fn, value = site["fn"], None
    for center in (_median, lambda fn: fn.mean, lambda fn: fn.mode):
        try:
            value = center(fn)
        except (NotImplementedError, AttributeError, RuntimeError, ValueError, TypeError):
            continue  # torch raises any of these where a distribution lacks the method
        if value.shape == fn.shape() and _inside(fn, value):
            break
    else:
        value = feasible_value(site)
    # to Pyro's reparameterizers: a default, which they may replace without a warning
    setattr(value, "_pyro_custom_init", False)  # noqa: B010
    return value


def _median(fn: Any) -> Tensor:
    while hasattr(fn, "base_dist") and not hasattr(fn, "transforms"):
        fn = fn.base_dist  # of Independent, masks and expansions
    half = torch.full_like(fn.mean.expand(fn.shape()), 0.5)  # a draw would move the random state
    return fn.icdf(half)


def _inside(fn: Any, value: Tensor) -> bool:
    if not (torch.isfinite(value).all() and torch.as_tensor(fn.support.check(value)).all()):
        return False
    try:
        transform: Any = biject_to(fn.support)
    except NotImplementedError:  # a sphere, which has no boundary
        return True
    return bool(torch.isfinite(transform.inv(value)).all())  # not on the boundary


def _model_alone(guide: Any, args: Any, kwargs: Any) -> Callable[..., Any]:
    """The model with latent sites of other guides at the centres of their priors, discrete ones drawn.

    A search needs one function, and not every distribution draws under ``vmap``.
    """
    model = model_as_given(guide)
    whole = unblocked(model)

    def center(site: Any) -> Tensor:
        return site["fn"].sample() if site["fn"].support.is_discrete else init_to_center(site)

    with torch.no_grad(), own_random_state(0):
        trace: Any = poutine.trace(InitMessenger(center)(whole)).get_trace(*args, **kwargs)
    own = guide.prototype_trace.nodes
    sites = trace.iter_stochastic_nodes()
    fixed = {n: s["value"] for n, s in sites if n not in own and not site_is_subsample(s)}
    return poutine.condition(whole, data=fixed) if fixed else model


def _density_alone(guide: Any, start: Tensor, args: Any, kwargs: Any) -> ModelDensity:
    """The log joint on one minibatch: a search needs a function that does not change."""
    model = _model_alone(guide, args, kwargs)
    indices = ModelDensity(model, tuple(args), kwargs).trace(start.unsqueeze(0)).indices
    return ModelDensity(model, tuple(args), kwargs, indices=indices)


def find_mode(guide: Any, start: Tensor, args: Any, kwargs: Any) -> Tensor:
    """Mode of the log joint over the unconstrained vector, by L-BFGS; ``start`` (d,) if none is better.

    It depends on the parametrisation and can lie far from the mass of a hierarchical posterior: a
    start, not an answer.
    """
    density = _density_alone(guide, start, args, kwargs)
    theta = start.detach().clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS([theta], max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        loss = -density(theta.unsqueeze(0)).sum()
        theta.grad = torch.autograd.grad(loss, theta)[0]
        return loss

    with torch.enable_grad():
        before = closure().detach()
        optimizer.step(closure)
        after = closure().detach()
    better = torch.isfinite(after) & (after < before) & torch.isfinite(theta.detach()).all()
    return torch.where(better, theta.detach(), start)


def find_laplace(guide: Any, start: Tensor, args: Any, kwargs: Any) -> Found:
    """The Gaussian to start from (:mod:`.laplace`), for the log joint over the unconstrained vector."""
    kind, d = type(guide).__name__, len(start)
    if d > LARGEST:
        raise ValueError(
            f'{kind}: init="laplace" takes Hessians of {d} x {d} numbers, and {LARGEST} is the most. '
            f'Leave init out, or pass init="map".'
        )
    with own_random_state():  # a prototype draws
        density = _density_alone(guide, start, args, kwargs)
        found = best_gaussian(density, start, guide.init_scale)
    if not found.better:
        warnings.warn(
            f'{kind}: init="laplace" found no Gaussian with a larger ELBO than the one that it was to '
            f"replace, and starts there. Pass init_loc_fn= for another point.",
            UserWarning,
            stacklevel=2,
        )
    return found


def find_gaussian(guide: Any, family: Family, params: Tensors, args: Any, kwargs: Any) -> Tensors:
    """The Gaussian of ``family`` that 200 steps of NGVB reach from ``params``, of a seed of its own.

    If they end with a lower ELBO than they began, or none, ``params`` comes back.
    """
    density = ModelDensity(_model_alone(guide, args, kwargs), tuple(args), kwargs)
    rule = make_rule(family, averaging=False)

    def loss(q: Tensors, fixed: Tensors, n: int) -> Tensor:
        z = family.draw(q, torch.Size((n,)))
        return (family.log_prob(fixed, z) - density(z)).mean()

    with own_random_state(0), torch.no_grad():
        before = loss(params, params, 32 * DRAWS)
        now, state = params, rule.init(params)
        for _ in range(STEPS):
            leaves = {name: v.detach().requires_grad_() for name, v in now.items()}
            with torch.enable_grad():
                value = loss(leaves, now, DRAWS)
                found = torch.autograd.grad(value, list(leaves.values()))
            grads = dict(zip(leaves, found, strict=True))
            now, state, _ = rule.update(now, grads, state)
        after = loss(now, now, 32 * DRAWS)
    better = torch.isfinite(after) & ~(after > before)
    return {name: torch.where(better, v, params[name]) for name, v in now.items()}


class MadeAtFirstCall(OwnName, AutoGuide):
    """A guide with a name of its own: its copies, and states that are loaded before its first call."""

    prototype_trace: Any
    _waiting_state: tuple[dict[str, Any], bool] | None = None

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *lists: Any
    ) -> None:
        if self.prototype_trace is None:
            own = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
            self._waiting_state = deepcopy(own), strict
        else:
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)

    @contextmanager
    def _loading_waiting_state(self) -> Iterator[None]:
        """Around the set-up of the first call.  If that fails, the next call says the same again.

        With a state to load it leaves the random state alone, which may have been restored before.
        """
        try:
            if self._waiting_state is None:
                yield
            else:
                with own_random_state():
                    yield
                self.load_state_dict(self._waiting_state[0], strict=self._waiting_state[1])
                self._waiting_state = None
        except BaseException:
            self.prototype_trace = None
            raise

    def __getstate__(self) -> dict[str, Any]:
        with kept_whole(self):
            return {**super().__getstate__(), "curvature": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # a copy in the process of its original gets parameters of its own
        rename(self, claim_name(module_name(self)))


class FirstCall(MadeAtFirstCall, AutoContinuous):
    """How an :class:`~pyro_ngvi.guides.AutoFamily` is made: its arguments, first call and copies."""

    #: what ``init`` may be besides ``None``
    starts: tuple[str, ...] = ("map",)
    #: with ``init="laplace"``, nats: the largest ELBO of a Gaussian from each point of the search, far
    #: apart where there are several modes, and that of the Gaussian which it replaces
    start_elbos: tuple[float, ...] = ()

    def __init__(
        self,
        model: Callable[..., Any],
        init_loc_fn: Callable[..., Any] = init_to_center,
        *,
        init_scale: float = 0.1,
        sticking_the_landing: bool = True,
        init: str | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(init_scale, int | float) or not 0.0 < init_scale < float("inf"):
            raise ValueError(f"init_scale must be a positive number, got {init_scale!r}.")
        if init not in (None, *self.starts):
            known = " or ".join(["None", *(f'"{s}"' for s in self.starts)])
            raise ValueError(f"init must be {known}, got {init!r}.")
        super().__init__(HidesMarked()(model), init_loc_fn=init_loc_fn)
        self.take_name(name)
        self.family = self.make_family()
        self.init_scale, self.init = float(init_scale), init
        self.sticking_the_landing = sticking_the_landing

    def make_family(self) -> Family:
        """The family of the flat latent vector; what a guide of your own has to say."""
        raise NotImplementedError(f"{type(self).__name__}.make_family() says which family it is.")

    def _define_family(self, args: Any, kwargs: Any) -> None:
        """Complete a family that depends on the sites of the model, once they are known."""

    @outside_autocast
    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        guide: Any = self
        kind = type(self).__name__
        if not has_model(self):
            raise RuntimeError(
                f"This {kind} is a copy made before its original was called, and a copy does not carry "
                f"the model. Call the original once, then copy it."
            )
        with self._loading_waiting_state():
            with torch.no_grad():
                with model_under(self, ModuleParams()):
                    super()._setup_prototype(*args, **kwargs)
                sites = dict(self.prototype_trace.iter_stochastic_nodes())
                check_latents(kind, unblocked(model_as_given(self)), sites, args, kwargs)
            self._define_family(args, kwargs)
            loc = self._init_loc()
            for i in (~torch.isfinite(loc)).nonzero():
                raise ValueError(
                    f"{kind}: the start is not finite at the site {self.site_of(int(i))!r}. Pass "
                    f"another one, for instance init_loc_fn=pyro.infer.autoguide.init_to_feasible."
                )
            with poutine.block():  # a search is hidden from handlers around the first call
                params = self._start(loc, args, kwargs)
            check_names(self, in_use=False)
            self._register_params(params)
            guide._current()  # from here on they are parameters that this process has made

    def _start(self, loc: Tensor, args: Any, kwargs: Any) -> Tensors:
        """The first parameters, around ``loc``."""
        if self.init == "map":
            loc = find_mode(self, loc, args, kwargs)
        elif self.init == "laplace":
            family: Any = self.family
            found = find_laplace(self, loc, args, kwargs)
            self.start_elbos = found.elbos
            if found.better:
                return family.matched(found.loc, found.precision)
        return self.family.init(loc, self.init_scale)

    def _register_params(self, values: Tensors) -> None:
        for name, value in values.items():
            setattr(self, name, nn.Parameter(value))

    def site_of(self, index: int) -> str:
        """Name of the latent site that holds entry ``index`` of the flat latent vector."""
        return entry_name(index, self._unconstrained_shapes)
