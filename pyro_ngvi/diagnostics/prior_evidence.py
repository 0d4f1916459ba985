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

from .._draws import run_batched
from .._particles import sum_per_particle
from .._random import own_random_state

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
    with own_random_state():
        try:
            run = run_batched(model, {}, args, kwargs, num_samples, batch_size)
        except Exception:  # improper priors; models that fail far from the posterior, in any way
            return None
    log_weights = run.log_joint(torch.float64)
    for name in latent:  # what the draws came from: a masked prior is improper and still draws
        site = run.sites[name]
        drawn_from = sum_per_particle(site.unscaled_log_prob.double())
        log_weights = log_weights - drawn_from
    log_weights = torch.where(torch.isfinite(log_weights), log_weights, -torch.inf)
    return float(log_weights.logsumexp(0)) - float(np.log(num_samples))
