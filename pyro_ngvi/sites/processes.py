r"""A Gaussian process at some inputs X, seen from its white values eps at others, Z.

    u = f(Z) = mean(Z) + L eps,   L L' = k(Z, Z) + jitter I,
    f(X) = mean(X) + A eps + rest,   A = k(X, Z) L^-T,   rest independent of eps,
    var rest_n = k(x_n, x_n) + jitter - |A_n|^2.

For inducing points Z (Titsias 2009; eps as in Hensman, Matthews & Ghahramani 2015), and for new
inputs X with Z those of training.  O(N M^2), and no N x N matrix.  Data may see several processes,
each at the data's own inputs:

    h_n = H_n (f^1_i, ..., f^C_i) + b_n  (k,),      i = i(n) the number of the input of datum n.

Of data of shape (N,) datum n is at input n; where they have more dimensions, such as N inputs with K
outputs each, i is the number along one of them.  H and b are found by running the model at the C unit
vectors, at all inputs at once, and need no run where the data see processes as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..distributions.gaussian_process import GaussianProcess, factor, with_jitter
from ..linalg.host import fixed_normal
from ..linalg.products import matvec
from .bound_model import BoundModel, affine_maps
from .checks import other_priors
from .probe_points import by_halves
from .structure import Group, LinearMap, ModelStructure, same_bits


@dataclass(frozen=True)
class Maker:
    """Makes f = A eps + b of a process, A (N, M) and b (N,), from the M entries of its noise."""

    design: Tensor
    offset: Tensor

    @property
    def size(self) -> int:
        return self.design.shape[-1]

    def __call__(self, noise: Tensor) -> Tensor:
        return self.offset + self.design @ noise

    def plus(self, shift: Tensor) -> Maker:
        return Maker(self.design, self.offset + shift)


@dataclass(frozen=True)
class Regression(Maker):
    """A (N, M), mean(X) (N,), variances of the rest (N,); L (M, M) and mean(Z) (M,) of u.

    ``marks`` tell others from it.
    """

    rest: Tensor
    root: Tensor
    level: Tensor
    marks: tuple[Tensor, ...]

    def at(self, index: Tensor) -> Regression:
        """f at the inputs of these numbers (n,), of which each may come several times."""
        rows = {n: getattr(self, n).index_select(0, index) for n in ("design", "offset", "rest")}
        return replace(self, **rows)

    def marginals(self, mean: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f (N,), for eps of mean (M,) and A eps of covariance half' half."""
        return self.design @ mean + self.offset, half.square().sum(0) + self.rest


def regress(fn: GaussianProcess, known: Tensor, before: Regression | None = None) -> Regression:
    """f at the inputs of ``fn`` on its white values at ``known`` (M, ...).

    ``before``, that of another call, is given back where kernel, mean and inputs are still the same:
    O(N M).  So an unchanged prior is recognised by its object.
    """
    cross, inner = fn.kernel(known, fn.inputs), fn.kernel(known)
    variance, loc = fn.variance, fn.loc
    v = probe(cross)
    marks = (v @ cross, v @ inner, variance, loc)
    if before is not None and same_bits(marks, before.marks):
        return before
    root = factor(with_jitter(inner, fn.jitter), fn.jitter)
    half = torch.linalg.solve_triangular(root, cross, upper=False)
    rest = (variance - half.square().sum(0)).clamp_min(0.0)
    return Regression(half.mT, loc, rest, root, fn.mean_at(known), marks)


def probe(like: Tensor) -> Tensor:
    """A fixed eps (M,) for ``like`` (M, ...), at which two maps would differ."""
    return fixed_normal(len(like), seed=20_090_416).to(like)


@dataclass(frozen=True)
class Seen:
    """H (n, k, C) and b (n, k) of a group, and i (n,), ``None`` for 0, 1, 2, ..."""

    weights: Tensor
    offset: Tensor
    inputs: Tensor | None

    def on(self, processes: Sequence[Regression]) -> LinearMap:
        """h on the white values (C M,) of all processes at their inducing inputs."""
        H, at = self.weights, [r if self.inputs is None else r.at(self.inputs) for r in processes]
        rows = [H[..., c, None] * r.design.unsqueeze(1) for c, r in enumerate(at)]
        means = torch.stack([r.offset for r in at], -1)
        rests = torch.stack([r.rest for r in at], -1)
        return LinearMap(
            torch.cat(rows, -1),
            matvec(H, means) + self.offset,
            (H * rests.unsqueeze(1)) @ H.mT,
        )


def seen_by_group(call: BoundModel, axes: Mapping[str, int]) -> dict[str, Seen]:
    """What the data of every group see; ``axes``: along which dimension of them the inputs are."""
    _ = call.at_probe  # refuses processes at other inputs than those of the data
    plan, count, found, maps = call.plan, _count(call), {}, {}
    units = torch.eye(len(call.block), dtype=plan.dtype, device=plan.device)
    # all values of a process are one entry of the noise
    one = plan.zero().new_ones(count, 1)
    makers = {name: Maker(one, 0.0 * one[:, 0]) for name in call.block}
    for group in plan.groups:
        name, shape, chosen = group.name, call.shapes[group.name], _columns(plan, group)
        if chosen is not None:
            H = units[chosen].expand(count, -1, -1)
            found[name] = Seen(H, H.new_zeros(count, len(chosen)), None)
            continue
        maps = maps or affine_maps(lambda noise: call.predictors(noise, makers), units)
        i = None if len(shape) == 1 else _numbers(shape, axes[name], plan.device)
        found[name] = Seen(maps[name].design, maps[name].offset, i)
    return found


def only_processes(plan: ModelStructure, call: BoundModel, inducing: Tensor) -> None:
    """Refuse a block that is not of independent processes at inputs of the kind of ``inducing``."""
    block = call.block
    if not all(isinstance(fn, GaussianProcess) for fn in block.values()):
        found = ", ".join(f"{name!r} ({type(fn).__name__})" for name, fn in block.items())
        raise ValueError(
            f"AutoSites(inducing=...) is for a model whose Gaussian latent sites are all of them "
            f"GaussianProcess, and this model has {found}. Put linear terms into a kernel, give other "
            f"sites to other guides of an AutoGuideList, or leave inducing out."
        )
    for name, fn in block.items():
        wanted = (_count(call), *inducing.shape[1:])
        if tuple(fn.inputs.shape) != wanted or not len(inducing):
            raise ValueError(
                f"AutoSites: inducing has shape {tuple(inducing.shape)}, and the inputs of the "
                f"GaussianProcess {name!r} have {tuple(fn.inputs.shape)} instead of {wanted}: all "
                f"processes are at the inputs of the data, and inducing is some of such inputs."
            )
    if len(block) > 1:
        runs = [call.runner(x, look_at=plan.block_places).own for x in (plan.zero(), call.probe)]
        for name in other_priors(*runs):
            raise ValueError(
                f"AutoSites(inducing=...): the prior of the GaussianProcess {name!r} depends on "
                "the value of another one, by mean, kernel or inputs. With inducing points "
                "processes must be independent a priori: write a sum of two as f + g in the model."
            )


def find_axes(plan: ModelStructure, call: BoundModel) -> dict[str, int]:
    """Along which dimension of a group's data the inputs of the processes are, at the first call.

    Raises:
        ValueError: where the data see processes at other inputs than their own.
    """
    count = _count(call)
    axes = {group.name: 0 for group in plan.groups if _columns(plan, group) is not None}
    others = [group for group in plan.groups if group.name not in axes]
    if not others:
        return axes
    values = fixed_normal(len(call.block), count, seed=count).to(plan.zero())
    stay = by_halves(lambda z: call.predictors(z.mT.reshape(-1)), values.mT)
    for group in others:
        shape = call.shapes[group.name]
        for axis in [d for d, size in enumerate(shape) if size == count]:
            if stay(group.name, _numbers(shape, axis, plan.device)):
                axes[group.name] = axis
                break
        else:
            where = " and ".join(str(place) for place in group.places)
            raise ValueError(
                f"AutoSites(inducing=...): the data of {group.name!r}, of shape {tuple(group.batch)}, "
                f"see {' and '.join(map(repr, call.block))} through {where}, not each at its own "
                f"input only. Datum n must see a process at input n: GaussianProcess(kernel, X), X in "
                f"the order of the data."
            )
    return axes


def _count(call: BoundModel) -> int:
    return len(next(iter(call.block.values())).inputs)


def _columns(plan: ModelStructure, group: Group) -> list[int] | None:
    """The numbers of the processes whose values are what a datum sees; ``None`` for anything else."""
    sites = list(plan.shapes)
    chosen = [sites.index(p.site) for p in group.places if p.site in plan.shapes]
    return chosen if len(chosen) == len(group.places) == group.width else None


def _numbers(shape: torch.Size, axis: int, device: torch.device) -> Tensor:
    """i (n,) of data of this shape in a row, whose inputs are along ``axis``."""
    along = [-1 if d == axis else 1 for d in range(len(shape))]
    return torch.arange(shape[axis], device=device).reshape(along).expand(shape).reshape(-1)
