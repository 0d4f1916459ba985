r"""PSIS k-hat: can importance weights take the guide's draws to the posterior?

With log weights l_s = log p(x, z_s) - log q(z_s) of draws z_s ~ q, s = 1..S, the largest ones are
taken for the tail of a generalised Pareto distribution, see ``_pareto.py``. A tail of shape k has 1/k
finite moments, so k tells how far the guide's tails fall short of the posterior's.

Sources: Vehtari, Simpson, Gelman, Yao & Gabry (2024), "Pareto smoothed importance sampling",
JMLR 25(72), section 3; Yao, Vehtari, Simpson & Gelman (2018), "Yes, but did it work?", ICML.

When not to use it: it judges the joint posterior, so with hundreds of latents it is large for
guides whose single marginals are good; and it sees only where the guide puts its draws, so a mode
that the guide never visits goes unseen.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pyro_ngvi._draws import (
    draw_and_evaluate,
    prototype_sites,
    random_state,
    sites_of_kind,
    warn_of_edges,
)
from pyro_ngvi._summed_out import summed_out
from pyro_ngvi.diagnostics._pareto import find_tail, smoothed

__all__ = ["KHat", "khat", "khat_from_log_weights"]

NEGLIGIBLE = 0.01  # nats of KL that no reader of a posterior would notice
COARSE = 0.05  # nats of rounding above which equal and unequal weights look alike
MIN_DRAWS = 25  # fewer leave less than five weights for the tail


@dataclass(frozen=True)
class KHat:
    """A guide's k-hat and what it means.

    ``khat`` is the estimated shape of the tail of the importance weights, infinite where there is
    none to estimate; ``threshold`` is min(1 - 1/log10(S), 0.7), above which the weights are not
    to be relied on; ``ess`` = 1 / sum_s w_s^2 is how many exact draws the normalised weights w are
    worth; ``log_weights`` are their logarithms, (S,), in nats.

    k-hat does not depend on the scale of the weights: weights that are all equal to within a
    percent may still have a tail of some shape. So ``ok`` also holds where there is next to nothing
    to correct, that is where ``kl`` = -log S - mean(log weights), an estimate of KL(q || p), is below
    ``NEGLIGIBLE`` nats and the draws are worth at least 95 % of their number.
    """

    khat: float
    threshold: float
    ess: float
    log_weights: np.ndarray = field(repr=False)

    @property
    def ok(self) -> bool:
        """Whether k-hat is at most its threshold, or the weights are equal in practice."""
        if np.isnan(self.khat):
            return False
        return self.khat <= self.threshold or self.nearly_equal

    @property
    def kl(self) -> float:
        """Estimate of KL(q || posterior) in nats: log mean(weight) - mean(log weight)."""
        return float(-np.mean(self.log_weights) - np.log(len(self.log_weights)))

    @property
    def nearly_equal(self) -> bool:
        """Whether the weights correct next to nothing."""
        return self.kl < NEGLIGIBLE and self.ess >= 0.95 * len(self.log_weights)

    @property
    def psis_log_weights(self) -> np.ndarray:
        """Logarithms of the Pareto-smoothed weights, (S,), in nats; the weights sum to one.

        The largest weights are replaced by quantiles of the tail fitted to them, none above the
        largest of them. Weights that are equal, or without a tail to fit, stay as they are.

        :raises ValueError: when the weights are not finite numbers.
        """
        if not np.isfinite(self.log_weights.max()):
            raise ValueError(
                "The log weights are not finite: the model or the guide gives NaN or an infinite "
                "density at draws of the guide, or zero at all of them. There is nothing to smooth."
            )
        if not np.isfinite(self.khat) or self.khat == 0.0:
            return self.log_weights
        return smoothed(self.log_weights)

    @property
    def verdict(self) -> str:
        """What was found and what to do about it, in a sentence."""
        found = f"k-hat is {self.khat:.2f} from {len(self.log_weights)} draws"
        if np.isnan(self.khat):
            return (
                "The importance weights can not be told from rounding in this dtype, so k-hat says "
                "nothing: evaluate the model in float64."
            )
        if self.nearly_equal and self.khat > self.threshold:
            return (
                f"{found}, but all weights are nearly equal (KL of about {max(self.kl, 0.0):.1g} "
                f"nat): where the guide draws, it is the posterior."
            )
        if self.ok:
            return (
                f"{found}, within {self.threshold:.2f}: importance weights can correct what the "
                f"guide misses (the draws are worth {self.ess:.0f} exact ones)."
            )
        if self.khat <= 0.7:
            return f"{found}, above {self.threshold:.2f}: too few draws to tell; raise num_samples."
        return (
            f"{found}, above {self.threshold:.2f}: the guide misses part of the posterior, and its "
            "intervals may be too narrow; train longer, use a richer guide, reparametrise the "
            "model, or check against NUTS."
        )


def khat(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 1000,
    seed: int | None = None,
    batch_size: int | None = None,
    **kwargs: Any,
) -> KHat:
    """PSIS k-hat of a trained Pyro guide.

    The same ``num_samples`` and ``seed`` give the draws of :func:`pyro_ngvi.to_arviz`. The
    parameter store and gradients are left alone. Latent sites that are marked
    ``infer={"enumerate": "parallel"}`` and not in the guide are summed out.

    :param model: the Pyro model.
    :param guide: any trained Pyro guide of it.
    :param args: what the model is called with: the full data.
    :param num_samples: number of draws S, at least 25.
    :param seed: makes the result repeatable and leaves the global random state as it was.
    :param batch_size: draws that the model sees at once, to bound memory; ``None`` for all.
    :param kwargs: keyword arguments of the model.
    :raises ValueError: for fewer than 25 draws, a subsampled plate, a guide that is a point mass
        in some latent sites or does not sample the model's latent sites, and data outside the support
        of their site.

    >>> import pyro, pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("z", dist.Normal(0.0, 1.0))
    >>> def narrow():
    ...     pyro.sample("z", dist.Normal(0.0, 0.3))
    >>> khat(model, model, seed=0).khat  # an exact guide: all weights are equal
    0.0
    >>> khat(model, narrow, seed=0).ok
    False
    """
    with random_state(
        seed
    ):  # apart, because a guide's first run ever may draw more than later ones
        prototype = prototype_sites(model, guide, args, kwargs)
    latent = sites_of_kind(prototype, "latent")
    with random_state(seed):
        joint = summed_out(model, prototype)
        draws = draw_and_evaluate(joint, guide, args, kwargs, latent, num_samples, batch_size)
    warn_of_edges(prototype, draws.values)
    if fixed := draws.point_masses:
        raise ValueError(
            f"All draws of {', '.join(map(repr, fixed))} from the guide are the same point "
            f"(AutoDelta?): it has no density there to compare with the posterior, and no weights "
            f"could correct it. Judge the rest given that point: pass pyro.poutine.condition(model, "
            f"data=...) with it, and the guide of the other sites."
        )
    return khat_of(draws.log_joint, draws.log_q)


def khat_of(log_joint: torch.Tensor, log_q: torch.Tensor) -> KHat:
    """k-hat from the model's and the guide's log densities at the guide's draws, both (S,)."""
    # A log density is a sum, rounded relative to its own size, not to that of the difference.
    size = torch.stack([log_joint, log_q]).abs().nan_to_num(0.0, 0.0, 0.0).amax()
    resolution = 64 * torch.finfo(log_joint.dtype).eps * float(size)
    log_weights = log_joint.double() - log_q.double()
    return khat_from_log_weights(log_weights.cpu().numpy(), resolution)


def khat_from_log_weights(log_weights: np.ndarray, resolution: float = 0.0) -> KHat:
    """PSIS k-hat of given log weights.

    :param log_weights: log p - log q up to a constant, (S,), in nats; -inf is a weight of zero.
    :param resolution: log weights that all lie within that many nats are taken for equal.
    :raises ValueError: when they are not a vector of at least 25.

    >>> uniform = (np.arange(4000) + 0.5) / 4000
    >>> pareto = khat_from_log_weights(-0.9 * np.log1p(-uniform))  # a tail of shape 0.9
    >>> print(f"{pareto.khat:.2f} {pareto.threshold:.2f} {pareto.ok}")
    0.87 0.70 False
    """
    x = np.asarray(log_weights, dtype=np.float64)
    if x.ndim != 1 or len(x) < MIN_DRAWS:
        raise ValueError(
            f"k-hat needs a vector of at least {MIN_DRAWS} log weights and got one of shape "
            f"{x.shape}; raise num_samples."
        )
    threshold = float(min(1 - 1 / np.log10(len(x)), 0.7))
    if not np.isfinite(x.max()):  # a NaN, an infinite weight, or nothing but zeros
        return KHat(float("inf"), threshold, 0.0, x)
    x = x - x.max()
    normalised = x - np.log(np.exp(x).sum())
    ess = float(1 / np.exp(2 * normalised).sum())
    if -x.min() <= resolution and resolution > COARSE:
        return KHat(float("nan"), threshold, ess, normalised)
    # equal weights: the guide is the posterior, and there is no tail to fit
    shape = 0.0 if -x.min() <= resolution else find_tail(x).shape
    return KHat(shape, threshold, ess, normalised)
