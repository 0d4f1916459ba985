r"""Marginals of a guide of sites that are not Gaussian, and its evidence, by what the sites leave over.

    p(z | y)  propto  q(z) prod_j r_j(f_j),     r_j(f) = p(y_j | f) / t_j(f),
    p(x | y)  propto  q(x) E[prod_j r_j | x],       log p(y) = log Z + log E_q prod_j r_j,        (1)
    log E prod_j r_j  ~=  sum_j log E r_j + sum_(i<j) cov(r_i / E r_i, r_j / E r_j).              (2)

x is a number that is linear in the block.  The first sum of (2) given x is EP-FACT of Cseke & Heskes
(2011, "Approximate marginals in latent Gaussian models", JMLR 12): every datum is integrated by itself.
The second is how the r_j move together while x stands still, to second order (Opper, Paquet & Winther
2013, "Perturbative corrections for approximate inference in Gaussian latent variable models", JMLR 14),
from coefficients in Hermite polynomials He_l: with u_j = f_j standardised and rho the correlations of f

    r_j(f_j) / E r_j = sum_l a_jl He_l(u_j) / l!,      cov(i, j) = sum_(l >= 1) a_il a_jl rho_ij^l / l!,

up to l = 3, and for data with k = 1 alone.  A sum c over pairs counts as c / (1 + c^2)^(1/2): where it
is not small, (2) is no expansion, and far out it would grow without bound.

A heavy-tailed likelihood gives outliers sites of negative precision, so that q / t_j need not be proper
for another datum, and E r_j be infinite.  Then q r_j / E r_j is far from q: a datum with
a_j1^2 + a_j2^2 / 2 > 1 (k > 1: of all entries) counts as exp of its first two cumulants, which exist,

    log E r_j  ->  E log r_j + var(log r_j) / 2,       a_jl  ->  E[He_l(u_j) log r_j].

The evidence is no less than log Z + sum_j E log r_j, the ELBO of q (Jensen).

Each expectation is a sum over points of N(f; mean given x, covariance given x), in k <= 3 dimensions.
For x at a few standardised points t, with c the covariance of f_j and t under q(f_j) = N(m, C),

    f_j | t ~ N(m + c t, C - c c').

Where the likelihood is Gaussian r_j is constant, and all of it is exact.  For N data, D numbers, and Q
points it takes 29 N D Q log likelihoods and O(D N^2), in blocks, and N^2 numbers of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import factorial
from typing import NamedTuple

import torch
from torch import Tensor

from ..guides.marginals import place
from ..linalg.products import matvec
from .algebra import Snapshot
from .bound_model import moves
from .chain import ChainPosterior
from .dense import NoisePosterior, WhitePosterior
from .densities import REACH, Tilted, nodes
from .expectation import Points, quadrature_points
from .leave_one_out import square_root
from .structure import Group, ModelStructure

#: points for each of k entries of f: given x, and for the evidence, where q(f_j) is wider
ORDERS, FINER = {1: 12, 2: 10, 3: 6}, {1: 64, 2: 20, 3: 12}
#: the degree of (2) in rho, entries of f that are evaluated at once, and most numbers of a joint root
DEGREE, CHUNK, MOST = 3, 2**21, 2**27


Draws = dict[str, Tensor]


class Joint(NamedTuple):
    """The block z and all f under q: means (D,), (N, k), and halves (M, D), (M, N, k) of covariances.

    half' half is the covariance, also between them.
    """

    mean: Tensor
    half: Tensor
    seen: dict[str, tuple[Tensor, Tensor]]

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
        chain, units = q.distribution(), call.plan.zero().new_ones(size).diag()
        half = moves(lambda e: chain.from_noise(e.reshape(chain.event_shape)).reshape(-1), units)
        mean, states = q.mean.reshape(-1), half.reshape(size, *chain.event_shape)
        seen = {n: torch.einsum("tks,mts->mtk", m.design, states) for n, m in at.view.maps.items()}
    else:
        assert isinstance(q, WhitePosterior)
        noise = NoisePosterior(q, at.view.basis)
        white, inner = noise.half(), q.covariance_half()
        mean, half = call.flat_block(noise.mean), moves(call.flat_block, white)
        if at.view.basis is not None:
            inner = white @ at.view.basis
        seen = {n: torch.einsum("nkr,mr->mnk", m.design, inner) for n, m in at.view.maps.items()}
    return Joint(mean, half, {n: (at.marginals[n].mean, h) for n, h in seen.items()})


def _log_ratio(at: Snapshot, name: str, f: Tensor) -> Tensor:
    """log r (..., n) of a group at f (..., n, k)."""
    (linear, precision), rows = at.sites[name], f.flatten(0, -3)
    others = {n: m.mean.expand(len(rows), *m.mean.shape) for n, m in at.marginals.items()}
    log_p = at.call.log_likelihood(others | {name: rows})[name]
    log_t = (rows * (linear - 0.5 * matvec(precision, rows))).sum(-1)
    return (log_p.to(log_t) - log_t).reshape(f.shape[:-1])


def _far(log_r: Tensor, points: Points) -> Tensor:
    """Whether mean and second moments of q r / E r are far from those of q (n,), from log r (Q, n)."""
    share, x = (log_r + points.weights.log().unsqueeze(-1)).softmax(0), points.x
    moments = torch.einsum("qn,qi,qj->nij", share - points.weights.unsqueeze(-1), x, x)
    return (share.mT @ x).square().sum(-1) + 0.5 * moments.square().sum((-2, -1)) > 1.0


def _averages(log_r: Tensor, points: Points, far: Tensor) -> tuple[Tensor, Tensor]:
    """log E r (..., n) from log r (..., Q, n), and for k = 1 coefficients a (DEGREE, ..., n)."""
    w = points.weights.unsqueeze(-1)
    log_mean, center = torch.logsumexp(log_r + w.log(), -2), (w * log_r).sum(-2)
    left = log_r - center.unsqueeze(-2)
    log_mean = torch.where(far, center + 0.5 * (w * left.square()).sum(-2), log_mean)
    if points.x.shape[-1] > 1:
        return log_mean, log_mean.new_zeros(DEGREE, *log_mean.shape)
    u = points.x.squeeze(-1)
    share = w * torch.where(far, left, (log_r - log_mean.unsqueeze(-2)).exp())
    hermite = [torch.ones_like(u), u]
    for degree in range(1, DEGREE):
        hermite.append(u * hermite[-1] - degree * hermite[-2])
    return log_mean, torch.einsum("lq,...qn->l...n", torch.stack(hermite[1:]), share)


def _pairs(a: Tensor, K: Tensor) -> Tensor:
    """The second sum of (2) (...), bounded, from a (DEGREE, ..., N) and covariances K (N, N) of f."""
    scale = torch.where(K.diagonal() > 0.0, K.diagonal(), torch.inf).rsqrt()
    rho = (scale.unsqueeze(-1) * K * scale).clamp(-1.0, 1.0)
    rho.fill_diagonal_(0.0)  # a datum is no pair
    total, power = a.new_zeros(a.shape[1:-1]), torch.ones_like(rho)
    for degree, own in enumerate(a, start=1):
        power = power * rho
        total = total + 0.5 * (own @ power * own).sum(-1) / factorial(degree)
    return total / (1.0 + total.square()).sqrt()


def tilts(at: Snapshot, joint: Joint, far: Draws, half: Tensor, t: Tensor) -> Tensor:
    """log E prod_j r_j (P, G) given each of P numbers, ``half`` (M, P), at t (G,) sds from its mean."""
    unit = half / torch.linalg.vector_norm(half, dim=0).clamp_min(torch.finfo(half.dtype).tiny)
    alone = [own.squeeze(-1) for _, own in joint.seen.values() if own.shape[-1] == 1]
    singles = torch.cat([half[:, :0], *alone], -1)
    K, total = singles.mT @ singles, unit.new_zeros(unit.shape[1], len(t))
    size = max(
        n * k * len(t) * ORDERS[k] ** k for n, k in (m.shape for m, _ in joint.seen.values())
    )
    for rows in torch.arange(len(total), device=t.device).split(max(1, CHUNK // size)):
        coefficients = [t.new_zeros(DEGREE, len(rows), len(t), 0)]
        for name, (mean, own) in joint.seen.items():
            k = mean.shape[-1]
            points = quadrature_points(k, ORDERS[k], mean.dtype, mean.device)
            c = torch.einsum("mp,mni->pni", unit[:, rows], own)
            C = torch.einsum("mni,mnj->nij", own, own)
            root = square_root(C - c.unsqueeze(-1) * c.unsqueeze(-2))
            at_t = mean + t.reshape(-1, 1, 1) * c.unsqueeze(1)
            f = at_t.unsqueeze(2) + torch.einsum("pnij,qj->pqni", root, points.x).unsqueeze(1)
            log_mean, a = _averages(_log_ratio(at, name, f), points, far[name])
            total[rows] += log_mean.sum(-1)
            coefficients += [a] if k == 1 else []
        a, c = torch.cat(coefficients, -1), unit[:, rows].mT @ singles
        for i, row in enumerate(rows.tolist()):
            total[row] += _pairs(a[:, i], K - torch.outer(c[i], c[i]))
    return total


class Evidence(NamedTuple):
    """log p(y) by (2) in nats, with the size of that part of it which is of second order.

    ``slope`` is the largest |E_q d log r / df| in nats a standard deviation, 0 at the optimum of q;
    ``far`` (n,) by group, which data count by their cumulants.
    """

    log_p: float
    second: float
    slope: float
    far: Draws


def evidence_of(at: Snapshot, joint: Joint) -> Evidence:
    """The evidence, with log p of sites that are conditioned on."""
    bound = at.posterior.log_normalizer + at.call.other_terms()
    gain, second, far = torch.zeros_like(bound), torch.zeros_like(bound), {}
    coefficients, singles, slopes = [], [], []
    for name, (mean, half) in joint.seen.items():
        k = mean.shape[-1]
        points = quadrature_points(k, FINER[k], mean.dtype, mean.device)
        C = torch.einsum("mni,mnj->nij", half, half)
        f = mean + torch.einsum("nij,qj->qni", square_root(C), points.x)
        log_r = _log_ratio(at, name, f)
        slopes.append(torch.einsum("q,qn,qk->nk", points.weights, log_r, points.x).abs().max())
        far[name] = _far(log_r, points)
        log_mean, a = _averages(log_r, points, far[name])
        center = points.weights @ log_r
        bound, gain = bound + center.sum(), gain + (log_mean - center).sum()
        second = second + (log_mean - center)[far[name]].sum()
        if k == 1:
            coefficients.append(a)
            singles.append(half.squeeze(-1))
    if singles:
        half = torch.cat(singles, -1)
        pairs = _pairs(torch.cat(coefficients, -1), half.mT @ half)
        gain, second = (gain + pairs).clamp_min(0.0), second + pairs.abs()
    return Evidence(float(bound + gain), float(second), float(torch.stack(slopes).max()), far)


class Component(NamedTuple):
    """The marginals at one set of hyperparameters, by site, and the evidence there."""

    joint: Joint
    parts: dict[str, Tilted]
    evidence: Evidence

    def draws(self, count: int, plan: ModelStructure, generator: torch.Generator) -> Draws:
        """Draws (count, P) by name: of q, each number moved to its own marginal (a Gaussian copula)."""
        like = self.joint.half
        shape, dtype = (count, len(like)), torch.float64
        white = torch.randn(shape, generator=generator, dtype=dtype, device="cpu").to(like)
        found = {}
        for name, part in self.parts.items():
            _, half = self.joint.part(name, plan)
            found[name] = part.table().quantiles(torch.special.ndtr(white @ half / part.sd))
        return found


def component_of(at: Snapshot, names: Sequence[str]) -> Component:
    """That of a snapshot, for all entries of the sites ``names``."""
    joint, plan, parts = joint_of(at), at.call.plan, {}
    evidence = evidence_of(at, joint)
    for name in names:
        mean, half = joint.part(name, plan)
        sd = torch.linalg.vector_norm(half, dim=0)
        # what no datum moves is a point, and a table needs some width
        sd = sd.clamp_min(torch.finfo(sd.dtype).eps * (1.0 + mean.abs()))
        tilt = tilts(at, joint, evidence.far, half, nodes(half))
        if not bool(tilt.isfinite().all()):
            raise ValueError(
                f"AutoSites.marginals: for {int((~tilt.isfinite()).any(-1).sum())} entries of {name!r} "
                f"the likelihood is 0, or not a number, within {REACH:g} standard deviations. Take one "
                f"that allows all values of its predictor."
            )
        parts[name] = Tilted.of(mean, sd, tilt)
    return Component(joint, parts, evidence)
