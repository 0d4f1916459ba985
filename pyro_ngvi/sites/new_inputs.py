r"""Gaussian processes at inputs X other than those of the data or the inducing ones, Z: predictions.

At Z the white values eps make a process; from there

    u = f(Z) = mean(Z) + L eps,   L L' = k(Z, Z) + jitter I,
    f(X) = mean(X) + A eps + R eps',   A = k(X, Z) L^-T,   eps' ~ N(0, I) independent of eps,
    R R' = k(X, X) + jitter I - A A',  of which var rest_n = k(x_n, x_n) + jitter - |A_n|^2 alone

costs O(N M^2), and no N x N matrix (Titsias 2009; eps as in Hensman, Matthews & Ghahramani 2015).  The
dense algebra knows q over the noise of its whole block, of which all other sites are made as before.
So the block at X is affine in (eps, eps'), and runs at unit vectors give its moments under q.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..distributions.gaussian_process import GaussianProcess, factor, with_jitter
from ..linalg.host import at_hand, fixed_normal
from ..runtime.density import identity, is_same
from .bound_model import BoundModel, moves
from .structure import Kept, same_bits


class Maker(NamedTuple):
    """Makes the value (N,) of a process from so many entries of noise."""

    size: int
    value: Callable[[Tensor, GaussianProcess], Tensor]


@dataclass(frozen=True)
class Regression:
    """A (N, M), mean(X) and variances of the rest (N,) of f; L (M, M) and mean(Z) (M,) of u; ``marks``
    tell others from it."""

    design: Tensor
    offset: Tensor
    rest: Tensor
    root: Tensor
    level: Tensor
    marks: tuple[Tensor, ...]

    def plus(self, shift: Tensor | float = 0.0) -> Maker:
        """The process at these inputs, a ``shift`` (N,) above its regression."""
        b = torch.as_tensor(shift).to(self.offset)
        # the mean of each run, as it may depend on sites before the process
        return Maker(self.design.shape[-1], lambda eps, fn: fn.loc + (b + self.design @ eps))

    def left(self, fn: GaussianProcess) -> Tensor:
        """The covariance (N, N) of the rest."""
        return fn.covariance_matrix - self.design @ self.design.mT

    def at(self, index: Tensor) -> Regression:
        """f at the inputs of these numbers (n,), of which each may come several times."""
        rows = {n: getattr(self, n).index_select(0, index) for n in ("design", "offset", "rest")}
        return replace(self, **rows)


def regress(fn: GaussianProcess, known: Tensor, before: Regression | None = None) -> Regression:
    """f at the inputs of ``fn`` on its white values at ``known`` (M, ...); the object ``before``, of
    another call, where kernel, mean and inputs are still the same."""
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


class KnownInputs(nn.Module):
    """The inputs of the processes of a block with the data, as buffers."""

    def __init__(self, call: BoundModel) -> None:
        super().__init__()
        self._stamps: dict[str, Any] = {}
        #: processes at the new inputs of the last call, and the joint q there
        self._joint = Kept()
        if not call.whole:
            # a process with one input for each datum of a minibatch would be another one in the next
            sizes = {call.shapes[n].numel() for n, index in call.index.items() if index is not None}
            _refuse(n for n, fn in self.processes(call.block).items() if len(fn.inputs) in sizes)
        self._keep(call.block)

    @staticmethod
    def processes(block: Mapping[str, Any]) -> dict[str, GaussianProcess]:
        """Those of a block."""
        return {name: fn for name, fn in block.items() if isinstance(fn, GaussianProcess)}

    def follow(self, call: BoundModel) -> None:
        """Take the inputs of a call with data; a minibatch must be at those that are known."""
        if call.whole:
            self._keep(call.block)
        elif any(at_hand(fn.inputs) for fn in self.moved(call.block).values()):
            _refuse(self.moved(call.block))

    def _keep(self, block: Mapping[str, Any]) -> None:
        """Take the inputs of this block for those of the data."""
        for name, fn in self.processes(block).items():
            if not is_same(self._stamps.get(name), fn.inputs):
                # a copy, since the caller may write into his tensor
                self.register_buffer(_buffer(name), fn.inputs.detach().clone())
                self._stamps[name] = identity(fn.inputs)

    def moved(self, block: Mapping[str, Any]) -> dict[str, GaussianProcess]:
        """The processes of a block that are at other inputs."""

        def stays(name: str, x: Tensor) -> bool:
            return is_same(self._stamps.get(name), x) or torch.equal(x, self.at(name).to(x))

        return {n: fn for n, fn in self.processes(block).items() if not stays(n, fn.inputs)}

    def at(self, name: str) -> Tensor:
        """The inputs (N, ...) of a process."""
        return self.get_buffer(_buffer(name))

    def joint(self, call: BoundModel, q: Any, evidence: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (D,) and root R (D, D), lower triangular, of the flat block at the call's inputs:
        covariance R R'.  ``evidence`` is another tensor when q is."""
        moved, (before, *last) = self.moved(call.block), self._joint.value or ({},)
        maps = {n: regress(fn, self.at(n), before.get(n)) for n, fn in moved.items()}
        probe = fixed_normal(len(q.mean), seed=len(q.mean)).to(q.mean)
        probe = call.flat_block(probe, {n: at.plus() for n, at in maps.items()})
        marks = [evidence, *maps.values()]
        if self._joint.get(marks, [probe]) is not None:
            return last[0], last[1]
        roots = [factor(maps[n].left(fn), fn.jitter) for n, fn in moved.items()]

        def flat(noise: Tensor) -> Tensor:
            own, *rests = noise.split([len(q.mean), *map(len, roots)])
            made = zip(maps.items(), roots, rests, strict=True)
            return call.flat_block(own, {n: at.plus(root @ e) for (n, at), root, e in made})

        zero = q.mean.new_zeros(sum(map(len, roots)))
        mean = flat(torch.cat([q.mean, zero]))
        half = moves(flat, torch.block_diag(q.half(), torch.ones_like(zero).diag()))
        root = torch.linalg.qr(half, mode="r").R.mT
        kept = None if root.requires_grad else (maps, mean, root)
        self._joint.put(kept, marks, [probe.detach()])
        return mean, root

    def variances(self, call: BoundModel, q: Any) -> tuple[Tensor, Tensor] | None:
        """Means and variances (D,) without a factor; ``None`` where other sites see a process."""
        found = {name: regress(fn, self.at(name)) for name, fn in self.moved(call.block).items()}
        makers = {name: at.plus() for name, at in found.items()}

        def flat(noise: Tensor) -> Tensor:
            return call.flat_block(noise, makers)

        mean = flat(q.mean)
        none = {n: mean.new_zeros(fn.shape().numel()) for n, fn in call.block.items()}
        rest = torch.cat([found[n].rest if n in found else zero for n, zero in none.items()])
        # where other sites depend on a process its rest moves them too
        for name, at in found.items():
            moved = call.flat_block(q.mean, makers | {name: at.plus(at.rest)})
            if any(x.any() for n, x in call.by_site(moved != mean).items() if n != name):
                return None
        return mean, moves(flat, q.half()).square().sum(0) + rest

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stamps": {}}


def _refuse(names: Any) -> None:
    for name in names:
        raise ValueError(
            f"AutoSites: the GaussianProcess {name!r} is at other inputs in each minibatch, and "
            f"the guide keeps q over its values at one set of inputs. Give inducing inputs, "
            f"AutoSites(model, inducing=Z), or take all data."
        )


def _buffer(name: str) -> str:
    return "inputs_" + name.replace(".", "_")
