r"""Do draws from the prior know of evidence that the guide's draws do not show?

For draws z_s from the prior, mean_s p(y | z_s) is an unbiased estimate of p(y), whatever the guide.
By Markov's inequality it exceeds 100 p(y) with a probability of at most 1 %: where it exceeds the
guide's estimate by more than that, the guide has missed a mode, or the place of the posterior.

It sees only what some prior draw meets, so it is silent where the prior is much wider than the
posterior in many directions.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch

from .._map_draws import Parts, map_draws
from .._particles import Sites
from .._random import own_random_state
from ..density import site_log_prob

__all__ = ["SURPRISE", "prior_log_evidence"]

SURPRISE = float(np.log(100.0))  # nats; see the head of this file


def prior_log_evidence(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    latent: Collection[str],
    num_samples: int,
    batch_size: int | None = None,
) -> float | None:
    """log of the mean likelihood over draws of the prior, in nats; ``None`` where it has no such draws.

    Leaves the random state alone.
    """

    def likelihood(sites: Sites) -> Parts:
        terms = {name: site_log_prob(site) for name, site in sites.items()}
        log_joint = [scaled.double().sum() for _, scaled in terms.values()]
        # what the draws came from: a masked prior is improper and still draws
        drawn_from = [-terms[name][0].double().sum() for name in latent]
        return {"sums": {"log_weight": torch.stack([*log_joint, *drawn_from]).sum()}}

    with own_random_state():
        try:
            run = map_draws(model, likelihood, {}, args, kwargs, num_samples, batch_size)
        except Exception:  # improper priors; models that fail far from the posterior, in any way
            return None
    log_weights = run["sums"]["log_weight"]
    log_weights = torch.where(torch.isfinite(log_weights), log_weights, -torch.inf)
    return float(log_weights.logsumexp(0)) - float(np.log(num_samples))
