"""Priors of the weights of a module: from what the user writes to one distribution per parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ._refuse import refuse_other_than_pyro
from ._vectorized import broadcasts_to

__all__ = ["Prior", "choose_prior", "normal_prior", "prior_from"]

# A distribution is Any: to a type checker Pyro's are abstract.
Prior: TypeAlias = float | Callable[[str, Tensor], Any]

#: hyperparameters by name: the value, and its dimensions of vectorised particles
Sampled: TypeAlias = dict[str, tuple[Tensor, torch.Size]]


def choose_prior(prior: Prior | Mapping[str, Prior], name: str) -> Prior:
    """The prior of the parameter ``name``.

    Raises:
        ValueError: when no pattern fits, or an sd is not positive.
        TypeError: when it is neither a number nor a function.
    """
    if isinstance(prior, Mapping):
        found = [p for pattern, p in prior.items() if fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(
                f"prior has no pattern that fits the parameter {name!r}; its patterns are "
                f'{list(prior)}. Add one, for instance "*": 1.0 as the last.'
            )
        prior = found[0]
    if callable(prior) and not isinstance(prior, torch.distributions.Distribution):
        return prior
    if isinstance(prior, bool) or not isinstance(prior, int | float):
        raise TypeError(
            f"The prior of {name!r} is {prior!r}; give the sd of a centred normal as a number, or a "
            f"function prior(name, parameter) that returns a distribution, for instance "
            f"lambda name, p: dist.Cauchy(p.new_tensor(0.0), p.new_tensor(1.0))."
        )
    if not 0.0 < prior < math.inf:
        raise ValueError(f"The prior of {name!r} has sd {prior}; it must be positive and finite.")
    return float(prior)


def normal_prior(sd: float, like: Tensor) -> Any:
    """Independent centred normals in the shape, dtype and device of ``like``.

    It is made once and used in and out of ``vmap``, where validation cannot branch on values.
    """
    base: Any = dist.Normal(like.new_zeros(()), like.new_full((), sd), validate_args=False)
    return base.expand(like.shape).to_event(like.dim())


def prior_from(function: Any, name: str, parameter: Tensor, sampled: Sampled) -> Any:
    """What the user's function returns, in the shape of the parameter, which is one event.

    ``sampled`` holds the hyperparameters of this run of the model so far; new ones are added.

    Raises:
        TypeError: when it returns no distribution.
        ValueError: when the shape does not fit.
    """
    with _Hyperparameters(name, parameter.dim(), sampled) as seen:
        try:
            fn = function(name, parameter)
        except RuntimeError as error:
            if seen.lead:
                error.add_note(
                    f"The prior function of {name!r} has a hyperparameter of {seen.lead.numel()} "
                    f"vectorised particles, in dimensions in front. Return a scalar distribution "
                    f"rather than one expanded to the shape of the parameter."
                )
            raise
    refuse_other_than_pyro(f"The prior of {name!r}", fn)
    shape = parameter.shape
    if seen.lead or fn.shape() != shape:
        outer = seen.lead + shape[: len(shape) - fn.event_dim]
        fits = broadcasts_to(fn.batch_shape, outer)
        if not fits or outer + fn.event_shape != seen.lead + shape:
            raise ValueError(
                f"The prior of {name!r} has shape {tuple(fn.shape())}, the parameter has shape "
                f"{tuple(seen.lead + shape)}. Return a distribution of that shape, or a scalar one."
            )
        fn = fn.expand(outer)
    return fn.to_event(len(fn.batch_shape) - len(seen.lead))


class _Hyperparameters(Messenger):
    """Gives a prior function its hyperparameters of vectorised particles as (*lead, 1, ..., 1).

    They come as (*lead,), which would be broadcast against the parameter's own dimensions.  One that
    the function of another parameter has sampled is given again: it is one site, which they share.
    """

    def __init__(self, name: str, dims: int, sampled: Sampled) -> None:
        super().__init__()
        self.name, self.dims, self.sampled = name, dims, sampled
        self.lead = torch.Size()
        self._inside: set[str] = set()

    def _pyro_sample(self, msg: Any) -> None:
        # plates around the run add themselves after this, those of the function itself did before
        self._inside = {frame.name for frame in msg["cond_indep_stack"]}
        if msg["name"] in self.sampled:
            msg["value"], msg["done"], msg["stop"] = self.sampled[msg["name"]][0], True, True
        elif self.lead and len(msg["fn"].batch_shape) > len(self.lead):
            raise ValueError(
                f"The prior of the hyperparameter {msg['name']!r} depends on another one, of "
                f"{self.lead.numel()} vectorised particles, which look like entries of "
                f"{self.name!r}. Give it a prior of its own and multiply the two, or use "
                "BatchedELBO."
            )

    def _pyro_post_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or (msg["is_observed"] and _draws_nothing(msg)):
            return
        value, event_dim = msg["value"], msg["fn"].event_dim
        outside = [f for f in msg["cond_indep_stack"] if f.dim and f.name not in self._inside]
        split, lead = value.dim() - event_dim, torch.Size()
        if (
            outside
        ):  # as many dimensions as the outermost plate asks for, those that are left out too
            missing = max(0, max(-f.dim for f in outside) - split)
            lead = value.shape[:split] + (1,) * missing
        _, lead = self.sampled.setdefault(msg["name"], (value, lead))
        if not lead:
            return
        if self._inside:
            raise ValueError(
                f"The prior function of {self.name!r} samples {msg['name']!r} in a plate of its own, "
                f"which cannot be told from vectorised particles. Declare its dimensions as one "
                f"event, .to_event(...), instead of the plate."
            )
        self.lead = torch.broadcast_shapes(self.lead, lead)
        ones = (1,) * (self.dims - event_dim)
        # the trace has its copy of the message already: this is what the function gets
        msg["value"] = value.reshape(lead + ones + value.shape[split:])


def _draws_nothing(msg: Any) -> bool:
    """Whether an observed site is a ``pyro.deterministic`` or ``pyro.factor``.

    What a reparametrisation leaves of a site is none: its value has the dimensions of a draw.
    """
    return bool(msg["infer"].get("_deterministic")) or isinstance(msg["fn"], dist.Unit)
