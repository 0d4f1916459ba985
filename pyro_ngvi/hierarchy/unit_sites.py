r"""Gaussian sites of units, one for all values of the globals, and their steps.

The natural gradient of the ELBO in a site t_i, averaged over the globals v, vanishes where

    Lambda_i = E[H_i],    nu_i = E[g_i + H_i m_i(v)],       g_i = grad log p(y_i | u_i, v), H_i = -hess,

expectations over q(v) q(u_i | v) (Khan & Lin 2017, eq. 21, for q given v; Bonnet 1964, Price 1958).  It
is m_i(v) that multiplies H_i, not the draw u_i, which would add E[H_i (u_i - m_i)], a third derivative.
Lambda_i (u_i - m_i), with the site as it is, has expectation 0 and takes noise of g_i away: all of it
where log p is quadratic and Lambda_i says so.  A site moves a share of its way there.  H_i is made
positive semi-definite, so q is proper at every v.  Where gradients jump (Laplace, ReLU) averages of
second derivatives are wrong, and E[H] = Lambda - E[(g - nu + Lambda u) (u - m)'] Q takes their place.

Globals phi (D,) that enter the likelihood beside u move what data say of u, and how much that is.
There a site is

    Lambda_i(phi) = exp(a_i' phi) Lambda_i,        nu_i(phi) = exp(a_i' phi) (nu_i - C_i phi),

where a_i is 0 but for scales of the data, by which all that they say has a factor: with phi the
logarithm of that of Gaussian data q(u_i | v) is exact, a_i = -2 and C_i = 0.  For them tr(W Lambda_i),
W the covariance of q(u_i) in the middle of the draws of v, moves as tr(W E[H_i | v]): what H_i changes
by where an entry of phi is that of another draw, with the same white noise in u_i, less what Lambda_i
does, is regressed on what phi changes by, so that the noise of a_i is a share of these changes.  Other
globals that change Lambda_i change nu_i by another factor, as t does in t u + noise.  The target
C_i = E[g_i a_i' - d g_i / d phi'] / E[exp(a_i' phi)], phi from that middle, moves the mean of q(u_i) as
the maximum over u_i of p(u_i, y_i | v) moves with phi, to first order, by the implicit function theorem
(Rue, Martino & Chopin 2009 correct a Laplace approximation so; here it is part of q).

A step of a unit is shortened so that no variance changes by more than 16-fold, no mean of an entry by
more than three of its standard deviations, before and after, and all of them by that times the root of
k.  Where q becomes wider, one standard deviation of the prior will do.  After some ten steps that
needed nothing of the kind the share falls as one over their number.  Units whose expectations are not
finite keep their site.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..linalg.cholesky import solve_columns
from ..linalg.products import matvec
from ..linalg.spectral import positive_part
from .conditional import Conditionals, UnitPriors
from .slopes import Moving, Slopes, Swapped

#: by what factor a precision changes in a step at most, and by how many sds a mean of one entry
MOST_RATIO, MOST_SDS = 16.0, 3.0
#: by how much the logarithm of a precision changes, most: that with an sd of phi, in a step, and in all
MOST_GROWTH, MOST_LOG = 1.0, 60.0
#: the share of the first steps, how many these are, and how many shares of later ones make a whole
FIRST_SHARE, FAST, MEMORY = 0.8, 9.0, 8.0


@dataclass(frozen=True)
class Sites:
    """nu (B, k), Lambda (B, k, k), C (B, k, D) and a (B, D), and how often each was moved, (B,)."""

    linear: Tensor
    precision: Tensor
    cross: Tensor
    growth: Tensor
    visits: Tensor

    def at(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        """nu (S, B, k) and Lambda (S, B, k, k), or (B, k, k), at globals phi (S, D)."""
        if phi.shape[-1] == 0:
            return self.linear.expand(len(phi), *self.linear.shape), self.precision
        phi = phi.to(self.cross)
        times, beside = _growth(phi, self.growth), torch.einsum("bkd,sd->sbk", self.cross, phi)
        return times[..., None] * (self.linear - beside), times[..., None, None] * self.precision

    def around(self, middle: Tensor) -> Sites:
        """The same, of phi - ``middle`` (D,) in the place of phi."""
        times = _growth(middle, self.growth)[:, None]
        linear, cross = times * (self.linear - self.cross @ middle), times[..., None] * self.cross
        return replace(
            self, linear=linear, precision=times[..., None] * self.precision, cross=cross
        )

    @torch.no_grad()
    def moved(
        self,
        prior: UnitPriors,
        phi: Tensor,
        mean: Tensor,
        u: Tensor,
        slopes: Slopes,
        moving: Moving | None = None,
    ) -> Sites:
        """After a step towards the targets, from slopes at draws u (S, B, k) of a q with that ``mean``
        (S, B, k) at globals phi (S, D), and how they are ``moving`` with phi; H from g where it is not
        given."""
        g, H, phi, typical = slopes.g, slopes.H, phi.to(self.cross), prior.typical()
        share = (MEMORY / (self.visits + 1.0)).clamp_max(FIRST_SHARE)
        # from here on phi is what it is away from the middle of the draws of v
        middle = phi.mean(0)
        sites, away = self.around(middle), phi - middle
        before, held, cross, growth = sites.linear, sites.precision, sites.cross, sites.growth
        now = Conditionals.of(typical, before, held)
        at, half = now.mean, solve_columns(now.root[0], typical.root[0].mT)
        if moving is not None:
            if H is not None and moving.swapped is not None:
                swapped = moving.swapped._replace(phi=moving.swapped.phi.to(away) - middle)
                growth = growth + share[:, None] * sites._growing(half, away, H, swapped)
            of_few = _growth(away[moving.few], growth).mean(0)[:, None, None]
            cross = (moving.cross + moving.g.unsqueeze(-1) * growth.unsqueeze(-2)) / of_few
        times = _growth(away, growth)
        size = times.mean(0)
        if H is None:
            off = u - mean
            rest = (g - before + matvec(held, u)).unsqueeze(-1)
            pull = prior.precise(off) + matvec(held, off)
            product = rest * pull.unsqueeze(-2)
            wanted = positive_part((held - 0.5 * (product + product.mT)).mean(0))
            spread = matvec(wanted, mean - at)
        else:
            wanted = positive_part(H.mean(0)) / size[:, None, None]
            spread = matvec(H, mean - at)
        # nu belongs to Lambda as it is taken, where that is another than E[H]
        linear = (g + spread + times[..., None] * matvec(held, u - mean)).mean(0)
        linear = linear + torch.einsum("bkd,sb,sd->bk", cross, times, away) / len(away)
        linear = linear / size[:, None] + matvec(wanted, at[0])
        found = torch.cat([x.flatten(1) for x in (wanted, linear, cross, growth)], 1)
        finite = torch.isfinite(found).all(1)
        wanted = torch.where(finite[:, None, None], wanted, held)
        linear = torch.where(finite[:, None], linear, before)
        cross = torch.where(finite[:, None, None], cross, sites.cross)
        growth = torch.where(finite[:, None], growth, self.growth)
        change = share[:, None, None] * (wanted - held)
        relative = half @ change @ half.mT
        values = torch.linalg.eigvalsh(0.5 * (relative + relative.mT))
        up, down = values[:, -1] / (MOST_RATIO - 1.0), -values[:, 0] / (1.0 - 1.0 / MOST_RATIO)
        shorter = 1.0 / torch.maximum(up, down).clamp_min(1.0)
        precision = held + shorter[:, None, None] * change
        linear = torch.lerp(before, linear, (shorter * share)[:, None])
        cross = torch.lerp(sites.cross, cross, (shorter * share)[:, None, None])
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
            before - matvec(held, at[0]),
            linear - matvec(precision, then.mean[0]),
            most.unsqueeze(-1),
        )
        far = (most < 1.0).unsqueeze(-1)
        linear = torch.where(far, matvec(precision, there) + against, linear)
        # on the way the share stays what it is at first
        settled = (shorter == 1.0) & (sds <= MOST_SDS * far_out) & (entries[0] <= MOST_SDS)
        visits = torch.where(settled, self.visits + 1.0, (self.visits + 1.0).clamp_max(FAST))
        visits = torch.where(finite, visits, self.visits)
        return Sites(linear, precision, cross, growth, visits).around(-middle)

    def _growing(self, half: Tensor, phi: Tensor, H: Tensor, swapped: Swapped) -> Tensor:
        """By how much a (B, D) is too small, by what tr(W H), W = half' half, becomes where entries of
        phi (S, D) do."""
        trace, other = (((half @ x) * half).sum((-2, -1)) for x in (H, swapped.H))
        draws, entry = swapped.draws, swapped.entry
        times, then = (_growth(x, self.growth) for x in (phi, swapped.phi))
        size = trace.mean(0)
        rest = (other - trace[draws]) / size - (then - times[draws]) / times.mean(0)
        sd = phi.std(0, correction=0)
        unit = torch.where(sd > 0.0, 1.0 / sd, 0.0)
        # along each entry by least squares, less where their moves are small
        change = (swapped.phi - phi[draws]) * unit
        products = torch.zeros_like(self.growth.mT).index_add(
            0, entry, change.sum(-1, keepdim=True) * rest
        )
        found = (products / (1.0 + change.square().sum(0)).unsqueeze(-1)).mT
        found = found.clamp(-MOST_GROWTH, MOST_GROWTH) * unit
        return torch.where((size > 0.0)[:, None] & found.isfinite(), found, 0.0)


def _growth(phi: Tensor, growth: Tensor) -> Tensor:
    """exp(a' phi) (S, B) at phi (S, D)."""
    return (phi @ growth.mT).clamp(-MOST_LOG, MOST_LOG).exp()
