r"""The dense algebra: a block with white prior noise, D x D, or smaller where there are fewer data.

    p(eps) = N(0, I),   f_n = A_n eps + b_n,   t_n(f_n) = exp(nu_n' f_n - f_n' Lambda_n f_n / 2),
    prod_n t_n = exp(c + h' eps - eps' P eps / 2),
    c = sum nu_n' b_n - b_n' Lambda_n b_n / 2,
    h = sum A_n' (nu_n - Lambda_n b_n),  P = sum A_n' Lambda_n A_n,
    q(eps) = N(W^-1 h, W^-1),  W = I + P,   log Z = c + h' W^-1 h / 2 - log |W| / 2.

q is proper where W is positive definite, whatever the signs of single Lambda_n.  Where none is negative
W >= I: nothing is badly conditioned, however wide or degenerate the prior.

With fewer rows in A than D, the data see Q' eps only, A = A~ Q' (A~ square and triangular, Q D x R with
orthonormal columns): everything happens in these R directions, and the others keep the prior.  Not for
many thousands of latent variables *and* data: it keeps min(D, N k)^2 numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..linalg.products import eye_like, matvec
from ..linalg.triangular import solve
from .algebra import Algebra, GaussianPotential, Pairs, SiteTensors, View
from .bound_model import BoundModel, moves
from .new_inputs import KnownInputs
from .structure import Kept, LinearMap, ModelStructure


class WhitePosterior:
    """q(eps) = N(mean, W^-1).  ``proper`` is a 0-dim bool; without it nothing holds.

    W is factored from its last row on: J W J = C C', J the reversal of the entries, C lower triangular.
    """

    def __init__(self, evidence: GaussianPotential) -> None:
        W = evidence.precision.flip(0, 1)
        W.diagonal().add_(1.0)
        self.evidence = evidence
        self.root, info = torch.linalg.cholesky_ex(W)
        self.proper = info == 0
        self.mean = self.solve(evidence.linear)
        self.log_det_root = self.root.diagonal().log().sum()
        at_mean = evidence.constant + 0.5 * (evidence.linear @ self.mean)
        self.log_normalizer = at_mean - self.log_det_root

    def marginals(self, at: LinearMap) -> tuple[Tensor, Tensor]:
        """Mean (N, k) and covariance (N, k, k) of A eps + b, without the rest."""
        n, k, _ = at.design.shape
        A = at.design.flatten(0, 1)
        half = self.half(A).reshape(len(self.root), n, k)
        if k == 1:  # a row's square, without the n products of 1 x 1
            covariance = torch.linalg.vector_norm(half, dim=0).square().unsqueeze(-1)
        else:
            covariance = torch.einsum("rni,rnj->nij", half, half)
        return (A @ self.mean).reshape(n, k) + at.offset, covariance

    def half(self, rows: Tensor) -> Tensor:
        """H (r, M) with H'H the covariance of rows (M, r) of eps, of which the other columns are 0."""
        left_out = len(self.root) - rows.shape[-1]
        rest = self.root[left_out:, left_out:]
        return torch.linalg.solve_triangular(rest, rows.flip(-1).mT, upper=False)

    def sensitivity(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """How far variances of ``rows`` (n, k, R) of eps move, (n, k), where each entry of W does by 1
        relative to its diagonal, with a sign of its own; means by the root of that times the other."""
        diagonal = 1.0 + self.evidence.precision.diagonal()
        return self.solve(rows).square() @ diagonal, self.mean.square() @ diagonal

    def covariance_half(self) -> Tensor:
        """H (R, R) with H'H the covariance of eps."""
        return self.half(eye_like(self.root))

    def solve(self, vectors: Tensor) -> Tensor:
        """W^-1 times each of ``vectors`` (..., R)."""
        columns = vectors.reshape(-1, vectors.shape[-1]).flip(-1).mT
        half = torch.linalg.solve_triangular(self.root, columns, upper=False)
        full = torch.linalg.solve_triangular(self.root.mT, half, upper=True)
        return full.mT.flip(-1).reshape(vectors.shape)

    def expected(self, evidence: GaussianPotential) -> Tensor:
        """E_q of the logarithm of what some sites say, 0-dim, in nats."""
        half = self.covariance_half()
        second = half.mT @ half + torch.outer(self.mean, self.mean)
        at_mean = evidence.constant + evidence.linear @ self.mean
        return at_mean - 0.5 * (evidence.precision * second).sum()

    def kl(self, sites: Iterable[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """KL(q || p) = (|mean|^2 + tr W^-1 - R + log det W) / 2, 0-dim, in nats; cheaper from Lambda
        and C of all sites that q is made of: tr W^-1 - R = -sum_n tr Lambda_n C_n."""
        if sites is None:
            trace = self.covariance_half().square().sum() - len(self.mean)
        else:
            trace = -sum((Lambda * C).sum() for Lambda, C in sites)
        return 0.5 * (self.mean.square().sum() + trace) + self.log_det_root

    def draw(self, noise: Tensor) -> Tensor:
        """A draw for white ``noise`` (..., R)."""
        return self.mean + solve(self.root, noise, transposed=True).flip(-1)


def remainders(
    maps: Mapping[str, LinearMap], sites: SiteTensors, name: str, limit: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """1 - Lambda C (n, 1, 1) and nu - Lambda m (n, 1) of a group of width 1, without a subtraction, and
    how far roundings move the former, (n,).  ``None`` for more than ``limit`` rows.

    Over the rows of all groups, with d = |diag Lambda|^1/2, and K = A A',

        I - Lambda A W^-1 A' = (I + Lambda K)^-1 = d B^-1 d^-1,   B = I + d^-1 Lambda K d,

    whose entries have as many digits as B^-1, however near to 0 they are.  In float64, where a device
    has it: a wide prior makes the rows of B nearly the same.
    """
    if sum(nu.numel() for nu, _ in sites.values()) > limit:
        return None
    before = next(iter(sites.values()))[0]
    dtype = before.dtype if before.device.type == "mps" else torch.float64
    sizes, parts = [], []
    for other, (nu, Lambda) in sites.items():
        L, A, b = (x.to(dtype) for x in (Lambda, maps[other].design, maps[other].offset))
        d = L.diagonal(dim1=-2, dim2=-1).abs().sqrt()
        rows = A, L @ A, nu.to(dtype) - matvec(L, b), torch.where(d > 0.0, d, 1.0)
        sizes.append(nu.numel())
        parts.append((*(x.flatten(0, 1) for x in rows[:2]), *(x.flatten() for x in rows[2:])))
    A, weighted, g, d = map(torch.cat, zip(*parts, strict=True))
    B = (weighted / d.unsqueeze(-1)) @ (A * d.unsqueeze(-1)).mT
    B.diagonal().add_(1.0)
    inverse, info = torch.linalg.inv_ex(B)
    if bool(info > 0):
        return None
    error = torch.finfo(dtype).eps * (inverse.square() @ B.diagonal().abs())
    found = inverse.diagonal(), d * (inverse @ (g / d)), error
    at = list(sites).index(name)
    M, g, error = (x.split(sizes)[at].to(before.dtype) for x in found)
    return M.reshape(-1, 1, 1), g.unsqueeze(-1), error


@dataclass(frozen=True)
class NoisePosterior:
    """q(eps) over all D entries: ``white`` in the directions of ``basis`` (D, R), else the prior."""

    white: WhitePosterior
    basis: Tensor | None

    @property
    def mean(self) -> Tensor:
        mean = self.white.mean
        return mean if self.basis is None else self.basis @ mean

    def draw(self, noise: Tensor) -> Tensor:
        """A draw for white ``noise`` (..., D)."""
        if self.basis is None:
            return self.white.draw(noise)
        seen = noise @ self.basis
        return noise + (self.white.draw(seen) - seen) @ self.basis.mT

    def half(self) -> Tensor:
        """S (D, D) with S'S the covariance of eps."""
        inner = self.white.covariance_half()
        if self.basis is None:
            return inner
        seen = self.basis @ self.basis.mT
        return (eye_like(seen) - seen) + self.basis @ inner @ self.basis.mT


def reduced(maps: Mapping[str, LinearMap]) -> tuple[dict[str, LinearMap], Tensor]:
    """The maps in the directions that the data see, and these (D, R); for fewer rows than D."""
    rows = torch.cat([m.design.flatten(0, 1) for m in maps.values()])
    basis, triangle = torch.linalg.qr(rows.mT)
    parts = triangle.mT.split([m.offset.numel() for m in maps.values()])
    smaller = {
        name: LinearMap(part.reshape(*m.offset.shape, -1), m.offset, m.rest, len(maps) == 1)
        for (name, m), part in zip(maps.items(), parts, strict=True)
    }
    return smaller, basis


class DenseAlgebra(Algebra):
    """White noise eps (D,), or the R directions of it that the data see (``basis`` (D, R))."""

    basis: Tensor | None

    def __init__(self, plan: ModelStructure, call: BoundModel) -> None:
        rows = sum(group.size * group.width for group in plan.groups)
        size = min(plan.dim, rows) if call.whole else plan.dim
        super().__init__(GaussianPotential.none(plan.zero(), size))
        basis = torch.eye(plan.dim, size, dtype=plan.dtype, device=plan.device)
        self.register_buffer("basis", basis if size < plan.dim else None)
        #: the view of the last call
        self._view = Kept()
        #: where Gaussian processes of the block, if there are any, are at the data
        self.known = KnownInputs(call) if KnownInputs.processes(call.block) else None

    def view(self, call: BoundModel) -> View:
        """Maps made by running the model, or those of the last call where they still hold: at a random
        point, bit for bit, as small covariates hide behind large ones from any tolerance."""
        if self.basis is not None and not call.whole:
            raise ValueError(
                f"AutoSites: the guide began with all data and keeps {self.basis.shape[1]} directions "
                f"of {self.basis.shape[0]} latent variables, so it cannot take minibatches. Begin "
                f"with a minibatch."
            )
        if self.known is not None:
            self.known.follow(call)
        at_probe = call.at_probe.values()
        last = self._view.get(tensors=at_probe)
        if last is not None:
            return last
        maps = call.linear_maps()
        if self.basis is not None:
            maps, basis = reduced(maps)
            self.basis = basis.detach()
        view = View(maps, basis=self.basis)
        self._view.put(None if view.learns else view, tensors=[t.detach() for t in at_probe])
        return view

    def make_room(self, plan: ModelStructure) -> None:
        """The directions that data see become all, where data see them all, or others see more."""
        basis, e, rows = self.basis, self.evidence, sum(g.size * g.width for g in plan.groups)
        if basis is not None and (rows >= plan.dim or self.ranks.spread):
            self.basis = None
            self._view.put(None)
            moved = basis @ e.linear, basis @ e.precision @ basis.mT
            self.evidence = GaussianPotential(e.constant, *moved)

    def posterior(self, view: Any, evidence: GaussianPotential) -> WhitePosterior:
        return WhitePosterior(evidence)

    def _noise_posterior(self) -> NoisePosterior:
        return NoisePosterior(self.posterior(None, self.evidence), self.basis)

    def _moved(self, call: BoundModel) -> KnownInputs | None:
        """The inputs with the data, where processes are at other ones in this call."""
        return self.known if self.known is not None and self.known.moved(call.block) else None

    def joint(self, call: BoundModel) -> tuple[Tensor, Tensor]:
        assert self.known is not None
        return self.known.joint(call, self._noise_posterior(), self.linear)

    def drawer(self, call: BoundModel) -> tuple[int, Callable[[Tensor], Pairs]]:
        if self._moved(call):
            return super().drawer(call)
        q = self._noise_posterior()

        def draw(noise: Tensor) -> Pairs:
            found = call.block_at(q.draw(noise))
            name, (z, log_q) = next(iter(found.items()))
            return found | {name: (z, log_q + q.white.log_det_root / log_q.numel())}

        return call.plan.dim, draw

    def mean_and_sd(self, call: BoundModel) -> tuple[Tensor, Tensor]:
        known = self._moved(call)
        found = None if known is None else known.variances(call, self._noise_posterior())
        return super().mean_and_sd(call) if found is None else (found[0], found[1].sqrt())

    def moments(self, call: BoundModel) -> tuple[Tensor, Tensor]:
        if self._moved(call):
            return super().moments(call)
        q = self._noise_posterior()
        return call.flat_block(q.mean), moves(call.flat_block, q.half())
