"""What AutoSites knows about a model: its Gaussian block, and groups of data with their predictors.

A :class:`ModelStructure` is found once, at the first call (:mod:`pyro_ngvi.sites.find`); a
:class:`~pyro_ngvi.sites.bound_model.BoundModel` is the same at the arguments of one call of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from ..linalg.host import at_hand
from ..linalg.products import matvec
from ..runtime.density import Site, minibatch_scale

Indices = int | Sequence[int] | Tensor


@dataclass(frozen=True)
class TensorRef:
    """Where a predictor appears in a run: a ``site``, or operation ``number``, of that ``name``."""

    site: str | None = None
    number: int = -1
    name: str = ""

    def __str__(self) -> str:
        if self.site is not None:
            return f"the site {self.site!r}"
        return f"the result of {self.name} (operation {self.number} of the model)"


@dataclass(frozen=True)
class Group:
    """Data with one predictor f (N, k): one site a datum.

    ``observed`` are the model's sites that see it.  ``places`` have the values that side by side are f,
    ``trailing`` the shapes of what there is for one datum at each.  ``batch`` is the shape of all data.
    """

    name: str
    observed: tuple[str, ...]
    places: tuple[TensorRef, ...]
    trailing: tuple[torch.Size, ...]
    batch: torch.Size

    @property
    def size(self) -> int:
        """N."""
        return self.batch.numel()

    @property
    def width(self) -> int:
        """k."""
        return sum(shape.numel() for shape in self.trailing)

    def numbers(self, indices: Indices | None, device: torch.device) -> Tensor:
        """Numbers (n,) of data, each once; ``indices`` as torch takes them, ``None`` for all."""
        every = torch.arange(self.size, device=device)
        if indices is None:
            return every
        index = torch.as_tensor(indices, device=device).detach()
        mask = index.dtype == torch.bool
        if not mask and (index.numel() == 0 or index.dtype == torch.uint8):
            index = index.long()  # to torch an empty list has fractions, and bytes are a mask
        wrong = index.shape != (self.size,) if mask else bool((index < 0).any())
        if wrong:
            raise ValueError(
                f"AutoSites: name data of {self.name!r} by numbers from 0 to {self.size - 1}, or by "
                f"a mask of shape ({self.size},)."
            )
        found = every[index].reshape(-1)
        if len(found.unique()) < len(found):
            raise ValueError(f"AutoSites: a number of {self.name!r} comes more than once.")
        return found

    def join(self, seen: dict[TensorRef, Tensor], batch: torch.Size) -> Tensor:
        """Values at the places, each (*batch, ...), as one tensor (n, k)."""
        parts = []
        for place in self.places:
            value = seen[place]
            value = value if value.dim() else value.expand(batch)
            if value.shape[: len(batch)] != batch:
                raise ValueError(
                    f"AutoSites: {place} was the predictor at the first call and has the shape "
                    f"{tuple(value.shape)} for data of shape {tuple(batch)}. For minibatches make the "
                    f"first call with one, processes at GaussianProcess(kernel, X[plate.indices])."
                )
            parts.append(value.reshape(batch.numel(), -1))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def split(self, f: Tensor, batch: torch.Size) -> dict[TensorRef, Tensor]:
        """The other way round: f (n, k) as the value at each place."""
        parts = f.split([shape.numel() for shape in self.trailing], -1)
        named = zip(self.places, self.trailing, parts, strict=True)
        return {place: part.reshape(batch + shape) for place, shape, part in named}


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
    """``shapes`` and ``event_dims`` of the block's sites; ``dim`` is the length D of their noise, which
    is their value if ``direct``.  ``rest``: values that stand for latent sites of other guides."""

    shapes: dict[str, torch.Size]
    event_dims: dict[str, int]
    groups: tuple[Group, ...]
    dim: int
    dtype: torch.dtype
    device: torch.device
    direct: bool
    rest: dict[str, Tensor]

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
        return tuple(place for group in self.groups for place in group.places)

    @property
    def block_places(self) -> tuple[TensorRef, ...]:
        return tuple(TensorRef(site=name) for name in self.shapes)

    def group(self, name: str | None, table: bool = True) -> Group:
        """The group of that name, or the only one; ``table``: whether data may have two dimensions."""
        groups = {g.name: g for g in self.groups}
        if name is None and len(groups) == 1:
            (name,) = groups
        if name is None or name not in groups:
            what = "name a group of data" if name is None else f"there is no group {name!r}"
            raise ValueError(f"AutoSites: {what}, one of {', '.join(map(repr, groups))}.")
        group = groups[name]
        if len(group.batch) != 1 and not table:
            raise ValueError(
                f"AutoSites: the data of {name!r} have the shape {tuple(group.batch)}, and only data "
                f"along one dimension can come or go. Set data to NaN instead (they are then missing), "
                f"and guide.reset(indices) their sites."
            )
        return group

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


@dataclass(frozen=True)
class SiteView:
    """The sites of a group: exp(nu' f - f' Lambda f / 2), one a datum.

    ``linear`` is nu (N, k), ``precision`` Lambda (N, k, k).  ``mean`` (N, k) is Lambda^-1 nu: the site
    reads as an observation of f_n with that value and covariance Lambda^-1; NaN where there is none.
    """

    linear: Tensor
    precision: Tensor
    mean: Tensor

    @classmethod
    def of(cls, linear: Tensor, precision: Tensor) -> SiteView:
        linear, precision = linear.detach().clone(), precision.detach().clone()
        values, vectors = torch.linalg.eigh(precision)
        size = values.abs()
        least = precision.shape[-1] * torch.finfo(precision.dtype).eps * size.amax(-1)
        exists = (size.amin(-1) > least).unsqueeze(-1)  # not singular to working precision
        mean = matvec(vectors, matvec(vectors.mT, linear) / values)
        return cls(linear, precision, torch.where(exists, mean, torch.nan))


# --- the log likelihood of an observed site, a number for each datum


def unwrapped(site: Site) -> Any:
    """The distribution of an observed site without ``to_event``, so that its entries stand alone."""
    fn = site["fn"]
    while isinstance(fn, dist.Independent):
        fn = fn.base_dist
    return fn


def data_shape(site: Site) -> torch.Size:
    return torch.Size(unwrapped(site).batch_shape)


def missing(site: Site) -> Tensor | None:
    """Which data are NaN: bool, ``data_shape``; ``None`` for whole numbers, of which none can be."""
    value = site["value"]
    if not value.is_floating_point():
        return None
    absent = value.isnan()
    events = len(unwrapped(site).event_shape)
    return absent.flatten(absent.dim() - events).any(-1) if events else absent


def _filled(value: Tensor, absent: Tensor, fn: Any) -> Tensor:
    """A datum that is there in the place of each that is missing: gradients at NaN would be NaN."""
    flat = value.reshape((-1, *fn.event_shape))
    there = (~absent).reshape(-1).to(torch.uint8).argmax()
    where = absent.reshape(absent.shape + (1,) * len(fn.event_shape))
    stand_in = flat.index_select(0, there.reshape(1))[0].nan_to_num(0.5)  # where none is there
    return torch.where(where, stand_in, value)


def is_weighted(site: Site, plate: str | None = None) -> bool:
    """Whether a latent site stands under a mask, or a scale beside that of the subsampled ``plate``."""
    frames = (frame for frame in site["cond_indep_stack"] if frame.name == plate)
    own = prod((frame.full_size or frame.size) / frame.size for frame in frames)
    scale, mask = site["scale"], site["mask"]
    scaled = isinstance(scale, Tensor) or abs(scale / own - 1.0) > 1e-9
    return scaled or not (mask is None or mask is True)


def data_terms(site: Site, scaled: bool = True) -> Tensor:
    """log p of each datum, ``data_shape``, in nats: with masks, without the scale of a minibatch, and
    with other scales if ``scaled``.  A datum that is NaN is missing, and its term 0."""
    fn, value, absent = unwrapped(site), site["value"], missing(site)
    if absent is not None and absent.numel():
        value = _filled(value, absent, fn)
    terms = fn.log_prob(value)
    if absent is not None:
        terms = torch.where(absent, torch.zeros_like(terms), terms)
    weight = site["scale"] / minibatch_scale(site) if scaled else 1.0
    how: Any = [aligned(x, site, terms) for x in (weight, site["mask"])]
    return scale_and_mask(terms, *how)


def aligned(x: Any, site: Site, terms: Tensor) -> Any:
    """``x``, which broadcasts against the site's batch, made to broadcast against its entries."""
    if not isinstance(x, Tensor) or x.dim() == 0:
        return x
    return x.reshape(x.shape + (1,) * (terms.dim() - len(site["fn"].batch_shape)))


# --- what is kept from call to call


class Kept:
    """The last value, with the objects and the tensors that it was made of.  Copies begin empty."""

    def __init__(self, value: Any = None, objects: Any = (), tensors: Any = ()) -> None:
        self.put(value, objects, tensors)

    def put(self, value: Any, objects: Iterable[Any] = (), tensors: Iterable[Tensor] = ()) -> None:
        """Keep ``value`` until it is asked for with others."""
        self.value, self._objects, self._tensors = value, tuple(objects), tuple(tensors)

    def get(self, objects: Iterable[Any] = (), tensors: Iterable[Tensor] = ()) -> Any:
        """The value, if it is of these very objects, and of tensors with these bits; else None."""
        if not all_same(tuple(objects), self._objects):
            return None
        return self.value if same_bits(tuple(tensors), self._tensors) else None

    def copy(self) -> Kept:
        return Kept(self.value, self._objects, self._tensors)

    def __reduce__(self) -> Any:
        return Kept, ()


def tensors_of(*parts: Any) -> list[Tensor]:
    """Tensors that are attributes of objects, of which some may be ``None``."""
    values = (v for part in parts if part is not None for v in vars(part).values())
    return [t for t in values if isinstance(t, Tensor)]


def learns(*parts: Any) -> bool:
    """Whether they depend on parameters of the model."""
    return any(t.requires_grad for t in tensors_of(*parts))


def all_same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    """Whether tensors agree bit for bit, so far as the host can look without waiting."""
    if len(a) != len(b) or any(t.requires_grad for t in (*a, *b)):
        return False
    kinds = all((x.dtype, x.device) == (y.dtype, y.device) for x, y in zip(a, b, strict=True))
    return kinds and all(at_hand(x) and torch.equal(x, y) for x, y in zip(a, b, strict=True))


class ImproperError(RuntimeError):
    """Prior and sites do not make a proper Gaussian, or the prior is none."""

    def __init__(self) -> None:
        super().__init__(
            "AutoSites: with the parameters of the model as they are now, prior and sites do not make "
            "a proper Gaussian. Take smaller steps for them, or guide.reset()."
        )
