r"""The state-space algebra: a block of states s_1, ..., s_T with a Gauss-Markov prior, in O(T).

    p: s_1 ~ N(m, L_1 L_1'),    s_t = A_t s_{t-1} + c_t + L_t e_t,    e_t ~ N(0, I).

Datum t sees state t, f_t = H_t s_t + b_t, so that sites become Gaussian factors of single states,

    h_t = H_t'(nu_t - Lambda_t b_t),  P_t = H_t' Lambda_t H_t,  c = sum nu_t'b_t - b_t'Lambda_t b_t / 2,
    q(s) = p(s) prod_t exp(h_t's_t - s_t'P_t s_t / 2) exp(c) / Z.

Times without data are data that are NaN, or masked.  q is a chain again.  With the message exp(eta_t's
- s'J_t s / 2) of all that comes after t, and s counted from p's mean:

    M_t = I + L_t'(P_t + J_t) L_t,
    q(s_t | s_{t-1}) = N(L_t M_t^-1 (L_t^-1 A_t s_{t-1} + L_t'(h_t + eta_t)), L_t M_t^-1 L_t'),
    log Z = c + sum_t |M_t^-1/2 L_t'(h_t + eta_t)|^2 / 2 - log det M_t / 2.

The messages come from log2(T) rounds of cyclic reduction, after the scan of Sarkka & Garcia-Fernandez
(2021, "Temporal parallelization of Bayesian smoothers"): each integrates out every second state given
both its neighbours.  q is proper if and only if all pivots and M_t are positive definite, as they are
Schur complements of its precision.  p is kept as (A, L), whose joins and bridges are sums of positive
semi-definite matrices, and only what sites say as a quadratic form (X, h, P): the precision of a smooth
process in small steps has no digits.

O(T S^3) work and memory.  Not for states of more than some ten numbers, nor for exactly singular noise.
Sites on derivatives of a smooth process in small steps lose digits: with P of about 1 / variance on the
second derivative of a Matern-5/2 process, errors are 2e-11 in steps of 1e-2 lengthscales and 1e-3 in
steps of 1e-4.  Sites on the process itself lose none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor

from ..distributions.state_space import GaussianStateSpace, interleave, scan
from ..linalg.cholesky import inverse_cholesky, inverse_triangle
from ..linalg.products import eye_like, matvec
from .algebra import Algebra, GaussianPotential, Pairs, View
from .bound_model import BoundModel, affine_maps
from .probe_points import by_halves
from .structure import LinearMap, ModelStructure


class ChainAlgebra(Algebra):
    """Evidence of single states: h (T, S) and P (T, S, S)."""

    def __init__(self, plan: ModelStructure, call: BoundModel) -> None:
        ((name, shape),) = plan.shapes.items()
        if len(shape) != 2:
            raise ValueError(
                f"AutoSites: the state-space site {name!r} has shape {tuple(shape)}, several chains of "
                f"states. Here it is one chain: make a guide for each, in a loop over the series."
            )
        T, S = shape
        super().__init__(GaussianPotential.none(plan.zero(), T, S))
        for group in plan.groups:
            if tuple(group.batch) != (T,):
                raise ValueError(
                    f"AutoSites: {group.name!r} has data of shape {tuple(group.batch)}, and the "
                    f"prior {name!r} has {T} states. A state-space prior takes a datum per state, "
                    "in order: make times without a datum NaN, and several data at a time one "
                    "MultivariateNormal."
                )
        _refuse_minibatch(call)
        states = call.probe.reshape(shape)
        stay = by_halves(lambda z: call.predictors(z.reshape(-1)), states)
        every = torch.arange(T, device=plan.device)
        for group in call.index:
            if not stay(group, every):
                raise ValueError(
                    f"AutoSites: the predictor of datum t of {group!r} depends on other states than "
                    f"that of time t. Put what it needs into the state, or write the prior as a "
                    f"MultivariateNormal for the dense algebra."
                )

    def view(self, call: BoundModel) -> View:
        """H and b, by running the model at the unit vectors of a state, at all times at once."""
        _refuse_minibatch(call)
        (prior,) = call.block.values()

        def predictors(state: Tensor) -> dict[str, Tensor]:
            return call.predictors(state.expand(prior.event_shape).reshape(-1))

        units = call.plan.zero().new_ones(prior.event_shape[-1]).diag()
        return View(affine_maps(predictors, units), prior)

    @staticmethod
    def of_group(at: LinearMap, linear: Tensor, precision: Tensor) -> GaussianPotential:
        weighted = matvec(precision, at.offset)
        return GaussianPotential(
            (linear * at.offset - 0.5 * weighted * at.offset).sum(),
            matvec(at.design.mT, linear - weighted),
            at.design.mT @ precision @ at.design,
        )

    def posterior(self, view: Any, evidence: GaussianPotential) -> ChainPosterior:
        e = evidence
        return chain_posterior(view.prior, e.linear, e.precision, e.constant)

    def _chain(self, call: BoundModel) -> ChainPosterior:
        return self.posterior(View({}, *call.block.values()), self.evidence)

    def sample(self, call: BoundModel, name: str) -> Pairs:
        (site,) = call.plan.shapes
        q = self._chain(call).distribution()
        states: Any = pyro.sample(name + "_noise", q, infer={"is_auxiliary": True})
        return {site: (states, states.new_zeros(states.shape[:-2]))}

    def mean_and_sd(self, call: BoundModel) -> tuple[Tensor, Tensor]:
        q = self._chain(call)
        variance = q.covariance.diagonal(dim1=-2, dim2=-1)
        return q.mean.reshape(-1), variance.sqrt().reshape(-1)

    def distribution(self, call: BoundModel) -> GaussianStateSpace:
        return self._chain(call).distribution()


def _refuse_minibatch(call: BoundModel) -> None:
    if not call.whole:
        raise ValueError("AutoSites: a state-space prior takes all data, not a minibatch.")


@dataclass(frozen=True)
class ChainPosterior:
    """q(s) by its means (T, S) and covariances (T, S, S), log Z in nats, and whether it is ``proper``,
    without which nothing holds."""

    mean: Tensor
    covariance: Tensor
    log_normalizer: Tensor
    proper: Tensor
    _transition: Tensor
    _scale_tril: Tensor

    def marginals(self, at: LinearMap) -> tuple[Tensor, Tensor]:
        """Mean (T, k) and covariance (T, k, k) of H s + b."""
        H = at.design
        return matvec(H, self.mean) + at.offset, H @ self.covariance @ H.mT

    def distribution(self) -> GaussianStateSpace:
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


def chain_posterior(
    prior: GaussianStateSpace, linear: Tensor, precision: Tensor, constant: Tensor | float = 0.0
) -> ChainPosterior:
    """p(s) exp(c) times a Gaussian site h_t (T, S), P_t (T, S, S) at every time, normalised.

    P may have any rank and sign; only its symmetric part counts.  Nothing is read on the host.
    """
    P = 0.5 * (precision + precision.mT)
    A, _, L = prior.steps()
    center = prior.mean
    drift = matvec(P, center)
    at_center = (center * (linear - 0.5 * drift)).sum()
    h = linear - drift

    eta, J, proper = _messages(_Chain(A, L, inverse_triangle(L), torch.zeros_like(P), h, P))

    h, P = h + eta, P + J
    transition, _, _ = _condition(L, A, P)
    root = inverse_cholesky(eye_like(L) + L.mT @ P @ L)  # root root' = M^-1
    scale = L @ root
    y = matvec(scale.mT, h)
    log_det = root.diagonal(dim1=-2, dim2=-1).log().sum()
    log_normalizer = 0.5 * y.square().sum() + log_det + at_center
    proper = proper & torch.isfinite(log_normalizer)
    mean, covariance = scan(transition, matvec(scale, y), scale @ scale.mT)
    log_normalizer = log_normalizer + constant
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
    identity = eye_like(chain.scale)
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
    inverse = inverse_triangle(scale)
    G = k.scale @ (AL.mT @ inverse.mT) @ inverse
    Z = r.inverse @ AL
    K = _root(torch.cat((Z, identity.expand_as(Z)), -2)).mT  # K K' = I + Z'Z
    F = torch.linalg.solve_triangular(K, k.scale.mT, upper=False).mT
    m = torch.cat((k.transition - G @ A, G), -1)
    cross = torch.cat((k.cross.mT, r.cross), -1)
    linear, quadratic, fits = _integrate(F, m, cross, k.linear, k.precision)
    linear_l, linear_r = _earlier(linear[..., :S]), linear[..., S:]
    P_l, P_r = _earlier(-quadratic[..., :S, :S]), -quadratic[..., S:, S:]

    h, P = r.linear + linear_r + linear_l, r.precision + P_r + P_l
    eta, J, proper = _messages(_Chain(A, scale, inverse, quadratic[..., :S, S:], h, P))
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
    """x = (I + V P)^-1 m, the lower Cholesky factor of I + F'P F, and LAPACK's word on the latter."""
    identity = eye_like(F)
    C, info = torch.linalg.cholesky_ex(identity + F.mT @ P @ F)
    sd = torch.linalg.vector_norm(F, dim=-1).unsqueeze(-1)
    F = F / sd  # as F^-1 would mix rows of very different sizes: a smooth process in small steps
    x, _ = torch.linalg.solve_ex(identity + F @ F.mT @ (sd * P * sd.mT), m / sd)
    return sd * x, C, info


def _root(X: Tensor) -> Tensor:
    """Upper triangular R (n, S, S) with R'R = X'X for X (n, m, S) of full rank, by modified
    Gram-Schmidt: as accurate as Householder's QR (Bjorck 1967), in S operations on all n."""
    largest = X.detach().abs().amax(-2, keepdim=True)  # so that no square overflows in float32
    X, rows = X / largest, []
    for j in range(X.shape[-1]):
        size = torch.linalg.vector_norm(X[..., :1], dim=-2, keepdim=True)
        q, X = X[..., :1] / size, X[..., 1:]
        along = q.mT @ X
        X = X - q @ along
        rows.append(torch.nn.functional.pad(torch.cat((size, along), -1), (j, 0)))
    return torch.cat(rows, -2) * largest


def _earlier(x: Tensor) -> Tensor:
    """x_1, ..., x_{n-1}, 0: what belongs to a pair's left neighbour, which the pair before keeps."""
    return torch.cat((x[1:], torch.zeros_like(x[:1])))
