r"""Expected curvature of -log p(y, z) at the draws of a guide, for rules that build on it.

With z = z(theta), theta (d,) unconstrained, and one term per datum,

    -log p~(theta) = - sum_i s_i log p(y_i | theta) - rest(theta),

s_i the scale (and mask) of datum i, rest the prior, the log-Jacobian, factors and what is observed
outside a plate.  Averages over the draws theta ~ q of

    "hessian"            grad^2 (-log p~), by forward over reverse mode
    "gauss_newton"       sum_i s_i g_i g_i' + grad^2 (-rest),   g_i = grad log p(y_i | theta)
    "squared_gradient"   diag(G o G / N) + grad^2 (-rest),      G = sum_i s_i g_i,  N = sum_i s_i
    "price"              nothing: the gradients of the scales carry it (Price's theorem)
    "kronecker"          two factors for each matrix: see :mod:`pyro_ngvi.curvature.kronecker`

The outer products g_i g_i' stand for the Hessian as in VOGN and SLANG (Khan et al. 2018, Mishkin et al.
2018): positive semi-definite, right in expectation at parameters that fit the data, too small or too
large elsewhere. Their scale enters once: a minibatch of M of N data estimates the whole sum.
Squares of the sum over a minibatch, as Adam and Vadam have them, are M times smaller for M
independent terms.

A datum is an entry of the log probability of an observed site in a plate; with nested plates,
subjects by times, each entry is one.

A guide asks for a form: "dense" (d, d); "diagonal" (d,); "low_rank", rows (n, d) beside a diagonal.
The diagonal forms keep the diagonal of the rest's curvature.

Averages of second derivatives are the curvature of E_q[-log p] only where gradients are continuous:
those of Laplace distributions and of networks with ReLU jump, and the jumps are left out.  The first
step looks for them and warns (:mod:`pyro_ngvi.probing.kinks`).

Cost, for S draws: "hessian" d gradients, "gauss_newton" min(d, number of data) directional derivatives.
Not for d above some thousands with "hessian", nor with many data and many parameters at once
with "gauss_newton".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.func import grad, vmap

from ..linalg.random import fixed_normal
from ..runtime.checks import sum_log_prob
from ..runtime.density import site_kind, site_log_prob
from ..runtime.pyro_adapter import masks_of
from ..runtime.vmap import Site, Sites
from .forward import jvp
from .per_example import BUDGET, outer_sum, squared_sum, weighted_rows

__all__ = [
    "KINDS",
    "Run",
    "data_terms",
    "expected_curvature",
    "is_data",
    "rest_curvature",
    "rest_is_diagonal",
    "squares_of",
]

KINDS = ("price", "hessian", "gauss_newton", "squared_gradient", "kronecker", "scores")

#: the diagonal of a Hessian that is not diagonal takes so many passes at the most
MOST_COLUMNS = 20_000
#: columns of a Hessian that are computed at a time, for each draw
CHUNK = 64
#: and for all draws together
COLUMNS = 1024
#: random halves of the entries that are tried at each of three points
HALVES = 8

Run = Callable[[Tensor, Callable[[Sites], Any]], Any]


def expected_curvature(
    run: Run, theta: Tensor, kind: str, form: str, diagonal_rest: bool = False
) -> dict[str, Tensor]:
    """The average curvature at draws ``theta`` (S, d), in nats; see the head of this file.

    ``run(theta_s, reduce)`` runs the model at one draw (d,) and returns ``reduce(sites)`` with a
    leading dimension 1, and the log-Jacobian.  ``diagonal_rest``: whether the Hessian of the rest is
    diagonal (:func:`rest_is_diagonal`), which then costs one pass.
    """
    if kind == "price":
        return {}

    def joint(t: Tensor) -> Tensor:
        total, log_det = run(t, sum_log_prob)
        return -(total[0] + log_det)

    if kind == "hessian":
        if form == "dense":
            return {"dense": _average(lambda t: _hessian(joint, t), theta)}
        return {"diagonal": _average(lambda t: _hessian_diagonal(joint, t), theta)}

    data = data_terms(run)
    if form == "dense":
        rest = _rest(run)
        prior = _average(lambda t: _hessian(rest, t), theta)
    else:
        prior = rest_curvature(run, theta, diagonal_rest)

    if kind == "squared_gradient":
        _, weight = data(theta[0])
        count = weight.sum()

        def square(t: Tensor) -> Tensor:
            def weighted(t: Tensor) -> Tensor:
                log_prob, weight = data(t)
                return (log_prob * weight).sum()

            return grad(weighted)(t).square()

        likelihood = _average(square, theta, columns=1) / count
        return {"diagonal": likelihood + prior, "prior": prior, "count": count}

    products = _products(data, theta, form)
    if form == "low_rank":
        return {"rows": products, "diagonal": prior}
    return {form: products + prior}


def rest_curvature(run: Run, theta: Tensor, diagonal_rest: bool) -> Tensor:
    """The diagonal of the rest's Hessian, averaged over draws ``theta`` (S, d): (d,)."""
    rest = _rest(run)
    if diagonal_rest:
        return _average(lambda t: _row_sums(rest, t), theta, columns=1)
    _check_affordable(theta.shape[1])
    return _average(lambda t: _hessian_diagonal(rest, t), theta)


def rest_is_diagonal(run: Run, t: Tensor) -> bool:
    """Whether the Hessian of the rest is diagonal, probed around a draw ``t`` (d,).  It waits."""
    return _is_diagonal(_rest(run), t)


def _rest(run: Run) -> Callable[[Tensor], Tensor]:
    def rest(t: Tensor) -> Tensor:
        total, log_det = run(t, _log_prob_of_rest)
        return -(total[0] + log_det)

    return rest


def data_terms(run: Run) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """theta (d,) to the log probability of each datum and its weight, both (N,)."""

    def data(t: Tensor) -> tuple[Tensor, Tensor]:
        (log_prob, weight), _ = run(t, _data)
        return log_prob[0], weight[0]

    return data


def squares_of(run: Run, theta: Tensor, entries: Tensor) -> Tensor:
    """The average over draws of sum_i s_i g_i^2, of some ``entries`` (k,) of theta (S, d) only."""
    data = data_terms(run)
    _, weights = data(theta[0])

    def squares(t: Tensor) -> Tensor:
        def some(part: Tensor) -> Tensor:
            return data(t.index_copy(0, entries, part))[0]

        return squared_sum(some, t[entries], weights, budget=BUDGET // at_a_time)

    at_a_time = _at_a_time(theta, len(entries))
    return _average(squares, theta, columns=len(entries))


def _products(data: Callable[[Tensor], tuple[Tensor, Tensor]], theta: Tensor, form: str) -> Tensor:
    """The average over draws of sum_i s_i g_i g_i', or its rows, in the form asked for."""
    _, weights = data(theta[0])  # the same for all draws, as the minibatch is

    def reduced(t: Tensor) -> Tensor:
        reduce = {"diagonal": squared_sum, "dense": outer_sum, "low_rank": weighted_rows}[form]
        return reduce(lambda t: data(t)[0], t, weights, budget=BUDGET // _at_a_time(theta))

    if form == "low_rank":
        rows = vmap(reduced, chunk_size=_at_a_time(theta), randomness="same")(theta)
        return rows.flatten(0, 1) / len(theta) ** 0.5
    return _average(reduced, theta)


def _average(
    function: Callable[[Tensor], Tensor], theta: Tensor, columns: int | None = None
) -> Tensor:
    """The mean of ``function`` over the rows of ``theta`` (S, d), as many at a time as fit.

    ``columns`` is how many passes through the model one value holds at a time; by default d.
    """
    chunk = _at_a_time(theta, columns)
    return vmap(function, chunk_size=chunk, randomness="same")(theta).mean(0)


def _at_a_time(theta: Tensor, columns: int | None = None) -> int:
    return max(1, min(len(theta), COLUMNS // (columns or theta.shape[1])))


def _hessian(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    H = _jacobian(grad(function), t)
    return 0.5 * (H + H.mT)


def _jacobian(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """d function / dt, (n, d), by forward mode, ``CHUNK`` columns at a time."""

    def column(e: Tensor) -> Tensor:
        return jvp(function, (t,), (e,))[1]

    basis = torch.eye(len(t), dtype=t.dtype, device=t.device)
    return vmap(column, out_dims=-1, chunk_size=CHUNK, randomness="same")(basis)


def _hessian_diagonal(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    def entry(i: Tensor) -> Tensor:
        e = (torch.arange(len(t), device=t.device) == i).to(t)
        return (jvp(grad(function), (t,), (e,))[1] * e).sum()

    indices = torch.arange(len(t), device=t.device)
    return vmap(entry, chunk_size=CHUNK, randomness="same")(indices)


def _row_sums(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """H 1: the diagonal, for a diagonal H."""
    return _product(function, t, torch.ones_like(t))


def _product(function: Callable[[Tensor], Tensor], t: Tensor, v: Tensor) -> Tensor:
    """H v, by reverse over reverse mode: for one v far cheaper than forward over reverse."""
    return grad(lambda t: grad(function)(t) @ v)(t)


def _is_diagonal(function: Callable[[Tensor], Tensor], t: Tensor) -> bool:
    """Whether the Hessian is diagonal: for v that is zero in half of the entries, so is H v there.

    Zero to the bit, as products with 0 are, whatever the units of the latents and the rounding of the
    diagonal.  Of two entries that are coupled one half has one of them, and not the other, as often as
    not; over all halves it escapes once in 2^24.
    """
    values = fixed_normal(len(t), seed=len(t)).to(t)
    halves = (fixed_normal(HALVES, len(t), seed=len(t) + 1) > 0.0).to(t)
    away = torch.arange(1, len(t) + 1, dtype=t.dtype, device=t.device).sin()
    # at points away from the draw too: where it lies, terms may vanish that do so nowhere else
    for point in (t, t + away, t - 0.7 * away):
        for half in halves:
            if bool(((1.0 - half) * _product(function, point, half * values) != 0.0).any()):
                return False
    return True


def _data(sites: Sites) -> tuple[Tensor, Tensor]:
    """Log probability of each datum (N,), without scale, and its scale times mask (N,)."""
    log_probs, weights = [], []
    for site in filter(is_data, sites.values()):
        plain, _ = site_log_prob(site)
        log_probs.append(scale_and_mask(plain, 1.0, site["mask"]).reshape(-1))
        weights.append(scale_and_mask(_shown(site, plain), site["scale"], None).reshape(-1))
    if not log_probs:
        raise ValueError(
            "Products of the gradients of single data need to know what a datum is, and no observed "
            'site of the model lies in a plate. Put it in one (with pyro.plate("data", N): '
            'pyro.sample("y", ..., obs=y)), or use curvature="hessian".'
        )
    return torch.cat(log_probs), torch.cat(weights)


def _shown(site: Site, log_prob: Tensor) -> Tensor:
    """1 for the data that the site's masks leave, 0 for others."""
    shown = torch.ones_like(log_prob)
    for mask, left_out in masks_of(site):
        within = site["fn"].event_dim - left_out
        if within and isinstance(mask, Tensor):
            # of an event some parts may be hidden: the datum is there while one of them is
            mask = mask.expand(log_prob.shape + site["fn"].event_shape[:within])
            mask = mask.flatten(-within).any(-1)
        shown = shown * mask
    return shown


def _log_prob_of_rest(sites: Sites) -> Tensor:
    return sum_log_prob({name: site for name, site in sites.items() if not is_data(site)})


def is_data(site: Site) -> bool:
    """Whether a site is observed in a plate, so that its entries are data."""
    if site_is_subsample(site) or site_kind(site) != "observed":
        return False
    return any(f.vectorized for f in site["cond_indep_stack"])


def _check_affordable(d: int) -> None:
    """Refuse the diagonal of a dense Hessian of the log prior, a pass for each of ``d`` columns."""
    if d > MOST_COLUMNS:
        raise ValueError(
            "The Hessian of the log prior is not diagonal (one latent site in the prior of "
            f"another), and its diagonal would take {d:,} passes through the model. Use "
            "independent priors, or curvature='price' with pyro_ngvi.optim.IVON."
        )
