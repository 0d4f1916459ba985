r"""What importance weights say: the tail that they have, whether a fit had ended, what it missed.

For draws z_s of q, s = 1..S, and l_s = log p(data, z_s) - log q(z_s).

**Tail** (Vehtari, Simpson, Gelman, Yao & Gabry 2024, JMLR 25(72), section 3).  The largest
M = ceil(min(S/5, 3 sqrt(S))) weights exceed the next one, u, by a generalised Pareto distribution,

    Q(p) = sigma / k ((1 - p)^-k - 1),

k and sigma as of Zhang & Stephens (2009), k then pulled towards 1/2 with the weight of ten draws.
Smoothing replaces the i-th smallest weight of the tail by u + Q((i - 1/2) / M), cut at the largest.

Where k comes out too large though the weights are worth half of the draws, or more, the M / S may be no
tail: most of these weights lie just above u, at a maximum of the log ratio inside the bulk of q, and a
few far above.  The upper quarter decides there, if it has 90 weights or more.

**Slopes.**  With u the unconstrained draws in units of their sds,

    b = Cov(u, l),     c = Cov((u^2 - 1) / 2, l).

For a Gaussian q these are the natural gradient of the ELBO in the mean of an entry, in sds, and in its
log sd (Bonnet, Price); at the optimum of any family that can move and stretch along an entry they are
zero.

**Evidence.**  Draws of the prior give Z = mean_s p(y | z_s), unbiased for p(y) whatever the guide.  The
guide has missed a mode where the larger of two lower bounds on p(y) exceeds its own estimate: Z / 100,
above p(y) with probability 1 % at most (Markov), and Z less four standard errors.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..linalg.host import own_random_state
from ..runtime.density import Sites, site_log_prob
from ..runtime.model_density import map_draws
from .shifts import blocks

MIN_DRAWS = 25  # fewer leave less than five weights for the tail
FEWEST = 5  # weights that make a tail
PART, FEWEST_OF_PART = 0.25, 90  # of the tail, where the whole of it may be none
PRIOR_DRAWS, PRIOR_SHAPE = 10, 0.5
SURPRISE = float(np.log(100.0))  # nats
ERRORS = 4.0  # standard errors
NOTICED = 0.1  # nats of evidence that count


class Tail(NamedTuple):
    """Weights ``at`` these places, ascending, exceed ``cutoff`` by Pareto(shape, scale), in units of
    the largest; ``shape`` is infinite where there is no tail to fit."""

    at: np.ndarray
    cutoff: float
    shape: float
    scale: float


def find_tail(x: np.ndarray, share: float = 1.0) -> Tail:
    """The tail of the weights exp(x), for log weights x (S,) with maximum 0; or a share of it."""
    length = int(np.ceil(share * min(len(x) / 5, 3 * np.sqrt(len(x)))))
    cutoff = max(np.partition(x, -length - 1)[-length - 1], np.log(np.finfo(np.float64).tiny))
    at = np.flatnonzero(x > cutoff)
    at = at[np.argsort(x[at], kind="stable")]
    if len(at) < FEWEST:
        return Tail(at, float(np.exp(cutoff)), float("inf"), float("nan"))
    y = np.exp(x[at]) - np.exp(cutoff)
    # Zhang & Stephens (2009) with k = -(their k)
    n = len(y)
    m = 30 + int(np.sqrt(n))
    quartile = y[int(n / 4 + 0.5) - 1]
    theta = 1 / y[-1] + (1 - np.sqrt(m / (np.arange(1, m + 1) - 0.5))) / (3 * quartile)
    k = np.log1p(-theta[:, None] * y).mean(1)
    profile = n * (np.log(-theta / k) - k - 1)
    weights = np.exp(profile - profile.max())
    theta_hat = (weights / weights.sum()) @ theta
    k_hat = np.log1p(-theta_hat * y).mean()
    shape = (n * k_hat + PRIOR_DRAWS * PRIOR_SHAPE) / (n + PRIOR_DRAWS)
    scale = -k_hat / theta_hat  # it belongs to the shape of the data
    return Tail(at, float(np.exp(cutoff)), float(shape), float(scale))


def log_sum_exp(x: np.ndarray) -> float:
    """Of numbers (S,) of which one is finite."""
    return float(x.max() + np.log(np.exp(x - x.max()).sum()))


def smoothed(log_weights: np.ndarray, tail: Tail | None = None) -> np.ndarray:
    """Log weights (S,) with the tail smoothed, normalised; unchanged where there is no tail."""
    x = log_weights - log_weights.max()
    tail = tail or find_tail(x)
    if np.isfinite(tail.shape):
        p = (np.arange(len(tail.at)) + 0.5) / len(tail.at)
        log_rest = -np.log1p(-p)
        excess = tail.scale * log_rest
        if tail.shape != 0.0:
            with np.errstate(over="ignore"):  # which the largest weight cuts
                excess = tail.scale * np.expm1(tail.shape * log_rest) / tail.shape
        x[tail.at] = np.minimum(np.log(tail.cutoff + excess), 0.0)
    return x - log_sum_exp(x)


def systematic_resample(
    log_weights: np.ndarray, offset: float, count: int | None = None
) -> np.ndarray:
    """Places (n,), ascending, of ``count`` n, by default S, draws in proportion to normalised weights
    (S,); ``offset`` in [0, 1). Place s comes floor(n w_s) or ceil(n w_s) times."""
    share = np.cumsum(np.exp(log_weights))
    count = len(share) if count is None else count
    points = (np.arange(count) + offset) / count
    # the sum of all shares is 1 up to rounding
    return np.searchsorted(share / share[-1], points, side="right").clip(max=len(share) - 1)


@dataclass(frozen=True)
class Slope:
    """The steepest slope of the ELBO along an entry: ``size`` and its standard ``error``, in sds;
    ``excess`` is |slope| less 1 + sqrt(2 log 2n) errors, the largest noise of 2n slopes."""

    name: str
    what: str
    size: float
    error: float
    excess: float


def steepest(draws: Mapping[str, np.ndarray], log_ratio: np.ndarray) -> Slope | None:
    """The slope that stands out most of its noise, of unconstrained ``draws`` (S, *shape) by name."""
    found = None
    for name, quantity in draws.items():
        if not quantity.size:
            continue
        found = found or Slope(name, "mean", 0.0, 0.0, 0.0)
        if not np.isfinite(log_ratio).all():
            break
        centred = (log_ratio - log_ratio.mean())[:, None]
        noises = 1 + np.sqrt(2 * np.log(2.0 * np.prod(quantity.shape[1:])))
        for x in blocks(quantity):
            with np.errstate(all="ignore"):
                u = (x - x.mean(0)) / x.std(0)
                for what, feature in (("mean", u), ("sd", (u * u - 1) / 2)):
                    terms = feature * centred
                    slope = terms.mean(0)
                    error = (terms - slope).std(0) / np.sqrt(len(x))
                    excess = np.nan_to_num(np.abs(slope) - noises * error, nan=0.0, posinf=0.0)
                    at = int(excess.argmax())
                    if excess[at] > found.excess:
                        found = Slope(name, what, *map(float, (slope[at], error[at], excess[at])))
    return found


class Evidence(NamedTuple):
    """log of a mean weight, in nats, and the standard error of the mean over the mean."""

    log: float
    error: float


def evidence_of(log_weights: np.ndarray) -> Evidence:
    """The evidence that log weights (S,) show; -inf is a weight of zero."""
    top = log_weights.max()
    if not np.isfinite(top):
        return Evidence(-np.inf, np.inf)
    weights = np.exp(log_weights - top)
    mean = float(weights.mean())
    return Evidence(float(top + np.log(mean)), float(weights.std() / mean / len(weights) ** 0.5))


def missed_nats(prior: Evidence, guide: Evidence) -> float:
    """Nats by which lower bounds from the prior exceed the guide's estimate: positive if it missed."""
    by_markov = prior.log - SURPRISE - guide.log
    sure = 1.0 - ERRORS * prior.error
    if sure <= 0.0:
        return by_markov
    by_error = prior.log + float(np.log(sure)) - guide.log - float(np.log1p(ERRORS * guide.error))
    return max(by_markov, by_error - NOTICED)


def share_missed(nats: float) -> str:
    """What so many nats of evidence more than the guide's are of the mass, in words."""
    share = -100.0 * float(np.expm1(-nats))
    return f"at least {min(share, 99.0):.2g} % of the mass where the guide has next to none"


def prior_evidence(*args: Any, **kwargs: Any) -> Evidence | None:
    """The mean likelihood over draws of the prior, of :func:`prior_weights`, if there are any."""
    found = prior_weights(*args, **kwargs)
    return None if found is None else evidence_of(found[0].cpu().numpy())


def prior_weights(
    model: Callable[[], Any],
    latent: Collection[str],
    num_samples: int,
    batch_size: int | None = None,
    joints: Callable[[], Iterable[tuple[float, Any]]] | None = None,
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Log likelihoods (S,) at draws of the prior, and these (S, *shape); ``None`` where it cannot be
    drawn from.  ``joints`` give the model of each minibatch with its share, where ``model`` is one of
    them."""

    def likelihood(sites: Sites) -> tuple[Tensor, dict[str, Tensor]]:
        terms = {name: site_log_prob(site) for name, site in sites.items()}
        log_joint = [scaled.double().sum() for _, scaled in terms.values()]
        # what the draws came from: a masked prior is improper and still draws
        drawn_from = [-terms[name][0].double().sum() for name in latent]
        log_weight = torch.stack([*log_joint, *drawn_from]).sum()
        return log_weight, {name: sites[name]["value"] for name in latent}

    with own_random_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # far from the posterior models may warn of anything
        try:
            found, values = map_draws(model, likelihood, {}, num_samples, batch_size)
            if joints is not None:
                given = likelihood, values, num_samples, batch_size
                each = [share * map_draws(part, *given)[0] for share, part in joints()]
                found = torch.stack(each).sum(0)
        except Exception:  # improper priors; models that fail far from the posterior, in any way
            return None
    return torch.where(torch.isfinite(found), found, -torch.inf), values
