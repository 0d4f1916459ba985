r"""Gaussian sites on a Gauss-Markov chain: the posterior of a state-space model, parallel over time.

    q(s) = p(s) prod_t exp(h_t's_t - s_t'P_t s_t / 2) / Z,
    p: s_1 ~ N(m, L_1 L_1'),    s_t = A_t s_{t-1} + c_t + L_t e_t,    e_t ~ N(0, I).

With such sites for the data that are not Gaussian, q is the approximation of conjugate-computation
variational inference (Khan & Lin 2017).  It is a chain again.  Let exp(eta_t's - s'J_t s / 2) be the
message of all that comes after t, add it to the site, and count s from p's mean:

    M_t = I + L_t'(P_t + J_t) L_t,
    q(s_t | s_{t-1}) = N(L_t M_t^-1 (L_t^-1 A_t s_{t-1} + L_t'(h_t + eta_t)), L_t M_t^-1 L_t'),
    log Z = sum_t |M_t^-1/2 L_t'(h_t + eta_t)|^2 / 2 - log det M_t / 2.

The messages come from log2(T) rounds of cyclic reduction: a round integrates out every second state
given both its neighbours.  Its pivots and the M_t are Schur complements of q's precision, so q is
proper if and only if all are positive definite.  A filter has no such property when some P_t are
indefinite, nor has the scan over filters of Sarkka & Garcia-Fernandez (2021, "Temporal
parallelization of Bayesian smoothers"), whose idea this follows.

Cyclic reduction of the precision itself would lose all digits where L_t L_t' is nearly singular, as for
smooth processes in small steps (Matern-5/2 in steps of 1e-4 lengthscales: variances of 1e-20).  So
p is kept as (A, L), whose joins and bridges are sums of positive semi-definite matrices, and only the
sites' effect is kept as a quadratic form (X, h, P).

O(T S^3) work and memory, 2 log2(T) rounds.  Not for states of more than some ten numbers, nor for
exactly singular noise.  Sites on derivatives of a smooth process in small steps lose digits: with P of
about 1 / variance on the second derivative of a Matern-5/2 process, errors are 2e-11 in steps of
1e-2 lengthscales and 1e-3 in steps of 1e-4.  Sites on the process itself lose none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..distributions.scan import interleave, scan_moments
from ..distributions.state_space import GaussianStateSpace
from ..linalg.cholesky import inverse_cholesky
from ..linalg.products import matvec

__all__ = ["ChainPosterior", "chain_posterior"]


@dataclass(frozen=True)
class ChainPosterior:
    """q(s), of T states in R^S, as :func:`chain_posterior` finds it.

    Attributes:
        mean: of each state, (T, S).
        covariance: of each state, (T, S, S).
        log_normalizer: log of the integral of p(s) prod_t site_t(s_t), in nats, a 0-dim tensor.
        proper: a 0-dim bool tensor; where it is false, p times the sites has no finite integral and
            nothing else here means anything.
    """

    mean: Tensor
    covariance: Tensor
    log_normalizer: Tensor
    proper: Tensor
    _transition: Tensor
    _scale_tril: Tensor

    def posterior(self) -> GaussianStateSpace:
        """q(s) itself, to draw from and to evaluate."""
        A = self._transition[1:]
        return GaussianStateSpace(
            self.mean[0],
            transition=A,
            offset=self.mean[1:] - matvec(A, self.mean[:-1]),
            initial_scale_tril=self._scale_tril[0],
            noise_scale_tril=self._scale_tril[1:],
            validate_args=False,
        )


def chain_posterior(prior: GaussianStateSpace, linear: Tensor, precision: Tensor) -> ChainPosterior:
    """p(s) times a Gaussian site exp(h_t's_t - s_t'P_t s_t / 2) at every time, normalised.

    Differentiable in the prior and the sites.  Nothing is read on the host: whether q is proper comes
    back as a tensor.

    Args:
        prior: p(s), T states in R^S, batch shape ().
        linear: h (T, S).
        precision: P (T, S, S), symmetric (only the symmetric part counts); of any rank and sign.

    Raises:
        ValueError: for a prior with a batch shape and for sites of a wrong shape.

    Example:
        >>> import torch
        >>> from pyro_ngvi.distributions import local_level
        >>> prior = local_level(2, initial_scale=1.0, step_scale=1.0)
        >>> y = torch.tensor([[1.0], [2.0]])  # observed with unit variance: h = y, P = 1
        >>> q = chain_posterior(prior, y, torch.ones(2, 1, 1))
        >>> q.mean, q.covariance, bool(q.proper)
        (tensor([[0.8000],
                [1.4000]]), tensor([[[0.4000]],
                [[0.6000]]]), True)
    """
    if prior.batch_shape:
        raise ValueError(
            f"The prior has batch shape {tuple(prior.batch_shape)}; "
            "chain_posterior takes one chain, of batch shape ()."
        )
    T, S = prior.event_shape
    for name, value, shape in (("linear", linear, (T, S)), ("precision", precision, (T, S, S))):
        if value.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; the prior has {T} states of {S} numbers, "
                f"so it must be {shape}."
            )
    P = 0.5 * (precision + precision.mT)
    L = torch.cat((prior.initial_scale_tril.unsqueeze(0), prior.noise_scale_tril))
    A = torch.cat((torch.zeros_like(L[:1]), prior.transition))
    center = prior.mean
    drift = matvec(P, center)
    constant = (center * (linear - 0.5 * drift)).sum()
    h = linear - drift

    eta, J, proper = _messages(_Chain(A, L, _inverse(L), torch.zeros_like(P), h, P))

    h, P = h + eta, P + J
    transition, _, _ = _condition(L, A, P)
    identity = torch.eye(S, dtype=L.dtype, device=L.device)
    root = inverse_cholesky(identity + L.mT @ P @ L)  # root root' = M^-1
    scale = L @ root
    y = matvec(scale.mT, h)
    log_det = root.diagonal(dim1=-2, dim2=-1).log().sum()
    log_normalizer = 0.5 * y.square().sum() + log_det + constant
    mean, covariance = scan_moments(transition, matvec(scale, y), scale @ scale.mT)
    proper = proper & torch.isfinite(log_normalizer)
    return ChainPosterior(center + mean, covariance, log_normalizer, proper, transition, scale)


class _Chain(NamedTuple):
    """s_t = A_t s_{t-1} + L_t e_t, times exp(s_{t-1}'X_t s_t + h_t's_t - s_t'P_t s_t / 2)."""

    transition: Tensor  # A (n, S, S), the first of which is 0
    scale: Tensor  # L
    inverse: Tensor  # L^-1
    cross: Tensor  # X
    linear: Tensor  # h (n, S)
    precision: Tensor  # P


def _messages(chain: _Chain) -> tuple[Tensor, Tensor, Tensor]:
    """(eta (n, S), J (n, S, S)): integrals over all that comes after each t; whether they exist."""
    n, S = chain.linear.shape
    identity = torch.eye(S, dtype=chain.linear.dtype, device=chain.linear.device)
    if n == 1:
        L = chain.scale
        _, info = torch.linalg.cholesky_ex(identity + L.mT @ chain.precision @ L)
        none = torch.zeros_like(chain.linear), torch.zeros_like(chain.precision)
        return *none, (info == 0).all()
    if n % 2:  # a state that depends on none and that no site sees
        none, one = torch.zeros_like(chain.precision[:1]), identity.unsqueeze(0)
        last = _Chain(none, one, one, none, torch.zeros_like(chain.linear[:1]), none)
        chain = _Chain(*(torch.cat(both) for both in zip(chain, last, strict=True)))
    k = _Chain(*(x[0::2] for x in chain))  # to be integrated out, given l before and r behind
    r = _Chain(*(x[1::2] for x in chain))

    # p(s_r | s_l) = N(A s_l, scale scale'), and p(s_k | s_l, s_r) = N(B s_l + G s_r, F F')
    A, AL = r.transition @ k.transition, r.transition @ k.scale
    scale = _root(torch.cat((AL.mT, r.scale.mT), -2)).mT
    inverse = _inverse(scale)
    G = k.scale @ (AL.mT @ inverse.mT) @ inverse
    Z = r.inverse @ AL
    K = _root(torch.cat((Z, identity.expand_as(Z)), -2)).mT  # K K' = I + Z'Z
    F = torch.linalg.solve_triangular(K, k.scale.mT, upper=False).mT
    m = torch.cat((k.transition - G @ A, G), -1)
    cross = torch.cat((k.cross.mT, r.cross), -1)
    linear, quadratic, fits = _integrate(F, m, cross, k.linear, k.precision)
    linear_l, linear_r = _earlier(linear[..., :S]), linear[..., S:]
    P_l, P_r = _earlier(-quadratic[..., :S, :S]), -quadratic[..., S:, S:]

    shorter = _Chain(
        A,
        scale,
        inverse,
        quadratic[..., :S, S:],
        r.linear + linear_r + linear_l,
        r.precision + P_r + P_l,
    )
    eta, J, proper = _messages(shorter)
    eta, J = eta + linear_l, J + P_l
    linear, quadratic, _ = _integrate(
        r.scale, r.transition, r.cross.mT, r.linear + eta, r.precision + J
    )
    eta, J = interleave(linear, eta, -2), interleave(-quadratic, J, -3)
    return eta[:n], J[:n], proper & fits


def _integrate(
    F: Tensor, m: Tensor, cross: Tensor, linear: Tensor, precision: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """log E exp((h + X z)'s - s'P s / 2) over s ~ N(m z, F F') is b'z + z'E z / 2 + constant.

    With V = F F', x = (I + V P)^-1 m and W = (V^-1 + P)^-1 = F M^-1 F', M = I + F'P F,

        E = X'x + x'X + X'W X - m'P x,      b = x'h + X'W h.

    Returns b, E and whether all integrals exist.
    """
    x, C, info = _condition(F, m, precision)
    right = F.mT @ torch.cat((cross, linear.unsqueeze(-1)), -1)
    y = torch.linalg.solve_triangular(C, right, upper=False)
    g, y = y[..., :-1], y[..., -1:]
    E = (2.0 * cross - precision @ m).mT @ x + g.mT @ g
    b = x.mT @ linear.unsqueeze(-1) + g.mT @ y
    return b.squeeze(-1), 0.5 * (E + E.mT), (info == 0).all()


def _condition(F: Tensor, m: Tensor, P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x = (I + V P)^-1 m, the lower Cholesky factor of I + F'P F, and LAPACK's word on the latter.

    x is not F M^-1 F^-1 m: where F has rows of very different sizes, as in small steps of a smooth
    process, F^-1 mixes them.  In units of V's standard deviations elimination does not.
    """
    identity = torch.eye(F.shape[-1], dtype=F.dtype, device=F.device)
    C, info = torch.linalg.cholesky_ex(identity + F.mT @ P @ F)
    sd = torch.linalg.vector_norm(F, dim=-1).unsqueeze(-1)
    F = F / sd
    x, _ = torch.linalg.solve_ex(identity + F @ F.mT @ (sd * P * sd.mT), m / sd)
    return sd * x, C, info


def _root(X: Tensor) -> Tensor:
    """Upper triangular R (n, S, S) with R'R = X'X for X (n, m, S) of full rank, by Gram-Schmidt.

    Modified Gram-Schmidt gives R as accurately as Householder's QR (Bjorck 1967); X'X would lose half
    of the digits.  As S operations on all n matrices it is faster than LAPACK on each.
    """
    largest = X.detach().abs().amax(-2, keepdim=True)  # so that no square overflows in float32
    X, rows = X / largest, []
    for j in range(X.shape[-1]):
        size = torch.linalg.vector_norm(X[..., :1], dim=-2, keepdim=True)
        q, X = X[..., :1] / size, X[..., 1:]
        along = q.mT @ X
        X = X - q @ along
        rows.append(torch.nn.functional.pad(torch.cat((size, along), -1), (j, 0)))
    return torch.cat(rows, -2) * largest


def _inverse(scale: Tensor) -> Tensor:
    """Of lower triangular matrices."""
    identity = torch.eye(scale.shape[-1], dtype=scale.dtype, device=scale.device)
    return torch.linalg.solve_triangular(scale, identity.expand_as(scale), upper=False)


def _earlier(x: Tensor) -> Tensor:
    """x_1, ..., x_{n-1}, 0: what belongs to a pair's left neighbour, which the pair before keeps."""
    return torch.cat((x[1:], torch.zeros_like(x[:1])))
