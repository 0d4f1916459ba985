"""Runs of a model with its Gaussian block made from white noise, its predictors seen or replaced.

A block of latent sites z_1, z_2, ...  that are jointly Gaussian a priori is

    z_i = loc_i(z_1, ..., z_(i-1)) + R_i eps_i,        eps ~ N(0, I),

with R_i free of the other sites and loc_i affine in them.  So z, and everything that is affine in z, is
affine in the flat vector eps (D,): a posterior over eps is one over z, and the prior is always N(0, I).

A *predictor* is what a datum sees of the latent block, f_n = A_n z + b_n.  In a run of the model it is
either the value of a sample site (a latent Gaussian process, ``pyro.deterministic``), or the result of
one torch operation of the model's own code, not of handlers, found again in every run by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import log, pi
from operator import itemgetter
from typing import Any, TypeVar

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.util import sum_rightmost
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ..distributions import GaussianProcess, GaussianStateSpace
from ..runtime.density import Site, Sites
from ..runtime.run import Conditioned, Minibatches
from ..runtime.stand_ins import stand_ins
from ..runtime.told_in import told_in
from .structure import TensorRef, is_weighted, unwrapped

T = TypeVar("T")

#: torch functions that look at a tensor's kind alone
_DESCRIBE = {
    *("size", "__len__", "dim", "ndimension", "numel", "nelement", "stride", "element_size"),
    *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "get_device", "type"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
    *("__repr__", "__str__", "__format__", "__hash__"),
}


def reads(func: Any, result: Any) -> bool:
    """Whether a torch function that gave ``result`` looks at numbers, not at a tensor's kind alone."""
    name = getattr(func, "__name__", str(func))
    # of a tensor's attributes only another tensor, such as .T, has its numbers
    return name not in _DESCRIBE and (name != "__get__" or isinstance(result, Tensor))


class AllSeen(Exception):
    """The rest of the run is not needed."""


class OtherCourse(RuntimeError):
    """A run did not come by what it was to see or to replace."""


class _Operations(TorchFunctionMode):
    """Counts the model's own operations with real numbers, shows or replaces their results."""

    def __init__(self, run: WhitenedRun) -> None:
        super().__init__()
        self.run = run
        self.count = self.paused = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result, run = func(*args, **(kwargs or {})), self.run
        if self.paused:
            return result
        if run.unread and reads(func, result):
            run.unread.difference_update(map(id, tree_leaves((args, kwargs))))
        # only what may be a predictor counts: a plate makes whole numbers, or not, as it subsamples
        if not (isinstance(result, Tensor) and result.is_floating_point()):
            return result
        place = TensorRef(number=self.count, name=getattr(func, "__name__", str(func)))
        self.count += 1
        if place in run.replace:
            run.replaced += 1
            return run.replace[place].clone()  # the model may write into it
        run.see(place, result)
        return result


class WhitenedRun(Conditioned):
    """One run: the block's sites are made from ``noise`` (D,), entries of which are ``used`` in turn.

    Without ``noise`` they are at their means, whatever their number, and no kernel matrix is factored.

    Args:
        runner: the model; another latent site, such as data to be predicted, is drawn as usual.
        replace: values for predictors by place.
        look_at: places whose values ``seen`` has after the run, which stops there unless it is to
            ``go_on``; ``None`` for copies of all values.
        makers: what makes single Gaussian processes ``fn``, from noise of another length.
    """

    def __init__(
        self,
        runner: ConditionedModel,
        noise: Tensor | None,
        *,
        replace: Mapping[TensorRef, Tensor] | None = None,
        look_at: tuple[TensorRef, ...] | None = (),
        go_on: bool = False,
        makers: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(runner.values, runner.minibatches)
        self.runner, self.noise, self.used = runner, noise, 0
        self.replace, self.replaced = replace or {}, 0
        self._look_at, self._go_on = None if look_at is None else set(look_at), go_on
        self._makers = makers or {}
        self.own: dict[str, Any] = {}
        self.seen: dict[TensorRef, Tensor] = {}
        #: plates to which the model itself passes the numbers of their data
        self.given: set[str] = set()
        #: ids of the numbers that were drawn for a plate, and that the model has not looked at
        self.unread: set[int] = set()
        self.operations = _Operations(self)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self.operations.paused += 1
        try:
            yield
        finally:
            self.operations.paused -= 1

    def see(self, place: TensorRef, value: Tensor) -> None:
        if self._look_at is None:
            self.seen[place] = value.detach().clone()  # the model may write into it later
        elif place in self._look_at:
            self.seen[place] = value
            if len(self.seen) == len(self._look_at) and not self._go_on:
                raise AllSeen

    def check_course(self) -> None:
        """Refuse a run that did not come by every place that it was to see or to replace."""
        missed = [place for place in self._look_at or () if place not in self.seen]
        if missed or self.replaced < len(self.replace):
            raise OtherCourse(
                "AutoSites: the model took another course than at the guide's first call, without "
                f"{', '.join(map(str, missed or self.replace))}. It must run the same operations "
                "every time: keep an if, a loop or a module's value that changes out of it."
            )

    def _pyro_sample(self, msg: Site) -> None:
        with self._paused():
            name, plate = msg["name"], site_is_subsample(msg)
            if plate and msg["value"] is not None:
                self.given.add(name)
            super()._pyro_sample(msg)
            if plate and name not in self.given:
                if msg["value"] is None:
                    msg["value"] = msg["fn"]()  # of all data: drawn here, it counts as no operation
                self.unread.add(id(msg["value"]))
            latent = not (plate or msg["is_observed"] or msg["done"])
            if latent and (self.runner.block is None or name in self.runner.block):
                self._make(msg)
            place = TensorRef(site=name)
            if place in self.replace:
                msg["value"], msg["done"] = self.replace[place], True
                self.replaced += 1
            if isinstance(msg["value"], Tensor):
                self.see(place, msg["value"])

    def _make(self, msg: Site) -> None:
        name, noise, block, fn = msg["name"], self.noise, self.runner.block, gaussian_of(msg)
        self.own[name] = fn
        maker, process = self._makers.get(name), isinstance(fn, GaussianProcess)
        direct, share = self.runner.direct, fn.shape().numel() if maker is None else maker.size
        size = share
        if maker is None and block is not None and block[name].numel() != size:
            share = block[name].numel()
            if not (self._makers or noise is None or (direct and process)):
                raise other_size(name, fn.shape(), block[name])
        like = fn.initial_loc if isinstance(fn, GaussianStateSpace) else fn.loc
        if noise is None or share != size:
            own = like.new_zeros(size)
        else:
            own = noise[self.used : self.used + size].to(like)
        if maker is not None:
            value = maker.value(own, fn)
        elif direct:
            value = own
        elif process and (noise is None or TensorRef(site=name) in self.replace):
            value = fn.loc  # the kernel matrix would be factored for nothing
        else:
            value = colour(fn, own)
        msg["value"], msg["done"] = value.reshape(msg["fn"].shape()), True
        self.used += share

    def _pyro_param(self, msg: Site) -> None:
        with self._paused():
            super()._pyro_param(msg)
            if msg["value"] is None:  # made here, it takes as many operations as one that is there
                msg["value"] = msg["fn"](*msg["args"], **msg["kwargs"])

    def _pyro_post_sample(self, msg: Site) -> None:
        with self._paused():
            super()._pyro_post_sample(msg)
            if msg["name"] in self.own and is_weighted(msg):  # now all handlers have had their say
                raise ValueError(
                    f"AutoSites: the prior of {msg['name']!r} stands under a scale or a mask (a "
                    "subsampled plate, poutine.scale or poutine.mask): it would not be Gaussian. Take "
                    "the site out; mask missing data in the observed site alone, or leave them NaN."
                )


class MeansOfProcesses(Messenger):
    """Takes its mean for a draw of a :class:`GaussianProcess`: no N x N matrix is factored."""

    def _pyro_sample(self, msg: Site) -> None:
        if isinstance(unwrapped(msg), GaussianProcess) and not msg["is_observed"]:
            msg["value"], msg["done"] = msg["fn"].mean, True


def other_size(name: str, now: torch.Size, before: torch.Size) -> ValueError:
    return ValueError(
        f"AutoSites: {name!r} has the shape {tuple(now)} with these arguments, and {tuple(before)} "
        f"before. A block of another size needs a guide of its own, prediction at new inputs a "
        f"GaussianProcess, one in minibatches AutoSites(model, inducing=Z)."
    )


@dataclass
class ConditionedModel:
    """A model with its arguments, ``values`` of latent sites outside of the block, shapes of the block.

    ``direct``: noise stands for the values of the block themselves.  Handlers around a run see nothing
    of it but parameters, unless it is not ``hidden``, as a ``poutine.scale`` around a step of SVI.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: Mapping[str, Tensor]
    minibatches: Minibatches
    block: Mapping[str, torch.Size] | None = None
    direct: bool = False

    def __call__(self, noise: Tensor | None, hidden: bool = True, **options: Any) -> WhitenedRun:
        run = WhitenedRun(self, noise, **options)
        shield = pyro.poutine.block(hide_fn=lambda msg: hidden and msg.get("type") != "param")
        with shield, pyro.validation_enabled(False), run:
            try:
                with run.operations:
                    self.model(*self.args, **self.kwargs)
            except AllSeen:
                return run
        run.check_course()
        return run

    def sites(self, noise: Tensor | None, **options: Any) -> Sites:
        return self(noise, **options).sites


# --- Gaussian latent sites


def is_gaussian(fn: Any) -> bool:
    return isinstance(fn, dist.Normal | dist.MultivariateNormal) or hasattr(fn, "from_noise")


@told_in("guides.md#not-gaussian-or-has-no-data")
def gaussian_of(site: Site) -> Any:
    """The Gaussian of a latent site, without ``to_event``; refuses any other distribution."""
    fn, name = unwrapped(site), site["name"]
    if not is_gaussian(fn):
        raise ValueError(
            f"AutoSites: latent site {name!r} is {type(fn).__name__}, not Gaussian, or has no "
            f"data. Use AutoGuideList(model) of AutoSites(block(model, hide=[{name!r}])), "
            f"AutoMeanFieldNormal(block(model, expose=[{name!r}])), or scale * z in the likelihood."
        )
    if isinstance(fn, GaussianProcess) and fn.batch_shape:
        raise fn.in_plate(fn.batch_shape)
    return fn


def colour(fn: Any, noise: Tensor) -> Tensor:
    """loc + R noise in the shape of a draw, for as many entries of flat ``noise``."""
    shaped = noise.reshape(fn.shape())
    if isinstance(fn, dist.Normal):
        return fn.loc + fn.scale * shaped
    if hasattr(fn, "from_noise"):
        return fn.from_noise(shaped)
    # as a row: under vmap that is one product of matrices, and not many with a vector
    return fn.loc + (shaped.unsqueeze(-2) @ fn.scale_tril.mT).squeeze(-2)


def log_det_root(fn: Any, event_dim: int) -> Tensor:
    """log |det R|, summed over the last ``event_dim`` dimensions of a draw, in nats."""
    each = -fn.log_prob(fn.mean) - 0.5 * fn.event_shape.numel() * log(2.0 * pi)
    total: Any = sum_rightmost(each, event_dim - len(fn.event_shape))
    return total


def for_each(body: Callable[[Any], T], inputs: Any, chunk_size: int | None = None) -> T:
    """``body`` at every row of ``inputs`` (a tensor, or a dict of them), stacked.

    By ``torch.func.vmap``; one after the other where the model cannot run under it.
    """
    try:
        with stand_ins():
            return torch.func.vmap(body, randomness="same", chunk_size=chunk_size)(inputs)
    except RuntimeError:
        # a model that is wrong rather than unbatchable shows its own error here
        count = len(tree_leaves(inputs)[0])
        results = [body(tree_map(itemgetter(i), inputs)) for i in range(count)]
        return tree_map(lambda *rows: torch.stack(rows), *results)
