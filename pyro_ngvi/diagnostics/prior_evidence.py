r"""Do draws from the prior know of evidence that the guide's draws do not show?

For draws z_s from the prior, Z = mean_s p(y | z_s) is an unbiased estimate of p(y), whatever the guide.
The guide has missed a mode, or the place of the posterior, where the larger of two lower bounds on p(y)
exceeds its own estimate: Z / 100, which by Markov's inequality is above p(y) with a probability of at
most 1 %, and, where enough draws of the prior count, Z less four standard errors.

It sees only what some prior draws meet, so it is silent where the prior is much wider than the
posterior in many directions, and on modes with a small share of the mass.
"""

import warnings
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import torch

from ..linalg.host import own_random_state
from ..runtime.density import Sites, site_log_prob
from ..runtime.model_density import Parts, map_draws

__all__ = ["Evidence", "evidence_of", "missed_nats", "prior_evidence"]

SURPRISE = float(np.log(100.0))  # nats; see the head of this file
ERRORS = 4.0  # standard errors
NOTICED = 0.1  # nats of evidence that count


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


def prior_evidence(
    model: Callable[[], Any],
    latent: Collection[str],
    num_samples: int,
    batch_size: int | None = None,
) -> Evidence | None:
    """The mean likelihood over draws of the prior; ``None`` where it cannot be drawn from.

    Leaves the random state alone.
    """

    def likelihood(sites: Sites) -> Parts:
        terms = {name: site_log_prob(site) for name, site in sites.items()}
        log_joint = [scaled.double().sum() for _, scaled in terms.values()]
        # what the draws came from: a masked prior is improper and still draws
        drawn_from = [-terms[name][0].double().sum() for name in latent]
        return {"sums": {"log_weight": torch.stack([*log_joint, *drawn_from]).sum()}}

    with own_random_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # far from the posterior models may warn of anything
        try:
            run = map_draws(model, likelihood, {}, num_samples, batch_size)
        except Exception:  # improper priors; models that fail far from the posterior, in any way
            return None
    log_weights = run["sums"]["log_weight"]
    return evidence_of(
        torch.where(torch.isfinite(log_weights), log_weights, -torch.inf).cpu().numpy()
    )
