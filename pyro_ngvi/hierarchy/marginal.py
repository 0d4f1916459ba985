r"""Likelihoods of single units with their latent variables integrated out.

    L_i(v) = p(y_i | v) = E_q(u_i | v) [p(y_i | u_i, v) p(u_i | v) / q(u_i | v)]
           ~ sum_j w_j p(y_i | u_ij, v) p(u_ij | v) / q(u_ij | v),      u_ij = m_i(v) + A R_i(v)^-T x_j,

with the points x_j and weights w_j of :mod:`pyro_ngvi.sites.expectation`.  Since q(u_i | v) lies where
p(u_i | y_i, v) does, at every v, this is adaptive Gauss-Hermite quadrature (Liu & Pierce 1994) without
a search for modes.  It is exact where the data are Gaussian, and can be differentiated in v.  Leaving
unit i out,

    p(y_i | y_-i) = 1 / E_p(v | y) [1 / L_i(v)]

(Gelfand, Dey & Chang 1992; for random effects Vehtari, Mononen, Tolvanen, Sivula & Winther 2016).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import log, pi
from numbers import Integral
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor

from ..linalg.hessian import gradient
from ..linalg.host import fixed_normal
from ..linalg.products import matvec
from ..linalg.spectral import positive_part
from ..runtime.density import LatentLayout, Site, Sites, site_kind, site_log_prob, with_density
from ..runtime.model_density import MOST_NUMBERS
from ..sites.expectation import Points, quadrature_points
from ..sites.probe_points import digit_masks
from .conditional import Conditionals
from .runs import Given
from .units import Units

#: points a latent variable of a unit, or in all where it has more than three
ORDERS, SOBOL = {1: 20, 2: 7, 3: 5}, 512
#: points of a block at least and at most, and numbers that they and its matrix make: their error may
#: follow the scale of effects (11 of them, 16 points: .4 nats too much in its upper tail; 128: none)
FEW, MANY, NUMBERS = 16, 128, 1 << 16
#: points a latent variable for which NumPy finds their places
MOST = 200
#: latent variables of units at all points and draws at once: with some data for each they fit in caches
AT_ONCE = 1 << 18
#: Newton's steps of a block at each draw of the globals, those of units whose q(u | v) is astray,
#: and the sds of it at which that is looked at
NEWTON, STEPS, AWAY = 3, 4, 2.0
#: times as far as draws of q(v) at which sites are looked at, nats of data below the best of these, and
#: those of error from which quadrature is rough
SPREAD, LIKELY, NOTICED = (1.0, 2.0, 4.0, 8.0), 30.0, 0.1
#: points of wide tails and of q each that look for what the quadrature misses, and latent variables of
#: a unit up to which they find any: KL(N(0, 1) | Cauchy) is .2592 nats for each, and log 1024 = 6.93
WIDE, MOST_SEARCHED = 1024, 26


def point_count(units: Units, points: int | None) -> tuple[int, int]:
    """Points a latent variable of units of up to three, else in all; and in all."""
    k, block = units.width, units.is_block
    of_block = max(FEW, min(MANY, 2 * (NUMBERS // k**2 // 2)))
    count = (of_block if block else ORDERS.get(k, SOBOL)) if points is None else points
    if not isinstance(count, Integral) or count < 1 or (k in ORDERS and count > MOST):
        raise ValueError(
            f"points must be a whole number from 1, to {MOST} where a unit has up to three latent "
            f"variables, and is {points!r}."
        )
    return count, count**k if k in ORDERS and not block else count


def work_of_draw(units: Units, data: float) -> float:
    """Numbers gone through at each draw of v: those of the data at all points, and a block's matrix."""
    return point_count(units, None)[1] * (data + units.is_block * units.width**2)


def _points(units: Units, count: int, like: Tensor) -> Points:
    """A block has a few random ones in pairs: given v it is nearly Gaussian, whatever k is."""
    k = units.width
    if not units.is_block:
        return quadrature_points(k, count, like)
    half = fixed_normal(-(-count // 2), k, seed=count).to(like)
    x = torch.cat([half, -half])[:count]
    return Points(x, torch.full_like(x[:, 0], 1.0 / len(x)))


def at_globals(units: Units, given: Given, q: Conditionals) -> Conditionals:
    """q(u | v), of a block with the site that data make at each v, by Newton's steps from ``q``."""
    return q if units.coloring is None else _stepped(units, given, q, NEWTON)


def _stepped(units: Units, given: Given, q: Conditionals, steps: int) -> Conditionals:
    """``q`` after so many of Newton's steps towards the mode of p(u_i | y_i, v)."""
    one = torch.eye(units.width, dtype=q.white.dtype, device=q.white.device)
    vectors = one if units.coloring is None else units.coloring.vectors(q.white)
    for step in range(steps):
        # the last step alone has a gradient in v: where it begins does not matter to first order
        held = given if step == steps - 1 else given.detached()
        # not by backward: a run of a collapsed model may itself be under vmap
        slope = torch.func.grad(lambda x, held=held: units.log_likelihood(held, x).sum())
        at = q.mean.detach()
        with_products: Any = torch.func.vjp(slope, at)
        g, product = with_products
        H = -torch.stack([product(v.expand_as(at))[0] for v in vectors])
        if units.coloring is not None:
            H = units.coloring.matrix(H)
        else:  # of a block that would cost too much
            H = H.movedim(0, -1)
            H = positive_part(0.5 * (H + H.mT).flatten(0, 1)).reshape(H.shape)
        new = Conditionals.of(q.prior, g + matvec(H, at), H)
        fine = (new.white.isfinite().all(-1) & new.log_det.isfinite())[..., None]
        white = torch.where(fine, new.white, q.white)
        q = Conditionals(q.prior, white, torch.where(fine[..., None], new.root, q.root))
    return q


def _log_joint(units: Units, given: Given, w: Tensor) -> Tensor:
    """log p(y_i, u_i | v) (S, B) at white w, up to a constant at each v."""
    with torch.no_grad(), pyro.validation_enabled(False):  # far out parameters leave their support
        log_p = log_likelihoods(units, given, w) - 0.5 * w.square().sum(-1)
        return log_p.nan_to_num(-torch.inf)


def led_back(units: Units, given: Given, q: Conditionals) -> Conditionals:
    """``q``, or what Newton's steps make of it, or of the mean of the prior where p(u_i | y_i, v) is
    larger there, if that is so or if it falls by less than a tenth of what it should ``AWAY`` sds of q
    along an axis: sites follow the globals to first order, and one may lead nowhere far from q(v)."""
    one = torch.eye(units.width, dtype=q.white.dtype, device=q.white.device)
    away = [q.drawn((sign * AWAY * e).expand_as(q.white)) for e in one for sign in (1.0, -1.0)]
    here, prior, *beside = (
        _log_joint(units, given, w) for w in (q.white, torch.zeros_like(q.white), *away)
    )
    start = prior > here
    off = start | (here - torch.stack(beside).amax(0) < 0.05 * AWAY**2)
    white = torch.where(start[..., None], 0.0, q.white.detach())
    found = _stepped(units, given, Conditionals(q.prior, white, one.expand_as(q.root)), STEPS)
    better = (off & (_log_joint(units, given, found.white) >= here))[..., None]
    white = torch.where(better, found.white, q.white)
    return Conditionals(q.prior, white, torch.where(better[..., None], found.root, q.root))


class Integrated(NamedTuple):
    """log L_i(v) (S, B), and of the noise x of u_i given y_i, v the mean (S, B, k) and E x x'."""

    log_marginals: Tensor
    mean: Tensor
    square: Tensor


def integrated(
    units: Units, given: Given, q: Conditionals, points: int | None = None
) -> Integrated:
    """Units integrated out by so many ``points`` (:func:`point_count`) at each draw of v."""
    S, B, k = q.white.shape
    total = torch.full_like(q.white[..., 0], -torch.inf)
    mean, square = torch.zeros_like(q.white), torch.zeros_like(q.root)
    every = _points(units, point_count(units, points)[0], q.white)
    rows = max(1, AT_ONCE // max(1, S * B * k))
    for x, w in zip(every.x.split(rows), every.weights.split(rows), strict=True):
        noise = x[:, None, None].expand(-1, S, B, -1)
        white = q.drawn(noise)
        log_p = log_likelihoods(units, given.repeated(len(x)), white.flatten(0, 1))
        log_p = log_p.reshape(-1, S, B) + q.prior.log_prob(white)
        terms = log_p - q.log_q(noise) + w.log()[:, None, None]
        before, total = total, torch.logaddexp(total, torch.logsumexp(terms, 0))
        with torch.no_grad():
            safe = total.where(total.isfinite(), 0.0)  # no point has counted yet
            share, kept = (terms - safe).exp(), (before - safe).exp()[..., None]
            mean = kept * mean + torch.einsum("qsb,qk->sbk", share, x)
            square = kept[..., None] * square + torch.einsum("qsb,qk,ql->sbkl", share, x, x)
    return Integrated(total, mean, square)


def goes_astray(guide: Any, given: Given, points: int | None) -> bool:
    """Whether a q(u_i | v) of a ``guide`` does, so that quadrature notices, at globals further out than
    draws of q(v), which ``given`` are of, and not ruled out by the data."""
    units, layout = guide.units, LatentLayout(guide.globals.prototype_trace)
    if units.is_block:
        return False
    theta = layout.pack({name: given.values[name] for name in layout.transforms})
    theta = torch.cat([theta.mean(0) + times * (theta - theta.mean(0)) for times in SPREAD])
    # a Cholesky may fail so far out, and not all that runs has second derivatives
    with suppress(RuntimeError, ValueError), pyro.validation_enabled(False):
        wide = units.given(given.call, layout.unpack(theta))
        q = guide._conditionals(wide)
        own, back = (
            integrated(units, wide, x, points).log_marginals.sum(-1)
            for x in (q, led_back(units, wide, q))
        )
        likely = back > back.nan_to_num(-torch.inf).max() - LIKELY
        return bool((likely & ~((back - own).abs() <= NOTICED)).any())
    return False


def found_beyond(units: Units, given: Given, q: Conditionals, log_l: Tensor) -> Tensor:
    r"""What random points over all of the prior find of L_i(v), over the L_i(v) of the quadrature, of
    which ``log_l`` (S, B) are the logarithms.

    Points of q(u_i | v) alone agree on an L_i that lacks a mode where none of them is.  One half of
    these is from t, Cauchy entries with centre and scales of the prior; all count as from (t + q) / 2,
    so that weights are at most 2 L_i where q is p(u_i | y_i, v).

    Returns:
        The ratio minus 1 and its standard error, means over the draws of v, (2, B).
    """
    S, B, k = q.white.shape
    if k > MOST_SEARCHED:  # random points would find no mode
        return q.white.new_zeros(2, B)
    means, squares = torch.zeros(2, 2, S, B).to(q.white)
    rows = max(1, MOST_NUMBERS // max(1, S * B * k))

    def log_t(white: Tensor) -> Tensor:
        return -white.square().log1p().sum(-1) - k * log(pi) - q.prior.log_det

    for half in range(2):
        for n in (min(rows, WIDE - start) for start in range(0, WIDE, rows)):
            noise = torch.randn(2, n, S, B, k).to(q.white)
            white = q.drawn(noise[0]) if half else noise[0] / noise[1]
            with pyro.validation_enabled(False):  # far out parameters leave their support
                log_p = log_likelihoods(units, given.repeated(n), white.flatten(0, 1))
            log_w = log_p.reshape(n, S, B) + q.prior.log_prob(white) + log(2.0)
            log_w = log_w - torch.logaddexp(q.log_prob(white), log_t(white)) - log_l
            w = log_w.exp().nan_to_num(0.0)
            means[half] += w.sum(0) / WIDE
            squares[half] += w.square().sum(0) / WIDE
    error = ((squares - means.square()).sum(0) / WIDE).sqrt() / 2.0
    return torch.stack([means.mean(0).mean(0) - 1.0, error.square().sum(0).sqrt() / S])


def told_apart(units: Units, given: Given, q: Conditionals) -> Given:
    """With the unit that each datum outside their plate belongs to, as in ``Normal(u[index], s)``.

    Halves of the units are moved, told apart by the binary digits of their numbers.  Where a unit is
    NaN so are the densities of its data, flat or not.  What hides a NaN (torch.where), or spreads it
    (0 * NaN), is seen 1 to 64 sds away.  Refuses data of several units, and what nothing shows.
    """
    still, (S, count, k) = q.white, q.white.shape
    turn = torch.arange(S).to(still)[:, None, None]
    length = (-1.0) ** turn * 4.0 ** ((turn / 2.0).floor() % 4.0)
    noise = fixed_normal(1, count, k, seed=count).to(still)
    away = still + length * (noise + noise.sign())

    def terms(white: Tensor) -> dict[str, Tensor]:
        def outside(sites: Sites) -> dict[str, Tensor]:
            seen = {n: s for n, s in with_density(sites).items() if is_outside(units, s)}
            return {name: weighted_terms(site).reshape(-1) for name, site in seen.items()}

        values = units.values(given.latent.at(white), given.maps)
        return given.call.batched(outside, {**given.values, **values})

    masks, here, owners = digit_masks(count, still.device).unsqueeze(-1), terms(still), {}

    def there(white: Tensor) -> dict[str, Tensor]:
        with suppress(RuntimeError, ValueError), pyro.validation_enabled(False):
            return terms(white)
        # without a density there, as where a Cholesky fails, nothing is known
        return {name: torch.full_like(at, torch.nan) for name, at in here.items()}

    def changed(mask: Tensor) -> dict[str, Tensor]:
        far, lost = there(torch.where(mask, away, still)), there(still.masked_fill(mask, torch.nan))
        moved = {n: ((far[n] != at) & ~far[n].isnan()).any(0) for n, at in here.items()}
        gone = {n: (lost[n].isnan() & ~at.isnan()).any(0) for n, at in here.items()}
        return {name: torch.stack([moved[name], gone[name]]) for name in here}

    each = [changed(mask) for mask in masks if here]
    for name in here:
        moved, gone = torch.stack([x[name] for x in each], 1)
        either = moved | gone
        owned, seen = either.any(0), torch.where(_of_one(either), either, moved)
        if not bool(_of_one(seen)[owned].all()):
            raise _not_told_apart(units, name)
        ones = seen.chunk(2)[0].long()
        numbers = (ones << torch.arange(len(ones), device=still.device)[:, None]).sum(0)
        if bool(owned.any()):
            owners[name] = torch.where(owned, numbers, count)
    given = replace(given, call=replace(given.call, owners=owners))
    with torch.enable_grad():
        white = still.detach().requires_grad_()
        slope = gradient(log_likelihoods(units, given, white), white)
    whole = matvec(given.priors.root.mT, units.gradient(given, q.mean)) / given.seen.scale
    size = 1e-3 * whole.abs().max().clamp_min(1e-3)
    if not bool(((slope - whole).abs() <= size).all()):
        raise _not_told_apart(units, "")
    return given


def _of_one(changed: Tensor) -> Tensor:
    """Which of N changed (2 b, N), by the halves of :func:`digit_masks`, with a single number."""
    ones, zeros = changed.chunk(2)
    return (ones ^ zeros).all(0)


def _not_told_apart(units: Units, name: str) -> ValueError:
    which = f"a number of {name!r}" if name else "a density"
    return ValueError(
        f"AutoHierarchical: {which} outside the plate {units.plate!r} is of several units, or nothing "
        f"shows of which. Let each datum have its own, by u[..., index] in a plate of data: no "
        f".to_event(1), no matrix times u."
    )


def is_outside(units: Units, site: Site) -> bool:
    """Whether a site is data, or a factor, outside the plate of the units."""
    inside = any(frame.name == units.plate for frame in site["cond_indep_stack"])
    return not inside and site_kind(site) != "latent"


def weighted_terms(site: Site) -> Tensor:
    """The log density of a site, term by term, as scales and masks weigh it."""
    plain, weighted = site_log_prob(site)
    return weighted.expand(plain.shape)


def log_likelihoods(units: Units, given: Given, white: Tensor) -> Tensor:
    """log p(y_i | u_i, v) (S, B) at white w (S, B, k), of what is observed of each unit."""
    owners = given.call.owners

    def of_units(sites: Sites) -> Tensor:
        total = white.new_zeros(white.shape[1] + 1)
        for name, site in with_density(sites).items():
            outside = is_outside(units, site)
            if site_kind(site) == "latent" or (outside and name not in owners):
                continue
            terms = weighted_terms(site) / given.seen.scale
            if outside:
                total = total.index_add(0, owners[name], terms.reshape(-1).to(total))
            else:
                rows = terms.movedim(units.dim or 0, 0)  # without a plate all is outside
                total = total + torch.nn.functional.pad(rows.reshape(len(rows), -1).sum(-1), (0, 1))
        return total[:-1]

    values = units.values(given.latent.at(white), given.maps)
    return given.call.batched(of_units, {**given.values, **values})
