r"""Marginals of a guide of sites that are not Gaussian, and its evidence, by what the sites leave over.

    p(z | y)  propto  q(z) prod_j r_j(f_j),     r_j(f) = p(y_j | f) / t_j(f),
    p(x | y)  propto  q(x) E[prod_j r_j | x],       log p(y) = log Z + log E_q prod_j r_j,        (1)
    log E prod_j r_j  ~=  sum_j log E r_j + sum_(i<j) cov(r_i / E r_i, r_j / E r_j).              (2)

x is a number that is linear in the block.  The first sum of (2) given x is EP-FACT of Cseke & Heskes
(2011, "Approximate marginals in latent Gaussian models", JMLR 12): every datum is integrated by itself,
all that see one f as one (:mod:`pyro_ngvi.sites.joint`).  The second is how the r_j move together while
x stands still, to second order (Opper, Paquet & Winther 2013, "Perturbative corrections for approximate
inference in Gaussian latent variable models", JMLR 14), from coefficients in Hermite polynomials of
u_j = S_j^-1 (f_j - m_j), S S' = C.  For a word w of l of its k entries He_w(u) is the product over
entries e of He_n(u_e), n how often e is in w, and

    a_jw = E[r_j He_w(u_j)] / E r_j,      r_j / E r_j = sum_w a_jw He_w(u_j) / l!,
    cov(i, j) = sum_(l >= 1) sum_(v, w) a_iv a_jw prod_s R_(v_s w_s) / l!,      R = cov(u_i, u_j),

up to l = 3.  A sum c over pairs counts as c / (1 + c^2)^(1/2): where it is not small, (2) is no
expansion, and far out it would grow without bound.

Where outliers have sites of negative precision q / t_j of others need not be proper, and E r_j be
infinite: such a datum with squared coefficients of degree 1 and, halved, 2 of more than 1 counts as exp
of its first two cumulants,

    log E r_j  ->  E log r_j + var(log r_j) / 2,       a_jw  ->  E[He_w(u_j) log r_j].

The evidence is no less than log Z + sum_j E log r_j, the ELBO of q (Jensen).

Each expectation is a sum over points of N(f; mean given x, covariance given x), in k <= 3 dimensions.
For x at a few standardised points t, with c the covariance of f_j and t under q(f_j) = N(m, C),

    f_j | t ~ N(m + c t, C - c c').

Where the likelihood is Gaussian all of it is exact.  For N data, D numbers, and Q points it takes
29 N D Q log likelihoods, O(D N^2), and N^2 numbers of memory, for k > 1 times up to k^3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement, product
from math import factorial, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..linalg.products import matvec
from ..linalg.spectral import square_root
from .algebra import Snapshot
from .densities import REACH, Tilted, mixture, nodes
from .expectation import Points, quadrature_points
from .joint import Blocks, Joint, Shared, correlations, covariances, joint_of

#: points for each of k entries of f: given x, and for the evidence, where q(f_j) is wider
ORDERS, FINER = {1: 12, 2: 10, 3: 6}, {1: 64, 2: 20, 3: 12}
#: the degree of (2) in R, and entries of f that are evaluated at once
DEGREE, CHUNK = 3, 2**21


Draws = dict[str, Tensor]
Far = dict[int, Tensor]


def _log_ratio(at: Snapshot, shared: Shared, move: Tensor) -> Tensor:
    """log r (..., n) at f - m = ``move`` (..., n, k), of all data that see each f."""
    rows = move.flatten(0, -3)
    given = {n: m.mean.expand(len(rows), *m.mean.shape) for n, m in at.marginals.items()}
    for name, (owner, slope) in shared.data.items():
        own = torch.einsum("nij,qnj->qni", slope, rows[:, owner])
        given[name] = at.marginals[name].mean + own
    found, total = at.call.log_likelihood(given), rows.new_zeros(rows.shape[:-1])
    for name, (owner, _) in shared.data.items():
        (linear, precision), x = at.sites[name], given[name]
        log_t = (x * (linear - 0.5 * matvec(precision, x))).sum(-1)
        total.index_add_(-1, owner, found[name].to(log_t) - log_t)
    return total.reshape(move.shape[:-1])


def _averages(log_r: Tensor, points: Points, far: Tensor) -> tuple[Tensor, list[Tensor]]:
    """log E r (..., n) from log r (..., Q, n), and coefficients a (..., n, k^l) by degree l."""
    w = points.weights.unsqueeze(-1)
    weighted, center = log_r + w.log(), (w * log_r).sum(-2)
    log_mean = torch.logsumexp(weighted, -2)
    left = log_r - center.unsqueeze(-2)
    log_mean = torch.where(far, center + 0.5 * (w * left.square()).sum(-2), log_mean)
    share = torch.where(far, w * left, (weighted - log_mean.unsqueeze(-2)).exp())
    he = [torch.special.hermite_polynomial_he(points.x, n) for n in range(DEGREE + 1)]
    k = points.x.shape[-1]
    a = []
    for degree in range(1, DEGREE + 1):
        words = product(range(k), repeat=degree)
        rows = [torch.stack([he[v.count(e)][:, e] for e in range(k)]).prod(0) for v in words]
        a.append(torch.einsum("vq,...qn->...nv", torch.stack(rows), share))
    return log_mean, a


def _pairs(a: Mapping[int, Sequence[Tensor]], R: Blocks) -> Tensor:
    """The second sum of (2) (...), bounded, from a (..., n, k^l) by k and R (n, k, n', k') by both."""
    total = next(iter(a.values()))[0].new_zeros(())
    for (k, other), rho in R.items():
        if k == other:  # a datum is no pair, and each pair is there twice
            rho = rho.clone()
            rho.diagonal(dim1=0, dim2=2).zero_()
        for degree, (left, right) in enumerate(zip(a[k], a[other], strict=True), start=1):
            words = list(product(range(k), repeat=degree))
            for v in combinations_with_replacement(range(k), degree):
                power = rho[:, v[0]]
                for e in v[1:]:
                    power = (power.unsqueeze(-1) * rho[:, e].unsqueeze(-2)).flatten(-2)
                moved = left[..., words.index(v)] @ power.flatten(1)
                share = prod(factorial(v.count(e)) for e in range(k)) * (2 if k == other else 1)
                total = total + (moved * right.flatten(-2)).sum(-1) / share
    return total / (1.0 + total.square()).sqrt()


def tilts(at: Snapshot, joint: Joint, far: Far, half: Tensor, t: Tensor) -> Tensor:
    """log E prod_j r_j (P, G) given each of P numbers, ``half`` (M, P), at t (G,) sds from its mean."""
    unit = half / torch.linalg.vector_norm(half, dim=0).clamp_min(torch.finfo(half.dtype).tiny)
    K = covariances({k: shared.half for k, shared in joint.shared.items()})
    total = unit.new_zeros(unit.shape[1], len(t))
    widths = [(m.shape[-1], m.numel()) for m, _ in joint.seen.values()]
    size = max(count * len(t) * ORDERS[k] ** k for k, count in widths)
    for rows in torch.arange(len(total), device=t.device).split(max(1, CHUNK // size)):
        a, c, root = {}, {}, {}
        for k, shared in joint.shared.items():
            points = quadrature_points(k, ORDERS[k], t)
            c[k] = torch.einsum("mp,mni->pni", unit[:, rows], shared.half)
            C = torch.einsum("mni,mnj->nij", shared.half, shared.half)
            root[k] = square_root(C - c[k].unsqueeze(-1) * c[k].unsqueeze(-2))
            move = torch.einsum("pnij,qj->pqni", root[k], points.x).unsqueeze(1)
            move = t.reshape(-1, 1, 1, 1) * c[k][:, None, None] + move
            log_mean, a[k] = _averages(_log_ratio(at, shared, move), points, far[k])
            total[rows] += log_mean.sum(-1)
        for i, row in enumerate(rows.tolist()):
            left = {
                (k, other): x - torch.einsum("ni,mj->nimj", c[k][i], c[other][i])
                for (k, other), x in K.items()
            }
            R = correlations(left, {k: x[i] for k, x in root.items()})
            total[row] += _pairs({k: [x[i] for x in own] for k, own in a.items()}, R)
    return total


def _is_proper(at: Snapshot, shared: Shared, root: Tensor) -> Tensor:
    """Whether q(f) / t(f) is a Gaussian, (n,), for all data that see each f, of covariance S S'."""
    precision = torch.zeros_like(root)
    for name, (owner, slope) in shared.data.items():
        precision.index_add_(0, owner, slope.mT @ at.sites[name][1] @ slope)
    return torch.linalg.eigvalsh(root.mT @ precision @ root)[:, -1] < 1.0


class CorrectedEvidence(NamedTuple):
    """log p(y) by (2) in nats, and the size of its part of second order; ``slope`` is the largest
    |E_q d log r / df| in nats a standard deviation, 0 at the optimum of q; ``far`` is by k which data
    (n,) count by their cumulants."""

    log_p: float
    second: float
    slope: float
    far: Far


def corrected_evidence(at: Snapshot, joint: Joint) -> CorrectedEvidence:
    """The evidence, with log p of sites that are conditioned on."""
    bound = at.posterior.log_normalizer + at.call.other_terms()
    gain, second, far = torch.zeros_like(bound), torch.zeros_like(bound), {}
    a, root, slopes = {}, {}, []
    for k, shared in joint.shared.items():
        points = quadrature_points(k, FINER[k], bound)
        root[k] = square_root(torch.einsum("mni,mnj->nij", shared.half, shared.half))
        log_r = _log_ratio(at, shared, torch.einsum("nij,qj->qni", root[k], points.x))
        slopes.append(torch.einsum("q,qn,qk->nk", points.weights, log_r, points.x).abs().max())
        # how far mean and second moments of q r / E r are from those of q
        share, x = (log_r + points.weights.log().unsqueeze(-1)).softmax(0), points.x
        moments = torch.einsum("qn,qi,qj->nij", share - points.weights.unsqueeze(-1), x, x)
        far[k] = (share.mT @ x).square().sum(-1) + 0.5 * moments.square().sum((-2, -1)) > 1.0
        far[k] &= ~_is_proper(at, shared, root[k])
        log_mean, a[k] = _averages(log_r, points, far[k])
        center = points.weights @ log_r
        bound, gain = bound + center.sum(), gain + (log_mean - center).sum()
        second = second + (log_mean - center)[far[k]].sum()
    K = covariances({k: shared.half for k, shared in joint.shared.items()})
    pairs = _pairs(a, correlations(K, root))
    gain, second = (gain + pairs).clamp_min(0.0), second + pairs.abs()
    return CorrectedEvidence(
        float(bound + gain), float(second), float(torch.stack(slopes).max()), far
    )


class Component(NamedTuple):
    """The marginals at one set of hyperparameters, by site, the evidence there, and draws (S, P)."""

    parts: dict[str, Tilted]
    evidence: CorrectedEvidence
    draws: Draws


def component_of(
    at: Snapshot, names: Sequence[str], count: int, generator: torch.Generator
) -> Component:
    """That of a snapshot, for all entries of the sites ``names``; with ``count`` draws of q, each
    number moved to its own marginal (a Gaussian copula)."""
    joint, parts, draws = joint_of(at), {}, {}
    evidence = corrected_evidence(at, joint)
    how: Any = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    white = torch.randn(count, len(joint.half), **how).to(joint.half)
    for name in names:
        mean, half = joint.part(name, at.call.plan)
        sd = torch.linalg.vector_norm(half, dim=0)
        # what no datum moves is a point, and a table needs some width
        sd = sd.clamp_min(torch.finfo(sd.dtype).eps * (1.0 + mean.abs()))
        tilt = tilts(at, joint, evidence.far, half, nodes(half))
        bad = ~((tilt < torch.inf).all(-1) & (tilt > -torch.inf).any(-1))
        if bool(bad.any()):
            raise ValueError(
                f"AutoSites.marginals: for {int(bad.sum())} entries of {name!r} the likelihood is not "
                f"a number, or 0 all over, within {REACH:g} standard deviations. Look for overflow in "
                f"the model; take a likelihood that allows all values of its predictor."
            )
        parts[name] = Tilted.of(mean, sd, tilt)
        draws[name] = mixture([parts[name]], [1.0]).quantiles(torch.special.ndtr(white @ half / sd))
    return Component(parts, evidence, draws)
