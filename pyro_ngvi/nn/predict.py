r"""Predictions of a Bayesian network, averaged over draws of its weights, batch by batch.

With weights w_s ~ q, s = 1 ... S, the same for all batches,

    p(y | x)      ~  1/S sum_s p(y | x, w_s)
    log density   =  log p(y | x) = logsumexp_s log p(y | x, w_s) - log S          (nats)
    sd^2          =  mean_s Var[y | x, w_s] + var_s E[y | x, w_s]

The log density is that of the averaged prediction; the average of the log densities is lower, and
judges one draw. A finite S makes the estimate too low on average (Jensen), by about
var_s[p] / (2 S p^2). Draws of ``y``: ``pyro_ngvi.predict(model, guide, x)``.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ..diagnostics.draws import guide_draws, random_state
from ..diagnostics.over_batches import samplers_of
from ..runtime.checks import check_data, tensor_of
from ..runtime.density import Sites, check_guide_of_this_model, check_model, innermost
from ..runtime.model_density import map_draws
from ..runtime.run import look
from .bayesianize import BayesianModule

#: samplers of a loader whose rows come in another order at each pass
SHUFFLING = RandomSampler, SubsetRandomSampler, WeightedRandomSampler


@dataclass(frozen=True)
class Prediction:
    """What :func:`predict` returns, for n examples and S draws of the weights; its example shows one.

    Attributes:
        mean: predictive mean of y, (n, ...); for classes their probabilities, (n, ..., K).
        sd: predictive sd of y in the same shape, sd^2 = mean_s Var[y | x, w_s] + var_s E[y | x, w_s];
            for classes that of the indicator.
        log_density: log p(y | x) ~ log mean_s p(y | x, w_s), (n,) in nats, or ``None`` without y.
        draws: the means at each draw of the weights, (S, n, ...), or ``None``.
    """

    mean: Tensor
    sd: Tensor
    log_density: Tensor | None = None
    draws: Tensor | None = None


def predict(
    model: BayesianModule,
    guide: Callable[..., Any],
    x: Any,
    y: Tensor | None = None,
    *,
    num_samples: int = 100,
    batch_size: int = 1000,
    chunk_size: int | None = None,
    keep_draws: bool = False,
    seed: int | None = None,
) -> Prediction:
    """Predictive means, sds and log densities, averaged over draws of the weights.

    Args:
        model: made by :func:`bayesianize`.
        guide: a trained guide of it.
        x: inputs (n, ...), or a tuple of them; or an iterable of batches such as a ``DataLoader``,
            each x or a pair (x, y), in whose order the rows come: one that shuffles is warned of.
        y: targets (n, ...), for the log density; with batches they come from there.
        num_samples: S, the number of draws of the weights.
        batch_size: examples that the network sees at once, when ``x`` is a tensor.
        chunk_size: draws that it runs at once; ``None`` for a number that bounds the memory.
        keep_draws: whether to keep the means at each draw.
        seed: makes the result repeatable and leaves the global random state as it was.

    Raises:
        TypeError: when ``model`` was not made by :func:`bayesianize`, or x is no tensor but an array.
        ValueError: when there is no batch, when the guide was never called or is one of another
            model, when y fits neither the batches nor the likelihood and its support, or the
            likelihood has no mean and variance.

    Example:
        >>> import torch, pyro_ngvi as ngvi
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> model = ngvi.nn.bayesianize(net, "normal", num_data=3, noise=1.0)
        >>> x, y = torch.ones(3, 1), torch.tensor([1.0, 2.0, 3.0])
        >>> guide = ngvi.AutoMeanFieldNormal(model)
        >>> weights = guide(x, y)  # starts at the posterior, N(6 / 4, 1 / 4)
        >>> prediction = predict(model, guide, x, y, num_samples=2000, seed=0)
        >>> prediction.mean[0].round(decimals=1), prediction.sd[0].round(decimals=1)
        (tensor(1.5000), tensor(1.1000))
        >>> prediction.log_density.round(decimals=1)  # of N(1.5, 1 + 1 / 4) at y
        tensor([-1.1000, -1.1000, -1.9000])
    """
    if not isinstance(model, BayesianModule):
        raise TypeError(
            f"nn.predict takes a model made by bayesianize, got {type(model).__name__}. For "
            f"another model use pyro_ngvi.predict."
        )
    batches = _batches(x, y, batch_size)
    first = next(batches, None)
    if first is None:
        raise ValueError("There is nothing to predict: x gives no batch.")
    args = tuple(part for part in first if part is not None)  # a guide may look at its arguments
    with torch.no_grad():
        with random_state(seed):  # not around the batches: a loader may draw too
            values, _ = guide_draws(partial(guide, *args), num_samples)
        for name, shape in model.sites.items():  # before the network runs
            if name in values and values[name].shape[1:] != shape:
                raise ValueError(
                    f"The weight {name!r} has shape {tuple(shape)} in the model, but the guide gives "
                    f"it shape {tuple(values[name].shape[1:])}. Is it the guide of another network?"
                )
        parts = [
            _average(_run(model, *batch, values, num_samples, chunk_size), keep_draws)
            for batch in itertools.chain([first], batches)
        ]
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError("Some batches come with y and others do not.")
    return Prediction(
        **{
            key: torch.cat([part[key] for part in parts], dim=1 if key == "draws" else 0)
            for key in parts[0]
        }
    )


def _batches(x: Any, y: Tensor | None, batch_size: int) -> Iterator[tuple[Any, Tensor | None]]:
    """Pairs (x, y) of batches; y may be None."""
    if isinstance(x, Tensor | tuple):
        inputs = x if isinstance(x, tuple) else (x,)
        if y is not None and len(y) != len(inputs[0]):
            raise ValueError(f"There are {len(inputs[0])} examples in x and {len(y)} in y.")
        for start in range(0, len(inputs[0]), batch_size):
            part = slice(start, start + batch_size)
            batch = tuple(t[part] for t in inputs)
            yield batch if isinstance(x, tuple) else batch[0], None if y is None else y[part]
        return
    if hasattr(x, "__array__"):
        raise TypeError(f"x is of type {type(x).__name__}: pass {tensor_of('x', x)}.")
    if y is not None:
        raise ValueError(
            "x is an iterable of batches, so y has to come with them, as pairs (x, y)."
        )
    if any(isinstance(sampler, SHUFFLING) for sampler in samplers_of(x)):
        warnings.warn(
            "nn.predict: the loader shuffles, and rows of the result come in the order of this pass, "
            "which is not kept. Averages over all rows are right; for those of single rows pass a "
            "loader that does not shuffle, or x as a tensor.",
            stacklevel=3,
        )
    for batch in x:
        pair = (batch,) if isinstance(batch, Tensor) else batch
        if not isinstance(pair, list | tuple) or len(pair) not in (1, 2):
            raise ValueError(
                f"A batch is a {type(batch).__name__}; it must be a tensor x or a pair (x, y)."
            )
        yield pair[0], pair[1] if len(pair) == 2 else None


def _run(
    model: BayesianModule,
    x: Any,
    y: Tensor | None,
    values: dict[str, Tensor],
    num_samples: int,
    chunk_size: int | None,
) -> dict[str, Tensor]:
    """Mean and variance of y by draw of the weights (S, M, ...), and log p(y | x, w) (S, M)."""
    fn: Any = None

    def program() -> None:
        nonlocal fn
        fn = model.distribution(x)
        if y is not None:
            with pyro.plate("data", fn.batch_shape[-1]):
                pyro.sample("y", fn, obs=model.observed(fn, y))

    def reduce(sites: Sites) -> dict[str, Tensor]:
        check_model(sites, values, {})
        check_guide_of_this_model(values, sites)
        mean, variance = _moments(fn)
        result = {"mean": mean, "variance": variance}
        if y is not None:
            result["log_density"] = fn.log_prob(sites["y"]["value"])
        return result

    if y is not None:  # under vmap nothing is validated
        first = {name: value[0] for name, value in values.items()}
        check_data({"y": look(program, first)["y"]}, program, first)
    return map_draws(program, reduce, values, num_samples, chunk_size)


def _moments(fn: Any) -> tuple[Tensor, Tensor]:
    """Mean and variance; for classes those of their indicators."""
    base = innermost(fn)
    if isinstance(base, dist.Categorical):
        return base.probs, base.probs * (1.0 - base.probs)
    part = base
    while isinstance(part, dist.MixtureSameFamily):
        part = part.component_distribution
    try:
        if isinstance(part, dist.Categorical | dist.VonMises):  # of classes, or of an angle
            raise NotImplementedError
        return fn.mean, fn.variance
    except NotImplementedError as error:
        raise ValueError(
            f"The likelihood {type(base).__name__} has no mean or variance in closed form. Draw "
            f"from it: pyro_ngvi.predict(model, guide, x)."
        ) from error


def _average(per_draw: dict[str, Tensor], keep_draws: bool) -> dict[str, Tensor]:
    mean, variance = per_draw["mean"], per_draw["variance"]
    total = variance.mean(0) + mean.var(0, correction=0)
    result = {"mean": mean.mean(0), "sd": total.sqrt()}
    if "log_density" in per_draw:
        terms = per_draw["log_density"]
        result["log_density"] = terms.logsumexp(0) - math.log(len(terms))
    if keep_draws:
        result["draws"] = mean
    return result
