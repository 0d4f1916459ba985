"""What AutoSites knows about a model: its Gaussian block, and groups of data with their predictors.

A :class:`ModelStructure` is made once (:func:`pyro_ngvi.sites.find.make_plan`); a
:class:`~pyro_ngvi.sites.bound_model.BoundModel` is the plan at the arguments of one call of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .conditioned_model import TensorRef
from .predictor import Predictor

__all__ = ["Group", "LinearMap", "ModelStructure"]


@dataclass(frozen=True)
class Group:
    """Data with one predictor f (N, k): one site a datum.

    ``batch`` is the shape of all data, N entries; ``observed`` are the observed sites of the model that
    they belong to, more than one where several see the same f.
    """

    name: str
    observed: tuple[str, ...]
    predictor: Predictor
    batch: torch.Size

    @property
    def size(self) -> int:
        """N."""
        return self.batch.numel()

    @property
    def width(self) -> int:
        """k."""
        return self.predictor.width


@dataclass(frozen=True)
class LinearMap:
    """f = A eps + b + rest: A (N, k, D), b (N, k); the rest is noise of covariance (N, k, k).

    ``triangular``: A as (N k, D) is known to be square and lower triangular.
    """

    design: Tensor
    offset: Tensor
    rest: Tensor | None = None
    triangular: bool = False


@dataclass(frozen=True)
class ModelStructure:
    """What a model is made of: found once, at the first call.

    ``shapes`` and ``event_dims`` of the block's sites; ``dim`` is the length D of their noise.
    """

    shapes: dict[str, torch.Size]
    event_dims: dict[str, int]
    groups: tuple[Group, ...]
    dim: int
    dtype: torch.dtype
    device: torch.device
    direct: bool = False
    """whether "noise" stands for the values of the block themselves: a state-space prior, or
    Gaussian processes with inducing points"""

    @property
    def is_one_vector(self) -> bool:
        """Whether datum n sees entry n of the only site, a Gaussian vector: a latent process."""
        (site, shape), *others = self.shapes.items()
        seen = {place.site for place in self.places}
        each = all(group.width == 1 for group in self.groups)
        return each and not (others or self.direct) and seen == {site} and len(shape) == 1

    @property
    def places(self) -> tuple[TensorRef, ...]:
        """Where the predictors of all groups appear."""
        return tuple(place for group in self.groups for place in group.predictor.places)

    @property
    def block_places(self) -> tuple[TensorRef, ...]:
        """The sites of the block."""
        return tuple(TensorRef(site=name) for name in self.shapes)

    def group(self, name: str) -> Group:
        """The group of that name."""
        return next(g for g in self.groups if g.name == name)

    def resized(self, group: Group, size: int) -> ModelStructure:
        """The same with another number of data in a ``group`` of one dimension."""
        batch = torch.Size((size,))
        groups = tuple(replace(g, batch=batch) if g is group else g for g in self.groups)
        if not self.direct:
            return replace(self, groups=groups)
        # processes at the inputs of all data
        shapes = {n: batch if s == group.batch else s for n, s in self.shapes.items()}
        dim = sum(s.numel() for s in shapes.values())
        return replace(self, groups=groups, dim=dim, shapes=shapes)

    def zero(self) -> Tensor:
        """The noise of the prior's mean, (D,)."""
        return torch.zeros(self.dim, dtype=self.dtype, device=self.device)
