"""Which latent sites of a model are those of units, and what the model says of them.

*Units* are the entries of a plate: patients, schools, words.  Their latent sites must be Gaussian given
the *globals*, all other latent sites, or elementwise maps of such (``LogNormal``), and what is observed
must depend on units one by one.  Everything here is read off runs of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributions as td
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Transform

from ..linalg.host import at_hand
from ..runtime.density import Site, Sites, site_kind, site_log_prob
from ..runtime.pyro_adapter import with_inner
from ..runtime.run import CannotBatch, Minibatches, run_in_loop, run_particles, run_plainly
from .conditional import UnitPriors

Model = Callable[..., Any]
Values = Mapping[str, Tensor]

#: most latent variables of one unit
MOST_ENTRIES = 64


@dataclass(frozen=True)
class LocalSite:
    """A latent site of the units: ``rest`` is the shape of a unit's share, ``axis`` the units' dim."""

    name: str
    rest: torch.Size
    axis: int

    @property
    def size(self) -> int:
        return self.rest.numel()

    def rows(self, value: Tensor) -> Tensor:
        """(..., B, k) of a tensor (..., *shape) in the shape of the site."""
        lead = value.dim() - len(self.rest) - 1
        moved = value.movedim(self.axis, lead)
        return moved.reshape(*moved.shape[: lead + 1], self.size)

    def value(self, rows: Tensor) -> Tensor:
        """The other way round, (..., B, k) to (..., *shape)."""
        split = rows.reshape(rows.shape[:-1] + self.rest)
        return split.movedim(rows.dim() - 2, self.axis)


@dataclass(frozen=True)
class Seen:
    """The units of one run: their numbers (B,), and how many there are.

    ``whole``: they are all, in order.
    """

    index: Tensor
    size: int
    whole: bool

    @property
    def scale(self) -> float:
        """How many units one of the run stands for."""
        return self.size / max(len(self.index), 1)

    @property
    def given(self) -> Tensor | None:
        """What ``subsample=`` of the plate is."""
        return None if self.whole else self.index


@dataclass(frozen=True)
class Call:
    """A model with the arguments of one call, and its minibatches."""

    model: Model
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    minibatches: Minibatches

    def batched(self, reduce: Callable[[Sites], Any], values: Values, held: Any = None) -> Any:
        """``reduce`` of the sites of S runs at ``values`` (S, ...) by site, out of handlers' sight.

        ``held``: what makes the program of the model.  Where it cannot run under ``vmap`` the runs come
        one after the other.
        """
        program = self.model if held is None else held(self.model)
        count = len(next(iter(values.values())))
        given = program, reduce, values, count, self.args, self.kwargs
        with poutine.block(hide_fn=lambda msg: msg.get("type") != "param"):
            try:
                return run_particles(*given, minibatches=self.minibatches)
            except CannotBatch:
                return run_in_loop(*given, minibatches=self.minibatches)

    def at(self, values: Values, held: Any = None) -> Sites:
        """The sites of one run."""
        program = self.model if held is None else held(self.model)
        return run_plainly(program, values, self.args, self.kwargs, self.minibatches)


@dataclass(frozen=True)
class Given:
    """What a call says of its units at S draws of the globals, ``values`` (S, ...) by site.

    ``maps`` are those from Gaussians to local sites, by site.
    """

    call: Call
    values: Values
    seen: Seen
    priors: UnitPriors
    maps: Mapping[str, list[Transform]]

    def detached(self) -> Given:
        values = {name: value.detach() for name, value in self.values.items()}
        priors = UnitPriors(*(x.detach() for x in vars(self.priors).values()))
        return replace(self, values=values, priors=priors)


@dataclass(frozen=True)
class Units:
    """The latent sites of ``size`` units in the plate ``plate``, in the order of the model.

    ``dependent``: whether some of them are means of others.
    """

    plate: str
    dim: int
    size: int
    sites: tuple[LocalSite, ...]
    globals: tuple[str, ...]
    dependent: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites)

    @property
    def width(self) -> int:
        """k."""
        return sum(site.size for site in self.sites)

    def __str__(self) -> str:
        plural = "" if self.width == 1 else "s"
        return (
            f"{self.size:,} units of {self.width} latent variable{plural} ({', '.join(self.names)}) in "
            f"the plate {self.plate!r}, given {', '.join(self.globals)}"
        )

    def parts(self) -> Iterator[tuple[LocalSite, slice]]:
        """Each site, and which of the k entries are its own."""
        start = 0
        for site in self.sites:
            yield site, slice(start, start + site.size)
            start += site.size

    def values(self, z: Tensor, maps: Mapping[str, list[Transform]]) -> dict[str, Tensor]:
        """Values (..., *shape) by site at Gaussians z (..., B, k)."""
        return {name: value for name, (value, _) in self.mapped(z, maps).items()}

    def mapped(
        self, z: Tensor, maps: Mapping[str, list[Transform]]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """With log |d value / dz|, summed over a unit (..., B)."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for site, own in self.parts():
            value, log_det = site.value(z[..., own]), torch.zeros(())
            for transform in maps[site.name]:
                y: Any = transform(value)
                each = transform.log_abs_det_jacobian(value, y)
                value, log_det = y, log_det + site.rows(each).sum(-1)
            found[site.name] = value, log_det
        return found

    def given(self, call: Call, values: Values) -> Given:
        """The prior of the units of a call at S draws of the globals."""
        known: dict[str, Any] = {}

        def parts(sites: Sites) -> tuple[Tensor, Tensor]:
            known["seen"] = self._seen(sites)
            known["maps"] = {name: gaussian_of(sites[name])[1] for name in self.names}
            return self.offset(sites), self.conditional_precision(sites)

        offset, precision = call.batched(parts, values, self.held())
        mixing = None
        if self.dependent:
            units = torch.eye(self.width, dtype=offset.dtype, device=offset.device)
            moved = [call.batched(parts, values, self.held(z))[0] - offset for z in units]
            mixing = torch.stack(moved, -1)
        priors = UnitPriors.of(offset, mixing, precision)
        return Given(call, values, known["seen"], priors, known["maps"])

    def slopes(self, given: Given, z: Tensor, hessian: bool = True) -> tuple[Tensor, Tensor] | None:
        """Gradient (S, B, k) and minus the Hessian (S, B, k, k) of log p of what is observed in z
        (S, B, k), unit by unit; None where nothing that is observed depends on z."""

        def total(sites: Sites) -> Tensor:
            observed = [s for s in sites.values() if site_kind(s) in ("observed", "factor")]
            terms = [site_log_prob(site)[1].sum() for site in observed]
            return torch.stack(terms).sum() if terms else torch.zeros(())

        with torch.enable_grad():
            z = z.detach().requires_grad_()
            log_p = given.call.batched(total, {**given.values, **self.values(z, given.maps)})
            if not log_p.requires_grad:
                return None
            (g,) = torch.autograd.grad(log_p.sum(), z, create_graph=hessian, materialize_grads=True)
            rows = [torch.zeros_like(z)] * self.width  # where the likelihood is linear
            if g.requires_grad:
                keep: Any = {"retain_graph": True, "materialize_grads": True}
                rows = [torch.autograd.grad(x.sum(), z, **keep)[0] for x in g.unbind(-1)]
        H = -torch.stack(rows, -1)
        return g.detach(), 0.5 * (H + H.mT)

    def held(self, z: Tensor | None = None) -> Callable[[Model], Held]:
        """What makes a model stop after the units, which stand at ``z``: see :class:`Held`."""
        return lambda model: Held(model, self, z)

    def offset(self, sites: Sites) -> Tensor:
        """Prior means (B, k) in a run."""
        parts = []
        for site in self.sites:
            fn = gaussian_of(sites[site.name])[0]
            parts.append(site.rows(fn.loc.expand(fn.shape())))
        return torch.cat(parts, -1)

    def conditional_precision(self, sites: Sites) -> Tensor:
        """Precisions (B, k, k), given means, in a run."""
        blocks = []
        for site in self.sites:
            fn = gaussian_of(sites[site.name])[0]
            if isinstance(fn, td.Normal):
                blocks.append(site.rows(fn.scale.expand(fn.batch_shape) ** -2).diag_embed())
                continue
            root = fn.scale_tril.expand(*fn.batch_shape, *fn.event_shape, *fn.event_shape)
            one = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
            inverse = torch.linalg.solve_triangular(root, one, upper=False)
            P = (inverse.mT @ inverse).movedim(site.axis - 1, 0)  # behind a matrix, not a vector
            P = P.reshape(len(P), -1, *P.shape[-2:])
            blocks.append(_block_diagonal([*P.unbind(1)]))
        return _block_diagonal(blocks)

    def _seen(self, sites: Sites) -> Seen:
        first = sites[self.names[0]]
        for name in self.names:
            _refuse_weights(sites[name], self.plate)
        size = next(f for f in first["cond_indep_stack"] if f.name == self.plate).size
        plate, every = sites.get(self.plate), torch.arange(size)
        if plate is None:
            return Seen(every, size, True)
        index = plate["value"]
        full = plate["fn"].size
        ordered = size == full and (not at_hand(index) or torch.equal(index, every))
        return Seen(index, full, ordered)


def _block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """Matrices (B, k_a, k_a) along the diagonal of one (B, k, k)."""
    if len(blocks) == 1:
        return blocks[0]
    k, start, rows = sum(b.shape[-1] for b in blocks), 0, []
    for b in blocks:
        n = b.shape[-1]
        rows.append(torch.nn.functional.pad(b, (start, k - start - n)))
        start += n
    return torch.cat(rows, -2)


class _AllSeen(Exception):
    """The rest of the run is not needed."""


class Held:
    """A model up to the last site of its units, which stand at z = 0, or at ``z`` (k,) or (B, k)."""

    def __init__(self, model: Model, units: Units, z: Tensor | None) -> None:
        self.model, self.handler = model, _Hold(units, z)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.handler.left = set(self.handler.units.names)
        try:
            with self.handler:
                self.model(*args, **kwargs)
        except _AllSeen:
            return


class _Hold(Messenger):
    def __init__(self, units: Units, z: Tensor | None) -> None:
        super().__init__()
        self.units, self.z = units, z
        self.parts = {site.name: (site, own) for site, own in units.parts()}
        self.left: set[str] = set()

    def _pyro_sample(self, msg: Site) -> None:
        if msg["name"] not in self.parts:
            return
        site, own = self.parts[msg["name"]]
        fn, maps = gaussian_of(msg)
        value = torch.zeros_like(fn.loc.expand(fn.shape()))
        if self.z is not None:
            z = self.z[..., own].to(value)
            value = site.value(z.expand(value.shape[site.axis], site.size))
        for transform in maps:
            value = transform(value)
        msg["value"], msg["done"] = value, True

    def _pyro_post_sample(self, msg: Site) -> None:
        self.left.discard(msg["name"])
        if not self.left:
            raise _AllSeen


def gaussian_of(site: Site) -> tuple[Any, list[Any]]:
    """The Gaussian of a site without ``to_event``, and the elementwise maps that follow it."""
    fn, maps = site["fn"], []
    while isinstance(fn, td.Independent | td.TransformedDistribution):
        if not isinstance(fn, td.Independent):
            maps = [*fn.transforms, *maps]
        fn = fn.base_dist
    return fn, maps


def is_gaussian(site: Site) -> bool:
    """Whether a latent site is a Gaussian, or an elementwise map of one."""
    fn, maps = gaussian_of(site)
    each = all(t.domain.event_dim == t.codomain.event_dim == 0 for t in maps)
    inner = [part for t in maps for part in with_inner(t)]
    fixed = not any(isinstance(x, Tensor) for t in inner for x in vars(t).values())
    return isinstance(fn, td.Normal | td.MultivariateNormal) and each and fixed


def _refuse_weights(site: Site, plate: str) -> None:
    scale = 1.0
    for frame in site["cond_indep_stack"]:
        if frame.full_size is not None and frame.full_size != frame.size:
            if frame.name != plate:
                raise ValueError(
                    f"AutoHierarchical: the site {site['name']!r} of the units in {plate!r} lies in "
                    f"another subsampled plate, {frame.name!r}. Subsample the units alone."
                )
            scale = frame.full_size / frame.size
    weighted = isinstance(site["scale"], Tensor) or abs(site["scale"] / scale - 1.0) > 1e-9
    if weighted or not (site["mask"] is None or site["mask"] is True):
        raise ValueError(
            f"AutoHierarchical: the prior of {site['name']!r} stands under poutine.scale or "
            f"poutine.mask. Scale or mask what is observed alone."
        )
