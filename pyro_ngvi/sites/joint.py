r"""The block and all predictors under q, and which data see the same of it.

Data that see the same f, or linear functions of each other's, are one datum to a correction:

    f_j = m_j + B_j (f_i - m_i),      r_i(f_i)  ->  prod_j r_j(m_j + B_j (f_i - m_i)),

an integral in the k dimensions of one of them.  With u = S^-1 (f - m), S S' = C, and R_ij = cov(u_i,
u_j), f_i tells f_j but for k - |R_ij|^2 of its k units of variance (less than ``SAME``, as of jitter,
counts as nothing), and B_j = S_j R_ji S_i^-1.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations_with_replacement
from typing import NamedTuple

import torch
from torch import Tensor

from ..guides.marginals import place
from ..linalg.products import eye_like
from ..linalg.spectral import square_root
from .algebra import Snapshot
from .bound_model import moves
from .chain import ChainPosterior
from .dense import NoisePosterior, WhitePosterior
from .structure import Group, ModelStructure

#: most numbers of a joint root, and variance of u that another datum need not tell
MOST, SAME = 2**27, 1e-3

#: means (N, k) and halves (M, N, k) by group; matrices (n, k, n', k') by k and k'
Seen = dict[str, tuple[Tensor, Tensor]]
Blocks = dict[tuple[int, int], Tensor]


class Shared(NamedTuple):
    """Those n f that tell what all data of one k see: halves (M, n, k) of covariances; ``data`` has by
    group the number (N,) of the f that tells each datum's, and B (N, k, k)."""

    half: Tensor
    data: dict[str, tuple[Tensor, Tensor]]


class Joint(NamedTuple):
    """The block z and all f under q: means (D,), (N, k), and halves (M, D), (M, N, k) of covariances,
    half' half, also between them; ``shared`` is by k."""

    mean: Tensor
    half: Tensor
    seen: Seen
    shared: dict[int, Shared]

    def part(self, name: str, plan: ModelStructure) -> tuple[Tensor, Tensor]:
        """Mean (P,) and half (M, P) of a latent site, or of a site that is (part of) a predictor."""
        if name in plan.shapes:
            own = place(plan.shapes, name)
            return self.mean[own], self.half[:, own]
        group, columns = predictors_of(plan)[name]
        mean, half = self.seen[group.name]
        return mean[:, columns].flatten(), half[..., columns].flatten(1)


def predictors_of(plan: ModelStructure) -> dict[str, tuple[Group, slice]]:
    """Sites that are not latent, and are what data see: the group, and columns of its f."""
    found = {}
    for group in plan.groups:
        start = 0
        for seen, trailing in zip(group.places, group.trailing, strict=True):
            stop = start + trailing.numel()
            if seen.site is not None and seen.site not in plan.shapes:
                found[seen.site] = group, slice(start, stop)
            start = stop
    return found


def joint_of(at: Snapshot) -> Joint:
    """The joint Gaussian of a dense block or of a chain."""
    q, call = at.posterior, at.call
    if at.view.processes or any(m.rest is not None for m in at.marginals.values()):
        raise NotImplementedError(
            "AutoSites.marginals: with inducing points q leaves parts of the processes at their prior, "
            "and a correction by the data does not know these. Leave inducing= out, for some thousand "
            "data at most."
        )
    size = call.plan.dim
    if size * size > MOST:
        raise NotImplementedError(
            f"AutoSites.marginals: the block has {size} latent variables, and a root of their "
            f"covariance would have {size * size:.0e} numbers. Use guide.predict."
        )
    if isinstance(q, ChainPosterior):
        chain, units = q.distribution(), eye_like(call.plan.zero())
        half = moves(lambda e: chain.from_noise(e.reshape(chain.event_shape)).reshape(-1), units)
        mean, states = q.mean.reshape(-1), half.reshape(size, *chain.event_shape)
        seen = {n: torch.einsum("tks,mts->mtk", m.design, states) for n, m in at.view.maps.items()}
    else:
        assert isinstance(q, WhitePosterior)
        basis = at.view.basis
        noise = NoisePosterior(q, basis)
        white = noise.half()
        mean, half = call.flat_block(noise.mean), moves(call.flat_block, white)
        inner = white if basis is None else white @ basis
        seen = {n: torch.einsum("nkr,mr->mnk", m.design, inner) for n, m in at.view.maps.items()}
    seen = {n: (at.marginals[n].mean, h) for n, h in seen.items()}
    widths = sorted({own.shape[-1] for own, _ in seen.values()})
    return Joint(mean, half, seen, {k: shared_of(k, seen) for k in widths})


def shared_of(k: int, seen: Seen) -> Shared:
    """What the data of k entries share."""
    halves = {name: half for name, (_, half) in seen.items() if half.shape[-1] == k}
    half = torch.cat(list(halves.values()), 1)
    root = square_root(torch.einsum("mni,mnj->nij", half, half))
    R = correlations(covariances({k: half}), {k: root})[k, k].movedim(2, 1)
    told = R.square().sum((2, 3))  # the diagonal is k, or the rank of C
    owner = _owners((told >= told.diagonal() - SAME).cpu()).to(R.device)
    own = R[torch.arange(len(owner), device=R.device), owner]
    slope = root @ own @ inverse_root(root)[owner]
    first, owner = owner.unique(return_inverse=True)
    sizes = [h.shape[1] for h in halves.values()]
    data = zip(owner.split(sizes), slope.split(sizes), strict=True)
    return Shared(half[:, first], dict(zip(halves, data, strict=True)))


def _owners(tells: Tensor) -> Tensor:
    """A datum that tells each (N,), by ``tells`` (N, N); those that tell others tell themselves."""
    owner = torch.arange(len(tells), device=tells.device)
    free = torch.ones_like(owner, dtype=torch.bool)
    for i in (tells.sum(1) > 1).nonzero().squeeze(-1).tolist():
        if free[i]:
            mine = tells[i] & free
            owner[mine], free = i, free & ~mine
    return owner


def inverse_root(root: Tensor) -> Tensor:
    """L (n, k, k) for a :func:`square_root` S: L S is 1 where C is not singular, and 0 elsewhere."""
    sd = torch.linalg.vector_norm(root, dim=-1, keepdim=True)
    sd = torch.where(sd > 0.0, sd, torch.inf)
    size = (root / sd).square().sum(-2, keepdim=True)  # eigenvalues of the correlations
    floor = 8.0 * torch.finfo(size.dtype).eps * size.amax(-1, keepdim=True)
    return (root / sd.square() / torch.where(size > floor, size, torch.inf)).mT


def covariances(halves: Mapping[int, Tensor]) -> Blocks:
    """Those (n, k, n', k') of f of halves (M, n, k), by both k."""
    return {
        (k, other): torch.einsum("mni,mpj->nipj", halves[k], halves[other])
        for k, other in combinations_with_replacement(sorted(halves), 2)
    }


def correlations(K: Blocks, root: Mapping[int, Tensor]) -> Blocks:
    """Those of f in units of the roots (n, k, k) of their own covariances."""
    inverse = {k: inverse_root(x) for k, x in root.items()}
    found = {}
    for (k, other), x in K.items():
        left = torch.einsum("nia,namb->nimb", inverse[k], x)
        found[k, other] = torch.einsum("nimb,mjb->nimj", left, inverse[other]).clamp_(-1.0, 1.0)
    return found


def white_posterior(at: Snapshot, what: str) -> WhitePosterior:
    if not isinstance(at.posterior, WhitePosterior):
        raise NotImplementedError(
            f"Influence: {what} needs the joint posterior of the whole block, and a state-space prior "
            f"keeps that of single states. distance, kl and prediction of single data are there."
        )
    return at.posterior


@torch.no_grad()
def in_latent(at: Snapshot, white: Tensor) -> Tensor:
    """Shifts (n, R) of the white block as shifts (n, D) of the latent variables."""
    designs = [process.design for process in at.view.processes]
    if designs:  # inducing points: the processes' own values, at all inputs
        parts = white.split([A.shape[-1] for A in designs], -1)
        return torch.cat([part @ A.mT for part, A in zip(parts, designs, strict=True)], -1)
    noises = white if at.view.basis is None else white @ at.view.basis.mT
    return moves(at.call.flat_block, noises)
