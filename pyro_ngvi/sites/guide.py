r"""AutoSites: prior times one Gaussian site per datum, with conjugate algebra for the rest.

    q(z)  propto  p(z) prod_n t_n(f_n),  t_n(f) = exp(nu_n' f - f' Lambda_n f / 2),  f_n = A_n z + b_n,

for a model whose latent block z is jointly Gaussian and whose datum n sees it through f_n alone (Khan &
Lin 2017; Opper & Archambeau 2009 for the parametrisation).  The sites (nu_n, Lambda_n) are the
parameters; everything about the prior and the f_n is read off the model at each call.

How the block and the f_n are found: :mod:`pyro_ngvi.sites.predictor`; the algebra:
:mod:`pyro_ngvi.sites.dense`, :mod:`pyro_ngvi.sites.chain`, :mod:`pyro_ngvi.sites.inducing`.

Not for: latent blocks that are not Gaussian a priori (a scale with a prior goes to another guide of an
``AutoGuideList``), likelihoods that tie several data's predictors together, networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.nn.module import pyro_method
from torch import Tensor, nn

from ..families.base import entry_name
from ..guides.made_at_first_call import MadeAtFirstCall
from ..guides.posterior import SiteValue
from ..linalg.autocast import outside_autocast
from ..runtime.module_params import follow_store
from ..runtime.pyro_adapter import (
    OwnName,
    claim_name,
    give_model,
    has_model,
    kept_whole,
    module_name,
    rename,
)
from .bound_model import BoundModel
from .check_new_data import check_later_data, likelihood_learns
from .data import SiteData
from .model import SiteModel
from .prediction import SitePrediction, same_objects
from .scaled_data import ScaledData
from .structure import ModelStructure

__all__ = ["AutoSites", "find_sites"]


class AutoSites(SiteData, SitePrediction, SiteModel, MadeAtFirstCall, OwnName, AutoGuide):
    r"""Prior times one Gaussian site per datum: a Gaussian guide for :class:`~pyro_ngvi.CVI`.

    q(z) propto p(z) prod_n exp(nu_n' f_n - f_n' Lambda_n f_n / 2), f_n = A_n z + b_n.  Linear and
    generalised linear models, Gaussian processes, random effects, state-space models: any latent
    block that is jointly Gaussian a priori (``Normal``, ``MultivariateNormal``,
    :class:`~pyro_ngvi.distributions.GaussianProcess`,
    :class:`~pyro_ngvi.distributions.GaussianStateSpace`, and Gaussians given other Gaussians), any
    likelihood whose datum n depends on k <= 64 linear combinations f_n (k,) of it.

    The structure is found by running the model at a few points at the first call, with the data.
    Row n of the data is the same datum at every call: a minibatch, or rows in another order, pass
    their numbers, ``pyro.plate("data", N, subsample=index)``.  After parameters of the model were
    changed by hand, or loaded, call :meth:`refresh`.  Hyperparameters are learned with all data, and
    with inducing points in minibatches too; q is then close to what all sites say, and exactly that
    after :meth:`refresh` with all data.  Data that are NaN are missing: entries of a Normal with
    ``to_event`` one by one, a row of a MultivariateNormal as a whole.
    Memory: N k (k + 1) numbers for the sites, and what the algebra needs: O(min(D, N k)^2) for a dense
    block of D latent variables, O(M^2) with M inducing points (of all processes together), O(T) for a
    state-space prior.

    Args:
        model: a Pyro model.
        latent: name of the site to take as f, latent or ``pyro.deterministic``; found where not given.
        inducing: inputs (M, ...) of inducing points for a latent ``GaussianProcess``, or for several
            that are independent and each at the inputs of the data (softmax classification, a
            location and a log scale, additive models).  A tensor is kept fixed, an ``nn.Parameter``
            is trained with the hyperparameters.
        name: name of the guide in Pyro's parameter store, as for our other guides.  Sites that are
            restored by the store make q anew at the next call, which needs all data.

    Raises:
        ValueError: at the first call, for a model outside the class, in a sentence that says which
            dependence is not Gaussian, not linear or not local; for a minibatch whose plate has drawn
            numbers that the model does not look at; at later calls for data of another number, out of
            the support, or that see more of the block than those of the first call: a covariate that
            was 0 in all of these, an outcome that was missing in all.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> import pyro_ngvi as ngvi
        >>> X, y = torch.randn(50, 2), torch.arange(50) % 2.0
        >>> def model(X, y=None):
        ...     w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        ...     with pyro.plate("data", len(X)):
        ...         pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)
        >>> guide = ngvi.AutoSites(model)
        >>> svi = SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
        >>> losses = [svi.step(X, y) for _ in range(10)]  # ten sweeps
        >>> abs(losses[-1] - losses[-2]) < 1e-4
        True
        >>> guide.sites()["y"].precision.shape
        torch.Size([50, 1, 1])
    """

    #: what a guide of ours says whose blocks are sites, which CVI alone steps
    holds_sites = True

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        latent: str | None = None,
        inducing: Tensor | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(model)
        self.take_name(name)
        self.latent = latent
        if isinstance(inducing, nn.Parameter):
            self.inducing = inducing
        else:
            self.register_buffer("inducing", inducing)
        self.plan: ModelStructure | None = None
        #: what the loss leaves for the optimizer, once
        self.curvature: Any = None
        self.averaged = False
        #: whether no site has been moved yet
        self.fresh = True
        self._rest: dict[str, Tensor] = {}
        self._last: tuple[Any, Any] | None = None
        self._stale = False
        self._scaled = ScaledData()

    # --- parameters

    def natural_params(self) -> dict[str, nn.Parameter]:
        """The sites' tensors by name; empty before the first call."""
        own: Any = self._parameters
        return {n: p for n, p in own.items() if n.startswith(("linear_", "precision_"))}

    @pyro_method
    def site_tensors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """nu (N, k) and Lambda (N, k, k) by group; access registers them with Pyro."""
        self._require_setup()
        assert self.plan is not None
        self._follow_store()
        _ = self.inducing  # so does an nn.Parameter
        return {
            g.name: (getattr(self, f"linear_{g.name}"), getattr(self, f"precision_{g.name}"))
            for g in self.plan.groups
        }

    def set_lag(self, lag: Any, answer: Any = None) -> None:
        """Sites are never averaged; the optimizers of our other guides ask for it."""

    def lag(self) -> dict[str, Tensor]:
        """None, see :meth:`set_lag`."""
        return {}

    def take_curvature(self) -> Any:
        """What the loss left for the optimizer at this step, once."""
        left, self.curvature = self.curvature, None
        return left

    def site_of(self, index: int) -> str:
        """Name of the latent site that holds entry ``index`` of the flat latent vector."""
        self._require_setup()
        assert self.plan is not None
        return entry_name(index, self.plan.shapes)

    def _follow_store(self) -> None:
        """Take the sites that Pyro's store holds now: it may have been restored in between."""
        if follow_store(self, {f"{module_name(self)}.": self}):
            self.fresh, self._stale, self.algebra._kept = not self._any_moved(), True, None

    # --- the posterior

    def remember(self, args: Any, kwargs: Any, stale: bool) -> None:
        """For the loss: the arguments of the last step, and whether it moves hyperparameters."""
        self._last, self._stale = (args, kwargs), stale

    def check_data(self, call: BoundModel) -> None:
        """For the loss: refuse data unlike the first call's, and batch after batch under a scale."""
        self._scaled.check(call, self.edition)
        now = call.runner.args, call.runner.kwargs
        if self._last is None or not same_objects(self._last, now) or likelihood_learns(call):
            check_later_data(call)

    def refresh(self, *args: Any, **kwargs: Any) -> None:
        """Make q anew from the sites, at the current hyperparameters and all data.

        Needed where parameters of the model were changed by other means than the optimizer.

        Raises:
            ValueError: for a minibatch, which does not know what the other sites see.
        """
        call = self.call_of(args, kwargs)
        if not call.whole:
            raise ValueError(
                "AutoSites.refresh needs all data; this call has a minibatch. After sites were "
                "restored call guide.refresh(*args) with all data first: q is made anew from them."
            )
        with torch.no_grad():
            view = self.algebra.view(call)
            self.algebra.recollect(view, self.site_tensors())
        self.remember(args, kwargs, False)

    def _up_to_date(self, *call: Any) -> None:
        """Make q anew where it is not that of the sites: at the last step's arguments, or ``call``."""
        if self.plan is None:
            return
        self._follow_store()
        if self._stale:
            args, kwargs = self._last or call or ((), {})
            self.check_arguments(args, kwargs)
            self.refresh(*args, **kwargs)

    @outside_autocast
    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latent sites of the block: a dict of values by name."""
        given = self._given_minibatches()
        call = self.call_of(args, kwargs, minibatches=given)
        self._up_to_date(args, kwargs)
        self.check_prior(call)
        sites = [p for pair in self.site_tensors().values() for p in pair]
        trap = _NoGradient.apply(*sites) if self.fresh and torch.is_grad_enabled() else None
        with poutine.block():
            self._create_plates(*args, **kwargs)
        drawn = self.algebra.sample(call, f"_{module_name(self)}")
        self._announce_minibatches(call, given)
        prototype: Any = self.prototype_trace
        result = {}
        for name, site in prototype.iter_stochastic_nodes():
            value, log_q = drawn[name]
            value = value if trap is None else value + trap.to(value)
            with ExitStack() as stack:
                for frame in site["cond_indep_stack"]:
                    stack.enter_context(self.plates[frame.name])
                density: Any = log_q
                q = SiteValue(value, density, site["fn"].event_dim)
                result[name] = pyro.sample(name, q)
        return result

    def _call_of_last(self, args: Any, kwargs: Any) -> BoundModel:
        self._require_setup()
        self._up_to_date(args, kwargs)
        if not args and not kwargs:
            args, kwargs = ((), {}) if self._last is None else self._last
            self.check_arguments(args, kwargs)
        call = self.call_of(args, kwargs)
        self.check_prior(call)
        return call

    def get_posterior(self, *args: Any, **kwargs: Any) -> Any:
        """q over the flat latent vector (D,), its sites in the order of the model: for small D.

        For a state-space prior q is a chain too, a ``GaussianStateSpace`` over (T, S).
        """
        with torch.no_grad():
            call = self._call_of_last(args, kwargs)
            return self.algebra.distribution(call)

    @staticmethod
    def _unpack(flat: Tensor, call: BoundModel) -> dict[str, Tensor]:
        shapes = {name: fn.shape() for name, fn in call.block.items()}
        parts = flat.split([shape.numel() for shape in shapes.values()], -1)
        return {
            name: part.reshape(part.shape[:-1] + shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The posterior median of every latent site, by name; arguments: those of the last step."""
        with torch.no_grad():
            call = self._call_of_last(args, kwargs)
            return self._unpack(self.algebra.mean_and_sd(call)[0], call)

    def quantiles(self, quantiles: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior quantiles of every latent site, (Q, *shape) by name."""
        with torch.no_grad():
            call = self._call_of_last(args, kwargs)
            mean, sd = self.algebra.mean_and_sd(call)
        levels = torch.as_tensor(quantiles, dtype=mean.dtype, device=mean.device)
        z = torch.special.ndtri(levels).reshape(*levels.shape, 1)
        return self._unpack(mean + z * sd, call)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        moved = super()._apply(fn, *args, **kwargs)
        if self.plan is not None:  # .to(), .double() and the like
            like = self.algebra.constant
            self.plan = replace(self.plan, dtype=like.dtype, device=like.device)
            self._rest = {name: fn(value) for name, value in self._rest.items()}
        return moved

    def __getstate__(self) -> dict[str, Any]:
        self._up_to_date()
        with kept_whole(self):
            state = {**super().__getstate__(), "_last": None, "curvature": None}
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> AutoSites:
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__setstate__(deepcopy(self.__getstate__(), memo))
        if has_model(self):
            give_model(other, self.model)
            # the model runs, so it can at the arguments of the last step, which are not copied
            other._last, other._since = self._last, self._since
        return other

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.fresh = not self._any_moved()

    def _any_moved(self) -> bool:
        return any(bool(p.any()) for p in self.natural_params().values())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # a copy in the process of its original gets parameters of its own
        rename(self, claim_name(module_name(self)))


class _NoGradient(torch.autograd.Function):
    """Zero; that a gradient is asked for shows an optimizer at work that can not move the sites."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*sites: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return sites[0].new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "The draws of AutoSites give its sites no gradient, so this loss leaves q at the prior. "
            "Train them by pyro_ngvi.CVI(guide). Pass SVI loss=pyro_ngvi.SitesELBO()."
        )


def find_sites(guide: Any) -> Iterator[tuple[str, AutoSites]]:
    """The ``AutoSites`` within ``guide``: itself, or its parts, each with its path ("" for itself)."""
    if isinstance(guide, nn.Module):
        for path, module in guide.named_modules():
            if isinstance(module, AutoSites):
                yield path, module
