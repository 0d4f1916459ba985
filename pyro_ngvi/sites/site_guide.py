"""Pyro's side of a guide of sites: its model, the first call, the parameter store, and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from pyro import poutine
from pyro.nn.module import pyro_method
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from ..families.vectors import entry_name
from ..guides.start import MadeAtFirstCall
from ..linalg.host import at_hand, own_random_state
from ..optim.blocks import HoldsIterate
from ..runtime.pyro_adapter import give_model, has_model, model_under
from ..runtime.run import Minibatches
from ..runtime.store import ModuleParams, check_names, follow_store, module_name
from .algebra import Algebra
from .bound_model import BoundModel
from .chain import ChainAlgebra
from .checks import check_prior
from .conditioned_model import ConditionedModel, MeansOfProcesses
from .dense import DenseAlgebra
from .find import find_structure
from .inducing import InducingAlgebra
from .last_step import LastStep
from .structure import ModelStructure

#: seed of the values that stand for latent sites of other guides while the structure is looked for
SEED = 20_180_216


class SiteGuide(HoldsIterate, MadeAtFirstCall):
    """A guide whose parameters are the sites of single data: nu (N, k) and Lambda (N, k, k) by group.

    ``plan`` is ``None`` before the first call; ``fresh`` whether no site has been moved yet;
    ``curvature`` what the loss leaves for the optimizer, once; ``counts`` how many points it takes.
    """

    #: what a guide of ours says whose blocks are sites, which CVI alone steps
    holds_sites = True

    inducing: Tensor | None
    algebra: Algebra

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
        self.register_buffer("inducing", None)
        self.inducing = inducing  # an nn.Parameter takes the buffer's place
        self.plan: ModelStructure | None = None
        self.last_step = LastStep()
        self.counts: dict[str, int] | None = None
        self.fresh = True

    # --- the model

    @pyro_method  # a loss may ask before the guide is called, and the store's sites are wanted then too
    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        self.whole_model()  # refuses a copy that has none
        try:
            loading = self._loading_waiting_state()
            with loading, poutine.block(), own_random_state(SEED), torch.no_grad():
                check_names(self, in_use=False)
                with ModuleParams():
                    _ = self.inducing  # read, so that a parameter is the one of the store
                drawn = MeansOfProcesses() if self.inducing is not None else Messenger()
                with model_under(self, ModuleParams()), model_under(self, drawn):
                    super()._setup_prototype(*args, **kwargs)
                self.plan, self.algebra = self._found(drawn, args, kwargs)
                self._make_sites(args, kwargs)
        except BaseException:
            self.prototype_trace = self.plan = None  # so that the next call says the same again
            raise

    def _found(self, drawn: Messenger, args: Any, kwargs: Any) -> tuple[ModelStructure, Algebra]:
        """The structure at these arguments, sites of other guides ``drawn`` under that handler, and
        the algebra that suits it."""
        own = {name for name, _ in self.prototype_trace.iter_stochastic_nodes()}
        model, direct = self.whole_model(), self.inducing is not None

        def rest() -> dict[str, Tensor]:
            trace: Any = poutine.trace(drawn(model)).get_trace(*args, **kwargs)
            sites = trace.iter_stochastic_nodes()
            return {n: s["value"] for n, s in sites if n not in own and not site_is_subsample(s)}

        runner = ConditionedModel(model, args, kwargs, rest(), Minibatches(), direct=direct)
        # at other values of theirs, with the same data
        other = replace(runner, values=rest()) if runner.values else None
        plan = find_structure(runner, other, self.latent)
        call = BoundModel(plan, runner)
        if self.inducing is not None:
            return plan, InducingAlgebra(plan, call, self.inducing)
        return plan, ChainAlgebra(plan, call) if plan.direct else DenseAlgebra(plan, call)

    def _make_sites(self, args: Any, kwargs: Any) -> None:
        plan = self._structure()
        for group in plan.groups:
            linear = plan.zero().new_zeros(group.size, group.width)
            precision = linear.new_zeros(*linear.shape, group.width)
            setattr(self, f"linear_{group.name}", nn.Parameter(linear))
            setattr(self, f"precision_{group.name}", nn.Parameter(precision))
        sites = self.site_tensors()
        self.fresh = not self._any_moved()
        if not self.fresh:  # a parameter store was loaded before this first call
            self.algebra.recollect(self.algebra.view(self._call_of_all(args, kwargs)), sites)

    def _holder(self) -> Any:
        """Who has the model: this guide, or the ``AutoGuideList`` that it is a part of."""
        return self if self.master is None else self.master()

    def whole_model(self) -> Callable[..., Any]:
        """The model; in an ``AutoGuideList`` that of the list, with sites of other guides."""
        if not has_model(self._holder()):  # Pyro leaves it out of copies
            raise RuntimeError(
                "This AutoSites was unpickled or loaded, and does not carry the model. Take a step, or "
                "evaluate the loss, by SVI(model, guide, ...) first: the guide gets the model from it."
            )
        return self._holder().model

    def adopt(self, model: Callable[..., Any]) -> None:
        """Take ``model``, if this is a copy that came without."""
        if not has_model(self._holder()):
            give_model(self._holder(), model)

    def owns(self, name: str) -> bool:
        """Whether a sample site of the guide's trace is one of this guide."""
        shapes = {} if self.plan is None else self.plan.shapes
        return name in shapes or name == f"_{module_name(self)}_noise"

    def _structure(self) -> ModelStructure:
        if self.plan is None:
            raise RuntimeError(
                "AutoSites does not know the model's sites yet: call it once with the arguments of the "
                "model and the data, or take a step of SVI."
            )
        return self.plan

    # --- calls of the model

    def call_of(
        self, args: Any, kwargs: Any, values: Any = None, given: Any = None, plan: Any = None
    ) -> BoundModel:
        """The structure at these arguments, which the first call finds, with ``values`` of the latent
        sites of other guides and minibatches that are ``given``; or the ``plan`` of before."""
        if self.plan is None:
            self._setup_prototype(*args, **kwargs)
        plan = plan or self._structure()
        call = args, kwargs, plan.rest if values is None else values, Minibatches(given)
        runner = ConditionedModel(self.whole_model(), *call, plan.shapes, plan.direct)
        return BoundModel(plan, runner)

    def _call_of_all(self, args: Any, kwargs: Any) -> BoundModel:
        call = self.call_of(args, kwargs)
        if not call.whole:
            raise ValueError(
                "AutoSites needs all data here, and this call has a minibatch. Make its size, or its "
                "numbers, an argument of the model, and pass those of all data. After sites were "
                "restored call guide.refresh(*args) with all data first."
            )
        return call

    def _call_before(self) -> BoundModel | None:
        last = self.last_step
        if last.arguments is None:
            return None
        return self.call_of(*last.arguments, plan=last.plan)

    def _current(
        self, args: Any, kwargs: Any, leave_out: bool = False
    ) -> tuple[BoundModel, list[str]]:
        """The model at these arguments, or those of the last step, ready as by :meth:`_ready`."""
        self._structure()
        return self._ready(self.call_of(*self.last_step.or_given(args, kwargs)), leave_out)

    def _ready(self, call: BoundModel, leave_out: bool = False) -> tuple[BoundModel, list[str]]:
        """A call whose prior is the last step's, with q made anew if need be; what is left out."""
        self.make_current(call.runner.args, call.runner.kwargs)
        before = self._call_before()
        if before is None or self.last_step.has_arguments_of(call) or not at_hand(call.plan.zero()):
            return call, []
        return call, check_prior(before, call, leave_out)

    def make_current(self, *call: Any) -> None:
        """Make q anew where it is not that of the sites: at the last step's arguments, or ``call``."""
        if self.plan is None:
            return
        self._follow_store()
        if self.last_step.stale:
            args, kwargs = self.last_step.arguments or call or ((), {})
            self.refresh(*args, **kwargs)

    def refresh(self, *args: Any, **kwargs: Any) -> None:
        """Make q anew from the sites, at the current hyperparameters and all data.

        Needed where parameters of the model were changed by other means than the optimizer.

        Raises:
            ValueError: for a minibatch, which does not know what the other sites see.
        """
        call = self._call_of_all(args, kwargs)
        with torch.no_grad():
            view = self.algebra.view(call)
            self.algebra.recollect(view, self.site_tensors())
        self.last_step.remember(args, kwargs, stale=False)
        self.last_step.see(call, {})

    # --- the sites, as an optimizer and the parameter store see them

    def natural_params(self) -> dict[str, nn.Parameter]:
        """The sites' tensors by name; empty before the first call."""
        own: Any = self._parameters
        return {n: p for n, p in own.items() if n.startswith(("linear_", "precision_"))}

    @pyro_method
    def site_tensors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """nu (N, k) and Lambda (N, k, k) by group; access registers them with Pyro."""
        plan = self._structure()
        self._follow_store()
        _ = self.inducing  # so does an nn.Parameter
        return {
            g.name: (getattr(self, f"linear_{g.name}"), getattr(self, f"precision_{g.name}"))
            for g in plan.groups
        }

    def _any_moved(self) -> bool:
        return any(bool(p.any()) for p in self.natural_params().values())

    def _follow_store(self) -> None:
        """Take the sites that Pyro's store holds now: it may have been restored in between."""
        if follow_store(self, {f"{module_name(self)}.": self}):
            self.fresh, self.last_step.stale = not self._any_moved(), True

    def site_of(self, index: int) -> str:
        """Name of the latent site that holds entry ``index`` of the flat latent vector."""
        return entry_name(index, self._structure().shapes)

    # --- copies

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        moved = super()._apply(fn, *args, **kwargs)
        if self.plan is not None:  # .to(), .double() and the like
            like, rest = self.algebra.constant, {n: fn(x) for n, x in self.plan.rest.items()}
            self.plan = replace(self.plan, dtype=like.dtype, device=like.device, rest=rest)
        return moved

    def __getstate__(self) -> dict[str, Any]:
        self.make_current()
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = self.copied_with_model(memo)
        if has_model(self):
            # the model runs, so it can at the arguments of the last step, which are not copied
            last, copied = self.last_step, other.last_step
            copied.arguments, copied.plan, copied.numbers = last.arguments, last.plan, last.numbers
        return other

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.fresh = not self._any_moved()


def find_sites(guide: Any) -> Iterator[tuple[str, SiteGuide]]:
    """The guides of sites within ``guide``, itself or its parts, each with its path ("" for itself)."""
    if isinstance(guide, nn.Module):
        for path, module in guide.named_modules():
            if isinstance(module, SiteGuide):
                yield path, module
