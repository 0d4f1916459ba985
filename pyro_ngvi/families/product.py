"""Families made of families: independent parts of z, and a Gaussian with other parameters beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import Family, NormalFamily, Tensors


class AugmentedGaussian(Family):
    """``gaussian`` and other parameters beside it, in the Gaussian's frame and plain coordinates."""

    gaussian: NormalFamily

    def _others(self, tensors: Tensors) -> Tensors:
        return {name: v for name, v in tensors.items() if name not in self.gaussian.names}

    @property
    def triangles(self) -> Mapping[str, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of ``gaussian``."""
        return self.gaussian.triangles

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        return tangent | self.gaussian.push(params, tangent)

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        return {n: grads[n] for n in self.names} | self.gaussian.pull(params, grads)

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        own = self.gaussian.retract(params, tangent, step)
        return own | {name: params[name] + step * v for name, v in self._others(tangent).items()}


def _by_parts(name: str, collect: str, split: str = "") -> Any:
    """``name`` of every part, with its own tensors and those that ``split`` gives it, collected."""

    def method(self: ProductFamily, *args: Any) -> Any:
        parts = getattr(self, split)(*args) if split else {}
        found = {}
        for part, family in self.parts.items():
            own = [self.own(part, a) if isinstance(a, dict) else a for a in args]
            found[part] = getattr(family, name)(*([own[0], parts[part]] if split else own))
        return getattr(self, collect)(found)

    method.__doc__ = getattr(Family, name).__doc__
    return method


class ProductFamily(Family):
    """Independent parts of z, each from a family of its own: log q(z) = sum_p log q_p(z_p).

    z (d,) is made of segments, each of a part; those of one part, in their order, make its family's
    vector z_p.  F is block-diagonal, a block for each part.

    Args:
        parts: family by name.  Their tensors are called ``{part}_{name}``.
        segments: (part, length) in the order of z.
        linear: move linearly in natural parameters, else along the local frame of each part, with
            momentum on what each part calls its location.
        curvature_form: the form of curvature that the parts have a use for together.

    Example:
        >>> import torch
        >>> from pyro_ngvi.families import MeanFieldGamma, MeanFieldNormal
        >>> parts = {"normal": MeanFieldNormal(), "gamma": MeanFieldGamma()}
        >>> family = ProductFamily(parts, [("gamma", 2), ("normal", 1), ("gamma", 1)])
        >>> {name: tuple(v.shape) for name, v in family.init(torch.zeros(4), 0.1).items()}
        {'normal_loc': (1,), 'normal_log_scale': (1,), 'gamma_log_mean': (3,),
        'gamma_log_concentration': (3,)}
    """

    def __init__(
        self,
        parts: Mapping[str, Family],
        segments: Sequence[tuple[str, int]],
        linear: bool = True,
        curvature_form: str | None = None,
    ) -> None:
        self.linear = linear
        # linear moves are local and natural ones in one
        self.coordinates = ("local", "natural") if linear else ("local",)
        self.curvature_form = curvature_form
        self.define(parts, segments)

    def define(self, parts: Mapping[str, Family], segments: Sequence[tuple[str, int]]) -> None:
        """Set parts and segments: for a guide, whose optimizer may exist before its sites are known."""
        self.parts = dict(parts)
        self.segments = tuple(segments)
        self.names = tuple(f"{p}_{name}" for p, f in self.parts.items() for name in f.names)
        self.triangles = {
            f"{p}_{name}": k for p, f in self.parts.items() for name, k in f.triangles.items()
        }
        self.orthogonal_frame = all(f.orthogonal_frame for f in self.parts.values())
        own = tuple(f"{p}_{name}" for p, f in self.parts.items() for name in f.location)
        self.location = self.names if self.linear else own
        self._lengths = [length for _, length in self.segments]
        self._where = {
            part: [i for i, (owner, _) in enumerate(self.segments) if owner == part]
            for part in self.parts
        }

    def own(self, part: str, tensors: Tensors) -> Tensors:
        """The tensors of one part, by its own names."""
        return {name: tensors[f"{part}_{name}"] for name in self.parts[part].names}

    def _named(self, parts: Mapping[str, Tensors]) -> Tensors:
        return {f"{p}_{name}": v for p, own in parts.items() for name, v in own.items()}

    def _sum(self, parts: Tensors) -> Tensor:
        terms = list(parts.values())
        return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]

    def _blocks(self, parts: Tensors) -> Tensor:
        """A matrix (d, d) from those of the parts, zero between parts: triangles stay triangles."""
        places = self.split(torch.arange(sum(self._lengths)))
        like = next(iter(parts.values()))
        whole = like.new_zeros(sum(self._lengths), sum(self._lengths))
        for part, block in parts.items():
            at = places[part].to(like.device)
            whole = whole.index_put((at.unsqueeze(-1), at), block)
        return whole

    def split(self, z: Tensor) -> Tensors:
        """The vector of each part, of z (..., d)."""
        pieces = z.split(self._lengths, -1)
        return {
            part: pieces[where[0]] if len(where) == 1 else torch.cat([pieces[i] for i in where], -1)
            for part, where in self._where.items()
        }

    def join(self, parts: Tensors) -> Tensor:
        """z (..., d) of the vectors of the parts."""
        pieces: dict[int, Tensor] = {}
        for part, where in self._where.items():
            lengths = [self._lengths[i] for i in where]
            pieces |= zip(where, parts[part].split(lengths, -1), strict=True)
        return torch.cat([pieces[i] for i in range(len(self.segments))], -1)

    def segment(self, params: Tensors, index: int) -> Tensors:
        """The parameters of segment ``index`` alone, by the names of its family."""
        part, length = self.segments[index]
        where = self._where[part]
        total = sum(self._lengths[i] for i in where)
        start = sum(self._lengths[i] for i in where if i < index)
        result = {}
        for name, value in self.own(part, params).items():
            # the leading dimension counts elements, of which each has the same number of entries
            entries = total // max(len(value), 1)
            whole = slice(start // entries, (start + length) // entries) if entries else slice(None)
            result[name] = value[whole]
        return result

    def init(self, loc: Tensor, scale: float) -> Tensors:
        locs = self.split(loc)
        return self._named({p: f.init(locs[p], scale) for p, f in self.parts.items()})

    def matched(self, loc: Tensor, precision: Tensor) -> Tensors:
        """Each part by its own entries of loc (d,) and block of precision (d, d)."""
        locs, at = self.split(loc), self.split(torch.arange(len(loc), device=loc.device))
        parts: dict[str, Any] = dict(self.parts)
        own = {p: f.matched(locs[p], precision[at[p]][:, at[p]]) for p, f in parts.items()}
        return self._named(own)

    def dim(self, params: Tensors) -> int:
        return sum(self._lengths)

    def noise_dim(self, params: Tensors) -> int:
        return sum(f.noise_dim(self.own(p, params)) for p, f in self.parts.items())

    def _split_noise(self, params: Tensors, noise: Tensor) -> Tensors:
        lengths = [f.noise_dim(self.own(p, params)) for p, f in self.parts.items()]
        return dict(zip(self.parts, noise.split(lengths, -1), strict=True))

    def _split_latent(self, params: Tensors, z: Tensor) -> Tensors:
        return self.split(z)

    @property
    def has_transport(self) -> bool:
        """Whether all parts have one."""
        return all(f.has_transport for f in self.parts.values())

    def transport(self, params: Tensors, noise: Tensor) -> tuple[Tensor, Tensor]:
        own = self._split_noise(params, noise)
        moved = {p: f.transport(self.own(p, params), own[p]) for p, f in self.parts.items()}
        z = self.join({p: part for p, (part, _) in moved.items()})
        return z, torch.stack([log_det for _, log_det in moved.values()]).sum(0)

    def noise_of(self, params: Tensors, z: Tensor) -> Tensor:
        zs = self.split(z)
        own = [f.noise_of(self.own(p, params), zs[p]) for p, f in self.parts.items()]
        return torch.cat(own, -1)

    def dilation(self, params: Tensors) -> Tensors:
        own = {p: f.dilation(self.own(p, params)) for p, f in self.parts.items()}
        return self._named(own) if all(own.values()) else {}

    rsample = _by_parts("rsample", "join", "_split_noise")
    log_prob = _by_parts("log_prob", "_sum", "_split_latent")
    score = _by_parts("score", "_named", "_split_latent")
    draw = _by_parts("draw", "join")
    centred_draw = _by_parts("centred_draw", "join")
    mean = _by_parts("mean", "join")
    stddev = _by_parts("stddev", "join")
    icdf = _by_parts("icdf", "join")
    not_finite = _by_parts("not_finite", "join")
    entropy = _by_parts("entropy", "_sum")
    kl = _by_parts("kl", "_sum")
    covariance = _by_parts("covariance", "_blocks")
    scale_tril = _by_parts("scale_tril", "_blocks")
    push = _by_parts("push", "_named")
    pull = _by_parts("pull", "_named")
    fisher_product = _by_parts("fisher_product", "_named")
    natural_gradient = _by_parts("natural_gradient", "_named")

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        # "natural" where a part has that: linear in its natural parameters, as the others move anyway
        moved: dict[str, Tensors] = {}
        for p, f in self.parts.items():
            way = "natural" if self.linear and "natural" in f.coordinates else "local"
            moved[p] = f.retract(self.own(p, params), self.own(p, tangent), step, way)
        return self._named(moved)
