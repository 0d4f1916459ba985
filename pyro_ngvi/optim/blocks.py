"""Blocks of parameters that a natural-gradient rule can step: our guides, and other guides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from pyro.distributions import TransformModule
from torch import Tensor, nn

from ..families.base import Tensors, interpolate
from ..families.vectors import entry_name, pack, unpack
from ..fisher.products import Product, SelfDivergence
from ..fisher.scores import GuideScores, packed_scores
from ..runtime.pyro_adapter import constraint_of
from .frames import STRAIGHT, Location, Straight, Triangles, frame_under


@dataclass(frozen=True)
class Coordinates:
    """Named tensors, each moved in a frame of its own: all that is known of a guide that is not ours.

    ``nearly_singular``: whether some are weights of networks or transforms, as in a flow.  ``exact``:
    whether products with the Fisher matrix are exact.  ``locations``: the first of them, if they only
    place Gaussians.  ``frames``: of those that do not move along straight lines.
    """

    coordinates: ClassVar[tuple[str, ...]] = ("local",)
    newton_like: ClassVar[bool] = True
    noise_radius: ClassVar[float] = 0.6
    orthogonal_frame: ClassVar[bool] = False
    known_fisher: ClassVar[bool] = False
    average = staticmethod(interpolate)

    names: tuple[str, ...]
    nearly_singular: bool = False
    exact: bool = False
    locations: tuple[str, ...] = ()
    frames: Mapping[str, Straight] = field(default_factory=dict, hash=False)

    @property
    def location(self) -> tuple[str, ...]:
        """Where nothing tells locations from scales, momentum acts on all."""
        return self.locations or self.names

    def frame(self, name: str) -> Straight:
        return self.frames.get(name, STRAIGHT)

    def block_sizes(self, params: Tensors) -> list[int]:
        """Entries of the blocks of the Fisher matrix: of locations, and of all others."""
        sizes = self.sizes(params)
        first = sum(sizes[name] for name in self.locations)
        return [n for n in (first, sum(sizes.values()) - first) if n]

    def sizes(self, like: Tensors) -> dict[str, int]:
        """Entries of each parameter in :meth:`pack`."""
        return {name: self.frame(name).size(v.shape) for name, v in like.items()}

    def pack(self, tensors: Tensors) -> Tensor:
        return torch.cat([self.frame(name).pack(v) for name, v in tensors.items()])

    def unpack(self, vector: Tensor, like: Tensors) -> Tensors:
        parts = zip(like.items(), vector.split(list(self.sizes(like).values())), strict=True)
        return {name: self.frame(name).unpack(part, v) for (name, v), part in parts}

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        return {name: self.frame(name).push(params, name, v) for name, v in tangent.items()}

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        return {name: self.frame(name).pull(params, name, g) for name, g in grads.items()}

    def framed(self, params: Tensors, product: Product) -> Product:
        """Products with F in the frames, from those in the stored coordinates."""

        def framed(v: Tensor) -> Tensor:
            velocity = pack(self.push(params, self.unpack(v, params)))
            return self.pack(self.pull(params, unpack(product(velocity), params)))

        return framed

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        return {n: self.frame(n).retract(params, n, step * tangent[n]) for n in params}

    def dilation(self, params: Tensors) -> Tensors:
        """Nothing tells which direction widens q."""
        return {}

    def not_finite(self, params: Tensors) -> Tensor:
        return ~torch.isfinite(pack(params))


@dataclass(frozen=True)
class EstimatedGeometry:
    """A frame whose natural gradient is ``product``, an estimate of F^-1 times a packed gradient."""

    frame: Any
    product: Callable[[Tensor], Tensor]

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        return self.frame.unpack(self.product(self.frame.pack(gradient)), gradient)

    @property
    def has_blocks(self) -> bool:
        """Whether the estimate, too, has no entries between locations and scales."""
        return bool(getattr(self.frame, "locations", ()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.frame, name)


class HoldsIterate:
    """What optimizers ask of a block, said by one that holds the iterate itself and no average."""

    holds_average = averaged = False
    curvature: Any = None
    path_share = _lag = _lag_of = None

    def iterate_offset(self, intact: Tensor | None = None) -> Tensors:
        """None, see :meth:`set_iterate_offset`."""
        return {}

    def set_iterate_offset(self, lag: Tensors | None, answer: Tensors | None = None) -> None:
        """Never averaged, it has none; the optimizers of our other guides ask for it."""


class GuideBlock(HoldsIterate):
    """The parameters of a guide on which its log q depends, as they are stored, without constraints.

    They are found at the first step, by running it.
    """

    def __init__(self, guide: Callable[..., Any], steady: bool) -> None:
        self.scores = GuideScores(guide, steady)
        self.divergence = SelfDivergence(self.scores)
        self._leaves: dict[str, Tensor] = {}
        self.family = Coordinates(())

    def find(self, taken: set[int]) -> None:
        """Find the parameters, leaving out those (by identity) that belong to other blocks."""
        found = self.scores.dependent()
        leaves = {name: p for name, p in found.items() if id(p) not in taken}
        exact = bool(leaves) and self.divergence.product(list(leaves)) is not None
        locations = tuple(self.divergence.locations(list(leaves))) if exact else ()
        first = {name: leaves.pop(name) for name in locations}
        self._leaves = first | leaves
        weights = {id(p) for module in self._modules() for p in module.parameters(recurse=False)}
        # pyro.module("net", net) in a guide function gives names of the form "net$$$weight"
        function = not isinstance(self.scores.guide, nn.Module)
        networks = any(
            id(p) in weights or (function and "$$$" in name) for name, p in self._leaves.items()
        )
        known = networks, exact, locations, self._find_frames()
        self.family = Coordinates(tuple(self._leaves), *known)

    def _find_frames(self) -> dict[str, Straight]:
        every = {name: frame_under(constraint_of(name)) for name in self._leaves}
        frames = {name: f for name, f in every.items() if f is not STRAIGHT}
        pairs = self.divergence.gaussians(list(self._leaves)) if frames else ()
        for place, factor, inverse in pairs:
            if isinstance(triangles := frames.get(factor), Triangles):
                frames[place] = Location(factor, triangles, inverse)
        return frames

    def _modules(self) -> Iterator[nn.Module]:
        """The layers and transforms of a guide."""
        guide = self.scores.guide
        plain = {nn.Module, nn.ModuleDict, nn.ModuleList, nn.Sequential}
        for module in guide.modules() if isinstance(guide, nn.Module) else ():
            kinds = {
                c for c in type(module).__mro__ if c.__module__.startswith("torch.nn.modules.")
            }
            if self.scores.moves_draws and isinstance(module, nn.Linear):
                continue  # slopes of one site on another, as in AutoStructured
            if isinstance(module, TransformModule) or kinds - plain:
                yield module

    def natural_params(self) -> dict[str, Tensor]:
        return dict(self._leaves)

    def _values(self) -> Tensors:
        return {name: p.detach() for name, p in self._leaves.items()}

    def product(self) -> Product | None:
        """Products with the Fisher matrix at the present parameters, where they are exact."""
        own = self.family
        stored = self.divergence.product(list(self._leaves)) if own.exact else None
        return own.framed(self._values(), stored) if stored and own.frames else stored

    def stored_scores(self, n: int) -> Tensor:
        """n scores (n, D) at the present parameters, in the coordinates in which they are stored."""
        return self.scores.draw(n, list(self._leaves))

    def draw_scores(self, n: int) -> Tensor:
        """n scores in the frames."""
        scores, values = self.stored_scores(n), self._values()
        if not self.family.frames:
            return scores
        each = torch.func.vmap(lambda s: unpack(s, values))(scores)
        return packed_scores(self.family, values, each)

    def site_of(self, index: int) -> str:
        """Name of the parameter that holds entry ``index`` of all of them in a row."""
        return entry_name(index, self._leaves)

    def offset_is_intact(self) -> Tensor:
        device = next(iter(self._leaves.values())).device
        return torch.ones((), dtype=torch.bool, device=device)


class UsingAverage:
    """Averages put in the place of the iterates, until the end of a ``with`` block."""

    def __init__(self, averages: list[tuple[Any, Any]]) -> None:
        self._iterates = [(p, {k: v.detach().clone() for k, v in p.items()}) for p, _ in averages]
        self._put(averages)

    @torch.no_grad()
    def _put(self, values: list[tuple[Any, Any]]) -> None:
        for params, wanted in values:
            for name, p in params.items():
                p.copy_(wanted[name])

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: Any) -> None:
        self._put(self._iterates)
