r"""Units given globals: a prior times a site for each unit, for many draws of the globals at once.

For unit i with k latent variables u_i, whose prior given the globals v is Gaussian,

    p(u_i | v) = N(u_i; P(v)^-1 h(v), P(v)^-1),      t_i(u_i) = exp(nu_i' u_i - u_i' Lambda_i u_i / 2),
    q(u_i | v) propto p(u_i | v) t_i(u_i) = N(m_i(v), Q_i(v)^-1),
    Q_i = P + Lambda_i,   m_i = Q_i^-1 (h + nu_i).

So effects shrink as their scale does.  In white coordinates, u = b + A w with w of N(0, I) a priori,

    q(w | v) = N((R R')^-1 A' (nu - Lambda b), (R R')^-1),      R R' = I + A' Lambda A,

which needs no inverse of the prior's covariance A A': smooth fields have nearly singular ones.  One
site serves all v.  The natural gradient of the ELBO in it, averaged over v, vanishes where

    Lambda_i = E[H_i],    nu_i = E[g_i + H_i m_i(v)],       g_i = grad log p(y_i | u_i, v), H_i = -hess,

expectations over q(v) q(u_i | v) (Khan & Lin 2017, eq. 21, for q given v; Bonnet 1964, Price 1958).  It
is m_i(v) that multiplies H_i, not the draw u_i, which would add E[H_i (u_i - m_i)], a third derivative.
Lambda_i (u_i - m_i), with the site as it is, has expectation 0 and takes noise of g_i away: all of it
where log p is quadratic and Lambda_i says so.  A site moves a share of its way there.  H_i is made
positive semi-definite, so q is proper at every v.  Where gradients jump (Laplace, ReLU) averages of
second derivatives are wrong, and E[H] = Lambda - E[(g - nu + Lambda u) (u - m)'] Q takes their place.

Globals phi (D,) that enter the likelihood beside u move what the data say of u.  There nu_i becomes
nu_i - C_i phi, whose target is C_i = -E[d g_i / d phi']: by the implicit function theorem it moves the
mean of q as the maximum over u_i of p(u_i, y_i | v) moves with phi, to first order (Rue, Martino &
Chopin 2009 correct a Laplace approximation so; here it is part of q).

A step of a unit is shortened so that no variance changes by more than 16-fold, no mean of an entry by
more than three of its standard deviations, before and after, and all of them by that times the root of
k.  Where q becomes wider, one standard deviation of the prior will do.  After some ten steps that
needed nothing of the kind the share falls as one over their number.  Units whose expectations are not
finite keep their site.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..families.mixture import quantiles_of_normals
from ..linalg.cholesky import cholesky, solve, solve_columns, solve_transposed
from ..linalg.products import matvec
from ..linalg.spectral import positive_part

#: by what factor a precision changes in a step at most, and by how many sds a mean of one entry
MOST_RATIO, MOST_SDS = 16.0, 3.0
#: the share of the first steps, how many these are, and how many shares of later ones make a whole
FIRST_SHARE, FAST, MEMORY = 0.8, 9.0, 8.0


class UnitPriors(NamedTuple):
    """p(u_i | v) of B units at S draws of v: u = b + A w, w white; b (S, B, k), A (S, B, k, k).

    A = P T with T lower triangular, where u are in the place of Gaussians z, u = P z + p (``turn`` is
    P^-1); else A = T.
    """

    offset: Tensor
    root: Tensor
    triangle: Tensor
    turn: Tensor | None = None

    @classmethod
    def of(cls, offset: Tensor, mixing: Tensor | None, root: Tensor) -> UnitPriors:
        """u = offset + mixing u + root w, mixing strictly lower triangular, root lower triangular."""
        if mixing is not None:
            left = torch.eye(offset.shape[-1], dtype=offset.dtype, device=offset.device) - mixing
            offset, root = solve(left, offset), solve_columns(left, root)
        return cls(offset, root, root)

    @property
    def log_det(self) -> Tensor:
        """log det T, (S, B)."""
        return torch.diagonal(self.triangle, dim1=-2, dim2=-1).log().sum(-1)

    def at(self, w: Tensor) -> Tensor:
        """u (..., S, B, k) of white w."""
        return self.offset + matvec(self.root, w)

    def log_prob(self, w: Tensor) -> Tensor:
        """log p(z_i | v) at white w, (..., S, B), in nats."""
        return _log_normal(w) - self.log_det

    def sd(self) -> Tensor:
        """Standard deviations (S, B, k) of u."""
        return torch.linalg.vector_norm(self.root, dim=-1)

    def precise(self, change: Tensor) -> Tensor:
        """P_i (..., S, B, k) times a change of u, P_i = (A A')^-1 the precision."""
        z = change if self.turn is None else matvec(self.turn, change)
        z = solve_transposed(self.triangle, solve(self.triangle, z))
        return z if self.turn is None else matvec(self.turn.mT, z)

    def typical(self) -> UnitPriors:
        """At one draw of v, (1, B, ...): the median one by volume."""
        chosen = self.log_det.sum(-1).nanmedian(0).indices.reshape(1)
        return tree_map_only(Tensor, lambda x: x.index_select(0, chosen), self)


@dataclass(frozen=True)
class Conditionals:
    """q(u_i | v) of B units at S draws of v: u = m + A R^-T e, e white; in white coordinates w the
    mean is ``white`` (S, B, k) and the precision R R'."""

    prior: UnitPriors
    white: Tensor
    root: Tensor

    @classmethod
    def of(cls, prior: UnitPriors, linear: Tensor, precision: Tensor) -> Conditionals:
        """From sites nu (B, k) or (S, B, k), Lambda (B, k, k)."""
        A = prior.root
        one = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        root = cholesky(one + A.mT @ (precision @ A))
        pull = matvec(A.mT, linear - matvec(precision, prior.offset))
        return cls(prior, solve_transposed(root, solve(root, pull)), root)

    @property
    def mean(self) -> Tensor:
        """m (S, B, k)."""
        return self.prior.at(self.white)

    @property
    def log_det(self) -> Tensor:
        """log det R, (S, B): how much narrower than the prior."""
        return torch.diagonal(self.root, dim1=-2, dim2=-1).log().sum(-1)

    def drawn(self, noise: Tensor) -> Tensor:
        """White w (..., S, B, k) for white noise e."""
        return self.white + solve_transposed(self.root, noise)

    def draw(self, noise: Tensor) -> Tensor:
        """u (..., S, B, k) for white noise e."""
        return self.prior.at(self.drawn(noise))

    def log_q(self, noise: Tensor) -> Tensor:
        """log q(z_i | v) of what is drawn with ``noise``, (..., S, B), in nats."""
        return _log_normal(noise) + self.log_det - self.prior.log_det

    def log_prob(self, w: Tensor) -> Tensor:
        """log q(z_i | v) at white w, (..., S, B), in nats."""
        return self.log_q(matvec(self.root.mT, w - self.white))

    def sd(self) -> Tensor:
        """Standard deviations (S, B, k) of u."""
        return torch.linalg.vector_norm(solve_columns(self.root, self.prior.root.mT), dim=-2)


def _log_normal(w: Tensor) -> Tensor:
    return -0.5 * (w.square().sum(-1) + w.shape[-1] * log(2.0 * pi))


class Slopes(NamedTuple):
    """Of log p(y_i | u_i, v) at S draws: g (S, B, k), H (S, B, k, k), and C (B, k, D), their mean.

    H is ``None`` where gradients jump.
    """

    g: Tensor
    H: Tensor | None
    cross: Tensor


@dataclass(frozen=True)
class Sites:
    """nu (B, k), Lambda (B, k, k) and C (B, k, D), and how often each was moved, (B,)."""

    linear: Tensor
    precision: Tensor
    cross: Tensor
    visits: Tensor

    def linear_at(self, phi: Tensor) -> Tensor:
        """nu - C phi (S, B, k) at globals phi (S, D)."""
        return self.linear - torch.einsum("bkd,sd->sbk", self.cross, phi.to(self.cross))

    def moved(
        self, prior: UnitPriors, phi: Tensor, mean: Tensor, u: Tensor, slopes: Slopes
    ) -> Sites:
        """After a step towards the targets, from slopes at draws u (S, B, k) of a q with that ``mean``
        (S, B, k) at globals phi (S, D); H from g where it is not given."""
        g, H, middle_phi = slopes.g, slopes.H, phi.mean(0, keepdim=True)
        # from here on nu is that in the middle of the draws of v
        before, typical = self.linear_at(middle_phi)[0], prior.typical()
        now = Conditionals.of(typical, before, self.precision)
        at = now.mean
        if H is None:
            off = u - mean
            rest = (g - self.linear_at(phi) + matvec(self.precision, u)).unsqueeze(-1)
            away = prior.precise(off) + matvec(self.precision, off)
            product = rest * away.unsqueeze(-2)
            precision = positive_part((self.precision - 0.5 * (product + product.mT)).mean(0))
            spread = matvec(precision, mean - at)
        else:
            precision, spread = positive_part(H.mean(0)), matvec(H, mean - at)
        # nu belongs to Lambda as it is taken, where that is another than E[H]
        linear = (g + spread + matvec(self.precision, u - mean)).mean(0)
        linear = linear + matvec(precision, at[0])
        found = torch.cat([x.flatten(1) for x in (precision, linear, slopes.cross)], 1)
        finite = torch.isfinite(found).all(1)
        precision = torch.where(finite[:, None, None], precision, self.precision)
        linear = torch.where(finite[:, None], linear, before)
        cross = torch.where(finite[:, None, None], slopes.cross, self.cross)
        share = (MEMORY / (self.visits + 1.0)).clamp_max(FIRST_SHARE)
        change = share[:, None, None] * (precision - self.precision)
        half = solve_columns(now.root[0], typical.root[0].mT)
        relative = half @ change @ half.mT
        values = torch.linalg.eigvalsh(0.5 * (relative + relative.mT))
        up, down = values[:, -1] / (MOST_RATIO - 1.0), -values[:, 0] / (1.0 - 1.0 / MOST_RATIO)
        shorter = 1.0 / torch.maximum(up, down).clamp_min(1.0)
        precision = self.precision + shorter[:, None, None] * change
        linear = torch.lerp(before, linear, (shorter * share)[:, None])
        cross = torch.lerp(self.cross, cross, (shorter * share)[:, None, None])
        then = Conditionals.of(typical, linear, precision)
        step = (then.white - now.white)[0]
        sds, later_sds = (
            torch.linalg.vector_norm(matvec(root[0].mT, step), dim=-1)
            for root in (now.root, then.root)
        )
        grows = (then.log_det > now.log_det)[0]

        def allowed(reach: float, before: Tensor, later: Tensor, prior: Tensor) -> Tensor:
            """The share of a step of these lengths, in sds before, after and of the prior."""
            most = MOST_SDS * reach
            narrower = most / torch.maximum(before, later)
            return torch.where(grows, narrower, torch.maximum(most / before, reach / prior))

        # so far is a draw of k entries from the mean, and an entry of it
        far_out, length = step.shape[-1] ** 0.5, torch.linalg.vector_norm(step, dim=-1)
        change_of_mean = (then.mean - now.mean)[0].abs()
        each_sd = torch.linalg.vector_norm(half, dim=-2), then.sd()[0], typical.sd()[0]
        entries = [(change_of_mean / sd).amax(-1) for sd in each_sd]
        most = torch.minimum(allowed(far_out, sds, later_sds, length), allowed(1.0, *entries))
        # nu - Lambda m is A^-T w: what the prior says against a site's mean
        there = torch.lerp(at[0], then.mean[0], most.unsqueeze(-1))
        against = torch.lerp(
            before - matvec(self.precision, at[0]),
            linear - matvec(precision, then.mean[0]),
            most.unsqueeze(-1),
        )
        far = (most < 1.0).unsqueeze(-1)
        linear = torch.where(far, matvec(precision, there) + against, linear)
        # on the way the share stays what it is at first
        settled = (shorter == 1.0) & (sds <= MOST_SDS * far_out) & (entries[0] <= MOST_SDS)
        visits = torch.where(settled, self.visits + 1.0, (self.visits + 1.0).clamp_max(FAST))
        linear = linear + matvec(cross, middle_phi.to(cross))
        return Sites(linear, precision, cross, torch.where(finite, visits, self.visits))


def antithetic(like: Tensor) -> Tensor:
    """White noise (S, B, k), in pairs e, -e; one is left over where S is odd."""
    half = torch.randn_like(like[: (len(like) + 1) // 2])
    return torch.cat([half, -half[: len(like) // 2]])


def mixture_quantiles(mean: Tensor, sd: Tensor, levels: Tensor) -> Tensor:
    """Quantiles (L, ...) of equal mixtures of S normals, ``mean`` and ``sd`` (S, ...)."""
    equal = mean.new_full((len(mean),), 1.0 / len(mean))
    # one level at a time, of which each takes S numbers for one
    return torch.cat([quantiles_of_normals(equal, mean, sd, level) for level in levels.split(1)])
