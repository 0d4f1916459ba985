"""Leaving out each datum in turn, of as many data as one likes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..hierarchy import ExactUnits
from ..runtime.density import Sites, site_log_prob
from ..runtime.model_density import map_draws
from .arviz_compat import elpd_data
from .correction import Corrected
from .diagnosis import Diagnosis
from .draws import Draws, Fitted, compact, mask_of, random_state, sites_of_kind, with_likelihood
from .groups import name_dims, observations
from .khat import KHat, khat_from_log_weights
from .verdict import MORE, PATIENCE, judge, may_draw_more
from .weights import log_sum_exp

#: log likelihoods that are held at once: a GiB, in float32 as `to_arviz` stores so many of them
HELD = 2**28
#: nats without which a draw has no weight; a difference of such numbers is one of roundings
RULED_OUT = 1e6
#: observed sites above which they are a series, of which a user would hardly choose one
FEW = 8


def loo(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 1000,
    var_name: str | None = None,
    seed: int | None = None,
    batch_size: int | None = None,
    verdict: KHat | Diagnosis | Corrected | None = None,
    **kwargs: Any,
) -> Any:
    r"""Leaving out one datum in turn, by Pareto-smoothed importance sampling from the guide's draws:
    ArviZ's ``ELPDData``, in nats, with the terms of all data.

    The draws z_s are of q, and the posterior without datum i is p(z | y) / p(y_i | z) up to a constant,
    so that the weights are p(y, z_s) / (q(z_s) p(y_i | z_s)) (Magnusson et al. 2019), smoothed:

    .. math:: \log p(y_i | y_{-i}) \approx \log \sum_s w_{is} p(y_i | z_s), \quad \sum_s w_{is} = 1.

    ``arviz.loo`` of the guide's draws leaves p / q out, as is done here only where p / q is of no use,
    :class:`KHat` "unusable".  Where chains have judged such a guide their last states are the draws:
    tails of a guide may be too light to show how far the data without one of them lead.  Where p / q
    is the same in practice at all draws, k-hat of a datum is of 1 / p(y_i | z_s) alone.  Under
    ``poutine.scale`` c it is p(y_i | z)^c that is left out.  Where a k-hat is too large 16 times as
    many draws decide, if they and the data are no more than 5 * 10^7 numbers (draws of units by
    quadrature, if they take 15 s at most).  Masked data are no data.  Not for data that depend on each
    other given the latent variables, nor for leaving out units of a hierarchy (:func:`loo_units`).

    Args:
        model: the Pyro model.
        guide: any trained guide of it.
        args: those of both, and ``kwargs``: the full data.
        num_samples: draws, at first.
        var_name: the observed site, where there are several.
        seed: makes the result repeatable and leaves the global random state as it was.
        batch_size: draws that the model sees at once; ``None`` for a number that bounds the memory.
        verdict: what is known of the guide, by :func:`khat` or :func:`diagnose`; found where not given.

    Raises:
        ValueError: as :func:`khat`, and where no or several sites have a likelihood by datum.

    Warns:
        RuntimeWarning: where weights are of no use, and the verdict does not say "intervals"; where
            rounding puts log p off.
        UserWarning: where k-hat of a datum is too large, as ``arviz.loo``; it is by the guide, not by
            the datum, where that of 1 / p(y_i | z_s) alone is not, and below that of p / q.

    Source: Magnusson, Andersen, Jonasson & Vehtari 2019, Bayesian leave-one-out cross-validation for
    large data, ICML, section 2.2.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer.autoguide import AutoNormal
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("unit", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> found = loo(model, AutoNormal(model, init_scale=0.2), torch.linspace(-1.0, 1.0, 20), seed=0)
        >>> found.n_data_points
        20
    """
    with random_state(seed):
        fitted = Fitted(model, guide, args, kwargs)
    fitted.shown = fitted.latent  # a deterministic site may be as large as the data
    name = _site_of(fitted, var_name)
    one, rows, powers = _rows(fitted, name)
    dims = name_dims({"": {name: one.numpy(force=True)}}, fitted.in_sum, {}, {})[name]
    shape = dict(zip(dims, one.shape, strict=False))
    if len(rows) < one.numel():
        shape = {f"{name}_seen": len(rows)}
    with random_state(seed):
        draws = fitted.draw(num_samples, batch_size)
        verdict = verdict or judge(fitted, draws, batch_size)
        weights = verdict if isinstance(verdict, KHat) else verdict.khat
        weigh = weights.decision != "unusable"
        if not verdict.ok and (not weigh or weights.other_modes):
            better = ", and guide.loo() does better" if hasattr(guide, "loo") else ""  # of sites
            words = f"loo cannot be relied on here{better}. {verdict.verdict}"
            warnings.warn(shorten(words, 240, placeholder=" ..."), RuntimeWarning, stacklevel=2)
        elif weights.rounded:
            warnings.warn(f"loo: {weights.rounded}", RuntimeWarning, stacklevel=2)
        ends = None if weigh else getattr(verdict, "ends", None)
        if ends is not None:
            num_samples = len(next(iter(ends.values())))
            even = torch.zeros(num_samples, dtype=torch.float64)
            draws = replace(draws, values=ends, log_q=even, log_joint=even)
        found = _left_out(fitted, draws, name, rows, powers, weigh, batch_size)
        # units that are drawn by quadrature may cost too much for that
        patient = not isinstance(guide, ExactUnits) or MORE * fitted.seconds <= PATIENCE
        patient &= ends is None
        if found[3].any() and patient and may_draw_more(fitted, draws):
            num_samples *= MORE
            draws = fitted.draw(num_samples, batch_size)
            found = _left_out(fitted, draws, name, rows, powers, weigh, batch_size)
    if found.shape[1] > len(rows):  # with those of other processes
        shape = {f"{name}_seen": found.shape[1]}
    by_guide = int(found[4].sum()), draws.weights.khat
    latent = sum(x[0].numel() for x in draws.values.values())
    return elpd_data(found[0], found[1], found[2], shape, num_samples, by_guide, latent)


def _left_out(
    fitted: Fitted,
    draws: Draws,
    name: str,
    rows: Tensor,
    powers: Tensor,
    weigh: bool,
    batch_size: int | None,
) -> np.ndarray:
    """:func:`_one` of all data, (5, N)."""
    size = len(draws.log_q)

    def terms(some: Tensor) -> Tensor:
        """Log likelihoods of some data at all draws."""

        def chosen(sites: Sites) -> Tensor:
            term = site_log_prob(sites[name])[0]
            return compact(term, size).flatten()[some]

        return map_draws(fitted.joint, chosen, draws.values, size, batch_size)

    log_ratio = draws.log_ratio if weigh else np.zeros(size)
    weights = draws.weights if weigh else khat_from_log_weights(log_ratio)
    parts = [*zip(*(x.split(max(1, HELD // size)) for x in (rows, powers)), strict=True)]
    ruled = log_ratio < log_ratio.max() - RULED_OUT
    if ruled.any():  # a draw that two data rule out has no weight without one of them
        count = sum((terms(part) < -RULED_OUT).sum(1).cpu().numpy() for part, _ in parts)
        ruled &= count != 1
    found = []
    for part, of_part in parts:
        log_l = terms(part).cpu().numpy()
        log_l[ruled] = 0.0
        pairs = zip(log_l.T, of_part.tolist(), strict=True)
        found += [_one(x, c, log_ratio, weights) for x, c in pairs]
    left_out = np.array(found).reshape(-1, 5).T
    if fitted.whole:
        left_out = np.hstack(fitted.whole.of_all(left_out, fitted.in_sum[name]))
    return left_out


def _one(
    log_l: np.ndarray, power: float, log_ratio: np.ndarray, weights: KHat
) -> tuple[float, float, float, bool, bool]:
    """log p(y_i | y_-i), log p(y_i | y), k-hat of the weights of the former, whether it is too large,
    and then more by p / q than by the datum: from log p(y_i | z_s), (S,), its power in the posterior,
    log p(y, z_s) / q(z_s) up to a constant, (S,), and the weights that it gives."""
    log_l, ratio, beside = log_l.astype(np.float64), log_ratio, 0.0
    if weights.nearly_equal:  # what p / q adds to the tail is noise
        ratio, beside = 0.0, weights.psis_log_weights
    left_out, k, found = without(log_l, ratio, power, beside)
    if math.isnan(left_out):
        return left_out, left_out, k, False, False
    large = k > found.threshold
    by_guide = large and not weights.nearly_equal
    if by_guide:
        own = khat_from_log_weights(-power * log_l)
        by_guide = own.khat <= own.threshold and own.khat < weights.khat
    return left_out, log_sum_exp(log_l + weights.psis_log_weights), k, large, by_guide


def without(
    log_l: np.ndarray,
    log_ratio: np.ndarray | float,
    power: float = 1.0,
    beside: np.ndarray | float = 0.0,
) -> tuple[float, float, KHat]:
    """log p(y_i | y_-i), NaN where a draw rules it out, whose weight is not known; k-hat, below its
    bound where weights are equal in practice; the weights.  ``beside`` are others, in no need of
    smoothing."""
    with np.errstate(invalid="ignore"):
        found = khat_from_log_weights(log_ratio - power * log_l)
    if found.ess == 0.0:
        return math.nan, found.khat, found
    # ArviZ counts the bound itself as too large
    k = min(found.khat, found.threshold - 1e-9) if found.reliable else found.khat
    log_weights = found.psis_log_weights + beside
    return log_sum_exp(log_l + log_weights) - log_sum_exp(log_weights), k, found


def _site_of(fitted: Fitted, var_name: str | None) -> str:
    names = with_likelihood(fitted)
    if var_name is not None and var_name not in names:
        raise ValueError(f"var_name is {var_name!r}; the sites with a likelihood are {names}.")
    if var_name is None and len(names) != 1:
        some = f"choose one of {names} by var_name"
        if not names and sites_of_kind(fitted.in_sum, "observed"):
            some = "the data share an enumerated variable, and none is alone"
        elif not names:
            some = "loo needs data in a plate, and pyro.factor has none"
        elif len(names) > FEW:
            some = "put the data of a series into one site in a plate, or choose a site by var_name"
        raise ValueError(f"{len(names)} observed sites have a likelihood by datum: {some}.")
    return var_name or names[0]


def _rows(fitted: Fitted, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Terms of one draw; which of them, flat, are not masked; and the powers of these in the posterior,
    but for what ranks stand for."""
    site, scale = fitted.in_sum[name], fitted.sites.get(name, {}).get("scale", 1.0)
    one = site_log_prob(site)[0]
    rows = mask_of(site).expand(one.shape).flatten().nonzero()[:, 0]
    scale = torch.as_tensor(scale, dtype=torch.float64, device=one.device)
    powers = (scale / getattr(fitted.whole, "factor", 1.0)).expand(one.shape).flatten()
    return one, rows, powers[rows]


def data_of(model: Any, guide: Any, args: Any, kwargs: Any, var_name: str | None) -> np.ndarray:
    """What :func:`loo` leaves out in turn, (N, ...); all data where they share enumerated variables."""
    with warnings.catch_warnings(), random_state(0):
        warnings.simplefilter("ignore")  # loo says so too
        fitted = Fitted(model, guide, args, kwargs)
        name = _site_of(fitted, var_name)
    held = observations(fitted.sites, sites_of_kind(fitted.sites, "observed"))
    if name not in held:
        return np.concatenate([x.flatten() for x in held.values()])
    one, rows, _ = _rows(fitted, name)
    return held[name].reshape(one.numel(), -1)[rows.cpu().numpy()]
