"""The first call of a guide: its sites, where it starts, and a state that was loaded before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoContinuous, AutoGuide
from torch import Tensor, nn

from ..families.base import Family, Tensors
from ..families.vectors import entry_name
from ..linalg.host import outside_autocast, own_random_state
from ..probing.latents import check_latents
from ..runtime.pyro_adapter import (
    HidesMarked,
    give_model,
    has_model,
    kept_whole,
    model_as_given,
    model_under,
    unblocked,
)
from ..runtime.store import ModuleParams, OwnName, check_names, claim_name, module_name, rename
from .centers import init_to_center
from .found import Found
from .laplace import best_gaussian
from .search import find_laplace, find_mode

#: sd of every unconstrained latent variable at the start, unless init_scale says another
SCALE = 0.1


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
        """Around the set-up of the first call: if that fails, the next call says the same again.

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
            return {**super().__getstate__(), "curvature": None, "find_start": None}

    def copied_with_model(self, memo: dict[int, Any]) -> Any:
        """A deep copy that, unlike those that Pyro makes, has the model if this guide has it."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__setstate__(deepcopy(self.__getstate__(), memo))
        if has_model(self):
            give_model(other, self.model)
        return other

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # a copy in the process of its original gets parameters of its own
        rename(self, claim_name(module_name(self)))


class FirstCall(MadeAtFirstCall, AutoContinuous):
    """How an :class:`~pyro_ngvi.guides.AutoFamily` is made: its arguments, first call and copies."""

    #: what ``init`` may be besides ``None``
    starts: tuple[str, ...] = ("map",)
    #: whether "auto" takes it to where a mean field comes: its family takes an sd for each entry
    begins_narrow = False
    #: the search behind "laplace" and "auto"
    search: Callable[..., Found] = staticmethod(best_gaussian)
    #: after a search for a Gaussian: what it saw, in words by ``str``
    start_report: Found | None = None
    #: other parameters to start at than around a point; of who makes this guide part of another
    find_start: Callable[[Tensor], Tensors | None] | None = None
    #: whether the first call has a minibatch that no step sees again, and a search takes it for itself
    begins_with_part = False

    def __init__(
        self,
        model: Callable[..., Any],
        init_loc_fn: Callable[..., Any] = init_to_center,
        *,
        init_scale: float | None = None,
        sticking_the_landing: bool = True,
        init: str | None = "auto",
        name: str | None = None,
    ) -> None:
        scale = SCALE if init_scale is None else init_scale
        if not isinstance(scale, int | float) or not 0.0 < scale < float("inf"):
            raise ValueError(f"init_scale must be a positive number, got {init_scale!r}.")
        if init not in (None, "auto", *self.starts):
            known = " or ".join(["None", *(f'"{s}"' for s in self.starts)])
            raise ValueError(f"init must be {known}, got {init!r}.")
        if init == "auto":
            # who says where to start is taken at their word
            given = init_scale is not None or init_loc_fn is not init_to_center
            init = None if given or "auto" not in self.starts else init
        super().__init__(HidesMarked()(model), init_loc_fn=init_loc_fn)
        self.take_name(name)
        self.family = self.make_family()
        self.init_scale, self.init = float(scale), init
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
        find, self.find_start = self.find_start, None
        if self.init == "map":
            loc = find_mode(self, loc, args, kwargs)
        params = self.family.init(loc, self.init_scale)
        if find is not None and self._waiting_state is None:
            params = find(loc) or params
        if self.init in ("laplace", "auto"):
            self.start_report = found = find_laplace(self, loc, params, args, kwargs)
            if found is not None and found.params is not None:
                return {name: v.clone() for name, v in found.params.items()}
        return params

    def _register_params(self, values: Tensors) -> None:
        for name, value in values.items():
            setattr(self, name, nn.Parameter(value))

    def site_of(self, index: int) -> str:
        """Name of the latent site that holds entry ``index`` of the flat latent vector."""
        return entry_name(index, self._unconstrained_shapes)
