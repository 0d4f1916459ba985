r"""One run of a model under ``vmap`` in which the layers with latent weights are seen and tapped.

A tap is the identity, put behind a layer. Its backward hands over the layer's input and the gradient of
its output, with their particle dimension, to a function: no hook, and nothing to be known before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from ...runtime.density import Site
from ...runtime.pyro_adapter import masks_of
from .calls import LAYERS, VIEWS, Call, Weights, is_training_batch_norm
from .squares import Inputs, Layer, Member, View

__all__ = ["LayerMode", "Run", "SiteWatch", "Use"]


@dataclass(frozen=True)
class Use:
    """One use of a site's value in a layer; ``ordinal`` counts those of the site."""

    site: str
    ordinal: int
    layer: Layer
    view: View
    out_dim: int


@dataclass(eq=False)
class Run:
    """What one run of the model leaves: uses, observed sites' scales and masks, uses that wait."""

    uses: list[Use] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    scales: dict[str, Any] = field(default_factory=dict)
    masked: set[str] = field(default_factory=set)
    batch_norm: bool = False
    as_checked: bool = False
    waiting: dict[tuple[str, int], list[Member]] = field(default_factory=dict)

    def signature(self) -> tuple[Any, ...]:
        """What has to be the same in later runs."""
        return tuple(self.uses), tuple(self.scales)


Arrived = Callable[[Run, list[Use], Inputs, Tensor], None]
"""Takes the inputs (S or 1, ...) and output gradient (S, ...) of the layer of some uses."""


class SiteWatch(Messenger):
    """Tells the mode which tensors are latent values, and notes the scales of observed sites."""

    def __init__(self, run: Run, twins: Mapping[str, Tensor], weights: Weights) -> None:
        super().__init__()
        self._run, self._twins, self._weights = run, twins, weights

    def _pyro_post_sample(self, msg: Site) -> None:
        name, value = msg["name"], msg["value"]
        if msg["is_observed"]:
            self._run.scales[name] = msg["scale"]
            if any(mask is not True for mask, _ in masks_of(msg)):
                self._run.masked.add(name)
        elif name in self._twins and isinstance(value, Tensor):
            twin = self._twins[name]
            if value.shape == twin.shape:
                self._weights.add(value, name, twin)


class LayerMode(TorchFunctionMode):
    """Sees every torch call of the model and puts taps behind the layers of latent weights."""

    def __init__(self, run: Run, arrived: Arrived) -> None:
        super().__init__()
        self._run, self._arrived = run, arrived
        self.weights = Weights()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        find = LAYERS.get(func)
        if find is not None:
            calls = list(find(self.weights, *args, **kwargs))
            if calls:
                return self._tap(out, calls)
        if func in VIEWS:
            self.weights.follow(func, args, kwargs, out)
        elif is_training_batch_norm(func, args, kwargs):
            self._run.batch_norm = True
        return out

    def _tap(self, out: Tensor, calls: list[Call]) -> Tensor:
        run, uses, inputs = self._run, [], ()
        for weight, layer, its_inputs in calls:
            site, twin = self.weights[weight]
            ordinal = run.counts[site] = run.counts.get(site, -1) + 1
            uses.append(Use(site, ordinal, layer, View.like(twin), out.dim()))
            inputs = its_inputs or inputs
        run.uses += uses
        arrived = partial(self._arrived, run, uses)
        return _Tap.apply(out, arrived, False, *(x.detach() for x in inputs))  # pyright: ignore


class _Tap(Function):
    """The identity; its backward hands the inputs and the gradient of ``out`` to ``arrived``.

    Under ``vmap`` it applies itself again outside, where tensors have their particle dimension.
    """

    @staticmethod
    def forward(out: Tensor, arrived: Any, batched: bool, *xs: Tensor) -> Tensor:
        return out.clone()  # not a view, which the model could not change in place

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.arrived, ctx.batched, *xs = inputs
        ctx.save_for_backward(*xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,), xs = grads, ctx.saved_tensors
        if ctx.batched:
            ctx.arrived(xs, g)
        else:
            ctx.arrived(tuple(x[None] for x in xs), g[None])
        return g, None, None, *(None for _ in xs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, out: Tensor, arrived: Any, _: bool, *xs: Tensor) -> Any:
        moved = [
            x[None] if dim is None else x.movedim(dim, 0)
            for x, dim in zip(xs, in_dims[3:], strict=True)
        ]
        return _Tap.apply(out.movedim(in_dims[0], 0), arrived, True, *moved), 0


def scale_refusal(name: str, scale: Any) -> str | None:
    """Why the scale of the observed site is none that all examples share, if so."""
    if isinstance(scale, int | float) and scale > 0:
        return None
    found = "a tensor" if isinstance(scale, Tensor) else scale
    return (
        f"The scale of the observed site {name!r} is {found}; layer taps need one positive number "
        f"for all examples."
    )
