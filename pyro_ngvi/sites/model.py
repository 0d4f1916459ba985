"""The model of an AutoSites: how it is run, and what is found about it at the first call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from pyro.nn.module import pyro_method
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from ..distributions.gaussian_process import draws_are_means
from ..linalg.random import own_random_state
from ..runtime.module_params import ModuleParams, check_names
from ..runtime.pyro_adapter import give_model, has_model, model_under, module_name
from ..runtime.vmap import Minibatches
from .bound_model import BoundModel
from .conditioned_model import ConditionedModel
from .find import make_plan
from .make_algebra import make_algebra
from .structure import ModelStructure

__all__ = ["SiteModel"]

#: seed of the values that stand for latent sites of other guides while the structure is looked for
SEED = 20_180_216


class SiteModel:
    """Mixed into ``AutoSites``."""

    master: Any
    prototype_trace: Any
    latent: str | None
    inducing: Any
    algebra: Any
    plan: ModelStructure | None
    fresh: bool
    site_tensors: Any
    _rest: dict[str, Tensor]

    @pyro_method  # a loss may ask before the guide is called, and the store's sites are wanted then too
    def _setup_prototype(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            loading = self._loading_waiting_state()
            with loading, poutine.block(), own_random_state(SEED), torch.no_grad():
                check_names(self, in_use=False)
                with ModuleParams():
                    _ = self.inducing  # read, so that a parameter is the one of the store
                with draws_are_means(self.inducing is not None):  # no N x N matrix
                    self._find_structure(args, kwargs)
        except BaseException:
            self.prototype_trace = self.plan = None  # so that the next call says the same again
            raise

    def _find_structure(self, args: Any, kwargs: Any) -> None:
        guide: Any = self
        if not has_model(guide):
            raise RuntimeError(
                "This AutoSites is a copy made before its original was called, and a copy does not "
                "carry the model. Call the original once, then copy it."
            )
        try:
            parent: Any = super()
            with model_under(guide, ModuleParams()):
                parent._setup_prototype(*args, **kwargs)
        except ZeroDivisionError:
            self.runner(args, kwargs)(None)  # which says so if it was an empty minibatch
            raise
        except NotImplementedError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"AutoSites: a latent site can not be drawn ({reason}), and the latent block must be "
                f"jointly Gaussian a priori. Give the site a proper Normal prior, however wide, or use "
                f"AutoFullRankNormal and NGVB."
            ) from error
        prototype: Any = self.prototype_trace
        own = {name for name, _ in prototype.iter_stochastic_nodes()}
        self._rest = self._draw_rest(own, args, kwargs)
        runner, other = self.runner(args, kwargs), None
        if self._rest:
            values = self._draw_rest(own, args, kwargs)
            other = self.runner(args, kwargs, values, runner.minibatches)  # with the same data
        self.plan = make_plan(runner, other, self.latent)
        self.algebra = make_algebra(self.plan, BoundModel(self.plan, runner), self.inducing)
        for group in self.plan.groups:
            n, k = group.size, group.width
            like = {"dtype": self.plan.dtype, "device": self.plan.device}
            setattr(self, f"linear_{group.name}", nn.Parameter(torch.zeros(n, k, **like)))
            setattr(self, f"precision_{group.name}", nn.Parameter(torch.zeros(n, k, k, **like)))
        self._take_stored(args, kwargs)

    def _take_stored(self, args: Any, kwargs: Any) -> None:
        """Where a parameter store was loaded before this first call, its sites are those of q."""
        sites = self.site_tensors()
        if not any(bool(t.any()) for pair in sites.values() for t in pair):
            return
        self.fresh = False
        assert self.plan is not None
        call = BoundModel(self.plan, self.runner(args, kwargs))
        if not call.whole:
            raise ValueError(
                "AutoSites: its sites were restored with the parameter store, and this first call has "
                "a minibatch. Make it with all data, from which q is made."
            )
        view = self.algebra.view(call)
        self.algebra.recollect(view, sites)

    def _draw_rest(self, own: set[str], args: Any, kwargs: Any) -> dict[str, Tensor]:
        """A value from the prior for every latent site that other guides of a list infer."""
        with torch.no_grad():
            trace = poutine.trace(self.whole_model()).get_trace(*args, **kwargs)
        sites: Any = trace.iter_stochastic_nodes()
        return {n: s["value"] for n, s in sites if n not in own and not site_is_subsample(s)}

    def whole_model(self) -> Callable[..., Any]:
        """The model; in an ``AutoGuideList`` that of the list, with sites of other guides."""
        holder: Any = self if self.master is None else self.master()
        if not has_model(holder):
            raise RuntimeError(
                "This AutoSites was unpickled or loaded, and does not carry the model. Take a step, or "
                "evaluate the loss, by SVI(model, guide, ...) first: the guide gets the model from it."
            )
        return holder.model

    def adopt(self, model: Callable[..., Any]) -> None:
        """Take ``model``, if this is a copy that came without."""
        holder: Any = self if self.master is None else self.master()
        if not has_model(holder):
            give_model(holder, model)

    def runner(
        self, args: Any, kwargs: Any, values: Any = None, minibatches: Minibatches | None = None
    ) -> ConditionedModel:
        """Runs of the model at these arguments, with ``values`` of the latent sites of other guides."""
        return ConditionedModel(
            self.whole_model(),
            args,
            kwargs,
            self._rest if values is None else values,
            Minibatches() if minibatches is None else minibatches,
            None if self.plan is None else self.plan.shapes,
            self.inducing is not None or (self.plan is not None and self.plan.direct),
        )

    def call_of(
        self, args: Any, kwargs: Any, values: Any = None, minibatches: Any = None
    ) -> BoundModel:
        """The structure at these arguments; the first call finds it."""
        if self.plan is None:
            self._setup_prototype(*args, **kwargs)
        assert self.plan is not None
        chosen = Minibatches(minibatches)
        return BoundModel(self.plan, self.runner(args, kwargs, values, chosen))

    def check_arguments(self, args: Any, kwargs: Any) -> None:
        """Refuse arguments that the model does not take: no step has left those of a user."""
        model: Any = self.whole_model()
        program = model.forward if isinstance(model, nn.Module) else model
        try:
            inspect.signature(program).bind(*args, **kwargs)
        except TypeError as error:
            raise RuntimeError(
                f"AutoSites has not made a step whose arguments it could take ({error}): pass those of "
                f"the model, as in guide.median(X)."
            ) from error

    def owns(self, name: str) -> bool:
        """Whether a sample site of the guide's trace is one of this guide."""
        shapes = {} if self.plan is None else self.plan.shapes
        guide: Any = self
        return name in shapes or name == f"_{module_name(guide)}_noise"

    def _require_setup(self) -> None:
        if self.plan is None:
            raise RuntimeError(
                "AutoSites does not know the model's sites yet: call it once with the arguments of the "
                "model and the data, or take a step of SVI."
            )
