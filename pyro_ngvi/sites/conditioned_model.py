"""Runs of a model with its Gaussian block made from white noise, its predictors seen or replaced.

A *predictor* is what a datum sees of the latent block, f_n = A_n z + b_n.  In a run of the model it is
either the value of a sample site (a latent Gaussian process, ``pyro.deterministic``), or the result of
one torch operation of the model's own code, found again in every run by its number: ``X @ w`` may be
the third.  Operations inside handlers are not counted, so the number does not depend on how latent
sites get their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

import pyro
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ..distributions import GaussianProcess, GaussianStateSpace
from ..runtime.density import Site, Sites
from ..runtime.run import Conditioned, Minibatches
from .whitening import colour, gaussian_of, refuse_weights

__all__ = ["ConditionedModel", "Found", "OtherCourse", "TensorRef", "WhitenedRun", "for_each"]

T = TypeVar("T")

#: torch functions that look at a tensor's kind alone
_DESCRIBE = {
    *("size", "__len__", "dim", "ndimension", "numel", "nelement", "stride", "element_size"),
    *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "get_device", "type"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
    *("__repr__", "__str__", "__format__", "__hash__"),
}


@dataclass(frozen=True)
class TensorRef:
    """Where a predictor appears in a run: the value of a site, or the result of operation ``number``.

    ``name`` is that of the operation, to find out where a run took another course.
    """

    site: str | None = None
    number: int = -1
    name: str = ""

    @property
    def label(self) -> str:
        """The site, or the name of the operation."""
        return self.name if self.site is None else f"the site {self.site!r}"

    def __str__(self) -> str:
        if self.site is not None:
            return self.label
        return f"the result of {self.name} (operation {self.number} of the model)"


class Found(Exception):
    """Everything that a run was to look at has been seen; the rest of it is not needed."""


class OtherCourse(RuntimeError):
    """A run did not come by what it was to see or to replace."""


class _Operations(TorchFunctionMode):
    """Counts the model's own operations with real numbers, shows or replaces their results."""

    def __init__(self, run: WhitenedRun) -> None:
        super().__init__()
        self.run = run
        self.count = 0
        self.paused = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.paused:
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if self.run.unread and not _only_describes(func, result):
            self.run.unread.difference_update(map(id, _flat((args, kwargs))))
        # only what may be a predictor counts: a plate makes whole numbers, or not, as it subsamples
        if not (isinstance(result, Tensor) and result.is_floating_point()):
            return result
        place = TensorRef(number=self.count, name=getattr(func, "__name__", str(func)))
        self.count += 1
        if place in self.run.replace:
            self.run.replaced += 1
            return self.run.replace[place].clone()  # the model may write into it
        self.run.on_operation(place, result)
        return result


class WhitenedRun(Conditioned):
    """One run: latent sites that have no value in ``values`` are made from ``noise`` (D,).

    With ``block``, shapes by site at the guide's first call, only those: another one, such as data to
    be predicted, is drawn as usual.  With ``direct`` the noise is not coloured: it stands for the
    values of the block themselves.  ``replace`` gives values for predictors by place.  After the run
    ``own`` holds the Gaussians of the block by site, and ``seen`` the values at the places to
    ``look_at``, after which the run stops unless it is to ``go_on``.

    Of Gaussian processes, whose inputs may be others at each call, ``makers`` make single sites from
    noise of another length; with ``at_mean`` the noise counts as 0 whatever its length, and no kernel
    matrix is factored; with ``direct`` that of a process of another shape than in ``block`` does.
    """

    def __init__(
        self,
        noise: Tensor | None,
        values: Mapping[str, Tensor],
        minibatches: Minibatches,
        *,
        replace: Mapping[TensorRef, Tensor] | None = None,
        look_at: tuple[TensorRef, ...] = (),
        go_on: bool = False,
        on_operation: Callable[[TensorRef, Tensor], None] | None = None,
        block: Mapping[str, torch.Size] | None = None,
        direct: bool = False,
        makers: Mapping[str, Any] | None = None,
        at_mean: bool = False,
    ) -> None:
        super().__init__(values, minibatches)
        self.noise = noise
        self._makers, self._at_mean = makers or {}, at_mean
        self._block = block
        self._direct = direct
        self.own: dict[str, Any] = {}
        #: plates to which the model itself passes the numbers of their data
        self.given: set[str] = set()
        #: ids of the numbers that were drawn for a plate, and that the model has not looked at
        self.unread: set[int] = set()
        self.used = 0
        self.seen: dict[TensorRef, Tensor] = {}
        self._look_at, self._go_on = set(look_at), go_on
        self._report = on_operation
        self.replace = dict(replace or {})
        self.replaced = 0
        self.operations = _Operations(self)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self.operations.paused += 1
        try:
            yield
        finally:
            self.operations.paused -= 1

    def on_operation(self, place: TensorRef, result: Tensor) -> None:
        """Called with every result of the model's own operations."""
        with self._paused():
            if self._report is not None:
                self._report(place, result)
            self._see(place, result)

    def check_course(self) -> None:
        """Refuse a run that did not come by every place that it was to see or to replace."""
        missed = [p for p in self._look_at if p not in self.seen]
        if missed or self.replaced < len(self.replace):
            what = ", ".join(map(str, missed or self.replace))
            raise OtherCourse(
                "AutoSites: the model took another course than at the guide's first call, and did "
                f"not come by {what}. It must run the same operations every time: keep what "
                "changes between calls (an if, a loop, a module's value) out of it."
            )

    def _see(self, place: TensorRef, value: Tensor) -> None:
        if place in self._look_at:
            self.seen[place] = value
            if len(self.seen) == len(self._look_at) and not self._go_on:
                raise Found

    def _pyro_sample(self, msg: Site) -> None:
        with self._paused():
            name = msg["name"]
            if site_is_subsample(msg) and msg["value"] is not None:
                self.given.add(name)
            super()._pyro_sample(msg)
            if site_is_subsample(msg) and msg["value"] is None:
                msg["value"] = msg["fn"]()  # of all data: drawn here, it counts as no operation
            if site_is_subsample(msg) and name not in self.given:
                self.unread.add(id(msg["value"]))
            latent = not msg["is_observed"] and not msg["done"]
            wanted = self._block is None or name in self._block
            if latent and wanted and not site_is_subsample(msg):
                self._make(msg)
            place = TensorRef(site=name)
            if place in self.replace:
                msg["value"], msg["done"] = self.replace[place], True
                self.replaced += 1
            if msg["value"] is not None:
                self._see(place, msg["value"])

    def _make(self, msg: Site) -> None:
        name, noise, fn = msg["name"], self.noise, gaussian_of(msg)
        self.own[name] = fn
        maker, process = self._makers.get(name), isinstance(fn, GaussianProcess)
        share = size = fn.shape().numel() if maker is None else maker.size
        if self._direct and process and maker is None and self._block is not None:
            share = self._block[name].numel()
        if noise is None or self._at_mean or share != size:
            own = torch.zeros(size) if noise is None else noise.new_zeros(size)
        else:
            own = noise[self.used : self.used + size]
        if len(own) < size:
            raise ValueError(
                f"AutoSites: the latent site {name!r} has {size} entries now, more than at the "
                f"guide's first call. A block of another size needs a guide of its own."
            )
        own = own.to(_like(fn))
        if maker is not None or self._direct:
            value = maker(own) if maker is not None else own
        elif process and (self._at_mean or TensorRef(site=name) in self.replace):
            value = fn.loc  # the kernel matrix would be factored for nothing
        else:
            value = colour(fn, own)
        msg["value"], msg["done"] = value.reshape(msg["fn"].shape()), True
        self.used += share

    def _pyro_param(self, msg: Site) -> None:
        with self._paused():
            super()._pyro_param(msg)
            if (
                msg["value"] is None
            ):  # one that is made takes more operations than one that is there
                msg["value"] = msg["fn"](*msg["args"], **msg["kwargs"])

    def _pyro_post_sample(self, msg: Site) -> None:
        with self._paused():
            super()._pyro_post_sample(msg)
            if msg["name"] in self.own:  # only now have all handlers had their say
                refuse_weights(msg)


def for_each(body: Callable[[Any], T], inputs: Any, chunk_size: int | None = None) -> T:
    """``body`` at every row of ``inputs`` (a tensor, or a dict of them), stacked.

    By ``torch.func.vmap``; one after the other where the model cannot run under it (Pyro's
    ``OrderedLogistic`` fills a tensor in place).
    """
    try:
        return torch.func.vmap(body, randomness="same", chunk_size=chunk_size)(inputs)
    except RuntimeError:
        # a model that is wrong rather than unbatchable shows its own error here
        count = len(tree_leaves(inputs)[0])
        results = [body(tree_map(itemgetter(i), inputs)) for i in range(count)]
        return tree_map(lambda *rows: torch.stack(rows), *results)


@dataclass
class ConditionedModel:
    """A model with its arguments and the values of latent sites outside of the block.

    Handlers around a run see nothing of it but parameters, unless it is not ``hidden``: then a
    ``poutine.scale`` around a step of SVI acts on its sites as it does on any loss.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: Mapping[str, Tensor]
    minibatches: Minibatches
    block: Mapping[str, torch.Size] | None = None
    direct: bool = False

    def __call__(self, noise: Tensor | None, hidden: bool = True, **options: Any) -> WhitenedRun:
        """One run, as far as needed."""
        how = {"block": self.block, "direct": self.direct, **options}
        run = WhitenedRun(noise, self.values, self.minibatches, **how)
        shield = pyro.poutine.block(hide_fn=_is_no_parameter) if hidden else nullcontext()
        with shield, pyro.validation_enabled(False), run:
            try:
                with run.operations:
                    self.model(*self.args, **self.kwargs)
            except Found:
                return run
            except ZeroDivisionError as error:
                if any(len(index) == 0 for index in self.minibatches.values()) or _is_empty(run):
                    raise ValueError(
                        "AutoSites: a plate is empty: there are no data, or an empty minibatch "
                        "(subsample= of length 0). Leave such a step out."
                    ) from error
                raise
        run.check_course()
        return run

    def sites(self, noise: Tensor | None, **options: Any) -> Sites:
        """The recorded sites of one run."""
        return self(noise, **options).sites


def _like(fn: Any) -> Tensor:
    """A tensor of the kind that draws of ``fn`` are."""
    if not isinstance(fn, GaussianStateSpace | GaussianProcess):
        return fn.loc
    tensors = (v for v in vars(fn).values() if isinstance(v, Tensor))
    return next(v for v in tensors if v.is_floating_point())


def _only_describes(func: Any, result: Any) -> bool:
    """Whether a torch function tells the kind of a tensor, and nothing of its numbers."""
    name = getattr(func, "__name__", "")
    return name in _DESCRIBE or (name == "__get__" and not isinstance(result, Tensor))


def _flat(arguments: Any) -> Iterator[Any]:
    """What a torch function is called with, without the containers."""
    if isinstance(arguments, dict):
        arguments = arguments.values()
    elif not isinstance(arguments, tuple | list):
        yield arguments
        return
    for part in arguments:
        yield from _flat(part)


def _is_empty(run: WhitenedRun) -> bool:
    values = [s["value"] for s in run.sites.values() if site_is_subsample(s)]
    return any(len(value) == 0 for value in values)


def _is_no_parameter(msg: Any) -> bool:
    return msg["type"] != "param"
